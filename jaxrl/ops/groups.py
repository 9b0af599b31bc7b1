"""Statistics of the groups of a batch (rows that share a prompt): host-side NumPy, float64."""

from __future__ import annotations

import numpy as np

from jaxrl.errors import DataError


class Groups:
    """Rows of a batch partitioned by group id; groups may differ in size and be interleaved.

    Every statistic is over the valid rows of a group and is returned once per ROW (shape [N]), so that it can be
    combined with per-row values directly. Groups without a valid row give 0.

    Args:
      group_ids: [N] ids (integers or strings).
      valid: bool [N]; rows that take part in the statistics. None means all.
    """

    def __init__(self, group_ids: np.ndarray, valid: np.ndarray | None = None):
        group_ids = np.asarray(group_ids)
        if group_ids.ndim != 1 or group_ids.size == 0:
            raise DataError(f"group_ids has shape {group_ids.shape}; pass one id per row, at least one row")
        self.ids, index = np.unique(group_ids, return_inverse=True)
        self.index = index.reshape(-1)
        self.valid = np.ones(len(group_ids), bool) if valid is None else np.asarray(valid, bool)
        if self.valid.shape != group_ids.shape:
            raise DataError(f"valid has shape {self.valid.shape}, group_ids {group_ids.shape}; make them equal")
        self.size = np.bincount(self.index)[self.index]
        self.count = self.sum(np.ones(len(group_ids)))

    @property
    def num_groups(self) -> int:
        return len(self.ids)

    @property
    def singleton(self) -> np.ndarray:
        """bool [N]: the row is alone in its group (unlike a lone VALID row of a larger group)."""
        return self.size == 1

    def sum(self, x: np.ndarray) -> np.ndarray:
        return np.bincount(self.index, weights=np.where(self.valid, x, 0.0))[self.index]

    def mean(self, x: np.ndarray) -> np.ndarray:
        return self.sum(x) / np.maximum(self.count, 1)

    def std(self, x: np.ndarray) -> np.ndarray:
        """Standard deviation with ddof = 1; 0 where a group has fewer than two valid rows."""
        deviation = np.where(self.valid, x, 0.0) - self.mean(x)
        return np.sqrt(self.sum(deviation**2) / np.maximum(self.count - 1, 1))

    def constant(self, x: np.ndarray) -> np.ndarray:
        """bool [N]: all valid values of the group are the same number (or there are fewer than two).

        Tested as max == min: the float mean of equal values need not equal them, so a zero spread cannot be
        recognised from the standard deviation.
        """
        high = np.full(self.num_groups, -np.inf)
        low = np.full(self.num_groups, np.inf)
        np.maximum.at(high, self.index[self.valid], np.asarray(x, float)[self.valid])
        np.minimum.at(low, self.index[self.valid], np.asarray(x, float)[self.valid])
        return (high <= low)[self.index] | (self.count < 2)

    def first(self) -> np.ndarray:
        """int [num_groups]: the first row of each group, groups in the order of ``ids``."""
        return np.unique(self.index, return_index=True)[1]
