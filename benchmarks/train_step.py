"""Speed, memory and agreement of one GRPO optimizer step of jaxrl beside its peers, in one run.

    python -m benchmarks.train_step --model smollm2 --rows 32 --prompt 32 --new 32 --repeats 5 --peers tunix,torch

Every library loads the same weights and takes the same full-parameter step: clipped policy-gradient loss at ratio 1,
no KL term, global-norm clip at 1, AdamW, float32, one micro-batch, no rematerialisation, log-probs of the completion
tokens at temperature 1. Completions all have the same length, so token-mean and sequence-mean losses coincide and the
libraries must agree on log-probs and gradient norm; the table says how closely they do.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from typing import Any

import numpy as np

if __package__ in (None, ""):
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from benchmarks.peers import arena
from benchmarks.peers.protocol import Worker

LEARNING_RATE = 1e-5


def make_batch(rows: int, prompt: int, new: int, vocab_size: int, seed: int) -> dict[str, Any]:
    """Random tokens ``[rows, prompt + new]`` and advantages ``[rows]`` of mean 0 and standard deviation 1."""
    tokens = arena.random_prompts(rows, prompt + new, vocab_size, seed)
    advantages = np.random.default_rng(seed).normal(size=rows)
    advantages = (advantages - advantages.mean()) / advantages.std()
    return {"tokens": tokens, "prompt": prompt, "advantages": advantages.tolist()}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run the whole comparison and return its figures, one dict per library."""
    model_dir, vocab_size = arena.model_directory(args.model)
    batch = make_batch(args.rows, args.prompt, args.new, vocab_size, seed=0)
    half = make_batch(args.rows // 2, args.prompt, args.new, vocab_size, seed=1)
    score_args = {"tokens": batch["tokens"][:4], "prompt": args.prompt}

    def step(worker: Worker, repeat: int) -> dict[str, Any]:
        return worker.call("train_step", **batch)

    names = ["jaxrl", *args.peers]
    figures: dict[str, Any] = {name: {} for name in names}
    with arena.workers(names, arena.ROOT / "runs" / "benchmarks" / "logs") as crew:
        for name, worker in crew.items():
            figures[name] |= worker.call("load", model_dir=str(model_dir))
            figures[name]["loaded"] = worker.call("memory")["rss"]
            figures[name]["before"] = worker.call("score", **score_args)
            worker.call("prepare_training", learning_rate=LEARNING_RATE, prompt=args.prompt, new=args.new)
            figures[name]["first"] = step(worker, 0)
            figures[name]["peak"] = worker.call("memory")["peak"]
            worker.call("memory", reset=True)
        second = arena.alternate(crew, 1, step)  # not timed: may still compile
        timed = arena.alternate(crew, args.repeats, step)
        for name, worker in crew.items():
            figures[name]["timed"], figures[name]["second"] = timed[name], second[name][0]
            figures[name]["steady_peak"] = worker.call("memory")["peak"]
            figures[name]["after"] = worker.call("score", **score_args)
            figures[name]["batch_changed"] = worker.call("train_step", **half)
    return figures


def table(figures: dict[str, Any], args: argparse.Namespace) -> str:
    """Markdown table of the figures."""
    names = list(figures)
    tokens = args.rows * (args.prompt + args.new)
    seconds = arena.medians({name: figures[name]["timed"] for name in names}, "seconds")
    cpu = arena.medians({name: figures[name]["timed"] for name in names}, "cpu_seconds")
    spread = {name: [item["seconds"] for item in figures[name]["timed"]] for name in names}
    steady_compiles = {name: sum(item["compiles"] for item in figures[name]["timed"]) for name in names}

    def each(function: Any) -> dict[str, str]:
        return {name: function(name) for name in names}

    def difference(key: str) -> dict[str, str]:
        ours = np.asarray(figures["jaxrl"][key]["log_probs"])
        return each(lambda name: f"{np.abs(np.asarray(figures[name][key]['log_probs']) - ours).max():.1e}")

    changed = {name: figures[name]["batch_changed"] for name in names}
    rows = [
        ("version", each(lambda name: figures[name]["version"])),
        ("parameters", each(lambda name: f"{figures[name]['parameters']:,}")),
        (
            f"s per step of {tokens} tokens, median of {args.repeats}",
            each(lambda name: f"{seconds[name]:.3f}"),
        ),
        ("s, fastest to slowest", each(lambda name: f"{min(spread[name]):.3f} to {max(spread[name]):.3f}")),
        ("tokens/s", each(lambda name: f"{tokens / seconds[name]:,.0f}")),
        ("time relative to jaxrl", each(lambda name: f"{seconds[name] / seconds['jaxrl']:.2f}x")),
        ("processor seconds (all threads), median", each(lambda name: f"{cpu[name]:.3f}")),
        ("processor time relative to jaxrl", each(lambda name: f"{cpu[name] / cpu['jaxrl']:.2f}x")),
        ("first step, with compilation, s", each(lambda name: f"{figures[name]['first']['seconds']:.2f}")),
        ("programs compiled in the first step", each(lambda name: str(figures[name]["first"]["compiles"]))),
        (
            "programs compiled in the second step (step time)",
            each(
                lambda name: (
                    f"{figures[name]['second']['compiles']} ({figures[name]['second']['seconds']:.2f} s)"
                )
            ),
        ),
        ("programs compiled in the timed steps", each(lambda name: str(steady_compiles[name]))),
        (
            "compiled after halving the batch (step time)",
            each(lambda name: f"{changed[name]['compiles']} ({changed[name]['seconds']:.2f} s)"),
        ),
        ("peak RSS, first step", each(lambda name: arena.mebibytes(figures[name]["peak"]))),
        ("peak RSS, steady", each(lambda name: arena.mebibytes(figures[name]["steady_peak"]))),
        ("RSS after loading", each(lambda name: arena.mebibytes(figures[name]["loaded"]))),
        ("gradient norm, first step", each(lambda name: f"{figures[name]['first']['grad_norm']:.6g}")),
        ("max abs log-prob difference to jaxrl, initial weights", difference("before")),
        (f"the same after {args.repeats + 2} steps", difference("after")),
    ]
    title = (
        f"### GRPO train step: {args.model}, {args.rows} rows of {args.prompt} + {args.new} tokens, all parameters, "
        "AdamW, float32, CPU"
    )
    return f"{title}\n\n{arena.markdown(rows, names)}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=arena.MODELS, default="smollm2")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=32, help="prompt tokens")
    parser.add_argument("--new", type=int, default=32, help="completion tokens per row")
    arena.add_common_arguments(parser)
    args = parser.parse_args()
    figures = measure(args)
    arena.report(table(figures, args), figures, args)


if __name__ == "__main__":
    main()
