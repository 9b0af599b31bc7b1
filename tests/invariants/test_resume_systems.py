"""Killed with -9, then stopped with TERM, then run to its end: the same log and the same bits as left alone."""

from __future__ import annotations

import json
import os
import pathlib
import random
import subprocess
import sys

import numpy as np
import pytest

from jaxrl.runtime.checkpoint import load_arrays
from jaxrl.runtime.metrics import deterministic, read_metrics
from tiny_systems import GRPO, SFT, leaves, settings

HERE = pathlib.Path(__file__).parent
STEPS = 8
RUN = dict(total_steps=STEPS, checkpoint_every=2, progress=False)
#: Everything that has a position, a counter or a random stream of its own.
GRPO_EVERYTHING = settings(
    GRPO,
    update__minibatches=2,
    update__epochs=2,
    update__order="rows",
    update__micro_batches=2,
    rollout__dynamic_sampling=True,
    rollout__max_batches=2,
    algorithm__kl_coef=0.1,
    algorithm__kl_target=0.01,
    algorithm__kl_horizon=500.0,
    optimizer=dict(
        name="adamw", learning_rate=0.01, schedule="cosine", warmup_steps=4, decay_steps=40, weight_decay=0.1
    ),
    eval=dict(prompts=4, samples=2, k=(1,)),
)
#: A data set that goes round several times, on a mesh, with part of the parameters frozen.
SFT_EVERYTHING = settings(
    SFT,
    trainable="last:1",
    data__params=dict(num_digits=1),
    rows=8,
    micro_batches=2,
    optimizer=dict(name="adam", learning_rate=0.01, schedule="linear", decay_steps=8),
)
CASES = {
    "grpo": (GRPO_EVERYTHING, dict(run=RUN | dict(eval_every=3), mesh=dict(data=-1)), 1),
    "sft": (SFT_EVERYTHING, dict(run=RUN | dict(eval_every=4), mesh=dict(data=1, fsdp=2)), 2),
}


def start(config: pathlib.Path, run_dir: pathlib.Path, devices: int, event: str = "none", at: int = 0):
    flags = [f for f in os.environ["XLA_FLAGS"].split() if "device_count" not in f]
    flags.append(f"--xla_force_host_platform_device_count={devices}")
    environment = os.environ | {
        "XLA_FLAGS": " ".join(flags),
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE.parent)]),
    }
    command = [
        sys.executable,
        str(HERE / "launch_and_stop.py"),
        event,
        str(at),
        f"--config={config}",
        f"--run_dir={run_dir}",
    ]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


def result(run_dir: pathlib.Path, parts: tuple[str, ...]):
    rows = [deterministic(row) for row in read_metrics(run_dir / "metrics.jsonl")]
    return rows, {part: leaves(load_arrays(run_dir, prefix=part)) for part in parts}


@pytest.mark.parametrize("name", CASES)
def test_killed_stopped_and_resumed_equals_left_alone(name, tmp_path):
    base, more, devices = CASES[name]
    config = tmp_path / "config.json"
    config.write_text(json.dumps(base | more | dict(system=name)))
    parts = {
        "grpo": ("train/params", "train/opt_state", "reference"),
        "sft": ("params", "frozen", "opt_state"),
    }[name]

    whole = start(config, tmp_path / "whole", devices)
    assert whole.returncode == 0, whole.stderr
    first = random.randrange(1, 4)  # any step must do
    killed = start(config, tmp_path / "broken", devices, "KILL", first)
    assert killed.returncode == -9, (first, killed.stderr)
    second = random.randrange(0, 3)
    stopped = start(config, tmp_path / "broken", devices, "TERM", second)
    assert stopped.returncode == 143 and "run the same command to go on" in stopped.stderr, (
        first,
        second,
        stopped.stderr,
    )
    saved = [int(p.name) for p in (tmp_path / "broken" / "checkpoints").iterdir() if p.name.isdecimal()]
    assert 0 < max(saved) < STEPS, (first, second, saved)
    resumed = start(config, tmp_path / "broken", devices)
    assert resumed.returncode == 0, (first, second, resumed.stderr)

    rows, arrays = result(tmp_path / "whole", parts)
    other_rows, other_arrays = result(tmp_path / "broken", parts)
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, STEPS + 1))
    for row, other in zip(rows, other_rows, strict=True):
        np.testing.assert_equal(other, row, err_msg=f"killed at {first}, stopped at {second}")
    for part, found in arrays.items():
        assert found.keys() == other_arrays[part].keys() and found
        for path, x in found.items():
            np.testing.assert_array_equal(
                other_arrays[part][path], x, err_msg=f"{part}/{path}: {first}, {second}"
            )
