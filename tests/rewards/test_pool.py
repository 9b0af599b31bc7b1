"""Worker processes: time limits, deaths, order, closing."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

from jaxrl.errors import ConfigError, RewardError
from jaxrl.rewards import RewardInput, RewardPool, RewardSet, RewardSpec
from jaxrl.rewards.pool import reward_key

PATH = "sample_rewards:obedient"
HERE = pathlib.Path(__file__).parent


def row(text: str) -> RewardInput:
    return RewardInput("prompt", text)


def isolated(**settings) -> RewardSpec:
    return RewardSpec(PATH, **{"isolate": True, "time_limit": 30.0, "on_error": "decline", **settings})


@pytest.fixture(scope="module")
def pool():
    with RewardPool(workers=2, warm=[(PATH, {})]) as shared:
        yield shared


@pytest.mark.parametrize("how", ["hang", "hang in C"])
def test_hung_row_costs_only_itself(pool, how):
    rewards = RewardSet([isolated(time_limit=0.5)], pool=pool)
    result = rewards.score([row("1"), row(how), row("2"), row("3")])
    np.testing.assert_array_equal(result.R[:, 0], [1, np.nan, 2, 3])
    assert result.metrics["reward/obedient/timeouts"] == 1
    assert result.metrics["reward/obedient/declined"] == 1
    assert result.metrics["reward/obedient/errors"] == 0
    assert result.metrics["reward/obedient/mean"] == 2
    assert "row 1" in result.failures[0] and "longer than 0.5 s" in result.failures[0]
    np.testing.assert_array_equal(rewards.score([row("5")] * 8).R[:, 0], [5] * 8)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("raise", "ValueError: I was told to"),
        ("raise awkwardly", "AwkwardError: this and that"),
        ("die", "exit code 3"),
        ("eat memory", "MemoryError"),
        ("infinite", "must be finite"),
    ],
)
def test_failure_is_counted_and_pool_lives(pool, text, words):
    rewards = RewardSet([isolated()], pool=pool)
    result = rewards.score([row("1"), row(text), row("2")])
    np.testing.assert_array_equal(result.R[:, 0], [1, np.nan, 2])
    assert result.metrics["reward/obedient/errors"] == 1
    assert words in result.failures[0]


def test_decline_is_no_error(pool):
    result = RewardSet([isolated()], pool=pool).score([row("decline"), row("2")])
    assert result.metrics["reward/obedient/errors"] == 0
    assert result.metrics["reward/obedient/declined"] == 1
    assert result.failures == ()


def test_raise_policy_names_reward_row_and_exception(pool):
    rewards = RewardSet([isolated(on_error="raise")], pool=pool)
    with pytest.raises(
        RewardError, match=r"'obedient' failed on row 1: ValueError: I was told to \(sample_rewards.py"
    ):
        rewards.score([row("1"), row("raise")])


def test_reward_that_fails_everywhere_is_refused(pool):
    rewards = RewardSet([isolated()], pool=pool)
    with pytest.raises(RewardError, match="20 of 24 rows failed"):
        rewards.score([row("raise")] * 20 + [row("1")] * 4)
    assert (
        RewardSet([isolated(max_failed=1.0)], pool=pool)
        .score([row("raise")] * 20)
        .metrics["reward/obedient/errors"]
        == 20
    )


def test_order_is_that_of_the_rows(pool):
    rewards = RewardSet([isolated(kwargs={"scale": 2.0})], pool=pool)
    pending = [rewards.submit(row(str(i))) for i in range(40)]
    np.testing.assert_array_equal(
        rewards.collect(pending[::-1]).R[:, 0], [2.0 * i for i in reversed(range(40))]
    )


def test_submit_does_not_wait(pool):
    rewards = RewardSet([isolated(time_limit=1.0)], pool=pool)
    pending = [rewards.submit(row(text)) for text in ("hang", "2")]
    assert not pending[0].futures[0].done()
    np.testing.assert_array_equal(rewards.collect(pending).R[:, 0], [np.nan, 2])


def test_cancelled_row_must_not_be_collected(pool):
    rewards = RewardSet([isolated()], pool=pool)
    pending = rewards.submit(row("hang"))
    pending.cancel()
    with pytest.raises(RewardError, match="cancelled"):
        rewards.collect([pending])
    assert rewards.score([row("4")]).R[0, 0] == 4


def test_closed_pool_refuses_rows_and_leaves_no_worker():
    rewards = RewardSet([isolated()], workers=1)
    pid = int(rewards.score([row("pid")]).R[0, 0])
    os.kill(pid, 0)
    rewards.close()
    rewards.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(RewardError, match="closed"):
        rewards.score([row("1")])


def test_unpicklable_kwargs_and_bad_sizes_are_named():
    with pytest.raises(ConfigError, match="do not pickle"):
        reward_key("exact_match", {"extract_from": lambda: 0})
    with pytest.raises(ConfigError, match="workers=0"):
        RewardPool(workers=0)


def _script(tmp_path: pathlib.Path, body: str) -> subprocess.Popen:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, sys, time
            print("main script runs", flush=True)
            sys.path.insert(0, {here!r})
            from jaxrl.rewards import RewardInput, RewardSet, RewardSpec
            rewards = RewardSet([RewardSpec({path!r}, isolate=True, time_limit=20.0)], workers=1)
            row = lambda text: RewardInput("", text)
            """
        ).format(here=str(HERE), path=PATH)
        + textwrap.dedent(body)
    )
    env = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    return subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=env)


def test_script_without_main_guard_runs_once_and_without_jax(tmp_path):
    process = _script(
        tmp_path, "print(rewards.score([row('6')] * 3).R.sum(), 'jax' in sys.modules, __file__)"
    )
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert out.split("\n")[:2] == ["main script runs", f"18.0 False {tmp_path / 'script.py'}"]


def test_workers_end_with_a_killed_parent(tmp_path):
    process = _script(
        tmp_path,
        """
        pid = int(rewards.score([row("pid")]).R[0, 0])
        rewards.submit(row("hang"))
        print(pid, flush=True)
        time.sleep(60)
        """,
    )
    assert process.stdout is not None
    process.stdout.readline()
    pid = int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + 30
    while _running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _running(pid)


def _running(pid: int) -> bool:
    try:
        return "State:\tZ" not in pathlib.Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
