"""Corrections for the difference between the sampler's and the trainer's log-probabilities of one and the same policy.

d = old_logp - sampler_logp, both for the parameters at sampling time. Weights multiply the policy loss; rejection
changes the loss mask. Sources: truncated importance sampling (Yao et al., 2025), masked importance sampling / IcePop
(2025), "When Speed Kills Stability" (Liu, Li et al., 2025); conventions of TRL, verl and tunix.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.errors import ConfigError
from jaxrl.ops._checks import check_choice, check_number
from jaxrl.ops.numerics import clamp, masked, sequence_max, sequence_sum

_REJECTION_LEVELS = ("token", "seq_sum", "seq_mean", "seq_max")
_REJECTION_CLAMP = 20.0


@dataclasses.dataclass(frozen=True)
class RejectionRule:
    """Keep a token (or a whole row) only if a statistic of d lies within inclusive bounds (verl ``rollout_rs``).

    Per token, with d clamped to [-20, 20]: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d.

    Attributes:
      statistic: ``<level>_<estimator>``; level ``token``, ``seq_sum``, ``seq_mean`` or ``seq_max``, estimator
        ``k1``, ``k2`` or ``k3`` (``seq_max_k1`` does not exist). A failing row loses its whole mask.
      upper: bound; for k1 a ratio, compared as log(upper).
      lower: k1 only, a ratio; 1 / upper if None.
    """

    statistic: str
    upper: float
    lower: float | None = None

    def __post_init__(self) -> None:
        names = [f"{level}_{kind}" for level in _REJECTION_LEVELS for kind in ("k1", "k2", "k3")]
        names.remove("seq_max_k1")
        check_choice("RejectionRule", "statistic", self.statistic, names)
        check_number("RejectionRule", "upper", self.upper, above=0.0)
        check_number("RejectionRule", "lower", self.lower, above=0.0, at_most=self.upper, optional=True)
        if self.lower is not None and self.estimator != "k1":
            raise ConfigError(f"RejectionRule.lower is {self.lower}, but {self.statistic!r} has an upper bound only")
        if self.lower is None and self.estimator == "k1" and self.upper < 1:
            raise ConfigError(f"RejectionRule.upper is {self.upper}; a single k1 bound is a ratio >= 1, or set lower")

    @property
    def level(self) -> str:
        return self.statistic.rsplit("_", 1)[0]

    @property
    def estimator(self) -> str:
        return self.statistic.rsplit("_", 1)[1]


@dataclasses.dataclass(frozen=True)
class MismatchConfig:
    """Weights exp(d), and rejection rules.

    Attributes:
      level: ``token``: exp(d) per token; ``sequence``: exp(sum of d over the row), one per row; ``none``: weight 1
        (rejection only).
      mode: ``truncate``: clip the weight to [lower, upper]; ``mask``: weight 0 outside [lower, upper] (inclusive).
      upper, lower: bounds; None means no bound on that side.
      log_clamp: the exponent is clamped to [-x, x] before exp; None means no clamp.
      batch_normalize: divide by the mean weight of the batch after truncation.
      rejection: rules that must all pass for a token to stay in the mask.
    """

    level: str = "token"
    mode: str = "truncate"
    upper: float | None = 2.0
    lower: float | None = None
    log_clamp: float | None = 20.0
    batch_normalize: bool = False
    rejection: tuple[RejectionRule, ...] = ()

    def __post_init__(self) -> None:
        check_choice("MismatchConfig", "level", self.level, ("token", "sequence", "none"))
        check_choice("MismatchConfig", "mode", self.mode, ("truncate", "mask"))
        check_number("MismatchConfig", "upper", self.upper, above=0.0, optional=True)
        check_number("MismatchConfig", "lower", self.lower, at_least=0.0, at_most=self.upper, optional=True)
        check_number("MismatchConfig", "log_clamp", self.log_clamp, above=0.0, optional=True)
        if self.level == "none" and self.batch_normalize:
            raise ConfigError("MismatchConfig.batch_normalize needs weights; set level to 'token' or 'sequence'")

    @property
    def row_local(self) -> bool:
        """Whether a row's correction depends on that row alone and leaves the mask as it is."""
        return not self.rejection and not self.batch_normalize


class MismatchCorrection(NamedTuple):
    """``weights`` [N, T] (0 outside the original mask) or None, and the new ``mask`` [N, T] in the old dtype."""

    weights: jax.Array | None
    mask: jax.Array


def correct_mismatch(
    config: MismatchConfig,
    old_logp: jax.Array,
    sampler_logp: jax.Array,
    mask: jax.Array,
    segment_ids: jax.Array | None = None,
) -> MismatchCorrection:
    """Weights and mask for a whole batch; compute denominators from the returned mask.

    Args:
      config: the correction.
      old_logp: [N, T] trainer's log-probabilities of the sampled tokens.
      sampler_logp: [N, T] the sampler's.
      mask: [N, T] loss mask.
      segment_ids: [N, T] for packed rows.
    """
    new_mask = rejection_mask(config.rejection, old_logp, sampler_logp, mask, segment_ids)
    if config.level == "none":
        return MismatchCorrection(None, new_mask)
    raw = mismatch_weights(config, old_logp, sampler_logp, mask, segment_ids)
    weights = masked(jnp.broadcast_to(raw, mask.shape), mask)
    if config.batch_normalize:
        weights = _normalize(config.level, weights, mask, segment_ids)
    return MismatchCorrection(weights, new_mask)


def mismatch_weights(
    config: MismatchConfig,
    old_logp: jax.Array,
    sampler_logp: jax.Array,
    mask: jax.Array,
    segment_ids: jax.Array | None = None,
) -> jax.Array:
    """Bounded exp(d), before batch normalisation; a constant.

    Returns:
      [N, T] for tokens, [N, 1] for sequences ([N, T] if packed). Columns outside the mask have d = 0.
    """
    exponent = log_mismatch(old_logp, sampler_logp, mask)
    if config.level == "sequence":
        exponent = sequence_sum(exponent, segment_ids)
    if config.log_clamp is not None:
        exponent = clamp(exponent, -config.log_clamp, config.log_clamp)
    weights = jnp.exp(exponent)
    if config.mode == "truncate":
        return jnp.clip(weights, config.lower, config.upper)
    inside = jnp.ones(weights.shape, bool)
    if config.upper is not None:
        inside &= weights <= config.upper
    if config.lower is not None:
        inside &= weights >= config.lower
    return jnp.where(inside, weights, 0)


def log_mismatch(old_logp: jax.Array, sampler_logp: jax.Array, mask: jax.Array) -> jax.Array:
    """d = old_logp - sampler_logp on loss tokens, 0 elsewhere; a constant."""
    return jax.lax.stop_gradient(masked(old_logp - sampler_logp, mask))


def rejection_mask(
    rules: tuple[RejectionRule, ...],
    old_logp: jax.Array,
    sampler_logp: jax.Array,
    mask: jax.Array,
    segment_ids: jax.Array | None = None,
) -> jax.Array:
    """``mask`` without the tokens and rows that fail a rule."""
    d = clamp(log_mismatch(old_logp, sampler_logp, mask), -_REJECTION_CLAMP, _REJECTION_CLAMP)
    valid = mask != 0
    keep = valid
    for rule in rules:
        value = {"k1": -d, "k2": 0.5 * d**2, "k3": jnp.expm1(d) - d}[rule.estimator]
        value = _statistic(rule.level, value, valid, segment_ids)
        upper = math.log(rule.upper) if rule.estimator == "k1" else rule.upper
        keep &= value <= upper
        if rule.estimator == "k1":
            keep &= value >= math.log(1.0 / rule.upper if rule.lower is None else rule.lower)
    return jnp.where(keep, mask, jnp.zeros((), mask.dtype))


def _statistic(level: str, value: jax.Array, valid: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
    if level == "token":
        return value
    if level == "seq_max":
        return sequence_max(jnp.where(valid, value, -jnp.inf), segment_ids)
    total = sequence_sum(masked(value, valid), segment_ids)
    if level == "seq_sum":
        return total
    return total / jnp.maximum(sequence_sum(valid.astype(value.dtype), segment_ids), 1)


def _normalize(level: str, weights: jax.Array, mask: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
    """Divide by the mean weight: over tokens, or over rows of the row's token mean (all rows count, as in verl)."""
    valid = (mask != 0).astype(weights.dtype)
    if level == "token":
        mean = jnp.sum(weights) / jnp.maximum(jnp.sum(valid), 1)
    elif segment_ids is None:
        mean = jnp.mean(jnp.sum(weights, axis=1) / (jnp.sum(valid, axis=1) + 1e-8))
    else:
        # Every token of a sequence carries the same weight, so a sequence's mean is the sum of weight / length.
        lengths = sequence_sum(valid, segment_ids)
        sequences = jnp.sum(jnp.where(valid > 0, 1.0 / jnp.maximum(lengths, 1), 0))
        mean = jnp.sum(jnp.where(valid > 0, weights / (lengths + 1e-8), 0)) / jnp.maximum(sequences, 1)
    return jnp.where(mean > 0, weights / jnp.where(mean > 0, mean, 1), weights)
