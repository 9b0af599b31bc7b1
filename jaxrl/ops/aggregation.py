"""From per-token losses to a scalar: the normalisers of GRPO-like losses, with denominators of the whole step.

A micro-batch contributes ``sum(per_token * token_weights)``, where the weights hold the denominators of the whole
optimizer step. Contributions, and so gradients, of any split add up to the one-shot value.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxrl.ops._checks import check_choice, check_number
from jaxrl.ops.numerics import count_sequences, masked, sequence_sum

AGGREGATION_MODES = (
    "token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "sum-norm",
)


@dataclasses.dataclass(frozen=True)
class Aggregation:
    """How per-token losses L with mask m become a scalar.

    ======================== =====================================================
    mode                     value (n_i tokens in row i, R rows, C length scale)
    ======================== =====================================================
    token-mean               sum L m / sum m
    seq-mean-token-mean      sum_i (sum_t L m / n_i) / R
    seq-mean-token-sum       sum_i (sum_t L m) / R
    seq-mean-token-sum-norm  sum_i (sum_t L m / C) / R
    sum-norm                 sum L m / C, with C = R if ``length_scale`` is None
    ======================== =====================================================

    Attributes:
      mode: one of the above.
      scope: ``"step"``: denominators of the whole optimizer step (the split never matters). ``"micro-batch"``: each
        micro-batch is normalised by itself and the micro-batches are averaged, as some trainers do.
      count_empty: whether R counts rows without any loss token.
      length_scale: C; the number of columns recorded in the denominators if None.
      length_epsilon: if > 0, rows are divided by n_i + epsilon instead of max(n_i, 1).
    """

    mode: str = "token-mean"
    scope: str = "step"
    count_empty: bool = False
    length_scale: float | None = None
    length_epsilon: float = 0.0

    def __post_init__(self) -> None:
        check_choice("Aggregation", "mode", self.mode, AGGREGATION_MODES)
        check_choice("Aggregation", "scope", self.scope, ("step", "micro-batch"))
        check_number("Aggregation", "length_scale", self.length_scale, above=0.0, optional=True)
        check_number("Aggregation", "length_epsilon", self.length_epsilon, at_least=0.0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Denominators:
    """Counts of one optimizer step (a pytree of int32 scalars).

    Attributes:
      tokens: loss tokens.
      rows: sequences, with or without loss tokens.
      live_rows: sequences with at least one loss token.
      columns: the length T used where a mode divides by it.
      micro_batches: number of micro-batches, for ``scope="micro-batch"``.
    """

    tokens: jax.Array
    rows: jax.Array
    live_rows: jax.Array
    columns: jax.Array
    micro_batches: jax.Array


def count(
    mask: jax.Array,
    segment_ids: jax.Array | None = None,
    columns: int | None = None,
    micro_batches: int = 1,
) -> Denominators:
    """Denominators of a step, from the loss mask of ALL its rows (before the split into micro-batches).

    Args:
      mask: [N, T], non-zero on loss tokens.
      segment_ids: [N, T] for packed rows, else None (see :func:`jaxrl.ops.numerics.sequence_sum`).
      columns: T if None. Pass the maximal completion length where columns also hold the prompt.
      micro_batches: number of micro-batches the step will be split into.
    """
    live, rows = count_sequences(mask, segment_ids)
    return Denominators(
        tokens=jnp.sum((mask != 0).astype(jnp.int32)),
        rows=rows,
        live_rows=live,
        columns=jnp.asarray(mask.shape[1] if columns is None else columns, jnp.int32),
        micro_batches=jnp.asarray(micro_batches, jnp.int32),
    )


def merge_denominators(*parts: Denominators) -> Denominators:
    """Denominators of a step whose micro-batches were counted one by one (each with ``micro_batches=1``)."""
    total = jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), *parts)
    columns = parts[0].columns
    for part in parts[1:]:
        columns = jnp.maximum(columns, part.columns)
    return dataclasses.replace(total, columns=columns)


def token_weights(
    aggregation: Aggregation | str,
    mask: jax.Array,
    denominators: Denominators,
    segment_ids: jax.Array | None = None,
    dtype: jnp.dtype = jnp.float32,
) -> jax.Array:
    """Weight of each token in the scalar loss: [N, T], 0 outside the mask.

    Args:
      aggregation: the mode; a plain string means that mode with its default options.
      mask: [N, T] of this micro-batch.
      denominators: counts of the whole step.
      segment_ids: [N, T] for packed rows.
      dtype: of the result.
    """
    if isinstance(aggregation, str):
        aggregation = Aggregation(aggregation)
    valid = (mask != 0).astype(dtype)
    counts = denominators
    shares = jnp.asarray(1, dtype)
    if aggregation.scope == "micro-batch":
        local = count(mask, segment_ids)
        counts = dataclasses.replace(local, columns=denominators.columns)
        shares = jnp.maximum(denominators.micro_batches, 1).astype(dtype)
    # A step without any loss token has loss 0, not nan.
    rows = jnp.maximum(counts.rows if aggregation.count_empty else counts.live_rows, 1).astype(dtype)
    if aggregation.mode == "token-mean":
        divisor = jnp.maximum(counts.tokens, 1).astype(dtype)
    elif aggregation.mode == "seq-mean-token-mean":
        lengths = sequence_sum(valid, segment_ids)
        epsilon = aggregation.length_epsilon
        divisor = rows * (lengths + epsilon if epsilon > 0 else jnp.maximum(lengths, 1))
    elif aggregation.mode == "seq-mean-token-sum":
        divisor = rows
    elif aggregation.mode == "seq-mean-token-sum-norm":
        scale = counts.columns if aggregation.length_scale is None else aggregation.length_scale
        divisor = rows * jnp.asarray(scale, dtype)
    else:
        divisor = rows if aggregation.length_scale is None else jnp.asarray(aggregation.length_scale, dtype)
    return jnp.where(valid > 0, valid / (divisor * shares), 0)


def aggregate(
    aggregation: Aggregation | str,
    per_token: jax.Array,
    mask: jax.Array,
    denominators: Denominators,
    segment_ids: jax.Array | None = None,
) -> jax.Array:
    """Contribution of one micro-batch to the scalar loss of its step.

    Args:
      aggregation: the mode; a plain string means that mode with its default options.
      per_token: [N, T], or [N, 1] for a loss that is the same on every token of a row.
      mask: [N, T]; values outside it are ignored, even nan.
      denominators: counts of the whole step, from :func:`count`.
      segment_ids: [N, T] for packed rows.

    Returns:
      Scalar in the dtype of ``per_token``.
    """
    weights = token_weights(aggregation, mask, denominators, segment_ids, per_token.dtype)
    return jnp.sum(masked(per_token, mask) * weights)
