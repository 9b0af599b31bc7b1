"""The policy objective of one micro-batch: surrogate, factors, KL and entropy terms, aggregated with global counts.

    loss = agg(policy * selection * mismatch * weights) + kl_coef * agg_kl(KL) - entropy_coef * agg_entropy(H)

This is the function that a train step differentiates.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxrl.errors import ConfigError
from jaxrl.ops._checks import check_choice, check_number
from jaxrl.ops.aggregation import Aggregation, Denominators, aggregate
from jaxrl.ops.kl import KL_ESTIMATORS, kl_penalty
from jaxrl.ops.metrics import Metrics, masked_max, masked_min, masked_pair
from jaxrl.ops.mismatch import MismatchConfig, log_mismatch, mismatch_weights
from jaxrl.ops.numerics import masked
from jaxrl.ops.policy_loss import PolicyLoss, PolicyLossConfig, policy_loss
from jaxrl.ops.selection import high_entropy_keep, off_policy_keep


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """The terms of the objective; hashable, so it can be a static argument of ``jax.jit``.

    Attributes:
      policy: the surrogate.
      aggregation: normaliser of the policy term.
      ratio_against: ``"old"``: trainer's log-probabilities at sampling time. ``"sampler"``: those that the sampler
        reported, so that the ratio itself contains the mismatch (verl ``bypass_mode``).
      mismatch: weights against the sampler/trainer difference, or None. Rejection and batch normalisation look at
        the whole batch: apply those with ``correct_mismatch`` first and pass its ``mask`` and ``weights``.
      off_policy_mask_threshold: see ``off_policy_keep``; None is off.
      top_entropy_quantile: share of tokens, by entropy, that the policy term keeps; None is off.
      kl_estimator: one of ``KL_ESTIMATORS``.
      kl_coef: weight of the KL term; 0 means that no reference is needed.
      kl_clamp: symmetric clamp of the KL value, or None.
      kl_bias_correction: multiply the KL by the importance ratio, with gradient (TRL ``use_bias_correction_kl``).
      kl_aggregation: normaliser of the KL term; that of the policy term if None.
      entropy_coef: weight of the entropy bonus.
      entropy_aggregation: normaliser of the entropy term; that of the policy term if None.
    """

    policy: PolicyLossConfig = dataclasses.field(default_factory=PolicyLossConfig)
    aggregation: Aggregation = dataclasses.field(default_factory=Aggregation)
    ratio_against: str = "old"
    mismatch: MismatchConfig | None = None
    off_policy_mask_threshold: float | None = None
    top_entropy_quantile: float | None = None
    kl_estimator: str = "k3"
    kl_coef: float = 0.0
    kl_clamp: float | None = None
    kl_bias_correction: bool = False
    kl_aggregation: Aggregation | None = None
    entropy_coef: float = 0.0
    entropy_aggregation: Aggregation | None = None

    def __post_init__(self) -> None:
        owner = "LossConfig"
        check_choice(owner, "ratio_against", self.ratio_against, ("old", "sampler"))
        check_choice(owner, "kl_estimator", self.kl_estimator, KL_ESTIMATORS)
        check_number(owner, "kl_coef", self.kl_coef)
        check_number(owner, "kl_clamp", self.kl_clamp, above=0.0, optional=True)
        check_number(owner, "entropy_coef", self.entropy_coef)
        check_number(owner, "off_policy_mask_threshold", self.off_policy_mask_threshold, above=0.0, optional=True)
        check_number(owner, "top_entropy_quantile", self.top_entropy_quantile, above=0.0, at_most=1.0, optional=True)
        if self.ratio_against == "sampler" and self.mismatch is not None and self.mismatch.level != "none":
            raise ConfigError(
                f"{owner}.mismatch and ratio_against='sampler' would correct the mismatch twice; drop one of them"
            )


def policy_objective(
    config: LossConfig,
    *,
    logp: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    denominators: Denominators,
    old_logp: jax.Array | None = None,
    ref_logp: jax.Array | None = None,
    sampler_logp: jax.Array | None = None,
    entropy: jax.Array | None = None,
    weights: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    entropy_threshold: jax.Array | None = None,
    kl_coef: jax.Array | float | None = None,
    entropy_coef: jax.Array | float | None = None,
) -> tuple[jax.Array, Metrics]:
    """Contribution of one micro-batch to the loss of its optimizer step, and metrics to merge.

    Args:
      config: the terms.
      logp: [N, T] log-probabilities of the sampled tokens under the parameters in training, of logits divided by
        the sampling temperature (like every other log-probability here). Carries the gradient.
      advantages: [N] or [N, T], constants.
      mask: [N, T], non-zero on loss tokens; everything else may hold anything.
      denominators: counts of the WHOLE step, from ``count``.
      old_logp: [N, T]; None means ``stop_gradient(logp)``, exact if this is the only update of the batch.
      ref_logp: [N, T] under the reference; needed if there is a KL term.
      sampler_logp: [N, T] reported by the sampler; needed by ``mismatch`` and ``ratio_against="sampler"``.
      entropy: [N, T] token entropies in nats; needed by the entropy term and by ``top_entropy_quantile``. Carries
        gradient if the entropy term is on.
      weights: [N, T] factors of the policy term, constants.
      segment_ids: [N, T] for packed rows.
      entropy_threshold: scalar from ``entropy_quantile`` over the whole step, for ``top_entropy_quantile``.
      kl_coef, entropy_coef: scalars that replace the coefficients of ``config``; pass arrays from adaptive
        controllers, so that a new value compiles nothing. None keeps the value of ``config``.

    Returns:
      (scalar, metrics as in :mod:`jaxrl.ops.metrics`).

    Raises:
      ConfigError: a term lacks the array it needs.
    """
    use_kl = kl_coef is not None or config.kl_coef != 0.0
    use_entropy = entropy_coef is not None or config.entropy_coef != 0.0
    mismatch = config.mismatch
    if mismatch is not None and not mismatch.row_local:
        raise ConfigError(
            "mismatch rejection and batch normalisation look at the whole batch; apply correct_mismatch to it, pass "
            "its weights and mask to policy_objective, and set LossConfig.mismatch to None"
        )

    behaviour = jax.lax.stop_gradient(logp) if old_logp is None else old_logp
    against = behaviour
    if config.ratio_against == "sampler":
        against = _require(sampler_logp, "sampler_logp", "ratio_against='sampler'")
    policy = policy_loss(config.policy, logp, against, advantages, mask, segment_ids)
    metrics = _policy_metrics(policy, logp, against, mask)
    terms: dict[str, jax.Array] = {}

    per_token = policy.per_token
    if config.off_policy_mask_threshold is not None:
        reported = behaviour if sampler_logp is None else sampler_logp
        keep = off_policy_keep(config.off_policy_mask_threshold, logp, reported, advantages, mask, segment_ids)
        per_token = jnp.where(keep, per_token, 0)
        metrics["mean"]["off_policy_dropped"] = masked_pair(~keep, mask)
    if config.top_entropy_quantile is not None:
        keep = high_entropy_keep(
            _require(entropy, "entropy", "top_entropy_quantile"),
            mask,
            _require(entropy_threshold, "entropy_threshold", "top_entropy_quantile"),
        )
        per_token = jnp.where(keep, per_token, 0)
        metrics["mean"]["high_entropy_share"] = masked_pair(keep, mask)
    if mismatch is not None and mismatch.level != "none":
        reported = _require(sampler_logp, "sampler_logp", "mismatch")
        factor = mismatch_weights(mismatch, behaviour, reported, mask, segment_ids).astype(logp.dtype)
        per_token = per_token * factor
        _add_weight_metrics(metrics, factor, mask)
    if weights is not None:
        per_token = per_token * masked(jax.lax.stop_gradient(weights), mask).astype(logp.dtype)
    if sampler_logp is not None:
        difference = jnp.abs(log_mismatch(behaviour, sampler_logp, mask))
        metrics["mean"]["sampler_logp_difference"] = masked_pair(difference, mask)
        metrics["max"]["sampler_logp_difference"] = masked_max(difference, mask)

    terms["policy_loss"] = aggregate(config.aggregation, per_token, mask, denominators, segment_ids)
    loss = terms["policy_loss"]
    if use_kl:
        _require(ref_logp, "ref_logp", "the KL term")
    if ref_logp is not None:
        kl = masked(kl_penalty(config.kl_estimator, masked(logp, mask), masked(ref_logp, mask), config.kl_clamp), mask)
        metrics["mean"]["kl"] = masked_pair(kl, mask)
        if use_kl:
            if config.kl_bias_correction:
                kl = kl * policy.ratio
            aggregation = config.kl_aggregation or config.aggregation
            terms["kl_loss"] = aggregate(aggregation, kl, mask, denominators, segment_ids)
            loss = loss + (config.kl_coef if kl_coef is None else kl_coef) * terms["kl_loss"]
    if use_entropy:
        _require(entropy, "entropy", "the entropy term")
    if entropy is not None:
        metrics["mean"]["entropy"] = masked_pair(entropy, mask)
        if use_entropy:
            aggregation = config.entropy_aggregation or config.aggregation
            terms["entropy_bonus"] = aggregate(aggregation, entropy, mask, denominators, segment_ids)
            loss = loss - (config.entropy_coef if entropy_coef is None else entropy_coef) * terms["entropy_bonus"]
    metrics["sum"] = jax.tree.map(jax.lax.stop_gradient, {"loss": loss, **terms})
    return loss, metrics


def _policy_metrics(policy: PolicyLoss, logp: jax.Array, against: jax.Array, mask: jax.Array) -> Metrics:
    clipped = policy.clipped_low | policy.clipped_high
    return {
        "sum": {},
        "mean": {
            "ratio": masked_pair(policy.ratio, mask),
            "ppo_kl": masked_pair(against - logp, mask),
            "clip_fraction": masked_pair(clipped, mask),
            "clip_fraction_low": masked_pair(policy.clipped_low, mask),
            "clip_fraction_high": masked_pair(policy.clipped_high, mask),
            "dual_clip_fraction": masked_pair(policy.dual_clipped, mask),
        },
        "min": {"ratio": masked_min(policy.ratio, mask)},
        "max": {"ratio": masked_max(policy.ratio, mask)},
    }


def _add_weight_metrics(metrics: Metrics, factor: jax.Array, mask: jax.Array) -> None:
    metrics["mean"]["mismatch_weight"] = masked_pair(factor, mask)
    metrics["mean"]["mismatch_weight_square"] = masked_pair(factor**2, mask)
    metrics["min"]["mismatch_weight"] = masked_min(factor, mask)
    metrics["max"]["mismatch_weight"] = masked_max(factor, mask)


def _require(array: jax.Array | None, name: str, purpose: str) -> jax.Array:
    if array is None:
        raise ConfigError(f"{purpose} needs {name}, which is None; pass {name}= or switch {purpose} off")
    return array
