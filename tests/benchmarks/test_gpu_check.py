"""The accelerator check: its small version passes on CPU, and a check that breaks is reported without stopping others."""

from __future__ import annotations

import importlib.util
import pathlib
import subprocess
import sys

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "benchmarks" / "gpu_check.py"


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)


def _module():
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module  # dataclasses look their module up while the class is made
    spec.loader.exec_module(module)
    return module


def test_every_check_passes_in_small(tmp_path):
    out = tmp_path / "check.md"
    done = _run("--tiny", "--out", str(out))
    table = out.read_text()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAILED" not in table
    for name in _module().CHECKS:
        assert f"| {name} | check took |" in table


def test_a_failed_check_is_reported_and_the_next_one_runs(monkeypatch):
    module = _module()
    outcomes = {"device": ([], "boom"), "log-probs": ([("speed", "1 | 2")], None)}
    monkeypatch.setattr(module, "run_one", lambda name, tiny, limit_s: outcomes[name])
    table, failures = module.run_all(["device", "log-probs"], tiny=True, budget_s=100)
    assert failures == 1
    assert "| device | FAILED | boom |" in table
    assert "| log-probs | speed | 1 \\| 2 |" in table


def test_a_check_that_outlives_its_limit_is_stopped():
    rows, error = _module().run_one("device", tiny=True, limit_s=0.01)
    assert rows == []
    assert error.startswith("stopped after")


def test_an_unknown_check_is_refused_by_name(tmp_path):
    done = _run("--tiny", "--out", str(tmp_path / "check.md"), "--only", "nonsense")
    assert done.returncode == 2
    assert "nonsense" in done.stderr and "log-probs" in done.stderr
