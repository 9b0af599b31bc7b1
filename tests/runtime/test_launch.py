"""The command line: overrides, refusals, dry run, a whole run."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import types

import pytest

import jaxrl
import toy_system
from jaxrl import launch
from jaxrl.runtime.metrics import deterministic, read_metrics

CONFIG = """
import ml_collections

def get_config(variant="plain"):
    if variant not in ("plain", "long"):
        raise ValueError(variant)
    config = ml_collections.ConfigDict()
    config.system = "toy"
    config.run = ml_collections.ConfigDict({"total_steps": 6 if variant == "long" else 3, "progress": False})
    config.optimizer = ml_collections.ConfigDict({"learning_rate": 0.05})
    return config
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    module = types.ModuleType("jaxrl.systems.toy")
    module.Config = toy_system.Config
    module.build = lambda config, mesh: toy_system.Toy(config)
    monkeypatch.setitem(sys.modules, "jaxrl.systems.toy", module)
    monkeypatch.setattr(launch, "system_names", lambda: ["grpo", "toy"])
    file = tmp_path / "toy.py"
    file.write_text(CONFIG)
    return file


def run(*arguments):
    return launch.main(["launch", *map(str, arguments)])


def test_whole_run_overrides_and_resume(config, tmp_path):
    folder = tmp_path / "run"
    flags = ("--config.optimizer.learning_rate=1e-2", "--config.run.eval_every=2", "--seed=3")
    assert run(f"--config={config}", f"--run_dir={folder}", *flags) == 0
    saved = json.loads((folder / "config.json").read_text())
    assert saved["optimizer"]["learning_rate"] == 0.01 and saved["run"]["seed"] == 3
    assert saved["run"]["keep"] == 2 and saved["mesh"]["data"] == -1  # defaults are resolved
    assert run(f"--config={config}:long", f"--run_dir={folder}", *flags) == 0
    assert run(f"--config={config}:long", f"--run_dir={tmp_path / 'whole'}", *flags) == 0
    # The saved configuration is a configuration.
    assert run(f"--config={folder / 'config.json'}", f"--run_dir={tmp_path / 'again'}") == 0
    logs = [
        [deterministic(row) for row in read_metrics(tmp_path / name / "metrics.jsonl")]
        for name in ("run", "whole", "again")
    ]
    assert len(logs[0]) == 7 and logs[0] == logs[1] == logs[2]
    assert "| optimizer.learning_rate | `0.01` |" in (folder / "report.md").read_text()


def test_resume_with_other_settings_says_so(config, tmp_path, capsys):
    assert run(f"--config={config}", f"--run_dir={tmp_path / 'run'}") == 0
    capsys.readouterr()
    assert run(f"--config={config}:long", f"--run_dir={tmp_path / 'run'}", "--config.noise=0.5") == 0
    assert "resuming with another noise: 0.5, was 0.1" in capsys.readouterr().err


def test_optional_settings_have_typed_flags(config):
    flags = ("--config.optimizer.decay_steps=7", "--config.run.keep_best=loss", "--noconfig.run.progress")
    _, settings = launch.parse(["launch", f"--config={config}", *flags])
    assert settings["optimizer"]["decay_steps"] == 7 and settings["run"]["keep_best"] == "loss"
    assert settings["run"]["progress"] is False
    assert (
        launch.resolve(settings).config.optimizer.warmup_steps == 2
    )  # default of the system, not of the class


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--config.optimizer.learning_rte=1"],
            "config.optimizer has no setting 'learning_rte'; did you mean 'learning_rate'",
        ),
        (["--config.nois=1"], "config has no setting 'nois'; did you mean 'noise'"),
        (["--config.noise.x=1"], "config.noise is a single value"),
        (["--config.optimizer.learning_rate=fast"], "learning_rate"),
        (["--config.optimizer.name=adamv"], "config.optimizer.name is 'adamv'"),
        (["--config.optimizer.b1=2"], "config.optimizer: b1 is 2.0"),
        (["--config.system=gpro"], "config.system"),
        (["--config.mesh.data=3"], "mesh"),
        (["--run_dri=x"], "run_dri"),
        (["extra"], "'extra' is not understood"),
        ([], "add --run_dir=FOLDER"),
    ],
)
def test_user_errors_are_one_message_and_code_2(config, capsys, arguments, message):
    folder = ["--run_dir=unused"] if arguments and "mesh" in arguments[0] else []
    assert run(f"--config={config}", *arguments, *folder) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and "Traceback" not in error


def test_system_can_be_set_on_the_command_line(config):
    file = config.with_name("other.py")
    file.write_text("def get_config(): return {'system': 'grpo', 'run': {'total_steps': 1}}")
    assert launch.parse(["launch", f"--config={file}", "--config.system=toy"])[1]["noise"] == 0.1


def test_debug_shows_the_traceback(config):
    with pytest.raises(launch.ConfigError):
        run(f"--config={config}", "--debug")


@pytest.mark.parametrize(
    ("text", "suffix", "message"),
    [
        (None, "", "no such file"),
        ("x = 1", "", "has no get_config"),
        ("def get_config(): return {'system': 'toy'}", ":big", "takes no variant"),
        ("def get_config(): return {'a': 1}", "", "names no system; set config.system to one of grpo, toy"),
        ("def get_config(): return {'system': 'grop'}", "", "config.system is 'grop'; did you mean 'grpo'"),
        (
            "def get_config(): return {'system': 'toy', 'run': {'total_steps': 1}, 'nose': 1}",
            "",
            "config.nose is not a setting of Config; did you mean",
        ),
        ("def get_config(): return {'system': 'toy', 'run': {}}", "", "config.run.total_steps must be set"),
    ],
)
def test_config_file_errors(config, capsys, text, suffix, message):
    file = config.with_name("other.py")
    if text is not None:
        file.write_text(text)
    assert run(f"--config={file}{suffix}", "--run_dir=unused") == 2
    assert message in capsys.readouterr().err


def test_dry_run_prints_and_writes_nothing(config, tmp_path, capsys):
    before = sorted(tmp_path.iterdir())
    assert run(f"--config={config}", f"--run_dir={tmp_path / 'run'}", "--dry_run") == 0
    out = capsys.readouterr().out
    assert '"learning_rate": 0.05' in out and "state_elements: " in out
    assert sorted(tmp_path.iterdir()) == before


def test_foreign_package_is_detected(config, monkeypatch, capsys):
    monkeypatch.setattr(jaxrl, "MARKER", "other")
    assert run(f"--config={config}") == 2
    assert "another package named jaxrl" in capsys.readouterr().err


def test_version_names_the_path():
    root = pathlib.Path(jaxrl.__file__).parents[1]
    out = subprocess.run(
        [sys.executable, "-m", "jaxrl", "--version"], cwd=root, capture_output=True, text=True, check=True
    ).stdout
    assert out == f"jaxrl {jaxrl.__version__} ({root / 'jaxrl'})\n"
