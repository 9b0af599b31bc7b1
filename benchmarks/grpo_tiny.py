"""Does the GRPO system learn? Scaled-down runs on two-digit sums, over seeds, with a verdict for each claim.

    python benchmarks/grpo_tiny.py --seeds 0,1,2 --out docs/results

Per seed, a character transformer (``configs/grpo_tiny.py``) learns sums by cross-entropy until it is right a quarter of
the time. From that one checkpoint, each with a fresh optimizer and the same run key, start

* the learning run: 100 updates, one per rollout batch, for each of ``VARIANTS``;
* the off-policy stress: 60 rollout batches of 8 updates on 2 prompts each, with and without the PPO clip (``STRESS``).

``benchmarks/length_bias.py`` adds the length bias of loss aggregations. Everything goes through ``grpo.build`` and
``Grpo.step``. Writes ``grpo_tiny.md`` (claims and tables), ``grpo_tiny.json`` (raw numbers) and three plots; the exit
code is 1 if a claim fails. ``--quick`` runs all of it at sizes too small to learn, and judges nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import pathlib
import platform
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

if __package__ in (None, ""):
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from benchmarks import length_bias
from jaxrl import launch
from jaxrl.runtime import plots
from jaxrl.runtime.host_memory import keep_freed_memory
from jaxrl.runtime.state import RunState
from jaxrl.systems import grpo

ROOT = pathlib.Path(__file__).resolve().parents[1]
Params = Mapping[str, Any]

RIGHT = dict(name="exact_match")
# Matches every completion, so it adds 5 to each reward: 0/1 becomes 5/6. Right or wrong is still decided by the first.
FIVE = dict(name="regex_format", kwargs=dict(pattern=".*"), weight=5.0, label="constant")

# name -> settings that differ from configs/grpo_tiny.py
VARIANTS: dict[str, dict[str, Any]] = {
    "GRPO": {},
    "Dr. GRPO": dict(algorithm=dict(name="dr_grpo")),
    "RLOO": dict(algorithm=dict(name="rloo")),
    "GRPO, reward 5/6": dict(rewards=(RIGHT, FIVE)),
    "no baseline, reward 5/6": dict(rewards=(RIGHT, FIVE), algorithm=dict(name="grpo", advantage_rule="reinforce")),
    "wrong sign": dict(rewards=(RIGHT | dict(weight=-1.0),)),
}
GROUP_BASELINE = ("GRPO", "Dr. GRPO", "RLOO", "GRPO, reward 5/6")
STRESS: dict[str, dict[str, Any]] = {
    "clip 0.2": dict(algorithm=dict(name="grpo", clip_low=0.2, clip_high=0.2)),
    "no clip": dict(algorithm=dict(name="grpo", clip_low=1e9, clip_high=1e9)),
}
# Mean length of (wrong, right) answers that each aggregation should end at; see benchmarks/length_bias.py.
LENGTHS = {"grpo": (6.67, 1.07), "grpo, no std": (5.92, 1.17), "dr_grpo": (4.50, 4.50), "dapo": (4.51, 4.49)}
LENGTH_TOLERANCE, LENGTH_FEW = 0.06, 10
# Metrics of each step that are kept: name here -> name of the system.
TRACKED = {
    "train_accuracy": "reward/exact_match",
    "clip_fraction": "clip_fraction",
    "largest_ratio": "ratio/max",
    "entropy": "entropy",
    "grad_norm": "grad_norm",
}


@dataclasses.dataclass(frozen=True)
class Scale:
    """How much is run."""

    config: str = "configs/grpo_tiny.py"
    updates: int = 100
    stress_batches: int = 60
    eval_every: int = 20
    eval_samples: int = 4
    length_seeds: int = 100


QUICK = Scale("configs/grpo_tiny.py:debug", updates=2, stress_batches=2, eval_every=2, eval_samples=1, length_seeds=2)


@dataclasses.dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
      rows: one per step, from step 0: ``step``, the metrics of ``TRACKED`` (not at step 0), and ``accuracy`` on held-out
        prompts where it was measured.
      params: final parameters, on the host.
      seconds: wall time, compilation included.
    """

    rows: list[dict[str, float]]
    params: Params
    seconds: float

    @property
    def start(self) -> float:
        return self.rows[0]["accuracy"]

    @property
    def end(self) -> float:
        return self.rows[-1]["accuracy"]

    def column(self, name: str) -> list[float]:
        return [row[name] for row in self.rows if name in row]


@dataclasses.dataclass(frozen=True)
class Claim:
    """What should hold, what was measured, and whether it does."""

    text: str
    measured: str
    passed: bool


@dataclasses.dataclass(frozen=True)
class Results:
    """Everything measured. ``learning`` and ``stress``: variant -> one run per seed."""

    seeds: tuple[int, ...]
    learning: dict[str, list[Run]]
    stress: dict[str, list[Run]]
    lengths: dict[str, np.ndarray]  # [length seeds, 2]: mean length of wrong and of right answers
    seconds: dict[str, float]


def build(scale: Scale, seed: int, **changes: Any) -> grpo.Grpo:
    """The system of the configuration file with some groups of settings replaced or extended; the seed is the data's."""
    settings = launch.load_config(str(ROOT / scale.config))
    changes["data"] = dict(seed=seed)
    for name, value in changes.items():
        old = settings.get(name)
        settings[name] = {**old, **value} if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return grpo.build(launch.resolve(settings).config)


def warm_start(scale: Scale, seed: int) -> Params:
    """Parameters after the supervised phase."""
    system = build(scale, seed, eval=dict(samples=scale.eval_samples, k=(1,), greedy=False))
    return system.init(jax.random.key(seed)).device["train"].params


def run(scale: Scale, seed: int, params: Params, steps: int, **changes: Any) -> Run:
    """Train from ``params`` with a fresh optimizer; the run key depends on the seed only."""
    begin = time.perf_counter()
    system = build(scale, seed, eval=dict(samples=scale.eval_samples, k=(1,), greedy=False), **changes)
    state = system.template(jax.random.key(seed))
    # Copies, because a train step donates its state.
    train = state.device["train"].replace(params=jax.tree.map(jnp.copy, params))
    state = RunState({**state.device, "train": train}, state.host)
    rows: list[dict[str, float]] = [{"step": 0, "accuracy": system.evaluate(state)["accuracy_sampled"]}]
    for step in range(1, steps + 1):
        state, metrics = system.step(state)
        rows.append({"step": step} | {name: float(metrics[key]) for name, key in TRACKED.items()})
        if step % scale.eval_every == 0 or step == steps:
            rows[-1]["accuracy"] = system.evaluate(state)["accuracy_sampled"]
    final = jax.tree.map(np.asarray, state.device["train"].params)
    return Run(rows, final, time.perf_counter() - begin)


def stress_update(scale: Scale) -> dict[str, int]:
    """Sequential minibatches of two prompts each."""
    prompts = launch.load_config(str(ROOT / scale.config))["rollout"]["prompts"]
    return dict(minibatches=prompts // 2)


def measure(scale: Scale, seeds: Sequence[int]) -> Results:
    """Run everything."""
    learning: dict[str, list[Run]] = {name: [] for name in VARIANTS}
    stress: dict[str, list[Run]] = {name: [] for name in STRESS}
    seconds = {"warm starts": 0.0}
    for seed in seeds:
        begin = time.perf_counter()
        params = warm_start(scale, seed)
        seconds["warm starts"] += time.perf_counter() - begin
        for name, changes in VARIANTS.items():
            learning[name].append(run(scale, seed, params, scale.updates, **changes))
            _say(seed, name, learning[name][-1])
        for name, changes in STRESS.items():
            changes = changes | dict(update=stress_update(scale))
            stress[name].append(run(scale, seed, params, scale.stress_batches, **changes))
            _say(seed, name, stress[name][-1])
    for part, table in (("learning runs", learning), ("off-policy stress", stress)):
        seconds[part] = sum(one.seconds for runs in table.values() for one in runs)
    begin = time.perf_counter()
    lengths = {
        name: np.array([length_bias.final_lengths(*variant, seed) for seed in range(scale.length_seeds)])
        for name, variant in length_bias.VARIANTS.items()
    }
    seconds["length bias"] = time.perf_counter() - begin
    return Results(tuple(seeds), learning, stress, lengths, seconds)


def _say(seed: int, name: str, one: Run) -> None:
    print(f"seed {seed}, {name}: {one.start:.3f} -> {one.end:.3f} ({one.seconds:.0f} s)", flush=True)


# --- claims -------------------------------------------------------------------------------------------------------


def judge(results: Results) -> list[Claim]:
    """The verdicts, one per claim."""
    claims = [_gain(name, results.learning[name]) for name in GROUP_BASELINE]
    claims.append(_shift(results.learning["GRPO"], results.learning["GRPO, reward 5/6"]))
    runs = results.learning["no baseline, reward 5/6"]
    text = "no baseline, reward 5/6: ends below its start on each seed"
    measured = "; ".join(f"{one.start:.3f} to {one.end:.3f}" for one in runs)
    claims.append(Claim(text, measured, all(one.end < one.start for one in runs)))
    runs = results.learning["wrong sign"]
    ends = "; ".join(f"{one.end:.4f}" for one in runs)
    claims.append(Claim("wrong sign: ends below 0.05 on each seed", ends, all(one.end < 0.05 for one in runs)))
    claims += _clip(results.stress["clip 0.2"], results.stress["no clip"])
    return claims + [claim for name in LENGTHS for claim in _lengths(name, results.lengths[name])]


def _gain(name: str, runs: Sequence[Run]) -> Claim:
    gains = [one.end - one.start for one in runs]
    text = f"{name}: gains at least 0.04 on each seed and 0.06 on average"
    measured = f"{'; '.join(f'{g:+.3f}' for g in gains)}; mean {np.mean(gains):+.3f}"
    return Claim(text, measured, min(gains) >= 0.04 and float(np.mean(gains)) >= 0.06)


def _shift(plain: Sequence[Run], shifted: Sequence[Run]) -> Claim:
    """Adding 5 to every reward changes a group-baseline run by rounding only."""
    moved = max(parameter_distance(a.params, b.params) for a, b in zip(plain, shifted, strict=True))
    accuracy = max(abs(a.end - b.end) for a, b in zip(plain, shifted, strict=True))
    text = "GRPO, reward 5/6 against 0/1: final parameters equal to 1e-5, final accuracy to 0.001"
    measured = f"largest difference of a parameter {moved:.1e}, of an accuracy {accuracy:.4f}"
    return Claim(text, measured, moved <= 1e-5 and accuracy <= 0.001)


def _clip(clip: Sequence[Run], free: Sequence[Run]) -> list[Claim]:
    ends = [float(np.mean([one.end for one in runs])) for runs in (clip, free)]
    text = "off-policy stress: mean accuracy with clip at least that without, minus 0.01"
    better = Claim(text, f"clip {ends[0]:.3f}, no clip {ends[1]:.3f}", ends[0] >= ends[1] - 0.01)
    shares = [float(np.mean(one.column("clip_fraction"))) for one in clip]
    text = "off-policy stress: the clip acts (mean clip fraction above 0 on each seed)"
    return [better, Claim(text, "; ".join(f"{share:.4f}" for share in shares), min(shares) > 0)]


def _lengths(name: str, ends: np.ndarray) -> list[Claim]:
    wrong, right = LENGTHS[name]
    what = f"length bias, {name}: wrong/right answers end at {wrong:.2f}/{right:.2f} within {LENGTH_TOLERANCE}"
    mean, few = ends.mean(axis=0), ends[:LENGTH_FEW]
    off = np.abs(mean - LENGTHS[name]).max()
    far = np.abs(few - LENGTHS[name]).max()
    measured = f"{mean[0]:.3f}/{mean[1]:.3f}, off by {off:.3f}"
    return [
        Claim(f"{what}, mean over {len(ends)} seeds", measured, bool(off <= LENGTH_TOLERANCE)),
        Claim(f"{what}, each of {len(few)} seeds", f"farthest off by {far:.3f}", bool(far <= LENGTH_TOLERANCE)),
    ]


def parameter_distance(a: Params, b: Params) -> float:
    """Largest absolute difference of two parameters of the same path."""
    return max(float(np.max(np.abs(x - y))) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


# --- report -------------------------------------------------------------------------------------------------------


def markdown(results: Results, claims: Sequence[Claim], command: str, judged: bool) -> str:
    """The report."""
    seeds = results.seeds
    lines = ["# GRPO on two-digit sums: scaled-down learning runs", ""]
    if not judged:
        lines += ["Quick run: the sizes are too small to learn, so the verdicts mean nothing.", ""]
    lines += [
        "A character transformer is trained by cross-entropy until it is right on a quarter of held-out sums; each run",
        "starts from that checkpoint of its seed with a fresh Adam. Accuracies are sampled at temperature 1, four times per",
        "held-out prompt. One seed can overshoot the quarter, because accuracy jumps late in the supervised phase.",
        "What each run does is described in `benchmarks/grpo_tiny.py`.",
        "",
        f"    {command}",
        "",
        f"Machine: {machine()}. Wall seconds, compilation included: "
        + ", ".join(f"{part} {value:.0f}" for part, value in results.seconds.items())
        + ". Raw numbers: [grpo_tiny.json](grpo_tiny.json).",
        "",
        "## Claims",
        "",
        "| claim | measured | verdict |",
        "|---|---|---|",
        *(f"| {c.text} | {c.measured} | {'PASS' if c.passed else 'FAIL'} |" for c in claims),
        "",
        "## Learning run",
        "",
        "![Accuracy over updates](grpo_tiny.png)",
        "",
        "The band is dominated by where the seeds start; the same as a gain over the start:",
        "",
        "![Gain over updates](grpo_tiny_gain.png)",
        "",
        *_table(results.learning, seeds),
        "",
        "## Off-policy stress",
        "",
        "![Accuracy over rollout batches](grpo_tiny_off_policy.png)",
        "",
        *_table(results.stress, seeds),
        "",
        "| variant | mean clip fraction per seed | largest ratio per seed |",
        "|---|---|---|",
    ]
    for name, runs in results.stress.items():
        shares = ", ".join(f"{np.mean(one.column('clip_fraction')):.4f}" for one in runs)
        ratios = ", ".join(f"{max(one.column('largest_ratio')):.1f}" for one in runs)
        lines.append(f"| {name} | {shares} | {ratios} |")
    lines += ["", "## Length bias", ""]
    count = len(next(iter(results.lengths.values())))
    lines += [
        f"Mean length of wrong and right answers at the end over {count} seeds; both start at 4.50. With a standard deviation",
        f"(sd) near 0.04, most draws of {LENGTH_FEW} seeds hold one that is off by more than {LENGTH_TOLERANCE} although the",
        "aggregation is right: there the rows on single seeds fail, and the mean is the test.",
        "",
        f"| aggregation | wrong: mean, sd (min..max) | right: mean, sd (min..max) | seeds off by > {LENGTH_TOLERANCE} |",
        "|---|---|---|---|",
    ]
    for name, ends in results.lengths.items():
        cells = [f"{c.mean():.3f}, {c.std(ddof=1):.3f} ({c.min():.2f}..{c.max():.2f})" for c in ends.T]
        far = np.mean(np.abs(ends - LENGTHS[name]).max(axis=1) > LENGTH_TOLERANCE)
        lines.append(f"| {name} | {cells[0]} | {cells[1]} | {100 * far:.0f} % |")
    return "\n".join(lines) + "\n"


def _table(table: Mapping[str, Sequence[Run]], seeds: Sequence[int]) -> list[str]:
    lines = ["| variant | " + " | ".join(f"seed {seed}" for seed in seeds) + " | mean end |"]
    lines.append("|---" * (len(seeds) + 2) + "|")
    for name, runs in table.items():
        cells = " | ".join(f"{one.start:.3f} to {one.end:.3f}" for one in runs)
        lines.append(f"| {name} | {cells} | {np.mean([one.end for one in runs]):.3f} |")
    return lines


def machine() -> str:
    """Processor, cores, and versions."""
    names = [platform.processor() or platform.machine()]
    info = pathlib.Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text().splitlines()
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")] or names
    return f"{names[0]}, {os.cpu_count()} cores, {jax.default_backend()} backend, jax {jax.__version__}"


def raw(results: Results, claims: Sequence[Claim]) -> dict[str, Any]:
    """What goes into the JSON file: per variant and seed, one list per metric, by step."""

    def lists(one: Run) -> dict[str, Any]:
        at = [int(row["step"]) for row in one.rows if "accuracy" in row]
        tracked = {name: [float(f"{x:.5g}") for x in one.column(name)] for name in TRACKED}
        return {"accuracy": dict(zip(at, one.column("accuracy"), strict=True)), "seconds": round(one.seconds, 1), **tracked}

    return {
        "machine": machine(),
        "seeds": list(results.seeds),
        "seconds": {part: round(value, 1) for part, value in results.seconds.items()},
        "claims": [dataclasses.asdict(claim) for claim in claims],
        "learning": {name: [lists(one) for one in runs] for name, runs in results.learning.items()},
        "off_policy": {name: [lists(one) for one in runs] for name, runs in results.stress.items()},
        "length_bias": {name: ends.tolist() for name, ends in results.lengths.items()},
    }


def write(results: Results, out: pathlib.Path, command: str, judged: bool) -> list[Claim]:
    """Judge, and write the report, the raw numbers and the plots."""
    claims = judge(results)
    out.mkdir(parents=True, exist_ok=True)
    (out / "grpo_tiny.md").write_text(markdown(results, claims, command, judged))
    (out / "grpo_tiny.json").write_text(json.dumps(raw(results, claims)) + "\n")
    for file, table, name in (
        ("grpo_tiny.png", results.learning, "accuracy"),
        ("grpo_tiny_gain.png", results.learning, "accuracy gain"),
        ("grpo_tiny_off_policy.png", results.stress, "accuracy"),
    ):
        rows = {label: [_with_gain(one) for one in runs] for label, runs in table.items()}
        plots.seed_band(rows, name, out / file)
    return claims


def _with_gain(one: Run) -> list[dict[str, float]]:
    return [row | ({"accuracy gain": row["accuracy"] - one.start} if "accuracy" in row else {}) for row in one.rows]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2", help="comma list")
    parser.add_argument("--out", type=pathlib.Path, help="folder; default docs/results, or runs/grpo_tiny_quick if quick")
    parser.add_argument("--quick", action="store_true", help="tiny sizes; exit code 0 whatever the verdicts")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for name in ("absl", "jax"):
        logging.getLogger(name).setLevel(logging.WARNING)
    keep_freed_memory()
    out = args.out or ROOT / ("runs/grpo_tiny_quick" if args.quick else "docs/results")
    seeds = [int(seed) for seed in args.seeds.split(",")]
    with tempfile.TemporaryDirectory(prefix="jaxrl-cache-") as cache:
        # Each variant builds its system anew; what they have in common is compiled once.
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        results = measure(QUICK if args.quick else Scale(), seeds)
    command = f"python benchmarks/grpo_tiny.py --seeds {args.seeds}" + (" --quick" if args.quick else "")
    claims = write(results, out, command, judged=not args.quick)
    for claim in claims:
        print(f"{'PASS' if claim.passed else 'FAIL'}  {claim.text}: {claim.measured}")
    print(f"report: {out / 'grpo_tiny.md'}")
    return 0 if args.quick or all(claim.passed for claim in claims) else 1


if __name__ == "__main__":
    sys.exit(main())
