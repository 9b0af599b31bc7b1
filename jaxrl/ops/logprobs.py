"""Log-probabilities and entropies of given tokens, without ever holding ``[N, S, V]``.

The vocabulary product is done in chunks of columns, and only for columns that count: each row's masked tokens are
moved to the front, and the loop ends at the longest row. So memory is ``chunk_tokens x V`` whatever the sequence
length, and prompt or padding columns cost nothing. The backward pass recomputes the logits chunk by chunk.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array


def token_logprobs(
    hidden: Array,
    head: Array,
    targets: Array,
    mask: Array,
    *,
    temperature: Array | float = 1.0,
    chunk_tokens: int = 512,
) -> tuple[Array, Array]:
    """Log-probability of ``targets`` and entropy of their distribution, ``softmax(hidden @ head.T / temperature)``.

    Differentiable in ``hidden`` and ``head`` (both outputs); computed in float32, or float64 for float64 input.

    Args:
      hidden: ``[N, S, D]``; ``hidden[n, s]`` predicts ``targets[n, s]``.
      head: ``[V, D]`` output table.
      targets: int ``[N, S]``.
      mask: ``[N, S]``, non-zero where a result is wanted; elsewhere both outputs are 0.
      temperature: scalar or ``[N]``, positive; a traced value, so that another one does not recompile.
      chunk_tokens: about how many tokens have their logits in memory at once.

    Returns:
      logp ``[N, S]`` and entropy ``[N, S]`` in nats.
    """
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    inverse = jnp.broadcast_to(1.0 / jnp.asarray(temperature, wide), (hidden.shape[0],))
    order = jnp.argsort(mask == 0, axis=1, stable=True).astype(jnp.int32)
    counts = jnp.sum(mask != 0, axis=1)
    columns = int(np.clip(chunk_tokens // hidden.shape[0], 1, hidden.shape[1]))
    padding = -hidden.shape[1] % columns
    # Columns beyond the row's count are out of range on purpose: reads are clipped, writes dropped.
    order = jnp.where(jnp.arange(hidden.shape[1]) < counts[:, None], order, hidden.shape[1])
    order = jnp.pad(order, ((0, 0), (0, padding)), constant_values=hidden.shape[1])
    chunks = (jnp.max(counts) + columns - 1) // columns
    return _chunked(columns, hidden, head, targets, inverse, order, chunks)


def _take(x: Array, index: Array) -> Array:
    return jax.vmap(lambda row, i: row.at[i].get(mode="clip"))(x, index)


def _put(buffer: Array, index: Array, values: Array) -> Array:
    return jax.vmap(lambda row, i, v: row.at[i].set(v, mode="drop"))(buffer, index, values)


def _logits(hidden: Array, head: Array, inverse: Array) -> Array:
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    # Products of matrices, here and in the backward pass: see models.layers.Linear.
    flat = hidden.reshape(-1, hidden.shape[-1])
    logits = jnp.einsum("td,vd->tv", flat, head.astype(hidden.dtype), preferred_element_type=wide)
    return logits.reshape(*hidden.shape[:2], -1) * inverse[:, None, None]


def _one_hot(logits: Array, targets: Array) -> Array:
    return jnp.arange(logits.shape[-1], dtype=targets.dtype) == targets[..., None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked(
    columns: int, hidden: Array, head: Array, targets: Array, inverse: Array, order: Array, chunks: Array
) -> tuple[Array, Array]:
    return _chunked_fwd(columns, hidden, head, targets, inverse, order, chunks)[0]


def _chunked_fwd(columns, hidden, head, targets, inverse, order, chunks):
    def body(i, carry):
        logp, entropy, lse = carry
        index = jax.lax.dynamic_slice_in_dim(order, i * columns, columns, axis=1)
        logits = _logits(_take(hidden, index), head, inverse)
        norm = jax.nn.logsumexp(logits, axis=-1)
        # A masked sum, not a gather: it stays local when the vocabulary is sharded.
        chosen = jnp.sum(jnp.where(_one_hot(logits, _take(targets, index)), logits, 0), axis=-1)
        expected = jnp.sum(jnp.exp(logits - norm[..., None]) * logits, axis=-1)
        values = (chosen - norm, norm - expected, norm)
        return tuple(_put(buffer, index, value) for buffer, value in zip((logp, entropy, lse), values))

    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    zeros = jnp.zeros(hidden.shape[:2], wide)
    logp, entropy, lse = jax.lax.fori_loop(0, chunks, body, (zeros, zeros, zeros))
    return (logp, entropy), (hidden, head, targets, inverse, order, chunks, lse, entropy)


def _chunked_bwd(columns, residuals, gradients):
    hidden, head, targets, inverse, order, chunks, lse, entropy = residuals
    grad_logp, grad_entropy = gradients
    wide = lse.dtype

    def body(i, carry):
        grad_hidden, grad_head = carry
        index = jax.lax.dynamic_slice_in_dim(order, i * columns, columns, axis=1)
        inside = index < hidden.shape[1]
        chosen = _take(hidden, index)
        logits = _logits(chosen, head, inverse)
        log_p = logits - _take(lse, index)[..., None]
        p = jnp.exp(log_p)
        g_logp = jnp.where(inside, _take(grad_logp, index), 0)[..., None]
        g_entropy = jnp.where(inside, _take(grad_entropy, index), 0)[..., None]
        one_hot = _one_hot(logits, _take(targets, index))
        grad = jnp.where(one_hot, g_logp, 0) - p * (g_logp + g_entropy * (log_p + _take(entropy, index)[..., None]))
        grad = (grad * inverse[:, None, None]).astype(hidden.dtype).reshape(-1, grad.shape[-1])
        back = jnp.einsum("tv,vd->td", grad, head.astype(hidden.dtype), preferred_element_type=wide)
        flat = chosen.reshape(-1, chosen.shape[-1])
        grad_head = grad_head + jnp.einsum("tv,td->vd", grad, flat, preferred_element_type=wide)
        return _put(grad_hidden, index, back.astype(hidden.dtype).reshape(chosen.shape)), grad_head

    start = (jnp.zeros_like(hidden), jnp.zeros(head.shape, wide))
    grad_hidden, grad_head = jax.lax.fori_loop(0, chunks, body, start)
    return grad_hidden, grad_head.astype(head.dtype), None, None, None, None


_chunked.defvjp(_chunked_fwd, _chunked_bwd)


def dense_logprobs(logits: Array, targets: Array, temperature: Array | float = 1.0) -> tuple[Array, Array]:
    """The same two results from full logits ``[..., V]``; for small vocabularies and as a check."""
    log_p = jax.nn.log_softmax(logits / temperature, axis=-1)
    chosen = jnp.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0]
    return chosen, -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
