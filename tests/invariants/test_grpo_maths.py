"""Identities of the GRPO family that hold exactly: gradients, shifts, scales, permutations, padding, splits, shards."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxrl import ops
from jaxrl.ops import tabular

ROW_MEAN = ops.Aggregation("seq-mean-token-mean")
SURROGATES = {
    "ppo_clip": ops.PolicyLossConfig(),
    "clip_higher": ops.PolicyLossConfig(clip_high=0.28),
    "dual_clip": ops.PolicyLossConfig(dual_clip=3.0),
    "cispo": ops.PolicyLossConfig("cispo", cap_high=5.0),
    "sapo": ops.PolicyLossConfig("sapo"),
    "reinforce": ops.PolicyLossConfig("reinforce"),
    "gspo": ops.PolicyLossConfig(importance_level="sequence", clip_low=3e-4, clip_high=4e-4),
    "gspo_token": ops.PolicyLossConfig(importance_level="sequence_token", clip_low=3e-4, clip_high=4e-4),
    "gmpo": ops.PolicyLossConfig("gmpo"),
}
GLOBAL_MODES = {mode: ops.Aggregation(mode) for mode in ops.aggregation.AGGREGATION_MODES} | {
    "count_empty": ops.Aggregation("seq-mean-token-mean", count_empty=True),
    "verl_epsilon": ops.Aggregation("seq-mean-token-mean", length_epsilon=1e-8),
    "scaled": ops.Aggregation("sum-norm", length_scale=17.0),
}


def make_batch(rows: int = 8, columns: int = 6, seed: int = 0) -> dict[str, jax.Array]:
    """Ragged rows, one of them empty, with everything a loss can ask for."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, columns + 1, rows)
    lengths[1] = 0
    logp = -rng.exponential(1.0, (rows, columns))
    return {
        "logp": jnp.asarray(logp, jnp.float32),
        "old_logp": jnp.asarray(logp + rng.normal(0, 0.3, logp.shape), jnp.float32),
        "ref_logp": jnp.asarray(logp + rng.normal(0, 0.5, logp.shape), jnp.float32),
        "sampler_logp": jnp.asarray(logp + rng.normal(0, 0.3, logp.shape), jnp.float32),
        "entropy": jnp.asarray(rng.exponential(1.0, logp.shape), jnp.float32),
        "advantages": jnp.asarray(rng.normal(0, 1, rows), jnp.float32),
        "mask": jnp.asarray(np.arange(columns) < lengths[:, None], jnp.float32),
    }


FULL_LOSS = ops.LossConfig(
    policy=ops.PolicyLossConfig(clip_high=0.28, dual_clip=3.0),
    mismatch=ops.MismatchConfig(upper=1.1),
    off_policy_mask_threshold=0.2,
    top_entropy_quantile=0.7,
    kl_coef=0.05,
    kl_bias_correction=True,
    entropy_coef=0.01,
)


@functools.partial(jax.jit, static_argnames="config")
def loss_and_gradients(config, batch, denominators, entropy_threshold=0.0):
    """(loss, metrics), gradients wrt log-probabilities and entropies."""

    def loss(logp, entropy):
        return ops.policy_objective(
            config,
            **{**batch, "logp": logp, "entropy": entropy},
            denominators=denominators,
            entropy_threshold=entropy_threshold,
        )

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(batch["logp"], batch["entropy"])


def on_policy_gradient(policy: ops.PolicyLossConfig, aggregation: ops.Aggregation, batch: dict) -> np.ndarray:
    config = ops.LossConfig(policy=policy, aggregation=aggregation)
    batch = {name: value for name, value in batch.items() if name not in ("old_logp", "ref_logp", "sampler_logp")}
    (_, gradients) = loss_and_gradients(config, batch, ops.count(batch["mask"]))
    return np.asarray(gradients[0])


# One on-policy update: every surrogate is the policy gradient


@pytest.mark.parametrize("surrogate", ["ppo_clip", "clip_higher", "dual_clip", "cispo", "sapo", "reinforce"])
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_on_policy_gradient_is_minus_advantage_times_score(surrogate, mode):
    batch = make_batch()
    aggregation = GLOBAL_MODES[mode]
    gradient = on_policy_gradient(SURROGATES[surrogate], aggregation, batch)
    weights = np.asarray(ops.token_weights(aggregation, batch["mask"], ops.count(batch["mask"])))
    np.testing.assert_allclose(gradient, -np.asarray(batch["advantages"])[:, None] * weights, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("surrogate", ["gspo", "gspo_token", "gmpo"])
def test_sequence_surrogates_have_the_gradient_of_row_mean_grpo(surrogate):
    batch = make_batch()
    expected = on_policy_gradient(SURROGATES["ppo_clip"], ROW_MEAN, batch)
    actual = on_policy_gradient(SURROGATES[surrogate], ROW_MEAN, batch)
    assert np.abs(expected).max() > 0.01
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-7)


def test_luspo_has_the_gradient_of_row_sum_grpo():
    batch = make_batch()
    luspo = ops.algorithm("luspo").loss
    expected = on_policy_gradient(SURROGATES["ppo_clip"], ops.Aggregation("seq-mean-token-sum"), batch)
    np.testing.assert_allclose(on_policy_gradient(luspo.policy, luspo.aggregation, batch), expected, rtol=1e-6)


def test_unbounded_clip_is_importance_weighted_reinforce():
    batch = make_batch()
    policy = ops.PolicyLossConfig(clip_low=1e9, clip_high=1e9)

    def total(logp):
        return jnp.sum(
            ops.policy_loss(policy, logp, batch["old_logp"], batch["advantages"], batch["mask"]).per_token
        )

    ratio = np.exp(np.asarray(batch["logp"] - batch["old_logp"]))
    expected = -np.asarray(batch["advantages"])[:, None] * ratio * np.asarray(batch["mask"])
    np.testing.assert_allclose(jax.grad(total)(batch["logp"]), expected, rtol=1e-5)


# Exact expectations


@pytest.mark.parametrize("group_size", [2, 3, 5])
def test_expected_update_of_each_baseline(group_size):
    logits, rewards = np.array([0.3, -0.4, 1.1]), np.array([1.0, 0.25, -0.5])
    _, gradient = tabular.expected_reward_gradient(logits, rewards)
    shares = {
        ops.AdvantageConfig("rloo"): 1.0,
        ops.AdvantageConfig("grpo", scale="none"): 1.0 - 1.0 / group_size,
        ops.AdvantageConfig("reinforce"): 1.0,
    }
    for config, share in shares.items():
        rule = functools.partial(ops.compute_advantages, config)
        update = tabular.expected_update(logits, rewards, group_size, rule)
        np.testing.assert_allclose(update, share * gradient, atol=1e-12)


def test_dividing_by_the_deviation_changes_the_expected_direction():
    logits, rewards = np.array([0.0, 0.5, -1.0]), np.array([1.0, -0.5, 2.0])
    _, gradient = tabular.expected_reward_gradient(logits, rewards)
    rule = functools.partial(ops.compute_advantages, ops.AdvantageConfig("grpo"))
    update = tabular.expected_update(logits, rewards, 4, rule)
    cosine = update @ gradient / np.linalg.norm(update) / np.linalg.norm(gradient)
    assert 0.5 < cosine < 0.9999


@pytest.mark.parametrize("seed", range(3))
def test_expectations_of_the_kl_estimators(seed):
    rng = np.random.default_rng(seed)
    with jax.enable_x64(True):
        logits, ref = jnp.asarray(rng.normal(size=7)), jax.nn.log_softmax(jnp.asarray(rng.normal(size=7)))

        def mean(logits, estimator, differentiate_sampling):
            logp = jax.nn.log_softmax(logits)
            p = jnp.exp(logp) if differentiate_sampling else jax.lax.stop_gradient(jnp.exp(logp))
            return jnp.sum(p * ops.kl_penalty(estimator, logp, ref))

        kl, gradient = jax.value_and_grad(mean)(logits, "k1", True)
        for estimator in ("k1", "k3", "k1+"):
            np.testing.assert_allclose(mean(logits, estimator, False), kl, atol=1e-12)
        np.testing.assert_allclose(jax.grad(mean)(logits, "k1", False), 0.0, atol=1e-12)
        for estimator in ("k2", "k1+", "k3+"):
            np.testing.assert_allclose(jax.grad(mean)(logits, estimator, False), gradient, atol=1e-12)


# Shifts and scales of the rewards

REWARDS = np.array([1.0, 0.0, 0.5, 0.25, 2.0, -1.0, 0.75, 0.0, 3.0, 3.0, 3.0, 3.0])
GROUPS = np.repeat([0, 1, 2], 4)
LENGTHS = np.array([3, 1, 4, 2, 2, 6, 1, 1, 2, 3, 4, 5])
SHIFTED = REWARDS + np.array([0.0, 5.0, -2.0])[GROUPS]

SHIFT_FREE = {
    "grpo": ops.AdvantageConfig("grpo"),
    "dr_grpo": ops.AdvantageConfig("grpo", scale="none"),
    "rloo": ops.AdvantageConfig("rloo"),
    "rloo_normalized": ops.AdvantageConfig("rloo", normalize=True),
    "opo": ops.AdvantageConfig("opo"),
    "grpo_passk": ops.AdvantageConfig("grpo_passk"),
    "reinforce_plus_plus_baseline": ops.AdvantageConfig("reinforce_plus_plus_baseline"),
}
SHIFT_SENSITIVE = {
    "grpo_batch": ops.AdvantageConfig("grpo", scale="batch"),
    "reinforce_plus_plus": ops.AdvantageConfig("reinforce_plus_plus"),
    "gpg": ops.AdvantageConfig("gpg"),
}
SCALE_FREE = ("grpo", "grpo_batch", "grpo_passk", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
SCALE_EQUIVARIANT = ("dr_grpo", "rloo", "opo", "gpg")
ALL_RULES = SHIFT_FREE | SHIFT_SENSITIVE


@pytest.mark.parametrize("name", sorted(SHIFT_FREE))
def test_a_constant_per_group_changes_nothing(name):
    before = ops.compute_advantages(SHIFT_FREE[name], REWARDS, GROUPS, LENGTHS)
    after = ops.compute_advantages(SHIFT_FREE[name], SHIFTED, GROUPS, LENGTHS)
    assert np.abs(before).max() > 0.1
    np.testing.assert_allclose(after, before, atol=1e-12)


@pytest.mark.parametrize("name", sorted(SHIFT_SENSITIVE))
def test_rules_that_look_at_raw_rewards_do_change(name):
    before = ops.compute_advantages(SHIFT_SENSITIVE[name], REWARDS, GROUPS, LENGTHS)
    after = ops.compute_advantages(SHIFT_SENSITIVE[name], SHIFTED, GROUPS, LENGTHS)
    assert np.abs(after - before).max() > 1e-2


@pytest.mark.parametrize("name", SCALE_FREE)
def test_scaling_the_rewards_leaves_normalised_rules_unchanged(name):
    before = ops.compute_advantages(ALL_RULES[name], REWARDS, GROUPS, LENGTHS)
    after = ops.compute_advantages(ALL_RULES[name], 3.0 * REWARDS, GROUPS, LENGTHS)
    np.testing.assert_allclose(after, before, atol=1e-5)


@pytest.mark.parametrize("name", SCALE_EQUIVARIANT)
def test_scaling_the_rewards_scales_the_other_rules(name):
    before = ops.compute_advantages(ALL_RULES[name], REWARDS, GROUPS, LENGTHS)
    after = ops.compute_advantages(ALL_RULES[name], 3.0 * REWARDS, GROUPS, LENGTHS)
    np.testing.assert_allclose(after, 3.0 * before, atol=1e-12)


@pytest.mark.parametrize("size, value", [(2, 1e6), (7, 0.7), (3, -0.1), (5, 1e-12)])
@pytest.mark.parametrize("rule", ["grpo", "rloo", "opo", "gpg", "grpo_passk"])
def test_equal_rewards_give_exactly_zero(rule, size, value):
    rewards = np.concatenate([np.full(size, value), [0.0, 1.0]])
    ids = np.array([0] * size + [1, 1])
    for scale in ("group", "batch", "none") if rule == "grpo" else ("group",):
        config = ops.AdvantageConfig(rule, scale=scale, epsilon=0.0)
        advantages = ops.compute_advantages(config, rewards, ids, np.arange(1, size + 3))
        assert (advantages[:size] == 0.0).all()
        assert np.isfinite(advantages).all()
        assert advantages[size:].any()


def test_equal_rewards_contribute_no_gradient():
    batch = make_batch()
    advantages = ops.compute_advantages(ops.AdvantageConfig("grpo"), [0.7] * 4 + [0, 1, 1, 0], [0] * 4 + [1] * 4)
    batch["advantages"] = jnp.asarray(advantages, jnp.float32)
    gradient = on_policy_gradient(SURROGATES["ppo_clip"], ROW_MEAN, batch)
    assert (gradient[:4] == 0).all()
    assert np.abs(gradient[4:]).max() > 0


# Permutation, padding, splits, shards


@pytest.mark.parametrize("name", sorted(ALL_RULES))
def test_permuting_rows_permutes_advantages(name):
    order = np.random.default_rng(1).permutation(len(REWARDS))
    plain = ops.compute_advantages(ALL_RULES[name], REWARDS, GROUPS, LENGTHS)
    mixed = ops.compute_advantages(ALL_RULES[name], REWARDS[order], GROUPS[order], LENGTHS[order])
    np.testing.assert_allclose(mixed, plain[order], atol=1e-12)


@pytest.mark.parametrize("mode", ["seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_padding_columns_change_nothing(mode):
    """Garbage in the new columns; only a normaliser that contains T may notice, and not if T is stated."""
    batch = make_batch()
    config = dataclasses.replace(FULL_LOSS, aggregation=GLOBAL_MODES[mode])
    columns = batch["mask"].shape[1]
    padded = {
        name: value if name == "advantages" else jnp.pad(
            value, ((0, 0), (0, 3)), constant_values=0.0 if name == "mask" else jnp.nan
        )
        for name, value in batch.items()
    }
    (loss, _), gradients = loss_and_gradients(config, batch, ops.count(batch["mask"]))
    denominators = ops.count(padded["mask"], columns=columns)
    (padded_loss, _), padded_gradients = loss_and_gradients(config, padded, denominators)
    np.testing.assert_allclose(padded_loss, loss, rtol=1e-6)
    for plain, wide in zip(gradients, padded_gradients, strict=True):
        np.testing.assert_allclose(wide[:, :columns], plain, rtol=1e-6, atol=1e-9)
        assert (np.asarray(wide[:, columns:]) == 0).all()


def test_only_modes_with_a_length_scale_see_the_number_of_columns():
    batch = make_batch()
    mask, per_token = batch["mask"], batch["logp"]
    narrow, wide = ops.count(mask), ops.count(mask, columns=2 * mask.shape[1])
    for mode, aggregation in GLOBAL_MODES.items():
        ratio = ops.aggregate(aggregation, per_token, mask, narrow) / ops.aggregate(aggregation, per_token, mask, wide)
        np.testing.assert_allclose(ratio, 2.0 if mode == "seq-mean-token-sum-norm" else 1.0, rtol=1e-6)


@pytest.mark.parametrize("mode", sorted(GLOBAL_MODES))
def test_weights_of_micro_batches_are_those_of_the_step(mode):
    """The loss is linear in its token weights, so this is the whole promise for a mode."""
    mask = make_batch()["mask"]
    denominators = ops.count(mask)
    whole = np.asarray(ops.token_weights(GLOBAL_MODES[mode], mask, denominators))
    assert (whole[1] == 0).all() and (whole[0] > 0).any()
    for parts in (2, 8):
        pieces = [ops.token_weights(GLOBAL_MODES[mode], part, denominators) for part in jnp.split(mask, parts)]
        assert (np.concatenate(pieces) == whole).all()
    padded = ops.token_weights(GLOBAL_MODES[mode], jnp.pad(mask, ((0, 0), (0, 3))), denominators)
    assert (np.asarray(padded[:, : mask.shape[1]]) == whole).all()


@pytest.mark.parametrize(("mode", "parts"), [("token-mean", 2), ("seq-mean-token-mean", 8)])
def test_micro_batches_add_up_to_the_step(mode, parts):
    batch = make_batch()
    config = dataclasses.replace(FULL_LOSS, aggregation=GLOBAL_MODES[mode])
    denominators = ops.count(batch["mask"])
    threshold = ops.entropy_quantile(batch["entropy"], batch["mask"], 0.7)
    (loss, metrics), gradients = loss_and_gradients(config, batch, denominators, threshold)
    pieces = [
        loss_and_gradients(config, {k: jnp.split(v, parts)[i] for k, v in batch.items()}, denominators, threshold)
        for i in range(parts)
    ]
    np.testing.assert_allclose(sum(piece[0][0] for piece in pieces), loss, rtol=1e-6, atol=1e-7)
    for which in (0, 1):
        together = np.concatenate([piece[1][which] for piece in pieces])
        np.testing.assert_allclose(together, gradients[which], rtol=1e-6, atol=1e-8)
    merged = functools.reduce(ops.merge_metrics, [piece[0][1] for piece in pieces])
    whole, merged = ops.summarize_metrics(metrics), ops.summarize_metrics(merged)
    assert set(whole) == set(merged)
    for name, value in whole.items():
        np.testing.assert_allclose(merged[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def test_denominators_counted_per_micro_batch_merge():
    mask = make_batch()["mask"]
    merged = ops.merge_denominators(*(ops.count(part) for part in jnp.split(mask, 4)))
    assert jax.tree.map(int, merged) == jax.tree.map(int, ops.count(mask, micro_batches=4))


def test_local_scope_averages_micro_batches():
    batch = make_batch()
    aggregation = ops.Aggregation("token-mean", scope="micro-batch")
    denominators = ops.count(batch["mask"], micro_batches=2)
    parts = [{k: jnp.split(batch[k], 2)[i] for k in ("logp", "mask")} for i in range(2)]
    total = sum(ops.aggregate(aggregation, p["logp"], p["mask"], denominators) for p in parts)
    means = [(p["logp"] * p["mask"]).sum() / p["mask"].sum() for p in parts]
    np.testing.assert_allclose(total, np.mean(means), rtol=1e-6)
    step_mean = (batch["logp"] * batch["mask"]).sum() / batch["mask"].sum()
    assert abs(float(total - step_mean)) > 1e-3


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_sharding_the_rows_gives_the_same_update(devices):
    mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices], axis_types=(AxisType.Auto,))
    batch = make_batch()
    sharded = {k: jax.device_put(v, NamedSharding(mesh, PartitionSpec("data"))) for k, v in batch.items()}
    (loss, _), gradients = loss_and_gradients(FULL_LOSS, batch, ops.count(batch["mask"]))
    (split_loss, _), split_gradients = loss_and_gradients(FULL_LOSS, sharded, ops.count(sharded["mask"]))
    np.testing.assert_allclose(split_loss, loss, rtol=1e-6)
    for plain, split in zip(gradients, split_gradients, strict=True):
        np.testing.assert_allclose(split, plain, rtol=1e-6, atol=1e-9)


def test_new_rewards_and_coefficients_compile_nothing():
    traces = 0

    @jax.jit
    def step(batch, kl_coef, entropy_coef):
        nonlocal traces
        traces += 1
        return ops.policy_objective(
            ops.LossConfig(),
            **batch,
            denominators=ops.count(batch["mask"]),
            kl_coef=kl_coef,
            entropy_coef=entropy_coef,
        )[0]

    losses = [step(make_batch(seed=seed), 0.1 * seed, 0.01 * seed) for seed in range(3)]
    assert traces == 1
    assert len({float(loss) for loss in losses}) == 3


# Packing


@pytest.mark.parametrize("policy", ["gspo", "gspo_token", "gmpo"])
def test_packed_rows_equal_separate_rows(policy):
    """Two sequences in one row, with per-sequence ratios and normalisers, give the gradient of two rows."""
    batch = make_batch(rows=4, columns=4, seed=3)
    batch["mask"] = batch["mask"].at[1].set(jnp.array([1.0, 1.0, 0.0, 0.0]))
    packed = {k: v.reshape(2, 8) for k, v in batch.items() if k != "advantages"}
    packed["advantages"] = jnp.repeat(batch["advantages"], 4).reshape(2, 8)
    packed["segment_ids"] = jnp.tile(jnp.repeat(jnp.array([1, 2]), 4), (2, 1))
    config = ops.LossConfig(
        policy=SURROGATES[policy],
        aggregation=ROW_MEAN,
        mismatch=ops.MismatchConfig("sequence", upper=1.5),
        off_policy_mask_threshold=0.05,
    )
    (loss, _), gradients = loss_and_gradients(config, batch, ops.count(batch["mask"]))
    denominators = ops.count(packed["mask"], packed["segment_ids"])
    assert int(denominators.rows) == 4 and int(denominators.live_rows) == 4
    (packed_loss, _), packed_gradients = loss_and_gradients(config, packed, denominators)
    np.testing.assert_allclose(packed_loss, loss, rtol=1e-5)
    np.testing.assert_allclose(packed_gradients[0].reshape(4, 4), gradients[0], rtol=1e-5, atol=1e-7)


# Mismatch weights


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_no_mismatch_changes_no_bit(level, mode):
    batch = make_batch()
    batch["sampler_logp"] = batch["old_logp"]
    config = ops.MismatchConfig(level, mode, upper=2.0, lower=0.5)
    weights, mask = ops.correct_mismatch(config, batch["old_logp"], batch["sampler_logp"], batch["mask"])
    assert (np.asarray(weights) == np.asarray(batch["mask"])).all()
    assert (np.asarray(mask) == np.asarray(batch["mask"])).all()
    denominators = ops.count(batch["mask"])
    plain, corrected = (
        loss_and_gradients(ops.LossConfig(mismatch=mismatch, kl_coef=0.1), batch, denominators)
        for mismatch in (None, config)
    )
    assert float(plain[0][0]) == float(corrected[0][0])
    assert (np.asarray(plain[1][0]) == np.asarray(corrected[1][0])).all()


def test_truncation_bounds_and_masking_zeroes():
    batch = make_batch(rows=16)
    arguments = (batch["old_logp"], batch["sampler_logp"], batch["mask"])
    raw = np.exp(np.asarray(batch["old_logp"] - batch["sampler_logp"])) * np.asarray(batch["mask"])
    truncated = np.asarray(ops.correct_mismatch(ops.MismatchConfig(upper=1.2), *arguments).weights)
    assert raw.max() > 1.2
    assert truncated.max() <= np.float32(1.2)
    masked = np.asarray(ops.correct_mismatch(ops.MismatchConfig(mode="mask", upper=1.2), *arguments).weights)
    np.testing.assert_allclose(masked, np.where(raw <= 1.2, raw, 0), rtol=1e-6)
    rows = ops.correct_mismatch(ops.MismatchConfig("sequence", "mask", upper=1.2, lower=0.8), *arguments).weights
    live = np.asarray(batch["mask"]) > 0
    for row in range(16):
        kept = np.asarray(rows)[row][live[row]]
        assert (kept == 0).all() or (kept > 0).all()
    kept_rows = (np.asarray(rows) > 0).any(axis=1)
    assert kept_rows.any() and not kept_rows[live.any(axis=1)].all()


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_batch_normalised_weights_have_mean_one(level):
    rng = np.random.default_rng(5)
    old, sampler = (jnp.asarray(rng.normal(-1, 0.2, (6, 5)), jnp.float32) for _ in range(2))
    mask = jnp.ones((6, 5))
    config = ops.MismatchConfig(level, upper=1.2, batch_normalize=True)
    weights = ops.correct_mismatch(config, old, sampler, mask).weights
    np.testing.assert_allclose(np.mean(weights), 1.0, rtol=1e-6)
