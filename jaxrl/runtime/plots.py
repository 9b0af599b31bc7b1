"""PNG plots: training curves, bands over seeds, before/after bars."""

from __future__ import annotations

import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.errors import DataError


def smooth(values: Sequence[float] | np.ndarray, weight: float) -> np.ndarray:
    """Exponential moving average with bias correction; nan entries are passed over.

    Args:
      values: [T] numbers.
      weight: in [0, 1); 0 returns the values.

    Returns:
      [T] float64: ``m_t / (1 - weight^n_t)`` with ``m_t = weight m_{t-1} + (1 - weight) x_t`` and ``n_t`` the
      number of finite entries so far; nan before the first.
    """
    result, mean, count = np.full(len(values), math.nan), 0.0, 0
    for t, x in enumerate(values):
        if math.isfinite(x):
            mean, count = weight * mean + (1 - weight) * x, count + 1
        if count:
            result[t] = mean / (1 - weight**count)
    return result


def curves(
    rows: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    path: str | os.PathLike[str],
    smoothing: float = 0.9,
) -> pathlib.Path:
    """One panel per metric against the step: raw values pale, the moving average on top.

    Args:
      rows: metrics rows (``metrics.read_metrics``).
      names: metrics to plot.
      path: PNG file to write.
      smoothing: weight of the moving average; metrics with fewer than 20 points are drawn raw.

    Raises:
      DataError: a name occurs in no row.
    """
    missing = [name for name in names if not any(name in row for row in rows)]
    if missing or not names:
        raise DataError(
            f"no row has the metric {missing[0]!r}" if missing else "no metric is named; give at least one"
        )
    columns = min(len(names), 3)
    figure, axes = _grid(math.ceil(len(names) / columns), columns)
    for axis, name in zip(axes, names, strict=False):
        points = [(row["step"], float(row[name])) for row in rows if name in row]
        steps, values = (np.asarray(v, dtype=float) for v in zip(*points, strict=True))
        if len(points) < 20:
            axis.plot(steps, values, color="C0", marker="o", markersize=3)
        else:
            axis.plot(steps, values, color="C0", alpha=0.25, linewidth=0.8)
            axis.plot(steps, smooth(values, smoothing), color="C0", linewidth=1.8)
        axis.set_title(name)
        axis.set_xlabel("step")
    return _save(figure, path)


def seed_band(
    runs: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]], name: str, path: str | os.PathLike[str]
) -> pathlib.Path:
    """Mean over seeds with a band of one standard deviation (ddof = 1), one colour per label.

    Args:
      runs: label -> one list of metrics rows per seed. Steps that not all seeds have are left out.
      name: the metric.
      path: PNG file to write.

    Raises:
      DataError: the seeds of a label share no step with this metric.
    """
    figure, (axis,) = _grid(1, 1)
    for index, (label, seeds) in enumerate(runs.items()):
        tables = [{row["step"]: float(row[name]) for row in rows if name in row} for rows in seeds]
        steps = sorted(set.intersection(*(set(t) for t in tables))) if tables else []
        if not steps:
            raise DataError(f"the runs of {label!r} share no step with metric {name!r}; check the name")
        values = np.asarray([[table[s] for s in steps] for table in tables])
        mean = values.mean(axis=0)
        axis.plot(steps, mean, color=f"C{index}", label=f"{label} (n={len(tables)})")
        if len(tables) > 1:
            spread = values.std(axis=0, ddof=1)
            axis.fill_between(steps, mean - spread, mean + spread, color=f"C{index}", alpha=0.2, linewidth=0)
    axis.set_xlabel("step")
    axis.set_ylabel(name)
    figure.legend(frameon=False, loc="outside lower center", ncols=min(len(runs), 2))  # never on the curves
    return _save(figure, path)


def before_after(
    before: Mapping[str, float], after: Mapping[str, float], path: str | os.PathLike[str], ylabel: str = ""
) -> pathlib.Path:
    """Pairs of bars with their values, for the keys that both have.

    Raises:
      DataError: they have no key in common.
    """
    names = [name for name in before if name in after]
    if not names:
        raise DataError("before and after have no metric in common; evaluate both in the same way")
    figure, (axis,) = _grid(1, 1)
    x = np.arange(len(names))
    for offset, values, label, color in ((-0.2, before, "before", "0.7"), (0.2, after, "after", "C0")):
        bars = axis.bar(x + offset, [values[n] for n in names], 0.38, label=label, color=color)
        axis.bar_label(bars, fmt="%.3g", padding=2)
    axis.set_xticks(x, names)
    axis.set_ylabel(ylabel)
    axis.margins(y=0.15)
    axis.legend(frameon=False)
    return _save(figure, path)


def _grid(rows: int, columns: int) -> tuple[Any, list[Any]]:
    # The Agg canvas is attached by hand: no global backend is touched, so a notebook keeps its own.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * columns + 0.6, 3.2 * rows + 0.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(rows, columns, i + 1) for i in range(rows * columns)]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.2)
    return figure, axes


def _save(figure: Any, path: str | os.PathLike[str]) -> pathlib.Path:
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    for axis in figure.axes:
        if not axis.has_data():
            axis.remove()
    figure.savefig(path, dpi=130)
    return path
