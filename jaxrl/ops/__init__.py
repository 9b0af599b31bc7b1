"""Pure array maths of policy-gradient training: advantages, losses, KL, aggregation, mismatch, evaluation."""

from __future__ import annotations

from jaxrl.ops.advantages import (
    ADVANTAGE_RULES,
    AdvantageConfig,
    RewardBatch,
    combine_rewards,
    compute_advantages,
    place_rewards,
)
from jaxrl.ops.aggregation import (
    Aggregation,
    Denominators,
    aggregate,
    count,
    merge_denominators,
    token_weights,
)
from jaxrl.ops.evaluation import majority_at_k, pass_at_k
from jaxrl.ops.groups import Groups
from jaxrl.ops.kl import KL_ESTIMATORS, adapt_kl_coef, kl_penalty
from jaxrl.ops.loss import LossConfig, policy_objective
from jaxrl.ops.metrics import batch_statistics, merge_metrics, summarize_metrics, zero_std_fraction
from jaxrl.ops.mismatch import MismatchConfig, RejectionRule, correct_mismatch, mismatch_weights
from jaxrl.ops.policy_loss import PolicyLoss, PolicyLossConfig, policy_loss
from jaxrl.ops.presets import ALGORITHMS, LossPreset, algorithm, trl, tunix, verl
from jaxrl.ops.selection import entropy_quantile, high_entropy_keep, off_policy_keep
from jaxrl.ops.shaping import keep_groups, linear_overlong_penalty, mask_truncated, soft_overlong_penalty

__all__ = [
    "ADVANTAGE_RULES",
    "ALGORITHMS",
    "KL_ESTIMATORS",
    "AdvantageConfig",
    "Aggregation",
    "Denominators",
    "Groups",
    "LossConfig",
    "LossPreset",
    "MismatchConfig",
    "PolicyLoss",
    "PolicyLossConfig",
    "RejectionRule",
    "RewardBatch",
    "adapt_kl_coef",
    "aggregate",
    "algorithm",
    "batch_statistics",
    "combine_rewards",
    "compute_advantages",
    "correct_mismatch",
    "count",
    "entropy_quantile",
    "high_entropy_keep",
    "keep_groups",
    "kl_penalty",
    "linear_overlong_penalty",
    "majority_at_k",
    "mask_truncated",
    "merge_denominators",
    "merge_metrics",
    "mismatch_weights",
    "off_policy_keep",
    "pass_at_k",
    "place_rewards",
    "policy_loss",
    "policy_objective",
    "soft_overlong_penalty",
    "summarize_metrics",
    "token_weights",
    "trl",
    "tunix",
    "verl",
    "zero_std_fraction",
]
