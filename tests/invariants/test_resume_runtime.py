"""Kill a run anywhere, start it again: the same bits and the same log as a run that was left alone."""

from __future__ import annotations

import os
import pathlib
import random
import subprocess
import sys

import numpy as np
import pytest

from jaxrl.runtime.checkpoint import load_arrays
from jaxrl.runtime.metrics import deterministic, read_metrics

ROOT = pathlib.Path(__file__).parents[2]
TOY = ROOT / "tests" / "runtime" / "toy_system.py"
STEPS = 7


def start(folder: pathlib.Path, event: str, at: int) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(TOY), str(folder), str(STEPS), event, str(at)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def result(folder: pathlib.Path) -> tuple[list[dict], dict[str, np.ndarray]]:
    rows = [deterministic(row) for row in read_metrics(folder / "metrics.jsonl")]
    params = load_arrays(folder)["linear"]
    return rows, {name: np.asarray(x) for name, x in params.items()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    done = start(folder, "none", 0)
    assert done.returncode == 0, done.stderr
    return result(folder)


@pytest.mark.parametrize("event", ["KILL", "TERM"])
def test_stopped_and_resumed_equals_left_alone(tmp_path, whole, event):
    at = random.randrange(STEPS - 1)  # any step must do
    stopped = start(tmp_path, event, at)
    assert stopped.returncode == (-9 if event == "KILL" else 143), (at, stopped.stderr)
    resumed = start(tmp_path, "none", 0)
    assert resumed.returncode == 0, (at, resumed.stderr)
    rows, params = result(tmp_path)
    assert rows == whole[0], at
    for name, x in whole[1].items():
        assert np.array_equal(x, params[name]), (at, name)
