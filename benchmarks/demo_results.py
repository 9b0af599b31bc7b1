"""Write docs/results/demo.md and its plot from finished runs of the demo with different seeds.

    for s in 0 1 2; do python -m jaxrl.launch --config=configs/grpo_smollm2.py --run_dir=runs/demo$s --seed=$s; done
    python -m benchmarks.demo_results runs/demo0 runs/demo1 runs/demo2
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

from jaxrl.runtime import plots
from jaxrl.runtime.metrics import read_metrics
from jaxrl.runtime.report import environment
from jaxrl.runtime.rundir import RunDir

COMMAND = """for s in 0 1 2; do python -m jaxrl.launch --config=configs/grpo_smollm2.py --run_dir=runs/demo$s --seed=$s; done
python -m benchmarks.demo_results runs/demo0 runs/demo1 runs/demo2"""
MEASURED = ("accuracy_greedy", "accuracy_sampled", "pass@4", "maj@4", "completion_length", "truncated_fraction")


def table(runs: Sequence[list[dict[str, Any]]]) -> list[str]:
    """Markdown rows: each measure before and after, per seed and on average."""
    lines = ["| held out | " + " | ".join(f"seed {i}" for i in range(len(runs))) + " | mean |"]
    lines.append("|---" * (len(runs) + 2) + "|")
    for name in MEASURED:
        pairs = []
        for rows in runs:
            values = [row[f"eval/{name}"] for row in rows if f"eval/{name}" in row]
            pairs.append((values[0], values[-1]))
        means = [statistics.mean(column) for column in zip(*pairs, strict=True)]
        cells = [f"{before:.3f} → {after:.3f}" for before, after in [*pairs, tuple(means)]]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def samples(folder: RunDir, count: int = 4) -> list[str]:
    """Completions of the same prompts before and after, sampled at temperature 1."""
    files = sorted(folder.samples.glob("step_*.jsonl"))
    read = lambda path: [json.loads(line) for line in path.read_text().splitlines() if line]  # noqa: E731
    after = {r["prompt"]: r for r in read(files[-1]) if r["decoding"] == "sampled"}
    lines = ["| prompt | before | after |", "|---|---|---|"]
    for record in [r for r in read(files[0]) if r["decoding"] == "sampled"][:count]:
        shown = [json.dumps(r["completion"], ensure_ascii=False) for r in (record, after[record["prompt"]])]
        lines.append(f"| {record['prompt']} | `{shown[0]}` | `{shown[1]}` |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="run folders, one per seed")
    parser.add_argument("--out", default="docs/results", help="folder of the results")
    args = parser.parse_args()
    folders = [RunDir(path) for path in args.runs]
    runs = [read_metrics(folder.metrics) for folder in folders]
    out = pathlib.Path(args.out)
    steps = [row["step"] for row in runs[0] if "reward/number_match" in row]
    plots.seed_band({"right, sampled at temperature 1": runs}, "reward/number_match", out / "demo.png")
    seconds = [[row["time/step_seconds"] for row in rows if "time/step_seconds" in row] for rows in runs]
    facts = environment()
    lines = [
        "# The demo: SmolLM2-135M-Instruct on sums of one- and two-digit numbers",
        "",
        "GRPO on the last 8 of 30 layers, 8 prompts x 8 completions a step, reward 1 for a right last number and 0.2 for",
        f"stopping in time. {steps[-1]} steps, 64 held-out prompts, 4 samples each at temperature 1. The seeds differ in the",
        "sampling; the order of the prompts is the same, hence the common ups and downs of the curve.",
        "",
        "![reward](demo.png)",
        "",
        *table(runs),
        "",
        "Seconds per step, median: " + ", ".join(f"{statistics.median(s[1:]):.1f}" for s in seconds)
        + "; first step with compilation: " + ", ".join(f"{s[0]:.1f}" for s in seconds)
        + "; all steps together: " + ", ".join(f"{sum(s) / 60:.1f} min" for s in seconds) + ".",
        "",
        "Sampled completions of the first seed, before and after:",
        "",
        *samples(folders[0]),
        "",
        "```bash",
        COMMAND,
        "```",
        "",
        ", ".join(f"{name} {value}" for name, value in facts.items()) + ".",
    ]  # fmt: skip
    (out / "demo.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
