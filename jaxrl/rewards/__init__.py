"""Host-side scoring of completions. Importing this package does not import JAX."""

from jaxrl.rewards.base import RewardFn, RewardInput, RewardResult, RewardSpec
from jaxrl.rewards.pool import RewardPool
from jaxrl.rewards.registry import REWARDS, register
from jaxrl.rewards.reward_set import PendingRow, RewardSet

__all__ = [
    "REWARDS",
    "PendingRow",
    "RewardFn",
    "RewardInput",
    "RewardPool",
    "RewardResult",
    "RewardSet",
    "RewardSpec",
    "register",
]
