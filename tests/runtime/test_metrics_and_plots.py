"""The metrics file, outside loggers, plots."""

from __future__ import annotations

import math
import sys
import types

import numpy as np
import pytest

from jaxrl.errors import ConfigError, DataError, MissingExtraError
from jaxrl.runtime import plots
from jaxrl.runtime.metrics import MetricsLog, Resilient, make_writers, read_metrics


def test_log_is_cut_at_the_restored_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, keep_until=-1)
    for step in range(6):
        log.write(step, {"loss": 0.1 * step})
    log.close()
    with open(path, "a") as file:
        file.write('{"step": 6, "lo')  # the process died in this write
    log = MetricsLog(path, keep_until=3)
    assert log.last["step"] == 3
    log.write(4, {"loss": 1.0})
    log.close()
    rows = read_metrics(path)
    assert [r["step"] for r in rows] == [0, 1, 2, 3, 4] and rows[3]["loss"] == 0.1 * 3


def test_damaged_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl:2 is not a metrics line"):
        read_metrics(path)


def test_tensorboard_writes_events(tmp_path):
    (writer,) = make_writers(("tensorboard",), tmp_path, "p", {}, start=3)
    writer.write(4, {"loss": 0.5})
    writer.close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    assert b"loss" in file.read_bytes()


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_missing_logger_names_the_extra(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=rf"pip install 'jaxrl-train\[{name}\]'"):
        make_writers((name,), tmp_path, "p", {}, start=0)


def test_unknown_logger(tmp_path):
    with pytest.raises(ConfigError, match="'wandbb'"):
        make_writers(("wandbb",), tmp_path, "p", {}, start=0)


def test_wandb_gets_one_identity_per_folder(tmp_path, monkeypatch):
    calls = []

    class Run:
        def log(self, metrics, step):
            calls.append((step, metrics))

        def finish(self):
            calls.append("finish")

    fake = types.SimpleNamespace(init=lambda **options: calls.append(options) or Run())
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for step in (1, 2):
        (writer,) = make_writers(("wandb",), tmp_path, "project", {"a": 1}, start=step)
        writer.write(step, {"loss": 0.5})
        writer.close()
    assert calls[0]["id"] == calls[3]["id"] and calls[0]["resume"] == "allow"
    assert calls[1] == (1, {"loss": 0.5}) and calls[4] == (2, {"loss": 0.5}) and calls[5] == "finish"


def test_outage_warns_once_and_the_run_goes_on(caplog):
    class Down:
        def write(self, step, metrics):
            raise ConnectionError("no route to host")

        def close(self):
            raise ConnectionError("no route to host")

    writer = Resilient("wandb", Down)
    for step in range(5):
        writer.write(step, {})
    writer.close()
    assert caplog.text.count("logger wandb failed") == 1 and "no route to host" in caplog.text


def test_smoothing_is_a_bias_corrected_average():
    np.testing.assert_allclose(plots.smooth([2.0, 2.0, 2.0], 0.9), 2.0)
    np.testing.assert_allclose(plots.smooth([1.0, 3.0], 0.5), [1.0, (0.25 * 1 + 0.5 * 3) / 0.75])
    gap = plots.smooth([math.nan, 1.0, math.nan, 3.0], 0.5)
    assert math.isnan(gap[0]) and gap[2] == 1.0 and gap[3] == pytest.approx((0.25 * 1 + 0.5 * 3) / 0.75)
    np.testing.assert_array_equal(plots.smooth([1.0, 5.0], 0.0), [1.0, 5.0])


def test_plots_are_written(tmp_path):
    rows = [{"step": s, "reward": math.sin(s / 5), "loss": 1 / (s + 1)} for s in range(40)]
    files = [
        plots.curves(rows, ["reward", "loss"], tmp_path / "a" / "curves.png"),
        plots.seed_band({"grpo": [rows, rows[:30]], "rloo": [rows]}, "reward", tmp_path / "band.png"),
        plots.before_after({"acc": 0.2, "x": 1.0}, {"acc": 0.7}, tmp_path / "bars.png", "accuracy"),
    ]
    assert all(f.read_bytes()[:4] == b"\x89PNG" for f in files)


def test_plots_name_what_is_missing(tmp_path):
    with pytest.raises(DataError, match="'reward'"):
        plots.curves([{"step": 1, "loss": 0.1}], ["reward"], tmp_path / "x.png")
    with pytest.raises(DataError, match="share no step"):
        plots.seed_band({"a": [[{"step": 1, "r": 1.0}], [{"step": 2, "r": 1.0}]]}, "r", tmp_path / "x.png")
    with pytest.raises(DataError, match="no metric in common"):
        plots.before_after({"a": 1.0}, {"b": 1.0}, tmp_path / "x.png")
