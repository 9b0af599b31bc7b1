"""Overlong penalties, group filters, batch statistics, pass@k and maj@k."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from jaxrl import ops
from jaxrl.errors import ConfigError, DataError

NAN = float("nan")


def test_overlong_penalties_agree_up_to_the_limit():
    lengths = np.arange(0, 101)
    soft = ops.soft_overlong_penalty(lengths, 100, 20)
    np.testing.assert_array_equal(soft, ops.linear_overlong_penalty(lengths, 100, 20))
    assert (soft[:81] == 0).all() and soft[100] == -1
    assert not np.signbit(soft[:81]).any()
    assert ops.soft_overlong_penalty([140], 100, 20)[0] == -1
    assert ops.linear_overlong_penalty([140], 100, 20)[0] == -3
    with pytest.raises(ConfigError, match="buffer is 200"):
        ops.soft_overlong_penalty(lengths, 100, 200)


def test_groups_without_signal_are_dropped():
    metric = [0.7, 0.7, 0.7, 1.0, 0.0, 5.0, NAN, 1.0, NAN]
    ids = [0, 0, 0, 1, 1, 2, 3, 3, 4]
    np.testing.assert_array_equal(ops.keep_groups(metric, ids), [0, 0, 0, 1, 1, 1, 0, 0, 0])
    assert ops.zero_std_fraction([0.7] * 7 + [0.0, 1.0], [0] * 7 + [1] * 2) == 0.5


def test_truncated_rows_lose_their_mask():
    mask = np.ones((2, 3), np.float32)
    np.testing.assert_array_equal(ops.mask_truncated(mask, [True, False]), [[0, 0, 0], [1, 1, 1]])
    with pytest.raises(DataError, match="one flag for each of 2 rows"):
        ops.mask_truncated(mask, [True])


def test_batch_statistics():
    stats = ops.batch_statistics(
        [1.0, 0.0, NAN, 1.0], [0, 0, 1, 1], [4, 2, 9, 3], truncated=[False, False, True, False],
        components={"format": np.array([1.0, NAN, NAN, 0.0])},
    )
    expected = {
        "reward": 2 / 3, "reward/std": np.std([1, 0, 1], ddof=1), "reward/format": 0.5, "frac_reward_zero_std": 0.5,
        "unscorable_rows": 1, "completion_length": 4.5, "completion_length/min": 2, "completion_length/max": 9,
        "completion_length/terminated": 3, "truncated_fraction": 0.25,
    }
    assert set(stats) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(stats[name], value, err_msg=name)


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_is_the_average_over_subsets(k):
    for right in range(6):
        flags = [True] * right + [False] * (5 - right)
        brute = np.mean([any(subset) for subset in itertools.combinations(flags, k)])
        np.testing.assert_allclose(ops.pass_at_k(5, right, k), brute, atol=1e-12)


def test_pass_at_k_of_many_samples_does_not_overflow():
    values = ops.pass_at_k(np.array([2000, 2000]), np.array([0, 1000]), 1000)
    np.testing.assert_allclose(values, [0.0, 1.0])
    with pytest.raises(DataError, match="at least"):
        ops.pass_at_k(np.array([3, 8]), np.array([1, 1]), 4)
    with pytest.raises(DataError, match="between 0 and num_samples"):
        ops.pass_at_k(3, 4, 1)


def test_majority_vote():
    answers = [["a", "b", "b", "a", "a"], ["x", "y", None], [None, None, None]]
    correct = [[False, True, True, False, False], [True, False, False], [False] * 3]
    np.testing.assert_array_equal(ops.majority_at_k(answers, correct, 3), [1.0, 0.5, 0.0])
    np.testing.assert_array_equal(ops.majority_at_k(answers[:1], correct[:1], 5), [0.0])
    with pytest.raises(DataError, match="problem 1"):
        ops.majority_at_k(answers, correct, 4)
