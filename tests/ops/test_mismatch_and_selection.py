"""Rejection rules, row and token selection, and presets."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl import ops
from jaxrl.errors import ConfigError

MASK = jnp.array([[1, 1, 0], [1, 1, 1], [0, 0, 0]])
D = jnp.log(jnp.array([[1.0, 1.5, 9.0], [1.0, 1.0, 0.9], [9.0, 9.0, 9.0]]))  # old - sampler


def rejected(statistic: str, upper: float, lower: float | None = None) -> np.ndarray:
    config = ops.MismatchConfig(level="none", rejection=(ops.RejectionRule(statistic, upper, lower),))
    correction = ops.correct_mismatch(config, D, jnp.zeros_like(D), MASK)
    assert correction.weights is None
    assert correction.mask.dtype == MASK.dtype
    return np.asarray(correction.mask)


def test_token_rejection_drops_tokens_and_sequence_rejection_drops_rows():
    np.testing.assert_array_equal(rejected("token_k1", 1.2), [[1, 0, 0], [1, 1, 1], [0, 0, 0]])
    np.testing.assert_array_equal(rejected("seq_sum_k1", 1.2), [[0, 0, 0], [1, 1, 1], [0, 0, 0]])
    np.testing.assert_array_equal(rejected("seq_max_k2", 0.05), [[0, 0, 0], [1, 1, 1], [0, 0, 0]])
    np.testing.assert_array_equal(rejected("seq_mean_k1", 1.3), MASK)


def test_a_single_k1_bound_is_symmetric_in_the_ratio():
    np.testing.assert_array_equal(rejected("token_k1", 1.05), rejected("token_k1", 1.05, 1 / 1.05))
    assert (rejected("token_k1", 1.05) != rejected("token_k1", 1.2)).any()


def test_all_rules_must_pass():
    rules = (ops.RejectionRule("token_k1", 1.2), ops.RejectionRule("token_k1", 1.05, 0.99))
    config = ops.MismatchConfig(level="none", rejection=rules)
    mask = ops.correct_mismatch(config, D, jnp.zeros_like(D), MASK).mask
    np.testing.assert_array_equal(mask, np.asarray(rejected("token_k1", 1.2)) * rejected("token_k1", 1.05, 0.99))


def test_bounds_are_inclusive():
    config = ops.MismatchConfig(mode="mask", upper=2.0, lower=0.5)
    d = jnp.log(jnp.array([[2.0, 0.5, 2.1, 0.4]]))
    weights = ops.mismatch_weights(config, d, jnp.zeros_like(d), jnp.ones_like(d))
    np.testing.assert_allclose(weights, [[2.0, 0.5, 0, 0]], rtol=1e-6)


def test_weights_of_an_empty_batch_are_finite():
    mask = jnp.zeros((2, 2))
    for level in ("token", "sequence"):
        config = ops.MismatchConfig(level, batch_normalize=True)
        weights, _ = ops.correct_mismatch(config, jnp.full((2, 2), jnp.nan), mask, mask)
        assert (np.asarray(weights) == 0).all()


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_packed_normalisation_equals_that_of_separate_rows(level):
    rng = np.random.default_rng(2)
    old, mask = jnp.asarray(rng.normal(0, 0.3, (4, 3)), jnp.float32), jnp.array([[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1]])
    config = ops.MismatchConfig(level, upper=1.2, batch_normalize=True)
    apart = ops.correct_mismatch(config, old, jnp.zeros_like(old), mask).weights
    ids = jnp.tile(jnp.repeat(jnp.array([1, 2]), 3), (2, 1))
    packed = ops.correct_mismatch(config, old.reshape(2, 6), jnp.zeros((2, 6)), mask.reshape(2, 6), ids).weights
    np.testing.assert_allclose(packed.reshape(4, 3), apart, rtol=1e-5)


def test_off_policy_rows_are_dropped_only_for_negative_advantages():
    logp = jnp.full((3, 2), -2.0)
    behaviour = logp + jnp.array([[0.1], [0.1], [0.01]])
    keep = ops.off_policy_keep(0.05, logp, behaviour, jnp.array([-1.0, 1.0, -1.0]), jnp.ones((3, 2)))
    np.testing.assert_array_equal(keep, [[False], [True], [True]])


def test_dropped_rows_stay_in_the_denominators():
    logp, mask = jnp.full((2, 2), -2.0), jnp.ones((2, 2))
    loss, metrics = ops.policy_objective(
        ops.LossConfig(off_policy_mask_threshold=0.05), logp=logp, old_logp=logp + jnp.array([[0.1], [0.0]]),
        advantages=jnp.array([-1.0, -1.0]), mask=mask, denominators=ops.count(mask),
    )
    np.testing.assert_allclose(loss, 0.5, rtol=1e-6)
    assert float(ops.summarize_metrics(metrics)["off_policy_dropped"]) == 0.5


def test_top_entropy_tokens_are_kept():
    entropy = jnp.array([[0.1, 0.2, 0.3, 0.4, 0.5, 99.0]])
    mask = jnp.array([[1, 1, 1, 1, 1, 0]])
    threshold = ops.entropy_quantile(entropy, mask, 0.5)
    np.testing.assert_allclose(threshold, 0.3, rtol=1e-6)
    np.testing.assert_array_equal(ops.high_entropy_keep(entropy, mask, threshold), [[0, 0, 1, 1, 1, 0]])
    with pytest.raises(ConfigError, match="top_quantile"):
        ops.entropy_quantile(entropy, mask, 0.0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ops.MismatchConfig("row"), "level"),
        (lambda: ops.MismatchConfig(upper=1.0, lower=2.0), "lower is 2.0"),
        (lambda: ops.MismatchConfig("none", batch_normalize=True), "batch_normalize"),
        (lambda: ops.RejectionRule("seq_max_k1", 1.2), "statistic"),
        (lambda: ops.RejectionRule("token_k2", 1.2, lower=0.1), "upper bound only"),
        (lambda: ops.RejectionRule("token_k1", 0.5), "ratio >= 1"),
        (lambda: ops.algorithm("ppo"), "choose one of"),
        (lambda: ops.trl(loss_type="cispo"), "absolute cap"),
        (lambda: ops.trl(delta=1.1), "delta is 1.1"),
        (lambda: ops.trl(vllm_importance_sampling_mode="token"), "mode"),
        (lambda: ops.trl(scale_rewards="row"), "scale"),
        (lambda: ops.verl(loss_mode="clip_cov"), "loss_mode"),
        (lambda: ops.verl(rollout_rs="token_k1"), "rollout_rs_threshold"),
        (lambda: ops.verl(rollout_rs="token_k1,token_k2", rollout_rs_threshold="1,2,3"), "2 rollout_rs options"),
        (lambda: ops.verl(rollout_is="token", rollout_is_threshold="high"), "write a number"),
        (lambda: ops.tunix(loss_algo="gspo"), "loss_algo"),
    ],
)
def test_bad_options_are_refused_by_name(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_presets_translate_library_conventions():
    assert ops.trl(scale_rewards=False).advantage.scale == "none"
    assert ops.trl(delta=1.5).loss.policy.dual_clip == 1.5
    assert ops.trl(loss_type="grpo").loss.aggregation.scope == "micro-batch"
    verl = ops.verl(rollout_is="token", rollout_rs="seq_mean_k1, token_k3", rollout_rs_threshold="0.9_1.1,0.1")
    assert verl.loss.mismatch is None and verl.correction.level == "token"
    assert verl.correction.rejection == (
        ops.RejectionRule("seq_mean_k1", 1.1, 0.9), ops.RejectionRule("token_k3", 0.1),
    )
    assert ops.verl(rollout_is="token", bypass_mode=True).loss.ratio_against == "sampler"
    geo = ops.verl(loss_mode="geo_mean", loss_agg_mode="token-mean").loss
    assert geo.aggregation.count_empty and geo.kl_aggregation.mode == "token-mean"
    assert ops.tunix(loss_agg_mode="sequence-mean-token-sum-norm").loss.aggregation.mode == "sum-norm"
    assert len({hash(preset) for preset in (ops.trl(), ops.verl(), ops.tunix())}) == 3
