"""Per-token policy-gradient surrogates: PPO clip and its relatives, with explicit clip gates.

Named algorithms are combinations: GSPO is ``ppo_clip`` with ``importance_level="sequence"``; LUSPO adds the
aggregation ``seq-mean-token-sum``; Dr. GRPO, DAPO and GRPO differ in advantage and aggregation only. See
:mod:`jaxrl.ops.presets`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl.errors import ConfigError
from jaxrl.ops._checks import check_choice, check_number
from jaxrl.ops.numerics import clamp, masked, sequence_sum

_SEQUENCE_LOG_RATIO_MAX = 10.0  # verl and tunix bound the log of the straight-through sequence ratio by this


@dataclasses.dataclass(frozen=True)
class PolicyLossConfig:
    """The surrogate and its options. r = exp(logp - old_logp), A the advantage, L the loss to minimise.

    Attributes:
      kind: ``ppo_clip``: L = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), arXiv 1707.06347.
        ``cispo``: L = -sg(clip(r, cap_low, cap_high)) A logp, arXiv 2506.13585.
        ``sapo``: L = -A (4 / tau) sigmoid(tau (r - 1)), arXiv 2511.20347.
        ``reinforce``: L = -A logp.
        ``gmpo``: L = -mean(A) exp(mean of log-ratios clipped to [-clip_low, clip_high] on the side that
        matters), one value per row, arXiv 2507.20673.
      importance_level: ``token``: r per token. ``sequence``: one r = exp(mean log-ratio) per row, gradient through
        the mean. ``sequence_token``: that value, but the gradient of each token's own log-probability (GSPO,
        arXiv 2507.18071, sections 4.1 and 4.3).
      clip_low, clip_high: distances of the clip bounds from 1 (``gmpo``: from 0, of the log-ratio).
      dual_clip: c; for A < 0 the loss is at most -A c (arXiv 1912.09729). TRL's ``delta`` is the same bound.
      cap_low, cap_high: absolute bounds of the ``cispo`` weight.
      tau_pos, tau_neg: temperatures of ``sapo`` for A > 0 and for the rest.
      log_ratio_clamp: log-ratios are clamped to [-x, x] before exp; None means no clamp.
    """

    kind: str = "ppo_clip"
    importance_level: str = "token"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    cap_low: float | None = None
    cap_high: float | None = None
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    log_ratio_clamp: float | None = 20.0

    def __post_init__(self) -> None:
        owner = "PolicyLossConfig"
        check_choice(owner, "kind", self.kind, POLICY_LOSSES)
        check_choice(owner, "importance_level", self.importance_level, ("token", "sequence", "sequence_token"))
        for name in ("clip_low", "clip_high"):
            check_number(owner, name, getattr(self, name), at_least=0.0)
        check_number(owner, "dual_clip", self.dual_clip, above=1.0, optional=True)
        check_number(owner, "cap_low", self.cap_low, at_least=0.0, optional=True)
        check_number(owner, "cap_high", self.cap_high, above=0.0, optional=True)
        check_number(owner, "tau_pos", self.tau_pos, above=0.0)
        check_number(owner, "tau_neg", self.tau_neg, above=0.0)
        check_number(owner, "log_ratio_clamp", self.log_ratio_clamp, above=0.0, optional=True)
        if self.kind == "cispo" and self.cap_high is None:
            raise ConfigError(f"{owner}.cap_high is None; 'cispo' needs an absolute cap of the ratio, for example 5.0")
        if self.kind != "cispo" and (self.cap_low is not None or self.cap_high is not None):
            raise ConfigError(f"{owner}.cap_low and cap_high belong to 'cispo', not {self.kind!r}; leave them None")
        if self.cap_low is not None and self.cap_high is not None and self.cap_low > self.cap_high:
            raise ConfigError(f"{owner}.cap_low {self.cap_low} exceeds cap_high {self.cap_high}; swap them")
        if self.kind != "ppo_clip" and self.dual_clip is not None:
            raise ConfigError(f"{owner}.dual_clip belongs to 'ppo_clip', not {self.kind!r}; leave it None")
        if self.kind == "gmpo" and self.importance_level != "token":
            raise ConfigError(f"{owner}.importance_level must be 'token' for 'gmpo', which averages by itself")


class PolicyLoss(NamedTuple):
    """Loss and what the metrics need; each [N, T], or [N, 1] where it is one value per row.

    Attributes:
      per_token: loss to aggregate; carries the gradient.
      ratio: importance ratio (carries the gradient).
      clipped_low, clipped_high: bool; the lower or upper bound stopped the gradient (``cispo``: capped the weight).
      dual_clipped: bool; the bound for negative advantages stopped the gradient.
    """

    per_token: jax.Array
    ratio: jax.Array
    clipped_low: jax.Array
    clipped_high: jax.Array
    dual_clipped: jax.Array


class _Inputs(NamedTuple):
    logp: jax.Array
    advantages: jax.Array
    mask: jax.Array
    log_ratio: jax.Array
    segment_ids: jax.Array | None


def policy_loss(
    config: PolicyLossConfig,
    logp: jax.Array,
    old_logp: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    segment_ids: jax.Array | None = None,
) -> PolicyLoss:
    """Surrogate loss per token (to minimise).

    Args:
      config: the surrogate.
      logp: [N, T] log-probability of the sampled token under the parameters in training.
      old_logp: [N, T] the same under the parameters the ratio is taken against; a constant. With a single update
        per batch ``stop_gradient(logp)`` is exact.
      advantages: [N] or [N, T]; constants.
      mask: [N, T], non-zero on loss tokens. Whatever stands elsewhere is ignored.
      segment_ids: [N, T] for packed rows; ``advantages`` must then be [N, T].
    """
    mask = mask != 0
    advantages = expand_rows(jax.lax.stop_gradient(advantages)).astype(logp.dtype)
    inputs = _Inputs(
        logp=masked(logp, mask),
        advantages=masked(advantages, mask),
        mask=mask,
        log_ratio=_log_ratio(config, logp, old_logp, mask, segment_ids),
        segment_ids=segment_ids,
    )
    return POLICY_LOSSES[config.kind](config, inputs)


def expand_rows(x: jax.Array) -> jax.Array:
    """[N] to [N, 1]; [N, T] unchanged."""
    return x[:, None] if x.ndim == 1 else x


def _log_ratio(
    config: PolicyLossConfig,
    logp: jax.Array,
    old_logp: jax.Array,
    mask: jax.Array,
    segment_ids: jax.Array | None,
) -> jax.Array:
    difference = masked(logp - jax.lax.stop_gradient(old_logp), mask)
    if config.log_ratio_clamp is not None:
        difference = clamp(difference, -config.log_ratio_clamp, config.log_ratio_clamp)
    if config.importance_level == "token":
        return difference
    mean = sequence_mean(difference, mask, segment_ids)
    if config.importance_level == "sequence":
        return mean
    own = masked(logp, mask)
    combined = own - jax.lax.stop_gradient(own) + jax.lax.stop_gradient(mean)
    return clamp(combined, None, _SEQUENCE_LOG_RATIO_MAX)


def sequence_mean(
    x: jax.Array, mask: jax.Array, segment_ids: jax.Array | None = None, epsilon: float = 0.0
) -> jax.Array:
    """Mean of already masked ``x`` over the loss tokens of each sequence; divisor max(n, 1), or n + epsilon."""
    lengths = sequence_sum((mask != 0).astype(x.dtype), segment_ids)
    return sequence_sum(x, segment_ids) / (lengths + epsilon if epsilon > 0 else jnp.maximum(lengths, 1))


def _ppo_clip(config: PolicyLossConfig, x: _Inputs) -> PolicyLoss:
    ratio = jnp.exp(x.log_ratio)
    low, high = 1.0 - config.clip_low, 1.0 + config.clip_high
    clipped_low = (x.advantages < 0) & (ratio < low)
    clipped_high = (x.advantages > 0) & (ratio > high)
    bound = jnp.where(clipped_low, low, high).astype(ratio.dtype)
    dual = jnp.zeros(clipped_low.shape, bool)
    if config.dual_clip is not None:
        dual = (x.advantages < 0) & (jnp.where(clipped_low, bound, ratio) > config.dual_clip)
        bound = jnp.where(dual, config.dual_clip, bound)
    stopped = clipped_low | clipped_high | dual
    # The exponent is replaced, not only the ratio: an overflowing ratio would turn its zero gradient into nan.
    used = jnp.where(stopped, bound, jnp.exp(jnp.where(stopped, 0, x.log_ratio)))
    return PolicyLoss(-x.advantages * used, ratio, clipped_low, clipped_high, dual)


def _cispo(config: PolicyLossConfig, x: _Inputs) -> PolicyLoss:
    ratio = jnp.exp(x.log_ratio)
    weight = jax.lax.stop_gradient(jnp.clip(ratio, config.cap_low, config.cap_high))
    never = jnp.zeros(ratio.shape, bool)
    low = never if config.cap_low is None else ratio < config.cap_low
    high = never if config.cap_high is None else ratio > config.cap_high
    return PolicyLoss(-weight * x.advantages * x.logp, ratio, low, high, never)


def _sapo(config: PolicyLossConfig, x: _Inputs) -> PolicyLoss:
    ratio = jnp.exp(x.log_ratio)
    tau = jnp.where(x.advantages > 0, config.tau_pos, config.tau_neg).astype(ratio.dtype)
    gate = 4.0 / tau * jax.nn.sigmoid(tau * (ratio - 1.0))
    return _unclipped(-x.advantages * gate, ratio)


def _reinforce(config: PolicyLossConfig, x: _Inputs) -> PolicyLoss:
    del config
    return _unclipped(-x.advantages * x.logp, jnp.exp(x.log_ratio))


def _gmpo(config: PolicyLossConfig, x: _Inputs) -> PolicyLoss:
    advantages = jnp.broadcast_to(x.advantages, x.mask.shape)
    clipped_high = (advantages > 0) & (x.log_ratio > config.clip_high)
    clipped_low = (advantages <= 0) & (x.log_ratio < -config.clip_low)
    used = jnp.where(clipped_high, config.clip_high, jnp.where(clipped_low, -config.clip_low, x.log_ratio))
    # 1e-8 is verl's; a row without loss tokens gives 0.
    mean_log_ratio = sequence_mean(masked(used, x.mask), x.mask, x.segment_ids, epsilon=1e-8)
    mean_advantage = sequence_mean(masked(advantages, x.mask), x.mask, x.segment_ids, epsilon=1e-8)
    ratio = jnp.exp(mean_log_ratio)
    return PolicyLoss(
        -mean_advantage * ratio, ratio, clipped_low, clipped_high, jnp.zeros(clipped_low.shape, bool)
    )


def _unclipped(per_token: jax.Array, ratio: jax.Array) -> PolicyLoss:
    never = jnp.zeros(ratio.shape, bool)
    return PolicyLoss(per_token, ratio, never, never, never)


POLICY_LOSSES: dict[str, Callable[[PolicyLossConfig, _Inputs], PolicyLoss]] = {
    "ppo_clip": _ppo_clip,
    "cispo": _cispo,
    "sapo": _sapo,
    "reinforce": _reinforce,
    "gmpo": _gmpo,
}
