"""Advantage rules of group-relative policy gradients: N rewards to N (or N x T) advantages.

Host-side NumPy in float64: a batch has few rewards, and near-constant groups lose their digits in float32. Apply a
rule to the WHOLE batch, before any split into minibatches or devices.

Adding a rule: write ``rule(batch: RewardBatch, config) -> np.ndarray`` of shape [N] or [N, T] and put it in
``ADVANTAGE_RULES``. Rows with ``batch.scorable[i] == False`` must not enter any statistic; their advantage is set
to 0 afterwards, and [N, T] results are multiplied by the mask. A rule that has options of its own takes a subclass
of ``AdvantageConfig``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from jaxrl.errors import ConfigError, DataError
from jaxrl.ops._checks import check_choice, check_number
from jaxrl.ops.groups import Groups


@dataclasses.dataclass(frozen=True)
class RewardBatch:
    """What an advantage rule may look at.

    Attributes:
      rewards: float64 [N]; 0 where the row is not scorable.
      scorable: bool [N]; False where every reward function declined the row.
      groups: statistics over the scorable rows of each prompt.
      lengths: float64 [N]; number of loss tokens of a row.
      mask: float64 [N, T] or None.
      token_rewards: float64 [N, T] or None.
      components: float64 [N, K] or None; the separate rewards, nan where a function declined.
      component_weights: float64 [K] or None.
    """

    rewards: np.ndarray
    scorable: np.ndarray
    groups: Groups
    lengths: np.ndarray
    mask: np.ndarray | None = None
    token_rewards: np.ndarray | None = None
    components: np.ndarray | None = None
    component_weights: np.ndarray | None = None

    def require_mask(self, rule: str) -> np.ndarray:
        """The token mask, or a ``DataError`` that says how to provide it."""
        if self.mask is None:
            raise DataError(f"advantage rule {rule!r} works per token; pass mask=, or lengths= (and num_columns=)")
        return self.mask


@dataclasses.dataclass(frozen=True)
class AdvantageConfig:
    """Which advantage rule, and its options.

    Attributes:
      rule: a key of ``ADVANTAGE_RULES``.
      scale: rule ``grpo``: divide by the standard deviation of the ``"group"``, of all raw rewards of the
        ``"batch"``, or by nothing (``"none"``: Dr. GRPO).
      epsilon: added to a standard deviation before dividing.
      gamma: discount of ``reinforce_plus_plus``, per token.
      normalize: rule ``rloo``: afterwards subtract the batch mean and divide by the batch deviation.
      normalize_epsilon: added to that deviation.
      allow_singleton: accept groups of one row.
      singleton_value: what such a row gets: its ``"reward"`` (baseline 0, deviation 1) or ``"zero"``.
    """

    rule: str = "grpo"
    scale: str = "group"
    epsilon: float = 1e-6
    gamma: float = 1.0
    normalize: bool = False
    normalize_epsilon: float = 1e-4
    allow_singleton: bool = False
    singleton_value: str = "reward"

    def __post_init__(self) -> None:
        owner = type(self).__name__
        check_choice(owner, "rule", self.rule, ADVANTAGE_RULES)
        check_choice(owner, "scale", self.scale, ("group", "batch", "none"))
        check_choice(owner, "singleton_value", self.singleton_value, ("reward", "zero"))
        check_number(owner, "epsilon", self.epsilon, at_least=0.0)
        check_number(owner, "gamma", self.gamma, at_least=0.0, at_most=1.0)
        check_number(owner, "normalize_epsilon", self.normalize_epsilon, at_least=0.0)
        if self.normalize and self.rule != "rloo":
            raise ConfigError(f"{owner}.normalize belongs to rule 'rloo', not {self.rule!r}; leave it False")


def combine_rewards(components: np.ndarray, weights: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Weighted sum of several rewards per row; nan entries (a function declined the row) are skipped.

    Args:
      components: [N, K].
      weights: [K]; ones if None.

    Returns:
      (rewards [N] float64, nan where every entry is nan; scorable bool [N]).

    Raises:
      DataError: shapes do not fit, or a reward is infinite.
    """
    components = np.asarray(components, np.float64)
    if components.ndim != 2 or components.shape[1] == 0:
        raise DataError(f"components has shape {components.shape}; pass [rows, reward functions]")
    weights = np.ones(components.shape[1]) if weights is None else np.asarray(weights, np.float64)
    if weights.shape != components.shape[1:]:
        raise DataError(f"{weights.size} reward weights for {components.shape[1]} reward functions; pass one each")
    _refuse_infinite("components", components)
    scorable = ~np.isnan(components).all(axis=1)
    rewards = np.where(np.isnan(components), 0.0, components) @ weights
    return np.where(scorable, rewards, np.nan), scorable


def place_rewards(
    rewards: np.ndarray, mask: np.ndarray, kl: np.ndarray | None = None, kl_coef: float = 0.0
) -> np.ndarray:
    """Token rewards [N, T]: the row's reward on its last loss token, minus ``kl_coef * kl`` on every loss token.

    Args:
      rewards: [N]; nan counts as 0.
      mask: [N, T] loss mask.
      kl: [N, T] per-token KL estimate of the sampling policy to the reference (:mod:`jaxrl.ops.kl`), or None.
      kl_coef: weight of the penalty (verl ``use_kl_in_reward``).
    """
    mask = np.asarray(mask) != 0
    placed = np.zeros(mask.shape)
    last = mask.shape[1] - 1 - np.argmax(mask[:, ::-1], axis=1)
    rows = np.flatnonzero(mask.any(axis=1))
    placed[rows, last[rows]] = np.nan_to_num(np.asarray(rewards, np.float64), nan=0.0)[rows]
    if kl is not None:
        placed -= kl_coef * np.where(mask, np.asarray(kl, np.float64), 0.0)
    return placed


def discounted_returns(token_rewards: np.ndarray, mask: np.ndarray, gamma: float = 1.0) -> np.ndarray:
    """G_t = r_t + gamma G_{t+1} over the loss tokens of each row; other columns are passed over and hold 0."""
    mask = np.asarray(mask) != 0
    returns = np.zeros(mask.shape)
    running = np.zeros(mask.shape[0])
    for column in reversed(range(mask.shape[1])):
        running = np.where(mask[:, column], token_rewards[:, column] + gamma * running, running)
        returns[:, column] = np.where(mask[:, column], running, 0.0)
    return returns


def whiten(x: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Zero mean and unit variance over the loss tokens (a long row counts many times); 0 elsewhere.

    The epsilons (1e-8 in each divisor and under the root) and the Bessel factor M/(M-1) are those of verl and tunix.
    With fewer than two tokens there is no spread and the result is 0.
    """
    mask = np.asarray(mask, np.float64)
    tokens = mask.sum()
    if tokens < 2:
        return np.zeros(mask.shape)
    mean = (x * mask).sum() / (tokens + 1e-8)
    variance = ((x - mean) ** 2 * mask).sum() / (tokens + 1e-8) * tokens / (tokens - 1)
    return (x - mean) / np.sqrt(variance + 1e-8) * mask


def centre(batch: RewardBatch, config: AdvantageConfig, baseline: np.ndarray | None = None) -> np.ndarray:
    """Reward minus baseline [N] (group mean if None): exactly 0 in groups of equal rewards; singletons by config.

    Raises:
      DataError: a group has one row and ``config.allow_singleton`` is False.
    """
    baseline = batch.groups.mean(batch.rewards) if baseline is None else baseline
    centred = np.where(batch.groups.constant(batch.rewards), 0.0, batch.rewards - baseline)
    alone = batch.groups.singleton
    if alone.any():
        if not config.allow_singleton:
            row = int(np.flatnonzero(alone)[0])
            raise DataError(
                f"{int(alone.sum())} group(s) have a single row (the first is row {row}), so {config.rule!r} has no "
                "baseline for them; sample more rows per prompt, or set allow_singleton=True"
            )
        centred = np.where(alone, batch.rewards if config.singleton_value == "reward" else 0.0, centred)
    return centred


def _grpo(batch: RewardBatch, config: AdvantageConfig) -> np.ndarray:
    """(r - mean_g) / (std + epsilon); DeepSeekMath, arXiv 2402.03300, and Dr. GRPO, arXiv 2503.20783."""
    centred = centre(batch, config)
    if config.scale == "none":
        return centred
    std = np.full_like(centred, _batch_std(batch.rewards, batch.scorable))
    if config.scale == "group":
        std = np.where(batch.groups.singleton, 1.0, batch.groups.std(batch.rewards))
    # A zero in the numerator stays zero, also with epsilon = 0 and no spread.
    return np.divide(centred, std + config.epsilon, out=np.zeros_like(centred), where=centred != 0)


def _rloo(batch: RewardBatch, config: AdvantageConfig) -> np.ndarray:
    """r minus the mean of the OTHER rows of the group; arXiv 2402.14740."""
    others = np.maximum(batch.groups.count - 1, 1)
    advantages = centre(batch, config) * batch.groups.count / others
    if not config.normalize:
        return advantages
    live = batch.scorable & ((batch.groups.count > 1) | batch.groups.singleton)
    if live.sum() < 2:
        return np.zeros_like(advantages)
    mean, std = advantages[live].mean(), _batch_std(advantages, live)
    normalized = (advantages - mean) / (std + config.normalize_epsilon)
    # The mean is 0 up to rounding (every group sums to 0), so equal groups may keep their exact 0.
    return np.where(live & (advantages != 0), normalized, 0.0)


def _opo(batch: RewardBatch, config: AdvantageConfig) -> np.ndarray:
    """r minus the length-weighted mean of the group; arXiv 2505.23585."""
    total = batch.groups.sum(batch.lengths)
    weighted = batch.groups.sum(batch.lengths * batch.rewards)
    baseline = np.where(total > 0, weighted / np.maximum(total, 1e-300), batch.groups.mean(batch.rewards))
    return centre(batch, config, baseline)


def _gpg(batch: RewardBatch, config: AdvantageConfig) -> np.ndarray:
    """(r - mean_g) times N / #(r != 0) over the batch; GPG, arXiv 2504.02546."""
    nonzero = np.count_nonzero(batch.rewards[batch.scorable])
    return centre(batch, config) * batch.scorable.sum() / max(nonzero, 1)


def _grpo_passk(batch: RewardBatch, config: AdvantageConfig) -> np.ndarray:
    """Only the best row of a group: (best - second) / (std_g + epsilon); arXiv 2503.19595."""
    if batch.groups.singleton.any():
        raise DataError("advantage rule 'grpo_passk' compares two rows; every group needs at least two")
    advantages = np.zeros_like(batch.rewards)
    std = batch.groups.std(batch.rewards)
    for group in range(batch.groups.num_groups):
        rows = np.flatnonzero((batch.groups.index == group) & batch.scorable)
        if len(rows) < 2:
            continue
        order = rows[np.argsort(-batch.rewards[rows], kind="stable")]
        gap = batch.rewards[order[0]] - batch.rewards[order[1]]
        if gap > 0:
            advantages[order[0]] = gap / (std[order[0]] + config.epsilon)
    return advantages


def _reinforce_plus_plus(batch: RewardBatch, config: AdvantageConfig) -> np.ndarray:
    """Whitened discounted token returns; arXiv 2501.03262."""
    mask = batch.require_mask(config.rule)
    token_rewards = batch.token_rewards
    if token_rewards is None:
        token_rewards = place_rewards(batch.rewards, mask)
    live = mask * batch.scorable[:, None]
    return whiten(discounted_returns(token_rewards, live, config.gamma), live)


def _reinforce_plus_plus_baseline(batch: RewardBatch, config: AdvantageConfig) -> np.ndarray:
    """(r - mean_g) on every token, whitened over the tokens of the batch; arXiv 2501.03262."""
    live = batch.require_mask(config.rule) * batch.scorable[:, None]
    return whiten(centre(batch, config)[:, None] * live, live)


def _reinforce(batch: RewardBatch, config: AdvantageConfig) -> np.ndarray:
    """The reward itself, without a baseline."""
    del config
    return batch.rewards


AdvantageRule = Callable[[RewardBatch, AdvantageConfig], np.ndarray]

ADVANTAGE_RULES: dict[str, AdvantageRule] = {
    "grpo": _grpo,
    "rloo": _rloo,
    "opo": _opo,
    "gpg": _gpg,
    "grpo_passk": _grpo_passk,
    "reinforce": _reinforce,
    "reinforce_plus_plus": _reinforce_plus_plus,
    "reinforce_plus_plus_baseline": _reinforce_plus_plus_baseline,
}
_TOKEN_REWARD_RULES = frozenset({"reinforce_plus_plus"})


def compute_advantages(
    config: AdvantageConfig,
    rewards: np.ndarray,
    group_ids: np.ndarray,
    lengths: np.ndarray | None = None,
    token_rewards: np.ndarray | None = None,
    num_columns: int | None = None,
    mask: np.ndarray | None = None,
    components: np.ndarray | None = None,
    component_weights: np.ndarray | None = None,
) -> np.ndarray:
    """Advantages of a whole batch.

    Args:
      config: the rule and its options.
      rewards: [N]; nan marks an unscorable row, which enters no statistic and gets advantage 0.
      group_ids: [N]; rows with the same id belong to one prompt. Any order, any group sizes.
      lengths: [N] loss tokens per row; needed by ``opo`` and by the token rules. Taken from ``mask`` if None.
      token_rewards: [N, T]; rule ``reinforce_plus_plus`` only (see :func:`place_rewards`).
      num_columns: T of a mask made from ``lengths``; the longest row if None.
      mask: [N, T] loss mask, where loss tokens are not simply the first ``lengths`` columns.
      components: [N, K] separate rewards, for rules that need them.
      component_weights: [K].

    Returns:
      float64 [N], or [N, T] from the token rules.

    Raises:
      DataError: shapes do not fit, a reward is infinite, or a group of one row is not allowed.
    """
    rewards = np.asarray(rewards, np.float64)
    group_ids = np.asarray(group_ids)
    if rewards.ndim != 1 or rewards.shape != group_ids.shape:
        raise DataError(f"rewards {rewards.shape} and group_ids {group_ids.shape} must both have shape [rows]")
    _refuse_infinite("rewards", rewards)
    if token_rewards is not None and config.rule not in _TOKEN_REWARD_RULES:
        raise DataError(f"advantage rule {config.rule!r} takes one reward per row; pass token_rewards.sum(1) as rewards")
    mask, lengths = _resolve_mask(len(rewards), lengths, num_columns, mask)
    if lengths is None:
        if config.rule == "opo":
            raise DataError("advantage rule 'opo' weights rows by length; pass lengths= or mask=")
        lengths = np.ones(len(rewards))
    if token_rewards is not None:
        token_rewards = np.asarray(token_rewards, np.float64)
        _refuse_infinite("token_rewards", token_rewards)
        if mask is None or token_rewards.shape != mask.shape:
            raise DataError(
                f"token_rewards has shape {token_rewards.shape}, the mask {None if mask is None else mask.shape}; "
                "pass a mask (or lengths and num_columns) of the same shape"
            )
    scorable = ~np.isnan(rewards)
    batch = RewardBatch(
        rewards=np.where(scorable, rewards, 0.0),
        scorable=scorable,
        groups=Groups(group_ids, scorable),
        lengths=lengths,
        mask=mask,
        token_rewards=token_rewards,
        components=None if components is None else np.asarray(components, np.float64),
        component_weights=None if component_weights is None else np.asarray(component_weights, np.float64),
    )
    advantages = ADVANTAGE_RULES[config.rule](batch, config)
    live = scorable if advantages.ndim == 1 else (scorable[:, None] & (batch.require_mask(config.rule) != 0))
    return np.where(live, advantages, 0.0)


def _resolve_mask(
    rows: int, lengths: np.ndarray | None, num_columns: int | None, mask: np.ndarray | None
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """(mask [N, T], lengths [N]) from whichever of the two was given."""
    if mask is not None:
        mask = (np.asarray(mask) != 0).astype(np.float64)
        if mask.ndim != 2 or mask.shape[0] != rows:
            raise DataError(f"mask has shape {mask.shape}; it must be [{rows}, columns]")
        return mask, mask.sum(axis=1) if lengths is None else np.asarray(lengths, np.float64)
    if lengths is None:
        return None, None
    lengths = np.asarray(lengths, np.float64)
    if lengths.shape != (rows,) or (lengths < 0).any():
        raise DataError(f"lengths has shape {lengths.shape}; pass one non-negative length for each of {rows} rows")
    columns = int(lengths.max()) if num_columns is None else num_columns
    if columns < lengths.max():
        raise DataError(f"num_columns is {columns}, but the longest row has {int(lengths.max())} tokens")
    return (np.arange(columns)[None, :] < lengths[:, None]).astype(np.float64), lengths


def _batch_std(x: np.ndarray, live: np.ndarray) -> float:
    return float(np.std(x[live], ddof=1)) if live.sum() > 1 else 0.0


def _refuse_infinite(name: str, x: np.ndarray) -> None:
    if np.isinf(x).any():
        where = tuple(int(i) for i in np.argwhere(np.isinf(x))[0])
        raise DataError(f"{name}{list(where)} is infinite; return a finite reward, or nan for a row without a score")
