"""One script that checks kernels, the sampler and a train step on one accelerator, and writes a Markdown table.

    python benchmarks/gpu_check.py --out gpu_check.md            # sized for one 80 GB+ GPU, under 8 minutes
    python benchmarks/gpu_check.py --out check.md --tiny         # the same code on any machine, CPU included

Every check runs in a process of its own with a time limit: a crash, an out-of-memory or a hang fails that check alone,
and each one reports its own peak memory. The exit code is 1 if any check failed. Needs jax, flax, optax and numpy only.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

Rows = list[tuple[str, str]]  # (metric, value) lines of the table


@dataclasses.dataclass(frozen=True)
class Check:
    """A registered check: ``run(tiny)`` returns table rows and raises when a promise is broken."""

    run: Callable[[bool], Rows]
    limit_s: float


CHECKS: dict[str, Check] = {}


def check(name: str, limit_s: float) -> Callable[[Callable[[bool], Rows]], Callable[[bool], Rows]]:
    """Register a check under ``name``; it is stopped after ``limit_s`` seconds, compilation and start-up included."""

    def register(function: Callable[[bool], Rows]) -> Callable[[bool], Rows]:
        CHECKS[name] = Check(function, limit_s)
        return function

    return register


def run_all(names: list[str], tiny: bool, budget_s: float) -> tuple[str, int]:
    """Run the checks one after another; return the table and the number that failed."""
    deadline = time.monotonic() + budget_s
    lines = ["| check | metric | value |", "|---|---|---|"]
    failures = 0
    for name in names:
        start = time.monotonic()
        limit_s = min(CHECKS[name].limit_s, deadline - start)
        rows, error = (
            run_one(name, tiny, limit_s) if limit_s > 5 else ([], f"no time left of {budget_s:.0f} s")
        )
        seconds = time.monotonic() - start
        if error is not None:
            failures += 1
            rows = [*rows, ("FAILED", error)]
        for metric, value in [*rows, ("check took", f"{seconds:.0f} s")]:
            lines.append(f"| {name} | {metric} | {_cell(value)} |")
        print(f"{name}: {'ok' if error is None else 'FAILED: ' + error} ({seconds:.0f} s)", flush=True)
    return "\n".join(lines) + "\n", failures


def run_one(name: str, tiny: bool, limit_s: float) -> tuple[Rows, str | None]:
    """Run one check in a child process; return its rows and, when it failed, the reason."""
    with tempfile.TemporaryDirectory() as folder:
        result_path = pathlib.Path(folder) / "result.json"
        command = [
            sys.executable,
            str(pathlib.Path(__file__).resolve()),
            "--child",
            name,
            "--out",
            str(result_path),
        ]
        try:
            child = subprocess.run(
                command + (["--tiny"] if tiny else []),
                check=False,
                timeout=limit_s,
                stderr=subprocess.PIPE,
                text=True,
            )
        except subprocess.TimeoutExpired:
            return [], f"stopped after {limit_s:.0f} s"
        if not result_path.exists():
            return (
                [],
                f"process ended with code {child.returncode}: {' '.join(child.stderr.splitlines()[-3:])}",
            )
        result = json.loads(result_path.read_text())
    return [tuple(row) for row in result["rows"]], result["error"]


def run_child(name: str, tiny: bool, result_path: pathlib.Path) -> None:
    """Body of the child process: run the check, write rows and error as JSON."""
    rows: Rows = []
    error = None
    try:
        rows = CHECKS[name].run(tiny)
    except Exception as problem:  # noqa: BLE001 - reported as FAILED, and the script exits with 1
        traceback.print_exc()
        error = f"{type(problem).__name__}: {problem}"
    result_path.write_text(json.dumps({"rows": rows, "error": error}))


def _cell(text: str) -> str:
    return " ".join(str(text).split()).replace("|", "\\|")[:400]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, help="Markdown file to write")
    parser.add_argument("--tiny", action="store_true", help="small sizes, for any machine")
    parser.add_argument("--only", type=lambda text: text.split(","), help="comma-separated names of checks")
    parser.add_argument("--budget", type=float, default=460.0, help="seconds for all checks together")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        run_child(args.child, args.tiny, args.out)
        return 0
    names = args.only or list(CHECKS)
    unknown = sorted(set(names) - set(CHECKS))
    if unknown:
        parser.error(f"unknown checks {unknown}; there are {list(CHECKS)}")
    os.environ.setdefault(
        "XLA_PYTHON_CLIENT_PREALLOCATE", "false"
    )  # so that peak memory is what a check used
    table, failures = run_all(names, args.tiny, args.budget)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(table)
    print(table)
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
