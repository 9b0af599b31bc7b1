"""Chunked log-probabilities against the dense formula, their gradients, and their memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.ops.logprobs import dense_logprobs, token_logprobs

N, S, D, V = 3, 7, 5, 11


@pytest.fixture(scope="module")
def data():
    keys = jax.random.split(jax.random.key(0), 5)
    with jax.enable_x64(True):
        hidden = jax.random.normal(keys[0], (N, S, D), jnp.float64)
        head = jax.random.normal(keys[1], (V, D), jnp.float64)
        weights = jax.random.normal(keys[4], (2, N, S), jnp.float64)
    targets = jax.random.randint(keys[2], (N, S), 0, V)
    mask = jax.random.bernoulli(keys[3], 0.6, (N, S)).at[1].set(False)
    return hidden, head, targets, mask, weights


def dense(hidden, head, targets, mask, temperature):
    logp, entropy = dense_logprobs(jnp.einsum("nsd,vd->nsv", hidden, head), targets, temperature)
    return jnp.where(mask, logp, 0), jnp.where(mask, entropy, 0)


@pytest.mark.parametrize("chunk_tokens", [1, 6, 9, 1000])
def test_values_and_gradients_equal_dense_in_float64(data, chunk_tokens):
    hidden, head, targets, mask, weights = data
    temperature = np.array([0.7, 1.0, 1.9])

    def loss(function, hidden, head):
        return sum(jnp.sum(w * x) for w, x in zip(weights, function(hidden, head)))

    chunked = lambda h, w: token_logprobs(h, w, targets, mask, temperature=temperature, chunk_tokens=chunk_tokens)
    exact = lambda h, w: dense(h, w, targets, mask, temperature[:, None, None])
    with jax.enable_x64(True):
        for got, want in zip(chunked(hidden, head), exact(hidden, head)):
            assert got.dtype == jnp.float64
            np.testing.assert_allclose(got, want, atol=1e-12)
        got = jax.grad(loss, argnums=(1, 2))(chunked, hidden, head)
        want = jax.grad(loss, argnums=(1, 2))(exact, hidden, head)
    for g, w in zip(got, want):
        np.testing.assert_allclose(g, w, atol=1e-12)


def test_empty_mask_gives_zeros_and_zero_gradients(data):
    hidden, head, targets, mask, _ = data
    hidden, head = hidden.astype(jnp.float32), head.astype(jnp.float32)
    empty = jnp.zeros_like(mask)
    value, grads = jax.value_and_grad(lambda h: token_logprobs(h, head, targets, empty)[0].sum())(hidden)
    assert value == 0 and not np.any(grads)


def test_other_masks_and_temperatures_do_not_recompile(data):
    hidden, head, targets, mask, _ = data
    traces = []

    @jax.jit
    def run(mask, temperature):
        traces.append(1)
        return token_logprobs(hidden.astype(jnp.float32), head.astype(jnp.float32), targets, mask, temperature=temperature)

    for m, t in [(mask, 1.0), (~mask, 0.5), (jnp.ones_like(mask), 2.0)]:
        run(m, jnp.float32(t))
    assert len(traces) == 1


def test_memory_does_not_grow_with_sequence_length():
    """Temporaries of the gradient stay below a quarter of one [N, S, V] array."""
    n, s, d, v = 4, 512, 8, 4096
    shapes = [
        jax.ShapeDtypeStruct((n, s, d), jnp.float32),
        jax.ShapeDtypeStruct((v, d), jnp.float32),
        jax.ShapeDtypeStruct((n, s), jnp.int32),
        jax.ShapeDtypeStruct((n, s), jnp.bool),
    ]
    loss = lambda h, w, t, m: sum(x.sum() for x in token_logprobs(h, w, t, m, chunk_tokens=64))
    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*shapes).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < n * s * v * 4 / 4
