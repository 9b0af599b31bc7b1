"""math-verify and reasoning-gym: verdicts, and failures that are counted instead of scored 0."""

from __future__ import annotations

import numpy as np
import pytest

from jaxrl.data.prompts import reasoning_gym_examples
from jaxrl.errors import ConfigError, RewardError
from jaxrl.rewards import RewardInput, RewardSet, RewardSpec
from jaxrl.rewards.registry import bind


@pytest.fixture(scope="module")
def maths():
    with RewardSet([RewardSpec("math_verify", time_limit=20.0)], workers=1) as rewards:
        yield rewards


@pytest.mark.parametrize(
    ("gold", "text", "expected"),
    [
        ("1/2", r"So it is $\frac{1}{2}$.", 1),
        ("0.5", r"\boxed{\frac{1}{2}}", 1),
        (r"\frac{\sqrt{2}}{2}", r"\boxed{1/\sqrt{2}}", 1),
        (r"$x^2+2x+1$", r"\boxed{(x+1)^2}", 1),
        ("12", "first 12, but in the end 13", 0),
        ("12", "I do not know", 0),
        ("12", "", 0),
    ],
)
def test_math_verify_verdicts(maths, gold, text, expected):
    result = maths.score([RewardInput("p", text, answer=gold)])
    assert result.R[0, 0] == expected
    assert result.failures == ()


def test_math_verify_counts_failures(maths):
    rows = [RewardInput("p", "3", answer="3"), RewardInput("p", "3", answer="$$"), RewardInput("p", "3")]
    result = maths.score(rows)
    np.testing.assert_array_equal(result.R[:, 0], [1, np.nan, np.nan])
    assert result.metrics["reward/math_verify/errors"] == 2
    assert result.metrics["reward/math_verify/mean"] == 1
    assert "holds no expression" in result.failures[0]
    with pytest.raises(RewardError, match="16 of 16 rows failed"):
        maths.score(rows[1:] * 8)


def test_math_verify_that_hangs_is_killed_and_counted():
    spec = RewardSpec("math_verify", time_limit=1.0)
    with RewardSet([spec], workers=1) as rewards:
        rows = [RewardInput("p", text, answer="3") for text in ("3", r"\boxed{9^{9^{9^{9}}}}", "3")]
        result = rewards.score(rows)
    np.testing.assert_array_equal(result.R[:, 0], [1, np.nan, 1])
    assert result.metrics["reward/math_verify/timeouts"] == 1


def test_math_verify_comparison_that_raises_is_no_verdict(monkeypatch):
    import math_verify

    def broken(*args, **kwargs):
        raise ArithmeticError("no idea")

    monkeypatch.setattr(math_verify, "verify", broken)
    with pytest.raises(ArithmeticError):
        bind("math_verify", {})([RewardInput("p", "3", answer="3")])


def test_math_verify_boxed_only():
    reward = bind("math_verify", {"require_boxed": True})
    rows = [RewardInput("p", text, answer="3") for text in ("it is 3", "$3$", r"\boxed{3}")]
    assert reward(rows) == [0, 0, 1]


def test_reasoning_gym_scores_with_the_tasks_own_scorer():
    examples = [
        *reasoning_gym_examples("chain_sum", size=2, seed=1),
        *reasoning_gym_examples("countdown", size=2, seed=1),
        *reasoning_gym_examples("knights_knaves", size=2, seed=1),
    ]
    rows = [RewardInput("p", f"<answer>{e.answer}</answer>", metadata=e.metadata) for e in examples]
    wrong = [RewardInput("p", "<answer>no</answer>", metadata=e.metadata) for e in examples]
    with RewardSet(
        [RewardSpec("reasoning_gym", kwargs={"extract_from": "answer_tag"})], workers=1
    ) as rewards:
        right, bad = rewards.score(rows), rewards.score(wrong)
    np.testing.assert_array_equal(right.R[:, 0], np.ones(6))
    assert (bad.R[:, 0] < 0.1).all()


def test_reasoning_gym_errors_are_named():
    with pytest.raises(ConfigError, match="did you mean 'chain_sum'"):
        RewardSet([RewardSpec("reasoning_gym", kwargs={"task": "chain_sums"})])
    with pytest.raises(RewardError, match="metadata lacks"):
        RewardSet([RewardSpec("reasoning_gym", isolate=False, on_error="raise")]).score(
            [RewardInput("p", "1")]
        )
