"""The loop: logs, evaluations, checkpoints, resume, faults."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import signal

import jax
import numpy as np
import pytest

from jaxrl.errors import CheckpointError, ConfigError, NonFiniteError
from jaxrl.runtime import loop
from jaxrl.runtime.checkpoint import Checkpointer
from jaxrl.runtime.metrics import deterministic, read_metrics
from jaxrl.runtime.run_config import RunConfig
from jaxrl.runtime.rundir import RunDir
from jaxrl.runtime.signals import Interrupted
from toy_system import Config, Toy

BASE = RunConfig(total_steps=8, eval_every=2, checkpoint_every=2, progress=False)


def rows_of(folder):
    return [deterministic(row) for row in read_metrics(folder / "metrics.jsonl")]


def same(a, b):
    """Equal structure and equal bits, typed keys included."""
    flat_a, flat_b = jax.tree_util.tree_leaves_with_path(a), jax.tree_util.tree_leaves_with_path(b)
    assert [p for p, _ in flat_a] == [p for p, _ in flat_b]
    for (path, x), (_, y) in zip(flat_a, flat_b, strict=True):
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        assert x.dtype == y.dtype and np.array_equal(x, y), path


def test_one_line_per_step_and_files(tmp_path):
    loop.run(Toy(), BASE, tmp_path)
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in rows] == list(range(9))
    assert [r["step"] for r in rows if "eval/norm" in r] == [0, 2, 4, 6, 8]
    assert all(r["time/step_seconds"] > 0 for r in rows[1:])
    assert not any(name.startswith("time/") for r in rows for name in deterministic(r))
    assert json.loads((tmp_path / "samples" / "step_00000008.jsonl").read_text())["completion"] == "2"
    report = (tmp_path / "report.md").read_text()
    assert "| loss |" in report and "completion: 2" in report and f"| jax | {jax.__version__} |" in report
    assert (tmp_path / "plots" / "curves.png").read_bytes()[:4] == b"\x89PNG"


def test_resume_in_parts_equals_one_run(tmp_path):
    whole = loop.run(Toy(), BASE, tmp_path / "whole")
    for total in (3, 4, 8):
        parts = loop.run(Toy(), dataclasses.replace(BASE, total_steps=total), tmp_path / "parts")
    same(parts.device, whole.device)
    assert parts.host == whole.host
    # The learning-rate schedule and the noise depend on the step; equal losses mean that both continued.
    assert rows_of(tmp_path / "parts") == rows_of(tmp_path / "whole")


def test_seed_changes_the_run(tmp_path):
    loop.run(Toy(), BASE, tmp_path / "a")
    loop.run(Toy(), dataclasses.replace(BASE, seed=1), tmp_path / "b")
    assert rows_of(tmp_path / "a")[1]["loss"] != rows_of(tmp_path / "b")[1]["loss"]


def test_complete_run_says_so(tmp_path, caplog):
    loop.run(Toy(), BASE, tmp_path)
    before = (tmp_path / "metrics.jsonl").read_text()
    with caplog.at_level(logging.WARNING, "jaxrl"):
        loop.run(Toy(), BASE, tmp_path)
    assert "raise total_steps" in caplog.text
    assert (tmp_path / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize("event", [signal.SIGTERM, signal.SIGINT])
def test_signal_saves_the_step_and_resume_is_exact(tmp_path, event):
    whole = loop.run(Toy(), BASE, tmp_path / "whole")
    toy = Toy()
    toy.hook = lambda position: os.kill(os.getpid(), event) if position == 2 else None
    with pytest.raises(Interrupted) as stop:
        loop.run(toy, BASE, tmp_path / "parts")
    assert stop.value.code == 128 + event and "after step 3 of 8" in stop.value.message
    assert rows_of(tmp_path / "parts")[-1]["step"] == 3  # the step in progress was finished, logged and saved
    assert Checkpointer(tmp_path / "parts").steps[-1] == 3
    parts = loop.run(Toy(), BASE, tmp_path / "parts")
    same(parts.device, whole.device)
    assert rows_of(tmp_path / "parts") == rows_of(tmp_path / "whole")


@pytest.fixture
def default_interrupt():
    """Ctrl-C as in a terminal: a background job of a shell starts with SIGINT ignored."""
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, old)


def test_second_signal_stops_at_once(tmp_path, default_interrupt):
    toy = Toy()

    def hook(position):
        # Each handler runs before the next line; two kills in a row could arrive as one.
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    toy.hook = hook
    with pytest.raises(KeyboardInterrupt):
        loop.run(toy, BASE, tmp_path)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_nonfinite_saves_the_last_good_state(tmp_path, caplog):
    with pytest.raises(NonFiniteError, match="row 3"):
        loop.run(Toy(Config(nan_at=5)), dataclasses.replace(BASE, checkpoint_every=4), tmp_path / "run")
    assert Checkpointer(tmp_path / "run").steps == [4, 5]
    assert "checkpoint of step 5" in caplog.text
    whole = loop.run(Toy(), BASE, tmp_path / "whole")
    resumed = loop.run(Toy(), BASE, tmp_path / "run")
    same(resumed.device, whole.device)


def test_nonfinite_after_donation_uses_the_state_of_the_error(tmp_path):
    class Donating(Toy):
        def step(self, state):
            if state.host["position"] == 3:
                kept, _ = self._step(state.device, np.zeros((16, 4), np.float32))
                error = NonFiniteError("loss is nan; lower the learning rate")
                error.state = dataclasses.replace(state, device=kept)
                raise error
            return super().step(state)

    with pytest.raises(NonFiniteError):
        loop.run(Donating(), BASE, tmp_path)
    assert Checkpointer(tmp_path).steps[-1] == 3


def test_resume_modes(tmp_path):
    with pytest.raises(ConfigError, match="has no checkpoint"):
        loop.run(Toy(), dataclasses.replace(BASE, resume="must"), tmp_path / "a")
    loop.run(Toy(), BASE, tmp_path / "a")
    with pytest.raises(ConfigError, match="already has checkpoints"):
        loop.run(Toy(), dataclasses.replace(BASE, resume="never"), tmp_path / "a")


def test_keep_best(tmp_path):
    config = dataclasses.replace(BASE, keep=1, keep_best="loss", best_mode="min")
    loop.run(Toy(), config, tmp_path)
    losses = {r["step"]: r["loss"] for r in rows_of(tmp_path) if r["step"] and r["step"] % 2 == 0}
    checkpointer = Checkpointer(tmp_path, keep=1, keep_best="loss", best_mode="min")
    best = min(losses, key=losses.get)
    assert checkpointer.best_step() == best
    assert checkpointer.steps == sorted({best, 8})


def test_keep_best_names_a_missing_metric(tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'loss'"):
        loop.run(Toy(), dataclasses.replace(BASE, keep_best="los"), tmp_path)


def test_folder_has_one_owner(tmp_path):
    with RunDir(tmp_path).create(), pytest.raises(ConfigError, match="in use by process"):
        loop.run(Toy(), BASE, tmp_path)
    loop.run(Toy(), BASE, tmp_path)


def test_save_error_stops_or_continues(tmp_path, monkeypatch, caplog):
    real = Checkpointer.save

    def failing(self, state, step, metrics=None):
        if step == 4:
            raise CheckpointError("the disk is full")
        real(self, state, step, metrics)

    monkeypatch.setattr(Checkpointer, "save", failing)
    with pytest.raises(CheckpointError, match="disk is full"):
        loop.run(Toy(), BASE, tmp_path / "stop")
    assert Checkpointer(tmp_path / "stop").steps == [2]
    loop.run(Toy(), dataclasses.replace(BASE, on_save_error="continue", keep=9), tmp_path / "go")
    assert Checkpointer(tmp_path / "go").steps == [2, 6, 8]
    assert "the run goes on" in caplog.text


def test_metrics_must_be_scalars(tmp_path):
    class Vector(Toy):
        def step(self, state):
            state, metrics = super().step(state)
            return state, metrics | {"rewards": np.zeros(3)}

    with pytest.raises(ValueError, match="'rewards' has shape"):
        loop.run(Vector(), BASE, tmp_path)


def test_nonfinite_metric_is_null_in_the_log(tmp_path):
    class Empty(Toy):
        def evaluate(self, state):
            return {"reward": math.nan}

    loop.run(Empty(), BASE, tmp_path)
    assert '"eval/reward": null' in (tmp_path / "metrics.jsonl").read_text()
    assert math.isnan(read_metrics(tmp_path / "metrics.jsonl")[0]["eval/reward"])


def test_profile_steps_write_a_trace(tmp_path):
    loop.run(Toy(), dataclasses.replace(BASE, total_steps=3, profile_steps="1:2"), tmp_path)
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))


def test_recompilation_in_a_run_is_reported(tmp_path, caplog):
    class Growing(Toy):
        def step(self, state):
            if state.host["position"] < 5:
                return super().step(state)
            raise_rows = np.zeros((16, 4), np.float32)
            device, metrics = self._grown(state.device, raise_rows)
            return dataclasses.replace(state, device=device), metrics

        def _grown(self, device, rows):
            return self._step(device, rows.astype(np.float16))

    config = dataclasses.replace(BASE, total_steps=6, recompile_guard="warn")
    loop.run(Growing(), config, tmp_path)
    assert (
        "step 6: train_step compiled again: argument rows changed from float32[16, 4] to float16[16, 4]"
        in caplog.text
    )
