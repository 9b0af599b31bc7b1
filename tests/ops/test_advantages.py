"""Advantage rules: values by hand, unscorable rows, singletons, token rewards, refusals."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxrl import ops
from jaxrl.errors import ConfigError, DataError
from jaxrl.ops import advantages as advantage_ops

NAN = float("nan")


def test_grpo_by_hand():
    advantages = ops.compute_advantages(ops.AdvantageConfig(epsilon=0.0), [1.0, 0.0, 3.0, 5.0], [0, 0, 1, 1])
    np.testing.assert_allclose(advantages, np.array([1, -1, -1, 1]) / np.sqrt(2))


def test_group_ids_may_be_names_and_interleaved():
    config = ops.AdvantageConfig(scale="none")
    advantages = ops.compute_advantages(config, [1.0, 10.0, 3.0, 30.0], np.array(["b", "a", "b", "a"]))
    np.testing.assert_allclose(advantages, [-1, -10, 1, 10])


@pytest.mark.parametrize("rule", sorted(ops.ADVANTAGE_RULES))
def test_unscorable_rows_are_as_if_absent(rule):
    rewards = np.array([1.0, NAN, 0.0, 0.25, 2.0, 0.5, NAN])
    ids, lengths = np.array([0, 0, 0, 1, 1, 1, 1]), np.array([2, 9, 3, 1, 4, 2, 9])
    live = ~np.isnan(rewards)
    config = ops.AdvantageConfig(rule)
    with_nan = ops.compute_advantages(config, rewards, ids, lengths)
    without = ops.compute_advantages(config, rewards[live], ids[live], lengths[live], num_columns=9)
    assert (with_nan[~live] == 0).all()
    np.testing.assert_allclose(with_nan[live], without, atol=1e-12)
    assert np.abs(without).max() > 0.1


@pytest.mark.parametrize("rule", ["grpo", "rloo", "opo", "gpg", "grpo_passk", "reinforce_plus_plus_baseline"])
def test_a_lone_scorable_row_gets_zero(rule):
    advantages = ops.compute_advantages(
        ops.AdvantageConfig(rule), [2.0, NAN, NAN, 1.0, 0.0], [0, 0, 0, 1, 1], [1, 1, 1, 1, 1]
    )
    np.testing.assert_array_equal(advantages[:3], np.zeros_like(advantages[:3]))
    assert advantages[3].max() > 0


@pytest.mark.parametrize("rule", ["grpo", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline"])
def test_singletons_are_refused_unless_allowed(rule):
    arguments = ([3.0, 1.0, 0.0], [0, 1, 1], [1, 1, 1])
    with pytest.raises(DataError, match="single row.*allow_singleton"):
        ops.compute_advantages(ops.AdvantageConfig(rule), *arguments)
    ops.compute_advantages(ops.AdvantageConfig(rule, allow_singleton=True), *arguments)


def test_singleton_values():
    arguments = ([3.0, 1.0, 0.0], [0, 1, 1])
    raw = ops.AdvantageConfig("rloo", allow_singleton=True)
    zero = dataclasses.replace(raw, singleton_value="zero")
    assert ops.compute_advantages(raw, *arguments)[0] == 3.0
    assert ops.compute_advantages(zero, *arguments)[0] == 0.0
    scaled = ops.AdvantageConfig("grpo", allow_singleton=True)
    np.testing.assert_allclose(ops.compute_advantages(scaled, *arguments)[0], 3.0 / (1 + 1e-6))
    with pytest.raises(DataError, match="at least two"):
        ops.compute_advantages(ops.AdvantageConfig("grpo_passk", allow_singleton=True), *arguments)


def test_normalized_rloo_has_unit_deviation():
    rewards = np.random.default_rng(0).normal(size=12)
    config = ops.AdvantageConfig("rloo", normalize=True, normalize_epsilon=0.0)
    advantages = ops.compute_advantages(config, rewards, np.repeat([0, 1, 2], 4))
    np.testing.assert_allclose([advantages.mean(), advantages.std(ddof=1)], [0, 1], atol=1e-12)


def test_whitening_is_over_tokens():
    mask = np.array([[1, 1, 1], [1, 0, 0]])
    white = advantage_ops.whiten(np.array([[1.0, 1, 1], [5, 99, 99]]), mask)
    valid = white[mask > 0]
    np.testing.assert_allclose([valid.mean(), valid.std(ddof=1)], [0, 1], atol=1e-6)
    assert (white[mask == 0] == 0).all()
    assert (advantage_ops.whiten(np.ones((1, 3)), np.array([[1, 0, 0]])) == 0).all()


def test_returns_pass_over_observation_tokens():
    rewards = np.array([[0.0, 7.0, 7.0, 1.0, 7.0]])
    mask = np.array([[1, 0, 0, 1, 0]])
    returns = advantage_ops.discounted_returns(rewards, mask, 0.5)
    np.testing.assert_array_equal(returns, [[0.5, 0, 0, 1, 0]])


def test_rewards_sit_on_the_last_loss_token():
    mask = np.array([[1, 0, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0]])
    placed = ops.place_rewards([2.0, 3.0, NAN], mask)
    np.testing.assert_array_equal(placed, [[0, 0, 2, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    penalised = ops.place_rewards([2.0, 3.0, 0.0], mask, kl=np.full((3, 4), 10.0), kl_coef=0.1)
    np.testing.assert_allclose(penalised, [[-1, 0, 1, 0], [0, 0, 0, 0], [-1, 0, 0, 0]])


def test_token_rewards_enter_reinforce_plus_plus():
    mask = np.ones((2, 3))
    config = ops.AdvantageConfig("reinforce_plus_plus")
    rewards = np.array([1.0, 0.0])
    same = ops.compute_advantages(config, rewards, [0, 1], mask=mask, token_rewards=ops.place_rewards(rewards, mask))
    np.testing.assert_array_equal(same, ops.compute_advantages(config, rewards, [0, 1], mask=mask))
    early = np.array([[1.0, 0, 0], [0, 0, 0]])
    moved = ops.compute_advantages(config, rewards, [0, 1], mask=mask, token_rewards=early)
    assert moved[0, 0] > moved[0, 1]


def test_lengths_and_mask_agree():
    config = ops.AdvantageConfig("reinforce_plus_plus_baseline")
    lengths = np.array([2, 3, 1, 3])
    mask = np.arange(5) < lengths[:, None]
    by_length = ops.compute_advantages(config, [1, 0, 1, 0], [0, 0, 1, 1], lengths, num_columns=5)
    by_mask = ops.compute_advantages(config, [1, 0, 1, 0], [0, 0, 1, 1], mask=mask)
    np.testing.assert_array_equal(by_length, by_mask)
    assert by_length.shape == (4, 5)


def test_combine_rewards_skips_declined_entries():
    rewards, scorable = ops.combine_rewards([[1.0, 2.0], [NAN, 2.0], [NAN, NAN]], [1.0, 0.5])
    np.testing.assert_array_equal(rewards, [2.0, 1.0, NAN])
    np.testing.assert_array_equal(scorable, [True, True, False])


def test_a_new_rule_is_one_function(monkeypatch):
    def best_only(batch: ops.RewardBatch, config: ops.AdvantageConfig) -> np.ndarray:
        return (batch.rewards > batch.groups.mean(batch.rewards)).astype(float)

    monkeypatch.setitem(ops.ADVANTAGE_RULES, "best_only", best_only)
    advantages = ops.compute_advantages(ops.AdvantageConfig("best_only"), [0.0, 1.0, NAN], [0, 0, 0])
    np.testing.assert_array_equal(advantages, [0, 1, 0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rule": "grop"}, "rule is 'grop'; choose one of"),
        ({"scale": "std"}, "scale"),
        ({"epsilon": -1.0}, "epsilon is -1.0"),
        ({"gamma": 1.5}, "gamma"),
        ({"normalize": True}, "normalize belongs to rule 'rloo'"),
        ({"singleton_value": "nan"}, "singleton_value"),
    ],
)
def test_bad_options_are_refused_by_name(options, message):
    with pytest.raises(ConfigError, match=message):
        ops.AdvantageConfig(**options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rewards": [1.0, 2.0], "group_ids": [0]}, "group_ids"),
        ({"rewards": [], "group_ids": []}, "at least one row"),
        ({"rewards": [1.0, float("inf")], "group_ids": [0, 0]}, r"rewards\[1\] is infinite"),
        ({"rewards": [1.0, 2.0], "group_ids": [0, 0], "lengths": [1, 5], "num_columns": 4}, "longest row has 5"),
        ({"rewards": [1.0, 2.0], "group_ids": [0, 0], "lengths": [1]}, "lengths"),
        ({"rewards": [1.0, 2.0], "group_ids": [0, 0], "mask": np.ones((3, 2))}, "mask has shape"),
        ({"rewards": [1.0, 2.0], "group_ids": [0, 0], "token_rewards": np.ones((2, 2))}, "takes one reward per row"),
    ],
)
def test_bad_batches_are_refused(arguments, message):
    with pytest.raises(DataError, match=message):
        ops.compute_advantages(ops.AdvantageConfig(), **arguments)


@pytest.mark.parametrize("rule", ["opo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_rules_say_that_they_need_lengths(rule):
    with pytest.raises(DataError, match="lengths"):
        ops.compute_advantages(ops.AdvantageConfig(rule), [1.0, 0.0], [0, 0])


def test_combine_rewards_refuses_bad_shapes():
    with pytest.raises(DataError, match="2 reward weights for 3"):
        ops.combine_rewards(np.ones((2, 3)), [1.0, 1.0])
    with pytest.raises(DataError, match="reward functions"):
        ops.combine_rewards(np.ones(3))
    with pytest.raises(DataError, match="infinite"):
        ops.combine_rewards([[1.0, -np.inf]])
