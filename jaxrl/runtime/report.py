"""The one-page report of a run, and the files of samples it quotes."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import jax

import jaxrl
from jaxrl.runtime import plots
from jaxrl.runtime.config import flatten
from jaxrl.runtime.metrics import read_metrics
from jaxrl.runtime.rundir import RunDir

PLOTTED = ("reward", "loss", "kl", "entropy", "length", "accuracy")
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def environment() -> dict[str, str]:
    """Versions and devices that a result depends on."""
    versions = {"jaxrl": jaxrl.__version__, "python": platform.python_version()}
    versions |= {name: importlib.metadata.version(name) for name in PACKAGES}
    device = jax.devices()[0]
    versions["devices"] = (
        f"{jax.device_count()} x {device.device_kind} ({device.platform}), {jax.process_count()} process(es)"
    )
    return versions


def write_samples(folder: RunDir, step: int, records: Sequence[Mapping[str, Any]]) -> None:
    """Write what the system produced after ``step`` steps, one JSON object a line."""
    folder.samples.mkdir(exist_ok=True)
    text = "".join(json.dumps(dict(record), ensure_ascii=False) + "\n" for record in records)
    folder.sample_file(step).write_text(text, encoding="utf-8")


def write(folder: RunDir, settings: Mapping[str, Any] | None, names: Sequence[str] = ()) -> None:
    """Write ``report.md`` and the plots of a run folder from its files.

    Args:
      folder: the run folder, with metrics.
      settings: resolved configuration as a dict.
      names: metrics to plot; empty: those whose name tells a reward, loss, KL, entropy, length or accuracy (9
        at most).
    """
    rows = read_metrics(folder.metrics)
    if not rows:
        return
    reported = list(dict.fromkeys(k for row in rows for k in row))
    names = [n for n in names if n in reported] or _default_names(reported)
    lines = [f"# {folder.path.name}", "", f"Step {rows[-1]['step']}.", ""]
    if names:
        plots.curves(rows, names, folder.plots / "curves.png")
        lines += ["![curves](plots/curves.png)", ""]
    first, last = _ends(rows, "eval/")
    shared = [n for n in first if n in last]
    if shared and first["step"] != last["step"]:
        lines += [
            "## Evaluation",
            "",
            f"| metric | step {first['step']} | step {last['step']} |",
            "|---|---|---|",
        ]
        lines += [f"| {n} | {first[n]:.5g} | {last[n]:.5g} |" for n in shared if n.startswith("eval/")] + [""]
    lines += ["## Last metrics", "", "| metric | value |", "|---|---|"]
    lines += [f"| {n} | {v:.5g} |" for n, v in sorted(rows[-1].items()) if n != "step"] + [""]
    lines += _samples(folder)
    if settings:
        lines += ["## Configuration", "", "| setting | value |", "|---|---|"]
        lines += [f"| {n} | `{json.dumps(v)}` |" for n, v in flatten(settings).items()] + [""]
    lines += ["## Environment", "", "| | |", "|---|---|"]
    lines += [f"| {n} | {v} |" for n, v in environment().items()]
    folder.report.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _default_names(reported: Sequence[str]) -> list[str]:
    chosen = [n for n in reported if not n.startswith("time/") and any(word in n.lower() for word in PLOTTED)]
    return sorted(chosen, key=lambda n: (n.count("/"), reported.index(n)))[:9]


def _ends(rows: Sequence[Mapping[str, Any]], prefix: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """First and last row that hold a metric with this prefix."""
    having = [row for row in rows if any(name.startswith(prefix) for name in row)]
    return (having[0], having[-1]) if having else ({}, {})


def _samples(folder: RunDir, count: int = 4) -> list[str]:
    files = sorted(folder.samples.glob("step_*.jsonl")) if folder.samples.is_dir() else []
    if not files:
        return []
    lines = [f"## Samples ({files[-1].stem})", ""]
    for text in files[-1].read_text(encoding="utf-8").split("\n")[:count]:
        if text:
            body = "\n".join(f"{k}: {v}" for k, v in json.loads(text).items())
            lines += ["````text", body, "````", ""]
    return lines
