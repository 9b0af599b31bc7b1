"""The decoder: what a forward pass computes does not depend on how it is laid out."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from jaxrl.errors import ConfigError
from jaxrl.models import LanguageModel, stack_layers, unstack_layers
from tiny_models import TINY, VARIANTS, forward, forward_cached, max_difference, start, tokens_of


@pytest.mark.parametrize("name", ["llama_untied_llama3", "qwen2_untied_yarn", "qwen3"])
def test_cached_equals_uncached(name):
    config = VARIANTS[name]
    model, params = start(config)
    tokens = tokens_of(config)
    whole = forward(model, params, tokens).hidden
    assert whole.shape == (2, 12, 24)

    flat = unstack_layers(params, config.num_layers)
    step = functools.partial(forward_cached, model)
    cache = model.init_cache(2, 16)
    positions = jnp.broadcast_to(jnp.arange(12), (2, 12))
    prefix, cache = step(flat, cache, tokens[:, :7], positions[:, :7])
    pieces = [prefix]
    for t in range(7, 12):
        hidden, cache = step(flat, cache, tokens[:, t : t + 1], positions[:, t : t + 1])
        pieces.append(hidden)
    assert max_difference(jnp.concatenate(pieces, axis=1), whole) < 2e-5


def test_cached_columns_outside_are_dropped():
    model, params = start(TINY.replace(scan_layers=False))
    cache = model.init_cache(1, 4)
    tokens = tokens_of(TINY, 1, 4)
    _, full = forward_cached(model, params, cache, tokens, jnp.arange(4)[None])
    _, after = forward_cached(model, params, full, tokens[:, :1], jnp.array([[4]]))
    jax.tree.map(np.testing.assert_array_equal, full, after)


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_scan_equals_unrolled(name):
    config = VARIANTS[name]
    model, params = start(config)
    flat = unstack_layers(params, config.num_layers)
    unrolled = LanguageModel(config.replace(scan_layers=False))
    tokens = tokens_of(config)
    want = ("layer:0", "layer:-1")
    a, b = forward(model, params, tokens, want=want), forward(unrolled, flat, tokens, want=want)
    assert max_difference(a.hidden, b.hidden) < 1e-5
    for layer in want:
        assert max_difference(a.extras[layer], b.extras[layer]) < 1e-5
    jax.tree.map(np.testing.assert_array_equal, stack_layers(flat), params)


def test_remat_keeps_the_gradient():
    tokens = tokens_of(TINY)
    gradients = {}
    for mode, scan in (("none", True), ("block", True), ("dots", True), ("block", False)):
        _, params = start(TINY)
        model = LanguageModel(TINY.replace(remat=mode, scan_layers=scan))
        params = params if scan else unstack_layers(params, TINY.num_layers)
        grad = jax.jit(jax.grad(lambda p, model=model: jnp.sum(model.forward(p, tokens).hidden ** 3)))(params)
        gradients[mode, scan] = grad if scan else stack_layers(grad)
    for grad in gradients.values():
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4), grad, gradients["none", True]
        )


def test_causal_sees_the_past_only_and_bidirectional_sees_all():
    tokens = tokens_of(TINY, 1)
    changed = tokens.at[0, -1].add(1) % TINY.vocab_size
    model, params = start(TINY)
    a, b = forward(model, params, tokens).hidden, forward(model, params, changed).hidden
    np.testing.assert_array_equal(a[:, :-1], b[:, :-1])
    assert max_difference(a[:, -1], b[:, -1]) > 1e-3
    both = LanguageModel(TINY.replace(causal=False))
    a, b = forward(both, params, tokens).hidden, forward(both, params, changed).hidden
    assert float(jnp.min(jnp.max(jnp.abs(a - b), axis=-1))) > 1e-4


def test_packed_rows_equal_separate_rows():
    model, params = start(TINY)
    a, b = tokens_of(TINY, 1, 5)[0], tokens_of(TINY, 1, 9)[0]
    packed = jnp.concatenate([a, b])[None]
    segments = jnp.array([[0] * 5 + [1] * 9])
    positions = jnp.concatenate([jnp.arange(5), jnp.arange(9)])[None]
    together = forward(model, params, packed, positions, segments).hidden[0]
    assert max_difference(together[:5], forward(model, params, a[None]).hidden[0]) < 1e-5
    assert max_difference(together[5:], forward(model, params, b[None]).hidden[0]) < 1e-5


def test_padding_on_the_right_changes_nothing():
    model, params = start(TINY)
    row = tokens_of(TINY, 1, 6)
    padded = jnp.pad(row, ((0, 0), (0, 5)))
    short, long = forward(model, params, row).hidden, forward(model, params, padded).hidden[:, :6]
    assert max_difference(short, long) < 1e-5


def test_want_gives_the_residual_stream():
    model, params = start(TINY)
    tokens = tokens_of(TINY)
    out = forward(model, params, tokens, want=("layer:1", "layer:-2"))
    assert set(out.extras) == {"layer:1", "layer:-2"}
    last = out.extras["layer:1"]
    scale = params["final_norm"]["scale"]
    normed = last / jnp.sqrt(jnp.mean(last**2, -1, keepdims=True) + TINY.norm_eps) * scale
    assert max_difference(normed, out.hidden) < 1e-5
    assert max_difference(out.extras["layer:-2"], last) > 1e-3
    for bad in ("layer:2", "layer:-3", "layer:x", "gate:0"):
        with pytest.raises(ConfigError, match="is not an output"):
            forward(model, params, tokens, want=(bad,))


@pytest.mark.parametrize("name", ["llama", "qwen3_untied_linear"])
def test_head_logits_and_counts(name):
    config = VARIANTS[name]
    model, params = start(config)
    tokens = tokens_of(config)
    hidden = forward(model, params, tokens).hidden
    logits = model.logits(params, hidden)
    table = params["embed" if config.tie_embeddings else "head"]["embedding"]
    np.testing.assert_allclose(logits, np.asarray(hidden) @ np.asarray(table).T, rtol=1e-4, atol=1e-4)
    assert ("head" in params) == (not config.tie_embeddings)


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_number_of_parameters(config):
    assert config.num_parameters() == sum(x.size for x in jax.tree.leaves(LanguageModel(config).abstract()))


def test_compute_and_storage_dtypes_are_separate():
    model, params = start(TINY.replace(dtype="bfloat16"))
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    hidden = forward(model, params, tokens_of(TINY)).hidden
    assert hidden.dtype == jnp.bfloat16
    assert model.logits(params, hidden).dtype == jnp.float32
    exact = forward(LanguageModel(TINY), params, tokens_of(TINY)).hidden
    assert 0 < max_difference(hidden, exact) < 0.1
    stored = LanguageModel(TINY.replace(param_dtype="bfloat16")).abstract()
    assert {x.dtype for x in jax.tree.leaves(stored)} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize("scan", [True, False])
def test_abstract_and_axes_cover_every_leaf(scan):
    config = VARIANTS["qwen2"].replace(scan_layers=scan, tie_embeddings=False, qk_norm=True)
    model = LanguageModel(config)
    abstract, params = model.abstract(), jax.eval_shape(model.init, jax.random.key(0))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(abstract))
    jax.tree.map(
        lambda a, b: np.testing.assert_equal((a.shape, a.dtype), (b.shape, b.dtype)), abstract, params
    )
    axes = flatten_dict(model.logical_axes())
    flat = flatten_dict(params)
    assert set(axes) == set(flat)
    for path, names in axes.items():
        assert len(names) == flat[path].ndim, path
        if path[-1] in ("kernel", "embedding", "bias"):
            assert None not in names, path


def test_abstract_of_a_large_model_needs_no_memory():
    huge = TINY.replace(
        vocab_size=128_000, d_model=16_384, num_layers=126, d_ff=53_248, head_dim=128, num_heads=128
    )
    sizes = [leaf.size for leaf in jax.tree.leaves(LanguageModel(huge).abstract())]
    assert sum(sizes) == huge.num_parameters() > 2e11


def test_flops_of_a_linear_model_by_hand():
    config = TINY.replace(num_layers=1)
    linear = 24 * 32 + 2 * 24 * 16 + 32 * 24 + 3 * 24 * 40
    assert config.flops_per_token(context=0, head=False) == 2 * linear
    assert config.flops_per_token(context=5, head=True) == 2 * (linear + 2 * 32 * 5 + 24 * 61)


def test_init_is_a_function_of_the_key():
    model = LanguageModel(TINY)
    a, b, c = (model.init(jax.random.key(s)) for s in (0, 0, 1))
    jax.tree.map(np.testing.assert_array_equal, a, b)
    assert max_difference(a["embed"]["embedding"], c["embed"]["embedding"]) > 1e-3
    kernel = a["layers"]["attn"]["q"]["kernel"]
    assert max_difference(kernel[0], kernel[1]) > 1e-3


def test_wrong_layout_is_named():
    model, params = start(TINY)
    with pytest.raises(ConfigError, match="stack_layers and unstack_layers convert"):
        forward(model, unstack_layers(params, TINY.num_layers), tokens_of(TINY))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 3}, "not a multiple"),
        ({"head_dim": 7}, "odd"),
        ({"dtype": "int8"}, "dtype='int8'"),
    ],
)
def test_impossible_shapes_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        TINY.replace(**changes)
