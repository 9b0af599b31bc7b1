"""Metrics of the parts of one step (rollout batches, optimizer steps) as metrics of the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

#: Names, or ends of names, that are summed over the parts.
COUNTS = ("tokens", "unscorable_rows", "time/rollout_seconds", "/declined", "/errors", "/timeouts")


def merge_parts(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One row from several: extremes of ``.../min`` and ``.../max``, sums of counts, means of the rest.

    A mean is over the parts that have the metric (nan: it does not); parts are equally large.
    """
    if len(parts) == 1:
        return dict(parts[0])
    merged = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        values = np.array([part[name] for part in parts if name in part], np.float64)
        known = values[~np.isnan(values)]
        if known.size == 0:
            merged[name] = float("nan")
        elif name.endswith("/min"):
            merged[name] = float(known.min())
        elif name.endswith("/max"):
            merged[name] = float(known.max())
        elif name in COUNTS or name.endswith(COUNTS[3:]):
            merged[name] = float(known.sum())
        else:
            merged[name] = float(known.mean())
    return merged
