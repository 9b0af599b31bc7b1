"""Starts one worker per library and runs the same workload on each in turn, in one session."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.peers.model_files import SHAPES, write_random_llama, write_smollm2
from benchmarks.peers.protocol import Worker

ROOT = pathlib.Path(__file__).resolve().parents[2]
HERE = pathlib.Path(__file__).resolve().parent
MODELS = ("smollm2", *SHAPES)
JAX_ENV = {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
# Passive: with spinning OpenMP threads torch is up to ten times slower as soon as another program uses a core.
TORCH_ENV = {"OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


@dataclasses.dataclass(frozen=True)
class Library:
    """Where a library's worker lives and which interpreter runs it."""

    script: str
    environment: str | None
    env: dict[str, str]

    def python(self) -> str:
        """Interpreter of this library: the running one for jaxrl, else that of its ``.venv-*``."""
        if self.environment is None:
            return sys.executable
        path = ROOT / self.environment / "bin" / "python"
        if not path.exists():
            name = self.environment.removeprefix(".venv-")
            raise SystemExit(f"{path} does not exist; make it with `benchmarks/peers/setup.sh {name}`.")
        return str(path)


LIBRARIES = {
    "jaxrl": Library("jaxrl_worker.py", None, JAX_ENV),
    "tunix": Library("tunix_worker.py", ".venv-tunix", JAX_ENV),
    "torch": Library("torch_worker.py", ".venv-torch", TORCH_ENV),
}


@contextlib.contextmanager
def workers(names: list[str], log_dir: pathlib.Path) -> Iterator[dict[str, Worker]]:
    """Start one worker per name and close them all at the end."""
    log_dir.mkdir(parents=True, exist_ok=True)
    threads = str(os.cpu_count() or 1)
    running: dict[str, Worker] = {}
    try:
        for name in names:
            library = LIBRARIES[name]
            env = {"OMP_NUM_THREADS": threads, "PYTHONPATH": str(ROOT), **library.env}
            running[name] = Worker(
                name, library.python(), HERE / library.script, env, log_dir / f"{name}.log"
            )
        yield running
    finally:
        for worker in running.values():
            worker.close()


def alternate(
    crew: dict[str, Worker], repeats: int, call: Callable[[Worker, int], dict[str, Any]]
) -> dict[str, list[dict[str, Any]]]:
    """Run ``call(worker, repeat)`` on A, B, C, A, B, C, ... so that a busy moment of the machine hits all alike."""
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in crew}
    for repeat in range(repeats):
        for name, worker in crew.items():
            results[name].append(call(worker, repeat))
    return results


def medians(results: dict[str, list[dict[str, Any]]], key: str) -> dict[str, float]:
    """Median of one entry over the repeats, per library."""
    return {name: statistics.median(item[key] for item in items) for name, items in results.items()}


def markdown(rows: list[tuple[str, dict[str, str]]], names: list[str]) -> str:
    """A table with one line per metric and one column per library."""
    lines = ["| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for label, values in rows:
        lines.append(f"| {label} | " + " | ".join(values.get(name, "-") for name in names) + " |")
    return "\n".join(lines)


def random_prompts(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Token ids drawn uniformly, leaving out the first 64 ids (special tokens of every tokenizer used here)."""
    rng = np.random.default_rng(seed)
    return rng.integers(64, vocab_size, (count, length)).tolist()


def mebibytes(count: float) -> str:
    return f"{count / 2**20:,.0f} MiB"


def model_directory(name: str) -> tuple[pathlib.Path, int]:
    """Directory (made on first use) that holds the weights for all libraries, and the vocabulary size."""
    directory = ROOT / "runs" / "benchmarks" / "models" / name
    if not (directory / "model.safetensors").exists():
        if name == "smollm2":
            write_smollm2(directory)
        else:
            write_random_llama(directory, SHAPES[name])
    return directory, json.loads((directory / "config.json").read_text())["vocab_size"]


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags that both comparisons share."""
    parser.add_argument(
        "--repeats", type=int, default=5, help="timed calls per library; the median is reported"
    )
    parser.add_argument(
        "--peers",
        type=lambda text: [name for name in text.split(",") if name],
        default=["tunix", "torch"],
        help="comma-separated: tunix, torch; empty for jaxrl alone",
    )
    parser.add_argument(
        "--out", type=pathlib.Path, help="also write the table here, and the figures beside it as JSON"
    )


def report(text: str, figures: dict[str, Any], args: argparse.Namespace) -> None:
    """Print the table, and write it with its raw figures when ``--out`` is given."""
    print(text)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text)
        for entry in figures.values():
            for item in [*entry["timed"], *(value for value in entry.values() if isinstance(value, dict))]:
                item.pop("tokens", None)
                item.pop("log_probs", None)
        args.out.with_suffix(".json").write_text(json.dumps(figures, indent=1))
