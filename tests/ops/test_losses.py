"""Surrogates, KL, aggregation and the objective: gates, masks, empty batches, refusals."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl import ops
from jaxrl.errors import ConfigError
from jaxrl.ops.numerics import clamp, count_sequences, sequence_max, sequence_sum

ONE = jnp.ones((1, 1))


def single_token(config: ops.PolicyLossConfig, log_ratio: float, advantage: float) -> tuple[float, float]:
    """(loss, d loss / d logp) of one token."""
    advantages = jnp.full(1, advantage)

    def loss(logp):
        return ops.policy_loss(config, logp, jnp.zeros((1, 1)), advantages, ONE).per_token.sum()

    value, gradient = jax.value_and_grad(loss)(jnp.full((1, 1), log_ratio))
    return float(value), float(gradient[0, 0])


def test_clamp_passes_the_gradient_at_the_bounds():
    x = jnp.array([-2.0, -1.0, 0.0, 1.0, 2.0])
    np.testing.assert_array_equal(clamp(x, -1.0, 1.0), [-1, -1, 0, 1, 1])
    np.testing.assert_array_equal(jax.grad(lambda x: clamp(x, -1.0, 1.0).sum())(x), [0, 1, 1, 1, 0])
    np.testing.assert_array_equal(clamp(x, None, 1.0), [-2, -1, 0, 1, 1])


@pytest.mark.parametrize(
    ("ratio", "advantage", "used", "open_gate"),
    [
        (1.1, 1.0, 1.1, True),
        (1.5, 1.0, 1.28, False),
        (0.5, 1.0, 0.5, True),
        (1.5, -1.0, 1.5, True),
        (0.5, -1.0, 0.8, False),
        (4.0, -1.0, 3.0, False),
        (4.0, 1.0, 1.28, False),
    ],
)
def test_ppo_gates(ratio, advantage, used, open_gate):
    config = ops.PolicyLossConfig(clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    loss, gradient = single_token(config, float(np.log(ratio)), advantage)
    np.testing.assert_allclose(loss, -advantage * used, rtol=1e-5)
    np.testing.assert_allclose(gradient, -advantage * used if open_gate else 0.0, rtol=1e-5)


def test_ppo_equals_the_max_formula():
    rng = np.random.default_rng(0)
    log_ratio, advantages = rng.normal(0, 0.5, (4, 50)), rng.normal(0, 1, (4, 50))
    ratio = np.exp(log_ratio)
    expected = np.maximum(-advantages * ratio, -advantages * np.clip(ratio, 0.8, 1.28))
    result = ops.policy_loss(
        ops.PolicyLossConfig(clip_high=0.28), jnp.asarray(log_ratio), jnp.zeros((4, 50)), jnp.asarray(advantages),
        jnp.ones((4, 50)),
    )
    np.testing.assert_allclose(result.per_token, expected, rtol=2e-5, atol=1e-6)


def test_an_overflowing_clipped_ratio_has_gradient_zero():
    config = ops.PolicyLossConfig(log_ratio_clamp=None)
    assert single_token(config, 200.0, 1.0) == (pytest.approx(-1.2), 0.0)


def test_log_ratio_clamp_stops_value_and_gradient():
    config = ops.PolicyLossConfig(clip_low=1e9, clip_high=1e9, log_ratio_clamp=2.0)
    assert single_token(config, 5.0, -1.0) == (pytest.approx(np.exp(2.0), rel=1e-5), 0.0)


def test_cispo_caps_the_weight_but_keeps_the_gradient():
    config = ops.PolicyLossConfig("cispo", cap_low=0.5, cap_high=1.3)
    for ratio, weight in ((2.0, 1.3), (1.0, 1.0), (0.1, 0.5)):
        _, gradient = single_token(config, float(np.log(ratio)), 2.0)
        np.testing.assert_allclose(gradient, -2.0 * weight, rtol=1e-5)


def test_sapo_by_hand():
    for advantage, tau in ((1.5, 1.0), (-1.5, 1.05)):
        loss, _ = single_token(ops.PolicyLossConfig("sapo"), float(np.log(1.4)), advantage)
        np.testing.assert_allclose(loss, -advantage * 4 / tau / (1 + np.exp(-tau * 0.4)), rtol=1e-5)


def test_sequence_ratio_is_the_geometric_mean():
    logp, mask = jnp.log(jnp.array([[2.0, 8.0, 99.0]])), jnp.array([[1, 1, 0]])
    config = ops.PolicyLossConfig(importance_level="sequence")
    result = ops.policy_loss(config, logp, jnp.zeros((1, 3)), jnp.ones(1), mask)
    np.testing.assert_allclose(result.ratio, [[4.0]], rtol=1e-6)


@pytest.mark.parametrize("name", sorted(ops.ALGORITHMS))
def test_garbage_outside_the_mask_never_matters(name):
    """nan and -inf on padding, and an empty row, leave loss and gradient finite and unchanged."""
    config = ops.algorithm(name).loss
    rng = np.random.default_rng(1)
    clean = {key: rng.normal(-1, 0.3, (3, 4)).astype(np.float32) for key in ("logp", "old_logp", "ref_logp")}
    mask = jnp.array([[1.0, 1, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0]])

    def run(arrays):
        def loss(logp):
            return ops.policy_objective(
                config, **{**arrays, "logp": logp}, advantages=jnp.array([1.0, 2.0, -1.0]), mask=mask,
                denominators=ops.count(mask), kl_coef=0.1,
            )[0]

        return jax.jit(jax.value_and_grad(loss))(arrays["logp"])

    dirty = {key: jnp.where(mask > 0, x, bad) for (key, x), bad in zip(clean.items(), (-np.inf, np.nan, np.inf))}
    loss, gradient = run({key: jnp.asarray(x) for key, x in clean.items()})
    dirty_loss, dirty_gradient = run(dirty)
    assert np.isfinite(loss) and (np.asarray(gradient)[0, :3] != 0).all()
    assert float(loss) == float(dirty_loss)
    np.testing.assert_array_equal(gradient, dirty_gradient)
    assert (np.asarray(gradient)[np.asarray(mask) == 0] == 0).all()


@pytest.mark.parametrize("mode", ops.aggregation.AGGREGATION_MODES)
@pytest.mark.parametrize("scope", ["step", "micro-batch"])
def test_a_batch_without_loss_tokens_has_loss_zero(mode, scope):
    mask = jnp.zeros((2, 3))
    aggregation = ops.Aggregation(mode, scope=scope)
    loss = ops.aggregate(aggregation, jnp.full((2, 3), jnp.nan), mask, ops.count(mask))
    assert float(loss) == 0.0


def test_aggregations_by_hand():
    per_token = jnp.array([[1.0, 2.0, 3.0], [5.0, 9.0, 9.0], [9.0, 9.0, 9.0]])
    mask = jnp.array([[1, 1, 1], [1, 0, 0], [0, 0, 0]])
    counts = ops.count(mask)
    expected = {
        ops.Aggregation("token-mean"): 11 / 4,
        ops.Aggregation("seq-mean-token-mean"): (2 + 5) / 2,
        ops.Aggregation("seq-mean-token-mean", count_empty=True): (2 + 5) / 3,
        ops.Aggregation("seq-mean-token-sum"): 11 / 2,
        ops.Aggregation("seq-mean-token-sum-norm"): 11 / 2 / 3,
        ops.Aggregation("seq-mean-token-sum-norm", length_scale=10.0): 11 / 2 / 10,
        ops.Aggregation("sum-norm"): 11 / 2,
        ops.Aggregation("sum-norm", length_scale=4.0): 11 / 4,
    }
    for aggregation, value in expected.items():
        np.testing.assert_allclose(ops.aggregate(aggregation, per_token, mask, counts), value, rtol=1e-6)


def test_sequence_reductions_of_packed_rows():
    x = jnp.array([[1.0, 2.0, 4.0, 8.0]])
    ids = jnp.array([[1, 1, 2, 0]])
    np.testing.assert_array_equal(sequence_sum(x, ids), [[3, 3, 4, 8]])
    np.testing.assert_array_equal(sequence_max(x, ids), [[2, 2, 4, 8]])
    live, rows = count_sequences(jnp.array([[1, 1, 0, 0]]), ids)
    assert (int(live), int(rows)) == (1, 2)


def test_large_steps_are_counted_exactly():
    """2^24 + 1 is not a float32 number."""
    one = ops.count(jnp.ones((1, 1)))
    many = dataclasses.replace(one, tokens=jnp.asarray(2**24))
    assert int(ops.merge_denominators(many, one).tokens) == 2**24 + 1


def test_kl_terms_reach_the_loss_after_the_factors():
    """A zero weight removes the policy term and leaves the KL term alone."""
    logp, ref, mask = jnp.array([[-1.0, -2.0]]), jnp.array([[-1.5, -1.0]]), jnp.ones((1, 2))
    config = ops.LossConfig(kl_estimator="k1", kl_coef=0.5, entropy_coef=0.1)
    loss, metrics = ops.policy_objective(
        config, logp=logp, advantages=jnp.ones(1), mask=mask, denominators=ops.count(mask), ref_logp=ref,
        weights=jnp.zeros((1, 2)), entropy=jnp.array([[1.0, 3.0]]),
    )
    np.testing.assert_allclose(loss, 0.5 * (-0.25) - 0.1 * 2.0, rtol=1e-6)
    flat = ops.summarize_metrics(metrics)
    np.testing.assert_allclose([flat["kl"], flat["entropy"], flat["policy_loss"]], [-0.25, 2.0, 0.0], rtol=1e-6)


def test_bypass_takes_the_ratio_against_the_sampler():
    logp, mask = jnp.array([[-1.0, -2.0]]), jnp.ones((1, 2))
    shared = {"logp": logp, "advantages": jnp.ones(1), "mask": mask, "denominators": ops.count(mask)}
    sampler = logp - 0.1
    bypass, _ = ops.policy_objective(
        ops.LossConfig(ratio_against="sampler"), **shared, old_logp=logp - 5.0, sampler_logp=sampler
    )
    np.testing.assert_allclose(bypass, -np.exp(0.1), rtol=1e-6)


def test_metrics_by_hand():
    logp = jnp.log(jnp.array([[1.5, 0.5, 1.0, 77.0]]))
    mask = jnp.array([[1, 1, 1, 0]])
    _, metrics = ops.policy_objective(
        ops.LossConfig(mismatch=ops.MismatchConfig(upper=2.0)), logp=logp, old_logp=jnp.zeros((1, 4)),
        sampler_logp=jnp.log(jnp.array([[1.0, 2.0, 1.0, 5.0]])), advantages=jnp.array([[1.0, -1.0, 1.0, 1.0]]),
        mask=mask, denominators=ops.count(mask),
    )
    flat = {name: float(value) for name, value in ops.summarize_metrics(metrics).items()}
    expected = {
        "ratio": 1.0, "ratio/min": 0.5, "ratio/max": 1.5, "clip_fraction": 2 / 3, "clip_fraction_low": 1 / 3,
        "clip_fraction_high": 1 / 3, "dual_clip_fraction": 0.0, "ppo_kl": -np.log(0.75) / 3,
        "sampler_logp_difference": np.log(2) / 3, "sampler_logp_difference/max": np.log(2),
        "mismatch_weight": 2.5 / 3, "mismatch_weight/min": 0.5, "mismatch_weight/max": 1.0,
        "mismatch_weight/effective_sample_share": (2.5 / 3) ** 2 / (2.25 / 3),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(flat[name], value, rtol=1e-5, err_msg=name)


def test_adaptive_kl_coefficient():
    np.testing.assert_allclose(ops.adapt_kl_coef(0.1, 1.0, target=0.1, horizon=100, num_rows=10), 0.1 * 1.02)
    np.testing.assert_allclose(ops.adapt_kl_coef(0.1, 0.0, target=0.1, horizon=100, num_rows=10), 0.1 * 0.98)
    np.testing.assert_allclose(ops.adapt_kl_coef(0.1, 0.11, target=0.1, horizon=100, num_rows=10), 0.1 * 1.01)
    with pytest.raises(ConfigError, match="target"):
        ops.adapt_kl_coef(0.1, 1.0, target=0.0, horizon=1, num_rows=1)


def test_kl_clamp_bounds_the_value():
    value = ops.kl_penalty("k1", jnp.array([-5.0, 0.1]), jnp.zeros(2), clamp_value=1.0)
    np.testing.assert_allclose(value, [-1.0, 0.1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "ppo"}, "kind"),
        ({"importance_level": "row"}, "importance_level"),
        ({"clip_low": -0.1}, "clip_low"),
        ({"dual_clip": 0.9}, "dual_clip"),
        ({"kind": "cispo"}, "cap_high"),
        ({"cap_high": 2.0}, "cap_low and cap_high belong to 'cispo'"),
        ({"kind": "cispo", "cap_high": 1.0, "cap_low": 2.0}, "exceeds"),
        ({"kind": "sapo", "dual_clip": 3.0}, "dual_clip belongs"),
        ({"kind": "sapo", "tau_pos": 0.0}, "tau_pos"),
        ({"kind": "gmpo", "importance_level": "sequence"}, "averages by itself"),
        ({"log_ratio_clamp": float("nan")}, "log_ratio_clamp"),
    ],
)
def test_bad_surrogates_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        ops.PolicyLossConfig(**options)


def test_bad_aggregations_and_losses_are_refused():
    with pytest.raises(ConfigError, match="mode is 'mean'"):
        ops.Aggregation("mean")
    with pytest.raises(ConfigError, match="length_scale"):
        ops.Aggregation(length_scale=0.0)
    with pytest.raises(ConfigError, match="kl_estimator"):
        ops.LossConfig(kl_estimator="k4")
    with pytest.raises(ConfigError, match="twice"):
        ops.LossConfig(ratio_against="sampler", mismatch=ops.MismatchConfig())
    with pytest.raises(ConfigError, match="estimator"):
        ops.kl_penalty("forward", jnp.zeros(1), jnp.zeros(1))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ops.LossConfig(kl_coef=0.1), "ref_logp"),
        (ops.LossConfig(entropy_coef=0.1), "entropy"),
        (ops.LossConfig(mismatch=ops.MismatchConfig()), "sampler_logp"),
        (ops.LossConfig(ratio_against="sampler"), "sampler_logp"),
        (ops.LossConfig(top_entropy_quantile=0.2), "entropy"),
    ],
)
def test_a_term_names_the_array_it_lacks(config, message):
    mask = jnp.ones((1, 2))
    with pytest.raises(ConfigError, match=message):
        ops.policy_objective(
            config, logp=mask, advantages=jnp.ones(1), mask=mask, denominators=ops.count(mask)
        )


def test_batch_wide_corrections_are_not_left_to_a_micro_batch():
    mask = jnp.ones((1, 2))
    for mismatch in (
        ops.MismatchConfig(batch_normalize=True),
        ops.MismatchConfig(rejection=(ops.RejectionRule("token_k1", 1.2),)),
    ):
        with pytest.raises(ConfigError, match="correct_mismatch"):
            ops.policy_objective(
                ops.LossConfig(mismatch=mismatch), logp=mask, sampler_logp=mask, advantages=jnp.ones(1), mask=mask,
                denominators=ops.count(mask),
            )


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_the_gate_is_open_at_the_bound(advantage):
    """A ratio of exactly 1 with clip bounds of exactly 1: the gradient passes."""
    config = ops.PolicyLossConfig(clip_low=0.0, clip_high=0.0)
    assert single_token(config, 0.0, advantage) == (-advantage, -advantage)
