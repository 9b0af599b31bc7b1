"""Sampling speed, memory, recompilations and train-versus-rollout gap of jaxrl beside its peers, in one run.

    python -m benchmarks.sampler --model smollm2 --rows 32 --prompt 32 --new 64 --repeats 5 --peers tunix,torch

Every library loads the same weights, continues the same prompts (rows / samples prompts, ``samples`` rows each) by the
same number of tokens, and is measured in turn (A, B, C, A, B, C, ...). See benchmarks/README.md for the rules.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from benchmarks.peers import arena
from benchmarks.peers.protocol import Worker, WorkerError


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run the whole comparison and return its figures, one dict per library."""
    model_dir, vocab_size = arena.model_directory(args.model)
    if args.rows % args.samples:
        raise SystemExit(f"--rows {args.rows} is not a multiple of --samples {args.samples}.")
    prompts = arena.random_prompts(args.rows // args.samples, args.prompt, vocab_size, seed=0)
    common = {"samples": args.samples, "new": args.new}

    def sample(worker: Worker, seed: int, **changes: Any) -> dict[str, Any]:
        reply = worker.call(
            "sample",
            **{"prompts": prompts, "seed": seed, "temperature": args.temperature, **common, **changes},
        )
        lengths = {len(row) for row in reply["tokens"]}
        if lengths != {args.new}:
            raise WorkerError(
                f"{worker.name} gave completions of {sorted(lengths)} tokens, expected {args.new}."
            )
        return reply

    names = ["jaxrl", *args.peers]
    figures: dict[str, Any] = {name: {} for name in names}
    with arena.workers(names, arena.ROOT / "runs" / "benchmarks" / "logs") as crew:
        for name, worker in crew.items():
            figures[name] |= worker.call("load", model_dir=str(model_dir))
            figures[name]["loaded"] = worker.call("memory")["rss"]
            figures[name] |= worker.call(
                "prepare_sampler", rows=args.rows, prompt=args.prompt, new=args.new, samples=args.samples
            )
            figures[name]["first"] = sample(worker, 1)
            figures[name]["peak"] = worker.call("memory")["peak"]
            worker.call("memory", reset=True)
        second = arena.alternate(
            crew, 1, lambda worker, repeat: sample(worker, 2)
        )  # not timed: may still compile
        timed = arena.alternate(crew, args.repeats, lambda worker, repeat: sample(worker, 100 + repeat))
        for name, worker in crew.items():
            figures[name]["timed"], figures[name]["second"] = timed[name], second[name][0]
            figures[name]["steady_peak"] = worker.call("memory")["peak"]
            figures[name]["batch_changed"] = sample(worker, 3, prompts=prompts[: len(prompts) // 2])
            figures[name]["temperature_changed"] = sample(worker, 4, temperature=0.7 * args.temperature)
            figures[name]["gap"] = worker.call(
                "gap", prompts=prompts, seed=5, temperature=args.temperature, **common
            )
    return figures


def table(figures: dict[str, Any], args: argparse.Namespace) -> str:
    """Markdown table of the figures."""
    names = list(figures)
    tokens = args.rows * args.new
    seconds = arena.medians({name: figures[name]["timed"] for name in names}, "seconds")
    cpu = arena.medians({name: figures[name]["timed"] for name in names}, "cpu_seconds")
    spread = {name: [item["seconds"] for item in figures[name]["timed"]] for name in names}
    steady_compiles = {name: sum(item["compiles"] for item in figures[name]["timed"]) for name in names}

    def each(function: Any) -> dict[str, str]:
        return {name: function(name) for name in names}

    def recompiled(key: str) -> dict[str, str]:
        return each(lambda name: f"{figures[name][key]['compiles']} ({figures[name][key]['seconds']:.2f} s)")

    rows = [
        ("version", each(lambda name: figures[name]["version"])),
        ("parameters", each(lambda name: f"{figures[name]['parameters']:,}")),
        (
            f"s per call of {tokens} tokens, median of {args.repeats}",
            each(lambda name: f"{seconds[name]:.3f}"),
        ),
        ("s, fastest to slowest", each(lambda name: f"{min(spread[name]):.3f} to {max(spread[name]):.3f}")),
        ("tokens/s", each(lambda name: f"{tokens / seconds[name]:,.0f}")),
        ("time relative to jaxrl", each(lambda name: f"{seconds[name] / seconds['jaxrl']:.2f}x")),
        ("processor seconds (all threads), median", each(lambda name: f"{cpu[name]:.3f}")),
        ("processor time relative to jaxrl", each(lambda name: f"{cpu[name] / cpu['jaxrl']:.2f}x")),
        ("first call, with compilation, s", each(lambda name: f"{figures[name]['first']['seconds']:.2f}")),
        ("programs compiled in the first call", each(lambda name: str(figures[name]["first"]["compiles"]))),
        ("programs compiled in the second call", each(lambda name: str(figures[name]["second"]["compiles"]))),
        ("programs compiled in the timed calls", each(lambda name: str(steady_compiles[name]))),
        ("compiled after halving the batch (call time)", recompiled("batch_changed")),
        ("compiled after changing temperature (call time)", recompiled("temperature_changed")),
        ("peak RSS, first call", each(lambda name: arena.mebibytes(figures[name]["peak"]))),
        ("peak RSS, steady", each(lambda name: arena.mebibytes(figures[name]["steady_peak"]))),
        ("RSS after loading", each(lambda name: arena.mebibytes(figures[name]["loaded"]))),
        ("rollout vs trainer, max abs log-prob gap", each(lambda name: f"{figures[name]['gap']['max']:.1e}")),
        (
            "rollout vs trainer, mean abs log-prob gap",
            each(lambda name: f"{figures[name]['gap']['mean']:.1e}"),
        ),
        ("rollout log-probs in the timed calls", each(lambda name: figures[name]["logprobs"])),
    ]
    title = (
        f"### Sampler: {args.model}, {args.rows // args.samples} prompts x {args.samples} samples, "
        f"{args.prompt} + {args.new} tokens, temperature {args.temperature}, float32, CPU"
    )
    return f"{title}\n\n{arena.markdown(rows, names)}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=arena.MODELS, default="smollm2")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--samples", type=int, default=4, help="rows per prompt")
    parser.add_argument("--prompt", type=int, default=32, help="prompt tokens")
    parser.add_argument("--new", type=int, default=64, help="sampled tokens per row")
    parser.add_argument("--temperature", type=float, default=1.0)
    arena.add_common_arguments(parser)
    args = parser.parse_args()
    figures = measure(args)
    arena.report(table(figures, args), figures, args)


if __name__ == "__main__":
    main()
