"""The frame of the side-by-side benchmarks: worker protocol, alternation, model files, and the jaxrl worker itself."""

from __future__ import annotations

import pathlib
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.peers import arena, model_files, protocol

ECHO = """
import sys
sys.path.insert(0, {folder!r})
import protocol

def double(x):
    print("a library prints")  # must not reach the replies
    return {{"value": 2 * x}}

def leave():
    sys.exit(3)

protocol.serve({{"double": double, "leave": leave}})
"""


@pytest.fixture
def echo(tmp_path):
    script = tmp_path / "echo.py"
    script.write_text(ECHO.format(folder=str(ROOT / "benchmarks" / "peers")))
    worker = protocol.Worker("echo", sys.executable, script, {}, tmp_path / "echo.log")
    yield worker
    worker.close()


def test_worker_answers_although_the_library_prints(echo):
    assert [echo.call("double", x=x)["value"] for x in (1, 21)] == [2, 42]


def test_worker_error_carries_the_traceback_and_the_worker_lives_on(echo):
    with pytest.raises(protocol.WorkerError, match="can't multiply|unsupported operand"):
        echo.call("double", x={})
    assert echo.call("double", x=3)["value"] == 6


def test_worker_death_is_an_error_with_its_exit_code(echo):
    with pytest.raises(protocol.WorkerError, match="code 3"):
        echo.call("leave")


def test_memory_peak_counts_a_buffer_that_is_gone(echo):
    before = protocol.memory()
    buffer = np.ones(50_000_000)
    del buffer
    assert protocol.memory()["peak"] >= before["rss"] + 300_000_000
    assert echo.call("memory")["peak"] > 0


def test_alternation_visits_the_libraries_in_turn():
    visits = []
    arena.alternate({"a": 1, "b": 2}, 3, lambda worker, repeat: visits.append((worker, repeat)) or {})
    assert visits == [(1, 0), (2, 0), (1, 1), (2, 1), (1, 2), (2, 2)]


def test_medians_and_table():
    results = {"a": [{"s": 3.0}, {"s": 1.0}, {"s": 2.0}], "b": [{"s": 5.0}]}
    assert arena.medians(results, "s") == {"a": 2.0, "b": 5.0}
    assert arena.markdown([("x", {"a": "1"})], ["a", "b"]).splitlines()[-1] == "| x | 1 | - |"


def test_jaxrl_worker_samples_exact_lengths_and_repeats_itself(tmp_path):
    shape = model_files.LlamaShape(vocab_size=128, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2, d_ff=48)
    model_files.write_random_llama(tmp_path / "model", shape)
    prompts = arena.random_prompts(2, 4, shape.vocab_size, seed=0)
    load = {"prompts": prompts, "samples": 2, "new": 6, "temperature": 1.0}
    with arena.workers(["jaxrl"], tmp_path) as crew:
        worker = crew["jaxrl"]
        assert worker.call("load", model_dir=str(tmp_path / "model"))["parameters"] == 128 * 32 + 32 + 2 * (
            2 * 32 + 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48
        )
        worker.call("prepare_sampler", rows=4, prompt=4, new=6, samples=2)
        first = worker.call("sample", seed=1, **load)
        again = worker.call("sample", seed=1, **load)
        other = worker.call("sample", seed=2, **load)
        assert {len(row) for row in first["tokens"]} == {6}
        assert first["tokens"] == again["tokens"] != other["tokens"]
        assert again["compiles"] == other["compiles"] == 0
        assert worker.call("gap", seed=1, **load)["max"] < 1e-5
