"""Choosing which rows and tokens take part in the policy loss; the denominators keep counting the rest."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl.errors import ConfigError
from jaxrl.ops._checks import check_number
from jaxrl.ops.numerics import masked
from jaxrl.ops.policy_loss import expand_rows, sequence_mean


def off_policy_keep(
    threshold: float,
    logp: jax.Array,
    behaviour_logp: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    segment_ids: jax.Array | None = None,
) -> jax.Array:
    """Drop rows with a negative advantage that the policy has already moved away from (DeepSeek-V3.2).

    A row is dropped if A < 0 and the mean over its loss tokens of (behaviour_logp - logp) exceeds ``threshold``.

    Args:
      threshold: in nats per token, > 0.
      logp: [N, T]; used as a constant.
      behaviour_logp: [N, T] sampler's log-probabilities if reported, else the trainer's at sampling time.
      advantages: [N] or [N, T].
      mask: [N, T] loss mask.
      segment_ids: [N, T] for packed rows.

    Returns:
      bool, [N, 1] or [N, T]: True where the token is kept.
    """
    check_number("off_policy_keep", "threshold", threshold, above=0.0)
    distance = masked(jax.lax.stop_gradient(behaviour_logp - logp), mask)
    drift = sequence_mean(distance, mask, segment_ids)
    return (expand_rows(advantages) >= 0) | (drift <= threshold)


def entropy_quantile(entropy: jax.Array, mask: jax.Array, top_quantile: float) -> jax.Array:
    """Entropy above which the ``top_quantile`` share of loss tokens lies (linear interpolation), a scalar.

    Compute it over the whole batch: a threshold per micro-batch would let the split select other tokens.

    Args:
      entropy: [N, T] token entropies in nats.
      mask: [N, T] loss mask.
      top_quantile: share of tokens to keep, in (0, 1].
    """
    if not 0.0 < top_quantile <= 1.0:
        raise ConfigError(f"top_quantile is {top_quantile}; it is the share of tokens to keep, in (0, 1]")
    values = jnp.where(mask != 0, jax.lax.stop_gradient(entropy), jnp.nan)
    return jnp.nanquantile(values, 1.0 - top_quantile)


def high_entropy_keep(entropy: jax.Array, mask: jax.Array, threshold: jax.Array) -> jax.Array:
    """bool [N, T]: loss tokens with at least ``threshold`` nats ("80/20 rule", arXiv 2506.01939)."""
    return (mask != 0) & (jax.lax.stop_gradient(entropy) >= threshold)
