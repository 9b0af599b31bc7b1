"""A model on a mesh of eight devices computes what it computes on one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models import LanguageModel
from jaxrl.parallel import MeshConfig, Sharding, make_mesh
from tiny_models import TINY, max_difference, random_like, tokens_of

CONFIG = TINY.replace(vocab_size=64, d_model=32, num_heads=8, num_kv_heads=4, d_ff=64, qkv_bias=True)


def value(params, model, tokens):
    hidden = model.forward(params, tokens).hidden
    return jnp.mean(jax.nn.logsumexp(model.logits(params, hidden), axis=-1) ** 2)


run = jax.jit(jax.value_and_grad(value), static_argnames="model")


@pytest.fixture(scope="module")
def single():
    model = LanguageModel(CONFIG)
    params, tokens = random_like(model.abstract()), tokens_of(CONFIG, rows=8)
    return params, tokens, run(params, model, tokens)


@pytest.mark.parametrize("sizes", [(8, 1, 1), (1, 8, 1), (2, 2, 2), (1, 2, 4)], ids=str)
def test_value_and_gradient(single, sizes):
    params, tokens, (expected, expected_grad) = single
    sharding = Sharding(make_mesh(MeshConfig(*sizes)))
    model = LanguageModel(CONFIG, sharding)
    placed = jax.device_put(params, model.param_shardings())
    result, grad = run(placed, model, jax.device_put(tokens, sharding.batch()))
    np.testing.assert_allclose(result, expected, rtol=1e-5)
    assert max(map(max_difference, jax.tree.leaves(grad), jax.tree.leaves(expected_grad))) < 1e-5
    kernel = placed["layers"]["mlp"]["up"]["kernel"]
    data, fsdp, tensor = sizes
    assert kernel.addressable_shards[0].data.shape == (2, 32 // fsdp, 64 // tensor)


def test_init_on_a_mesh_equals_init_on_one_device():
    sharding = Sharding(make_mesh(MeshConfig(data=1, fsdp=2, tensor=4)))
    model = LanguageModel(CONFIG, sharding)
    params = model.init(jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, params, LanguageModel(CONFIG).init(jax.random.key(0)))
    jax.tree.map(lambda x, s: np.testing.assert_(x.sharding == s), params, model.param_shardings())
    jax.tree.map(lambda a, x: np.testing.assert_(a.sharding == x.sharding), model.abstract(), params)


def test_cached_decoding_on_a_mesh(single):
    params, tokens, _ = single
    config = CONFIG.replace(scan_layers=False)
    sharding = Sharding(make_mesh(MeshConfig(data=2, fsdp=1, tensor=4)))
    model, plain = LanguageModel(config, sharding), LanguageModel(config)
    params = random_like(plain.abstract())
    placed = jax.device_put(params, model.param_shardings())
    cache = jax.device_put(model.init_cache(8, 12), model.cache_shardings(8, 12))
    assert cache[0]["k"].addressable_shards[0].data.shape == (4, 1, 8, 12)
    positions = jnp.broadcast_to(jnp.arange(12), (8, 12))
    hidden, after = jax.jit(model.forward_cached, donate_argnums=1)(placed, cache, tokens, positions)
    expected = jax.jit(plain.forward)(params, tokens).hidden
    assert max_difference(hidden, expected) < 2e-5
    assert after[0]["k"].shape == (8, 4, 8, 12)
