"""What a finished run prints: evaluation before and after, sample completions, where the files are."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxrl.runtime.metrics import read_metrics
from jaxrl.runtime.rundir import RunDir


def show(folder: RunDir, console: Console | None = None, samples: int = 6) -> None:
    """Print the summary of a run folder.

    Args:
      folder: of a finished run.
      console: where to print; the terminal by default.
      samples: prompts whose completions are shown.
    """
    console = console or Console()
    evaluations = [row for row in read_metrics(folder.metrics) if any(n.startswith("eval/") for n in row)]
    if len(evaluations) > 1:
        console.print(_evaluation(evaluations[0], evaluations[-1]))
    files = sorted(folder.samples.glob("step_*.jsonl")) if folder.samples.is_dir() else []
    if len(files) > 1:
        console.print(_samples(_records(files[0]), _records(files[-1]), samples))
    paths = {"report": folder.report, "curves": folder.plots / "curves.png", "weights (Hugging Face)": folder.path / "export"}
    for name, path in paths.items():
        if path.exists():
            console.print(f"{name}: {path}", highlight=False, soft_wrap=True)


def _evaluation(first: Mapping[str, Any], last: Mapping[str, Any]) -> Table:
    table = Table(title="held-out evaluation", title_justify="left")
    for name in ("metric", f"step {first['step']}", f"step {last['step']}"):
        table.add_column(name, justify="left" if name == "metric" else "right")
    for name in first:
        if name.startswith("eval/") and name in last and None not in (first[name], last[name]):
            style = "bold" if "accuracy" in name else None
            table.add_row(name.removeprefix("eval/"), f"{first[name]:.3f}", f"{last[name]:.3f}", style=style)
    return table


def _samples(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]], count: int) -> Table:
    """Completions of the same prompt and decoding, side by side."""
    later = {(r.get("prompt"), r.get("decoding")): r for r in after}
    table = Table(title="completions (before | after)", title_justify="left", show_lines=True)
    for name in ("prompt", "decoding", "before", "after"):
        table.add_column(name, overflow="fold")
    for record in before:
        match = later.get((record.get("prompt"), record.get("decoding")))
        if match is not None and table.row_count < count:
            cells = [str(record.get("prompt")), str(record.get("decoding"))]
            table.add_row(*(_plain(c) for c in cells), *(_verdict(r) for r in (record, match)))
    return table


def _verdict(record: Mapping[str, Any]) -> str:
    mark = {True: "[green]right[/] ", False: "[red]wrong[/] "}.get(record.get("correct"), "")
    return mark + _plain(str(record.get("completion")))


def _plain(text: str) -> str:
    """Text that must not be read as markup; line ends made visible."""
    return text.replace("[", "\\[").replace("\n", "⏎")


def _records(path: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
