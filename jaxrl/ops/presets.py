"""Bundles of options: named algorithms with this library's defaults, and the conventions of TRL, verl and tunix.

``trl``, ``verl`` and ``tunix`` take the option names of those libraries and reproduce their losses digit for digit,
including their normalisers and epsilons.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxrl.errors import ConfigError
from jaxrl.ops._checks import check_choice
from jaxrl.ops.advantages import AdvantageConfig
from jaxrl.ops.aggregation import Aggregation
from jaxrl.ops.loss import LossConfig
from jaxrl.ops.mismatch import MismatchConfig, RejectionRule
from jaxrl.ops.policy_loss import PolicyLossConfig


@dataclasses.dataclass(frozen=True)
class LossPreset:
    """An advantage rule and a loss that belong together.

    ``correction`` is a sampler-mismatch correction to apply to the whole batch before the step (rejection, batch
    normalisation); row-local weights are in ``loss.mismatch``.
    """

    advantage: AdvantageConfig = dataclasses.field(default_factory=AdvantageConfig)
    loss: LossConfig = dataclasses.field(default_factory=LossConfig)
    correction: MismatchConfig | None = None


def algorithm(name: str) -> LossPreset:
    """A published algorithm with this library's conventions (global denominators, live rows, epsilon 1e-6).

    Args:
      name: ``grpo``, ``dr_grpo``, ``dapo``, ``rloo``, ``reinforce_plus_plus_baseline``, ``gspo``, ``cispo``,
        ``sapo``, ``gpg``, ``gmpo`` or ``luspo``.
    """
    check_choice("algorithm", "name", name, ALGORITHMS)
    return ALGORITHMS[name]


_ROW_MEAN = Aggregation("seq-mean-token-mean")
_GSPO = PolicyLossConfig(importance_level="sequence", clip_low=3e-4, clip_high=4e-4)

ALGORITHMS: dict[str, LossPreset] = {
    "grpo": LossPreset(loss=LossConfig(aggregation=_ROW_MEAN)),
    "dr_grpo": LossPreset(
        AdvantageConfig(scale="none"), LossConfig(aggregation=Aggregation("seq-mean-token-sum-norm"))
    ),
    "dapo": LossPreset(loss=LossConfig(policy=PolicyLossConfig(clip_high=0.28))),
    "rloo": LossPreset(AdvantageConfig("rloo")),
    "reinforce_plus_plus_baseline": LossPreset(AdvantageConfig("reinforce_plus_plus_baseline")),
    "gspo": LossPreset(loss=LossConfig(policy=_GSPO, aggregation=_ROW_MEAN)),
    "cispo": LossPreset(loss=LossConfig(policy=PolicyLossConfig("cispo", cap_high=5.0))),
    "sapo": LossPreset(loss=LossConfig(policy=PolicyLossConfig("sapo"), aggregation=_ROW_MEAN)),
    "gpg": LossPreset(AdvantageConfig("gpg"), LossConfig(policy=PolicyLossConfig("reinforce"))),
    "gmpo": LossPreset(
        loss=LossConfig(policy=PolicyLossConfig("gmpo", clip_low=0.4, clip_high=0.4), aggregation=_ROW_MEAN)
    ),
    "luspo": LossPreset(loss=LossConfig(policy=_GSPO, aggregation=Aggregation("seq-mean-token-sum"))),
}


def trl(
    *,
    loss_type: str = "dapo",
    scale_rewards: str | bool = "group",
    beta: float = 0.0,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    importance_sampling_level: str = "token",
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    max_completion_length: int | None = None,
    use_bias_correction_kl: bool = False,
    off_policy_mask_threshold: float | None = None,
    top_entropy_quantile: float = 1.0,
    entropy_coef: float = 0.0,
    vllm_importance_sampling_correction: bool = True,
    vllm_importance_sampling_mode: str = "sequence_mask",
    vllm_importance_sampling_clip_max: float | None = 3.0,
    vllm_importance_sampling_clip_min: float | None = None,
) -> LossPreset:
    """The loss of TRL's GRPOTrainer, by its option names.

    ``max_completion_length`` is the divisor of ``dr_grpo``; None takes the columns of the denominators. ``grpo``,
    ``bnpo``, ``sapo`` and ``dr_grpo`` average over micro-batches, the others use the counts of the step.

    Raises:
      ConfigError: an unknown loss type, ``cispo`` without its absolute cap ``epsilon_high``, or a ``delta`` that
        lies inside the clip range (where it would replace the clip).
    """
    aggregations = {
        "grpo": Aggregation("seq-mean-token-mean", scope="micro-batch", count_empty=True),
        "sapo": Aggregation("seq-mean-token-mean", scope="micro-batch", count_empty=True),
        "bnpo": Aggregation("token-mean", scope="micro-batch"),
        "dapo": Aggregation("token-mean"),
        "cispo": Aggregation("token-mean"),
        "dr_grpo": Aggregation(
            "seq-mean-token-sum-norm", scope="micro-batch", count_empty=True, length_scale=max_completion_length
        ),
        "luspo": Aggregation("seq-mean-token-sum", scope="micro-batch", count_empty=True),
    }
    check_choice("trl", "loss_type", loss_type, aggregations)
    check_choice("trl", "importance_sampling_level", importance_sampling_level, ("token", "sequence"))
    clip_high = epsilon if epsilon_high is None else epsilon_high
    shared: dict[str, Any] = {"importance_level": importance_sampling_level, "log_ratio_clamp": None}
    if loss_type == "cispo":
        if epsilon_high is None:
            raise ConfigError("trl: 'cispo' reads epsilon_high as the absolute cap of the ratio; set it, e.g. to 5.0")
        policy = PolicyLossConfig("cispo", cap_high=epsilon_high, **shared)
    elif loss_type == "sapo":
        policy = PolicyLossConfig("sapo", tau_pos=sapo_temperature_pos, tau_neg=sapo_temperature_neg, **shared)
    else:
        if delta is not None and delta <= 1 + clip_high:
            raise ConfigError(f"trl: delta is {delta}; it must exceed 1 + epsilon_high = {1 + clip_high:g}")
        policy = PolicyLossConfig(clip_low=epsilon, clip_high=clip_high, dual_clip=delta, **shared)
    scale = scale_rewards if isinstance(scale_rewards, str) else ("group" if scale_rewards else "none")
    loss = LossConfig(
        policy=policy,
        aggregation=aggregations[loss_type],
        mismatch=_trl_mismatch(
            vllm_importance_sampling_mode, vllm_importance_sampling_clip_max, vllm_importance_sampling_clip_min
        )
        if vllm_importance_sampling_correction
        else None,
        off_policy_mask_threshold=off_policy_mask_threshold,
        top_entropy_quantile=None if top_entropy_quantile == 1.0 else top_entropy_quantile,
        kl_coef=beta,
        kl_bias_correction=use_bias_correction_kl,
        entropy_coef=entropy_coef,
        entropy_aggregation=Aggregation("token-mean"),
    )
    return LossPreset(AdvantageConfig(scale=scale, epsilon=1e-4), loss)


def _trl_mismatch(mode: str, clip_max: float | None, clip_min: float | None) -> MismatchConfig:
    modes = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    check_choice("trl", "vllm_importance_sampling_mode", mode, modes)
    level, action = mode.split("_")
    return MismatchConfig(level=level, mode=action, upper=clip_max, lower=clip_min, log_clamp=None)


def verl(
    *,
    adv_estimator: str = "grpo",
    norm_adv_by_std_in_grpo: bool = True,
    gamma: float = 1.0,
    loss_mode: str = "vanilla",
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
    clip_ratio_c: float = 3.0,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    loss_agg_mode: str = "token-mean",
    loss_scale_factor: float | None = None,
    use_kl_loss: bool = False,
    kl_loss_coef: float = 0.001,
    kl_loss_type: str = "low_var_kl",
    entropy_coeff: float = 0.0,
    rollout_is: str | None = None,
    rollout_is_threshold: float | str = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_rs: str | None = None,
    rollout_rs_threshold: float | str | None = None,
    bypass_mode: bool = False,
) -> LossPreset:
    """The actor loss of verl, by its option names.

    In ``bypass_mode`` the ratio is taken against the sampler and no weight applies. Thresholds: a number, or
    ``"lo_hi"``; ``rollout_rs`` and its thresholds are comma lists (one threshold serves all).
    """
    estimators = {
        "grpo": AdvantageConfig("grpo", scale="group" if norm_adv_by_std_in_grpo else "none", allow_singleton=True),
        "rloo": AdvantageConfig("rloo", allow_singleton=True),
        "opo": AdvantageConfig("opo", allow_singleton=True),
        "gpg": AdvantageConfig("gpg", allow_singleton=True),
        "grpo_passk": AdvantageConfig("grpo_passk"),
        "reinforce_plus_plus": AdvantageConfig("reinforce_plus_plus", gamma=gamma),
        "reinforce_plus_plus_baseline": AdvantageConfig("reinforce_plus_plus_baseline", allow_singleton=True),
    }
    check_choice("verl", "adv_estimator", adv_estimator, estimators)
    low = clip_ratio if clip_ratio_low is None else clip_ratio_low
    high = clip_ratio if clip_ratio_high is None else clip_ratio_high
    policies = {
        "vanilla": PolicyLossConfig(clip_low=low, clip_high=high, dual_clip=clip_ratio_c),
        "gspo": PolicyLossConfig(
            importance_level="sequence_token", clip_low=low, clip_high=high, log_ratio_clamp=None
        ),
        "sapo": PolicyLossConfig("sapo", tau_pos=tau_pos, tau_neg=tau_neg),
        "gpg": PolicyLossConfig("reinforce"),
        "cispo": PolicyLossConfig("cispo", cap_low=1 - low, cap_high=1 + high),
        "geo_mean": PolicyLossConfig("gmpo", clip_low=low, clip_high=high, log_ratio_clamp=None),
    }
    check_choice("verl", "loss_mode", loss_mode, policies)
    chosen = _verl_aggregation(loss_agg_mode, loss_scale_factor)
    # Two modes fix the normaliser of the policy term; the KL and entropy terms keep the chosen one.
    fixed = {
        "gspo": _verl_aggregation("seq-mean-token-mean", None),
        "geo_mean": Aggregation("seq-mean-token-mean", count_empty=True),
    }
    weights: MismatchConfig | None = None
    rules: tuple[RejectionRule, ...] = ()
    if rollout_is is not None and not bypass_mode:
        weights = _verl_weights(rollout_is, rollout_is_threshold, rollout_is_batch_normalize)
    if rollout_rs is not None:
        rules = _verl_rejection(rollout_rs, rollout_rs_threshold)
    correction = None
    if rules or (weights is not None and not weights.row_local):
        correction = dataclasses.replace(weights or MismatchConfig(level="none"), rejection=rules)
        weights = None
    loss = LossConfig(
        policy=policies[loss_mode],
        aggregation=fixed.get(loss_mode, chosen),
        ratio_against="sampler" if bypass_mode else "old",
        mismatch=weights,
        kl_estimator=_verl_kl(kl_loss_type),
        kl_coef=kl_loss_coef if use_kl_loss else 0.0,
        kl_aggregation=chosen,
        entropy_coef=entropy_coeff,
        entropy_aggregation=chosen,
    )
    return LossPreset(estimators[adv_estimator], loss, correction)


def _verl_aggregation(mode: str, scale: float | None) -> Aggregation:
    modes = {
        "token-mean": Aggregation("token-mean"),
        "seq-mean-token-mean": Aggregation("seq-mean-token-mean", length_epsilon=1e-8),
        "seq-mean-token-sum": Aggregation("seq-mean-token-sum"),
        "seq-mean-token-sum-norm": Aggregation("seq-mean-token-sum-norm", length_scale=scale),
    }
    check_choice("verl", "loss_agg_mode", mode, modes)
    return modes[mode]


def _verl_kl(name: str) -> str:
    names = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3_clamped"}
    names |= {"k3": "k3_clamped", "kl+": "k1+", "k1+": "k1+", "low_var_kl+": "k3+", "k3+": "k3+"}
    check_choice("verl", "kl_loss_type", name, names)
    return names[name]


def _verl_weights(level: str, threshold: float | str, normalize: bool) -> MismatchConfig:
    check_choice("verl", "rollout_is", level, ("token", "sequence"))
    lower, upper = _bounds("rollout_is_threshold", threshold)
    mode = "truncate" if lower is None else "mask"
    return MismatchConfig(level=level, mode=mode, upper=upper, lower=lower, batch_normalize=normalize)


def _verl_rejection(options: str, thresholds: float | str | None) -> tuple[RejectionRule, ...]:
    if thresholds is None:
        raise ConfigError("verl: rollout_rs needs rollout_rs_threshold; give one bound, or one per option")
    names = [name.strip() for name in options.split(",")]
    bounds = [bound.strip() for bound in str(thresholds).split(",")]
    if len(bounds) == 1:
        bounds *= len(names)
    if len(bounds) != len(names):
        raise ConfigError(f"verl: {len(names)} rollout_rs options but {len(bounds)} thresholds; give one, or one each")
    rules = []
    for name, bound in zip(names, bounds, strict=True):
        lower, upper = _bounds("rollout_rs_threshold", bound)
        rules.append(RejectionRule(name, upper=upper, lower=lower))
    return tuple(rules)


def _bounds(option: str, threshold: float | str) -> tuple[float | None, float]:
    """(lower or None, upper) from a number or ``"lo_hi"``."""
    parts = str(threshold).split("_")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2):
        raise ConfigError(f"verl: {option} is {threshold!r}; write a number, or two as 'lower_upper'")
    return (None, numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1])


def tunix(
    *,
    advantage_estimator: str = "grpo",
    loss_algo: str = "grpo",
    beta: float = 0.04,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    epsilon_c: float | None = None,
    loss_agg_mode: str = "sequence-mean-token-mean",
    loss_scale: float | None = None,
    kl_loss_mode: str = "kl",
    kl_clamp_value: float | None = None,
    sampler_is: str | None = None,
    sampler_is_threshold: float = 2.0,
) -> LossPreset:
    """The GRPO, Dr. GRPO and DAPO losses of tunix, by its option names.

    ``loss_scale`` is the length of ``sequence-mean-token-scale`` (T if None) and the divisor of
    ``sequence-mean-token-sum-norm`` (the row count if None).
    """
    estimators = {
        "grpo": AdvantageConfig("grpo", allow_singleton=True),
        "drgrpo": AdvantageConfig("grpo", scale="none", allow_singleton=True),
        "rloo": AdvantageConfig("rloo", allow_singleton=True, singleton_value="zero"),
    }
    check_choice("tunix", "advantage_estimator", advantage_estimator, estimators)
    levels = {"grpo": "token", "gspo-token": "sequence_token"}
    check_choice("tunix", "loss_algo", loss_algo, levels)
    modes = {
        "token-mean": Aggregation("token-mean"),
        "sequence-mean-token-mean": Aggregation("seq-mean-token-mean"),
        "sequence-mean-token-scale": Aggregation("seq-mean-token-sum-norm", length_scale=loss_scale),
        "sequence-mean-token-sum-norm": Aggregation("sum-norm", count_empty=True, length_scale=loss_scale),
    }
    check_choice("tunix", "loss_agg_mode", loss_agg_mode, modes)
    kl_modes = {"kl": "k1", "mse_kl": "k2", "low_var_kl": "k3"}
    check_choice("tunix", "kl_loss_mode", kl_loss_mode, kl_modes)
    check_choice("tunix", "sampler_is", sampler_is or "token", ("token",))
    policy = PolicyLossConfig(
        importance_level=levels[loss_algo],
        clip_low=epsilon,
        clip_high=epsilon if epsilon_high is None else epsilon_high,
        dual_clip=epsilon_c,
    )
    loss = LossConfig(
        policy=policy,
        aggregation=modes[loss_agg_mode],
        mismatch=MismatchConfig(level="token", upper=sampler_is_threshold) if sampler_is else None,
        kl_estimator=kl_modes[kl_loss_mode],
        kl_coef=beta,
        kl_clamp=kl_clamp_value,
    )
    return LossPreset(estimators[advantage_estimator], loss)
