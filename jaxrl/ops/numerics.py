"""Small array functions with the exact gradients that the losses of this package rely on."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def clamp(x: jax.Array, low: float | None, high: float | None) -> jax.Array:
    """Clip ``x`` to ``[low, high]``; the gradient is 1 inside and ON the bounds, 0 outside.

    ``jnp.clip`` halves the gradient at a bound, PyTorch passes it; ported runs expect the latter.
    """
    inside = jnp.ones(jnp.shape(x), bool)
    if low is not None:
        inside &= x >= low
    if high is not None:
        inside &= x <= high
    return jnp.where(inside, x, jax.lax.stop_gradient(jnp.clip(x, low, high)))


def masked(x: jax.Array, mask: jax.Array) -> jax.Array:
    """``x`` where ``mask`` is non-zero, exactly 0 elsewhere, whatever ``x`` holds there (inf and nan too)."""
    return jnp.where(mask != 0, x, jnp.zeros((), x.dtype))


def straight_through(value: jax.Array, gradient: jax.Array) -> jax.Array:
    """An array with the value of ``value`` and the gradient of ``gradient``."""
    return jax.lax.stop_gradient(value) + (gradient - jax.lax.stop_gradient(gradient))


def sequence_sum(x: jax.Array, segment_ids: jax.Array | None = None) -> jax.Array:
    """Sum over each sequence, in a shape that broadcasts against [N, T].

    Args:
      x: [N, T], already masked.
      segment_ids: None if every row is one sequence. For packed rows: int [N, T], the sequence each column
        belongs to, numbered within its row from 1 to at most T; 0 is padding.

    Returns:
      [N, 1], or for packed rows [N, T] with the sum of the sequence a column belongs to.
    """
    if segment_ids is None:
        return jnp.sum(x, axis=1, keepdims=True)
    totals = _segment_totals(x, segment_ids)
    return jnp.take_along_axis(totals, segment_ids, axis=1)


def sequence_max(x: jax.Array, segment_ids: jax.Array | None = None) -> jax.Array:
    """Maximum over each sequence; shapes as in :func:`sequence_sum`."""
    if segment_ids is None:
        return jnp.max(x, axis=1, keepdims=True)
    reduce = jax.vmap(lambda row, ids: jax.ops.segment_max(row, ids, num_segments=row.shape[0] + 1))
    return jnp.take_along_axis(reduce(x, segment_ids), segment_ids, axis=1)


def count_sequences(mask: jax.Array, segment_ids: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """Numbers of sequences (with at least one unmasked token, in all), both int32 scalars.

    In packed rows a sequence exists if some column carries its id; id 0 is padding and no sequence.
    """
    valid = (mask != 0).astype(jnp.int32)
    if segment_ids is None:
        return jnp.sum(jnp.any(valid > 0, axis=1).astype(jnp.int32)), jnp.asarray(mask.shape[0], jnp.int32)
    tokens = _segment_totals(valid, segment_ids)[:, 1:]
    columns = _segment_totals(jnp.ones_like(valid), segment_ids)[:, 1:]
    return jnp.sum((tokens > 0).astype(jnp.int32)), jnp.sum((columns > 0).astype(jnp.int32))


def _segment_totals(x: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """[N, T + 1]: sums per row and segment id."""
    reduce = jax.vmap(lambda row, ids: jax.ops.segment_sum(row, ids, num_segments=row.shape[0] + 1))
    return reduce(x, segment_ids)
