"""Metrics that can be merged over micro-batches: sums, (sum, count) pairs, minima and maxima.

A tree of metrics is ``{"sum": {name: scalar}, "mean": {name: (sum, count)}, "min": {...}, "max": {...}}``.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.ops.groups import Groups
from jaxrl.ops.numerics import masked

Metrics = dict[str, dict[str, Any]]


def masked_pair(x: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(sum of ``x`` over the mask, number of masked-in tokens); ``x`` may be [N, 1] or bool."""
    valid = mask != 0
    x = jnp.broadcast_to(jax.lax.stop_gradient(x), valid.shape)
    x = x.astype(jnp.float32) if x.dtype == jnp.bool_ else x
    return jnp.sum(masked(x, valid)), jnp.sum(valid).astype(x.dtype)


def masked_min(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Minimum over the mask; +inf if it is empty."""
    return jnp.min(jnp.where(mask != 0, jax.lax.stop_gradient(x), jnp.inf))


def masked_max(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Maximum over the mask; -inf if it is empty."""
    return jnp.max(jnp.where(mask != 0, jax.lax.stop_gradient(x), -jnp.inf))


def merge_metrics(a: Metrics, b: Metrics) -> Metrics:
    """Metrics of two micro-batches together; both must have the same names. Works under ``jit`` and in ``scan``."""
    operations = {"sum": jnp.add, "mean": jnp.add, "min": jnp.minimum, "max": jnp.maximum}
    return {kind: jax.tree.map(operations[kind], a[kind], b[kind]) for kind in a}


def summarize_metrics(metrics: Metrics) -> dict[str, jax.Array]:
    """Flat scalars: ``name`` for sums and means, ``name/min`` and ``name/max`` for the extremes.

    Where ``mismatch_weight`` and its square are present, adds ``mismatch_weight/effective_sample_share`` =
    mean(w)^2 / mean(w^2), the effective sample size over the number of tokens.
    """
    flat = dict(metrics.get("sum", {}))
    for name, (total, number) in metrics.get("mean", {}).items():
        flat[name] = total / jnp.maximum(number, 1)
    for kind in ("min", "max"):
        for name, value in metrics.get(kind, {}).items():
            flat[f"{name}/{kind}"] = value
    square = flat.pop("mismatch_weight_square", None)
    if square is not None:
        mean = flat["mismatch_weight"]
        flat["mismatch_weight/effective_sample_share"] = jnp.where(square > 0, mean**2 / square, 0)
    return flat


def batch_statistics(
    rewards: np.ndarray,
    group_ids: np.ndarray,
    lengths: np.ndarray,
    truncated: np.ndarray | None = None,
    components: dict[str, np.ndarray] | None = None,
) -> dict[str, float]:
    """Host-side statistics of a rollout batch.

    Args:
      rewards: [N]; nan marks an unscorable row.
      group_ids: [N].
      lengths: [N] completion tokens.
      truncated: bool [N]; the completion hit the length limit.
      components: name -> [N] of each reward function, nan where it declined.

    Returns:
      ``reward``, ``reward/std`` (ddof 1), ``reward/<name>``, ``frac_reward_zero_std``, ``unscorable_rows``,
      ``completion_length{,/min,/max,/terminated}``, ``truncated_fraction``. Statistics over nothing are nan.
    """
    rewards, lengths = np.asarray(rewards, np.float64), np.asarray(lengths, np.float64)
    scorable = ~np.isnan(rewards)
    out = {
        "reward": _mean(rewards[scorable]),
        "reward/std": float(np.std(rewards[scorable], ddof=1)) if scorable.sum() > 1 else float("nan"),
        "frac_reward_zero_std": zero_std_fraction(rewards, group_ids),
        "unscorable_rows": float((~scorable).sum()),
        "completion_length": _mean(lengths),
        "completion_length/min": float(lengths.min()),
        "completion_length/max": float(lengths.max()),
    }
    if truncated is not None:
        truncated = np.asarray(truncated, bool)
        out["truncated_fraction"] = float(truncated.mean())
        out["completion_length/terminated"] = _mean(lengths[~truncated])
    for name, values in (components or {}).items():
        values = np.asarray(values, np.float64)
        out[f"reward/{name}"] = _mean(values[~np.isnan(values)])
    return out


def zero_std_fraction(rewards: np.ndarray, group_ids: np.ndarray) -> float:
    """Share of groups whose (scorable) rewards are all the same, so that they teach nothing."""
    rewards = np.asarray(rewards, np.float64)
    groups = Groups(group_ids, ~np.isnan(rewards))
    return float(groups.constant(rewards)[groups.first()].mean())


def _mean(x: np.ndarray) -> float:
    return float(x.mean()) if x.size else float("nan")
