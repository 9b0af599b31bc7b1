"""Reward shaping and filtering of groups and rows (DAPO, arXiv 2503.14476): host-side NumPy."""

from __future__ import annotations

import numpy as np

from jaxrl.errors import ConfigError, DataError
from jaxrl.ops.groups import Groups


def soft_overlong_penalty(lengths: np.ndarray, max_length: int, buffer: int) -> np.ndarray:
    """Penalty [N] in [-1, 0]: 0 up to ``max_length - buffer``, falling linearly to -1 at ``max_length`` and beyond.

    The form of the paper (its equation 13) and of TRL.

    Args:
      lengths: [N] completion tokens.
      max_length: length limit in tokens.
      buffer: tokens before the limit over which the penalty grows, in [1, max_length].
    """
    return np.maximum(linear_overlong_penalty(lengths, max_length, buffer), -1.0)


def linear_overlong_penalty(
    lengths: np.ndarray, max_length: int, buffer: int, factor: float = 1.0
) -> np.ndarray:
    """As :func:`soft_overlong_penalty`, times ``factor``, but keeps falling beyond ``max_length`` (verl)."""
    if not 1 <= buffer <= max_length:
        raise ConfigError(f"overlong buffer is {buffer}; it must lie between 1 and max_length = {max_length}")
    excess = np.asarray(lengths, np.float64) - (max_length - buffer)
    return np.minimum(-excess / buffer * factor, 0.0) + 0.0


def keep_groups(metric: np.ndarray, group_ids: np.ndarray) -> np.ndarray:
    """Dynamic sampling: bool [N], True for rows of groups that carry a signal.

    Groups whose (non-nan) values are all equal are dropped; a group of one row is kept (its spread is unknown).

    Args:
      metric: [N], for example the reward or the accuracy; nan marks an unscorable row.
      group_ids: [N].
    """
    metric = np.asarray(metric, np.float64)
    groups = Groups(group_ids, ~np.isnan(metric))
    return ~groups.constant(metric) | (groups.singleton & groups.valid)


def mask_truncated(mask: np.ndarray, truncated: np.ndarray) -> np.ndarray:
    """Overlong filtering: ``mask`` [N, T] with the rows that hit the length limit (bool [N]) zeroed."""
    mask, truncated = np.asarray(mask), np.asarray(truncated, bool)
    if truncated.shape != mask.shape[:1]:
        raise DataError(f"truncated has shape {truncated.shape}; pass one flag for each of {mask.shape[0]} rows")
    return np.where(truncated[:, None], np.zeros((), mask.dtype), mask)
