"""The device step: against a dense float64 implementation, and whatever must not change a gradient."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dense_reference
from jaxrl import ops
from jaxrl.errors import ConfigError
from jaxrl.models.config import LoraConfig
from jaxrl.models.decoder import LanguageModel
from jaxrl.models.lora import trainable_predicate
from jaxrl.objectives import Objective, PolicyBatch, policy_gradient, score
from jaxrl.parallel.trees import combine, partition
from tiny_systems import leaves

TEMPERATURE = 0.8
COLUMNS = 7
STEP_MODES = ops.aggregation.AGGREGATION_MODES
EVERYTHING = ops.LossConfig(
    policy=ops.PolicyLossConfig(clip_low=0.1, clip_high=0.3),
    mismatch=ops.MismatchConfig(upper=1.05),
    kl_coef=0.2,
    entropy_coef=0.05,
)


def objective(**changes) -> Objective:
    """Every term on; ``mode`` sets the aggregation."""
    mode = changes.pop("mode", "token-mean")
    loss = changes.pop("loss", dataclasses.replace(EVERYTHING, aggregation=ops.Aggregation(mode)))
    return Objective(
        loss=loss, temperature=TEMPERATURE, completion_columns=COLUMNS, chunk_tokens=16, **changes
    )


@functools.cache
def compiled(model: LanguageModel, target: Objective, micro_batches: int = 1):
    return jax.jit(functools.partial(policy_gradient, model, target, micro_batches=micro_batches))


def gradient(model, target, params, batch, *, frozen=None, micro_batches=1):
    grads, metrics = compiled(model, target, micro_batches)(params, frozen or {}, batch)
    return leaves(grads), {name: float(x) for name, x in metrics.items()}


def assert_same(a: dict, b: dict, tolerance: float = 1e-5) -> None:
    """Leaf by leaf, relative to the largest entry of the leaf."""
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_allclose(
            a[name], b[name], rtol=0, atol=tolerance * max(np.abs(b[name]).max(), 1e-3), err_msg=name
        )


def on_policy(batch: PolicyBatch) -> PolicyBatch:
    """Without constants from other parameters."""
    return batch.replace(old_logp=None, ref_logp=None, sampler_logp=None, weights=None)


@pytest.fixture(scope="module")
def near_batch(model, params, batch):
    """Old, sampler and reference log-probabilities near those of the model, so that ratios fall on both sides of
    every bound."""
    logp, _ = score(model, objective(), params, {}, batch)
    rng = np.random.default_rng(1)
    mask = batch.loss_mask
    near = lambda scale: np.where(mask, logp + rng.normal(0, scale, mask.shape), 0).astype(np.float32)  # noqa: E731
    return batch.replace(old_logp=near(0.2), ref_logp=near(0.4), sampler_logp=near(0.2))


# --- against the dense float64 implementation


def test_score_is_log_softmax(model, params, batch):
    reference = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    for pieces in (1, 2):
        logp, entropy = score(model, objective(), params, {}, batch, pieces)
        assert (np.asarray(logp)[~batch.loss_mask] == 0).all() and (
            np.asarray(entropy)[~batch.loss_mask] == 0
        ).all()
        for n, row in enumerate(dense_reference.rows(batch, reference, model.config, TEMPERATURE)):
            np.testing.assert_allclose(np.asarray(logp)[n, batch.loss_mask[n]], row["logp"], atol=5e-6)
            np.testing.assert_allclose(np.asarray(entropy)[n, batch.loss_mask[n]], row["entropy"], atol=5e-6)


@pytest.mark.parametrize("mode", STEP_MODES)
def test_loss_and_gradient_equal_a_dense_float64_implementation(model, params, near_batch, mode):
    reference = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    value = functools.partial(
        dense_reference.loss,
        near_batch,
        config=model.config,
        temperature=TEMPERATURE,
        clip_low=0.1,
        clip_high=0.3,
        kl_coef=0.2,
        entropy_coef=0.05,
        mode=mode,
        columns=COLUMNS,
        cap=1.05,
    )
    grads, metrics = gradient(model, objective(mode=mode), params, near_batch)
    assert 0 < metrics["clip_fraction_low"] < 1 and 0 < metrics["clip_fraction_high"] < 1
    assert metrics["loss_tokens"] == near_batch.loss_mask.sum()
    np.testing.assert_allclose(metrics["loss"], value(reference), rtol=1e-5, atol=1e-6)
    # The slope along a random direction of each leaf alone, by central differences in float64.
    rng = np.random.default_rng(2)
    flat, structure = jax.tree.flatten(reference)
    scale = max(np.abs(g).max() for g in grads.values())
    for i, name in enumerate(grads):
        direction = rng.normal(size=flat[i].shape) / np.sqrt(flat[i].size)
        shifted = lambda h, i=i, d=direction: structure.unflatten(
            flat[:i] + [flat[i] + h * d] + flat[i + 1 :]
        )  # noqa: E731
        slope = (value(shifted(1e-6)) - value(shifted(-1e-6))) / 2e-6
        np.testing.assert_allclose(
            (grads[name] * direction).sum(), slope, rtol=1e-4, atol=2e-5 * scale, err_msg=name
        )


# --- what must not change a gradient


@pytest.mark.parametrize("mode", STEP_MODES)
def test_micro_batches_do_not_change_the_gradient(model, params, near_batch, mode):
    whole, metrics = gradient(model, objective(mode=mode), params, near_batch)
    for parts in (2, near_batch.rows) if mode in STEP_MODES[:2] else (2,):
        grads, other = gradient(model, objective(mode=mode), params, near_batch, micro_batches=parts)
        assert_same(whole, grads)
        assert metrics.keys() == other.keys()
        for name in metrics:
            assert other[name] == pytest.approx(metrics[name], rel=2e-5, abs=1e-6), name


def test_micro_batches_do_not_change_which_tokens_are_of_high_entropy(model, params, near_batch):
    loss = dataclasses.replace(EVERYTHING, top_entropy_quantile=0.4, off_policy_mask_threshold=0.05)
    whole, metrics = gradient(model, objective(loss=loss), params, near_batch)
    halves, other = gradient(model, objective(loss=loss), params, near_batch, micro_batches=2)
    assert 0.3 < metrics["high_entropy_share"] < 0.5
    assert other["high_entropy_share"] == pytest.approx(metrics["high_entropy_share"])
    assert_same(whole, halves)


def test_micro_batch_scope_is_the_mean_of_the_parts(model, params, near_batch):
    """Losses that normalise each micro-batch by itself: the step is the mean over its micro-batches, dealt like cards."""
    loss = dataclasses.replace(EVERYTHING, aggregation=ops.Aggregation("token-mean", scope="micro-batch"))
    halves, _ = gradient(model, objective(loss=loss), params, near_batch, micro_batches=2)
    parts = [
        gradient(model, objective(), params, near_batch.take(np.arange(i, near_batch.rows, 2)))[0]
        for i in range(2)
    ]
    assert_same(halves, {name: (parts[0][name] + parts[1][name]) / 2 for name in halves})


def test_padding_columns_and_pad_id_change_nothing(model, params, near_batch):
    whole, metrics = gradient(model, objective(), params, near_batch)
    wider = jax.tree.map(lambda x: np.pad(x, ((0, 0), (0, 5))), near_batch)
    used = np.cumsum(near_batch.loss_mask[:, ::-1], 1)[:, ::-1] > 0  # columns up to the last loss token
    other_pad = wider.replace(tokens=np.where(np.pad(used, ((0, 0), (0, 5))), wider.tokens, 13))
    for changed in (wider, other_pad):
        grads, other = gradient(model, objective(), params, changed)
        assert_same(whole, grads)
        assert other["loss"] == pytest.approx(metrics["loss"], rel=1e-5)


def test_garbage_outside_the_mask_changes_nothing(model, params, near_batch):
    dirty = {}
    for name in ("advantages", "weights", "old_logp", "ref_logp", "sampler_logp"):
        stream = getattr(near_batch, name)
        dirty[name] = np.where(near_batch.loss_mask, stream, np.nan).astype(np.float32)
    clean, _ = gradient(model, objective(), params, near_batch)
    assert_same(clean, gradient(model, objective(), params, near_batch.replace(**dirty))[0])


@pytest.mark.parametrize("mode", STEP_MODES)
def test_packed_equals_unpacked(model, params, near_batch, mode):
    """All rows in two long rows, with a sequence-level ratio too."""
    policy = ops.PolicyLossConfig(importance_level="sequence_token", clip_low=0.05, clip_high=0.05)
    loss = dataclasses.replace(
        EVERYTHING,
        policy=policy,
        aggregation=ops.Aggregation(mode),
        mismatch=ops.MismatchConfig("sequence", upper=1.1),
    )
    target = objective(loss=loss)
    apart, metrics = gradient(model, target, params, near_batch)
    grads, packed = gradient(model, target, params, pack(near_batch, [[0, 3, 5, 6], [7, 1, 2, 4]]))
    assert_same(apart, grads)
    for name in ("loss", "policy_loss", "kl_loss", "entropy_bonus", "clip_fraction", "ratio/max"):
        assert packed[name] == pytest.approx(metrics[name], rel=1e-4, abs=1e-6), name


def pack(batch: PolicyBatch, groups: list[list[int]]) -> PolicyBatch:
    """Rows of a batch, without their padding, one after the other in each new row."""
    lengths = [
        max(np.flatnonzero(batch.tokens[n] * 0 + batch.loss_mask[n]), default=4) + 1
        for n in range(batch.rows)
    ]
    width = max(sum(lengths[n] for n in group) for group in groups) + 2
    streams = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    made = {k: np.zeros((len(groups), width), x.dtype) for k, x in streams.items() if x is not None}
    made["positions"] = np.zeros((len(groups), width), np.int32)
    made["segment_ids"] = np.zeros((len(groups), width), np.int32)
    for i, group in enumerate(groups):
        start = 0
        for segment, n in enumerate(group, 1):
            to, length = slice(start, start + lengths[n]), lengths[n]
            for name, x in streams.items():
                if x is not None:
                    made[name][i, to] = x[n, :length]
            made["positions"][i, to], made["segment_ids"][i, to] = np.arange(length), segment
            start += length
    return PolicyBatch(**made)


@pytest.mark.parametrize("kind", ["last:1", "lora"])
def test_a_part_of_the_parameters_gets_its_leaves_of_the_full_gradient(model, params, batch, kind):
    batch = on_policy(batch)
    target = objective(loss=ops.LossConfig())
    if kind == "lora":
        config = model.config.replace(lora=LoraConfig(rank=2, alpha=4.0, targets=("q", "v", "down")))
        model = LanguageModel(config)
        fresh = model.init(jax.random.key(3))
        params = combine(partition(fresh, trainable_predicate("lora", model))[0], params)
        params = jax.tree.map(lambda x: x + 0.01 * jax.random.normal(jax.random.key(x.size), x.shape), params)
    full, _ = gradient(model, target, params, batch)
    some, frozen = partition(params, trainable_predicate(kind, model))
    grads, _ = gradient(model, target, some, batch, frozen=frozen)
    assert 0 < len(grads) < len(full)
    assert_same(grads, {name: full[name] for name in grads})
    assert all(np.abs(g).max() > 0 for g in grads.values())


def test_scanned_and_rematerialised_layers_have_the_same_gradient(model, params, near_batch):
    from jaxrl.models.decoder import stack_layers

    whole, _ = gradient(model, objective(), params, near_batch)
    stacked = LanguageModel(model.config.replace(scan_layers=True, remat="block"))
    grads, _ = compiled(stacked, objective(), 2)(stack_layers(params), {}, near_batch)
    assert_same(whole, leaves({**grads, "layers": {"0": jax.tree.map(lambda x: x[0], grads["layers"])}}))


# --- extra terms and outputs


def squared_hidden(params, batch, outputs):
    """Mean square of the residual stream after the first layer, on loss tokens."""
    del params
    square = (outputs.extras["layer:0"] ** 2).mean(-1)
    return jnp.sum(jnp.where(batch.loss_mask, square, 0)), jnp.sum(batch.loss_mask)


def test_extra_terms_add_their_gradient(model, params, batch):
    batch = on_policy(batch)
    plain = objective(loss=ops.LossConfig())
    extended = objective(loss=ops.LossConfig(), want=("layer:0",), terms=(("square", 0.3, squared_hidden),))
    base, _ = gradient(model, plain, params, batch)
    both, metrics = gradient(model, extended, params, batch)

    def alone(params):
        out = model.forward(params, batch.tokens, want=("layer:0",))
        return jnp.mean((out.extras["layer:0"] ** 2).mean(-1)[np.nonzero(batch.loss_mask)])

    value, extra = jax.value_and_grad(alone)(params)
    assert metrics["square"] == pytest.approx(float(value), rel=1e-5)
    assert_same(both, {name: base[name] + 0.3 * g for name, g in leaves(extra).items()})
    with pytest.raises(ConfigError, match="extra terms .'square'. with 2 micro-batches.*use one micro-batch"):
        policy_gradient(model, extended, params, {}, batch, micro_batches=2)


# --- coefficients, counts and refusals


def test_coefficients_as_arrays_replace_those_of_the_objective(model, params, near_batch):
    bare = dataclasses.replace(EVERYTHING, kl_coef=1e-9, entropy_coef=1e-9)
    step = jax.jit(functools.partial(policy_gradient, model, objective(loss=bare)))
    grads, _ = step(params, {}, near_batch, kl_coef=jnp.float32(0.2), entropy_coef=jnp.float32(0.05))
    assert_same(leaves(grads), gradient(model, objective(), params, near_batch)[0])


def test_one_program_for_all_values(model, params, near_batch):
    """Other rewards (advantages), tokens, masks and coefficients never compile again."""
    step = jax.jit(functools.partial(policy_gradient, model, objective(), micro_batches=2))
    rng = np.random.default_rng(3)
    for scale in (0.0, 1.0, 1e6):
        changed = near_batch.replace(
            advantages=(scale * rng.normal(size=near_batch.tokens.shape)).astype(np.float32),
            tokens=rng.integers(0, 14, near_batch.tokens.shape).astype(np.int32),
            loss_mask=near_batch.loss_mask & (rng.random(near_batch.tokens.shape) < 0.7),
        )
        grads, metrics = step(params, {}, changed)
        assert all(np.isfinite(g).all() for g in leaves(grads).values()) and np.isfinite(metrics["loss"])
    assert step._cache_size() == 1


def test_a_step_without_loss_tokens_has_no_gradient(model, params, near_batch):
    empty = near_batch.replace(loss_mask=np.zeros_like(near_batch.loss_mask))
    for mode in STEP_MODES:
        grads, metrics = gradient(model, objective(mode=mode), params, empty)
        assert metrics["loss"] == 0 and metrics["loss_tokens"] == 0
        assert all((g == 0).all() for g in grads.values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(temperature=0.0), "temperature is 0.0; it must be positive"),
        (dict(chunk_tokens=0), "chunk_tokens is 0; it must be at least 1"),
    ],
)
def test_impossible_objectives_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        Objective(**changes)


def test_missing_streams_and_wrong_splits_are_named(model, params, batch):
    with pytest.raises(ConfigError, match="KL term needs ref_logp"):
        policy_gradient(model, objective(), params, {}, batch.replace(ref_logp=None))
    with pytest.raises(ConfigError, match="mismatch needs sampler_logp"):
        policy_gradient(model, objective(), params, {}, batch.replace(sampler_logp=None))
    with pytest.raises(ConfigError, match="8 rows do not split into 3 micro-batches; choose a divisor of 8"):
        policy_gradient(model, objective(), params, {}, batch, micro_batches=3)
    with pytest.raises(ConfigError, match="want='layer:9' is not an output"):
        policy_gradient(model, objective(want=("layer:9",)), params, {}, batch)
