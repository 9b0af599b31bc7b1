"""One script that checks kernels, the sampler and a train step on one accelerator, and writes a Markdown table.

    python benchmarks/gpu_check.py --out gpu_check.md            # sized for one 80 GB+ GPU, under 8 minutes
    python benchmarks/gpu_check.py --out check.md --tiny         # the same code on any machine, CPU included

Every check runs in a process of its own with a time limit: a crash, an out-of-memory or a hang fails that check alone,
and each one reports its own peak memory. The exit code is 1 if any check failed. Needs jax, flax, optax and numpy only.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

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


# --- measuring ----------------------------------------------------------------------------------------------------

#: Dense bf16 matmul peak, TFLOP/s, by a piece of the device's name (vendors' data sheets).
PEAK_TFLOPS = {"H200": 989, "H100": 989, "A100": 312, "v5 lite": 197, "v5p": 459, "v6 lite": 918, "v4": 275}


def peak_tflops() -> float | None:
    """Data-sheet peak of the first device, None where it is not in the table (a CPU, for example)."""
    import jax

    kind = jax.devices()[0].device_kind
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in kind), None)


def peak_memory() -> str:
    """Most device memory in use so far in this process."""
    import jax

    stats = jax.devices()[0].memory_stats() or {}
    peak = stats.get("peak_bytes_in_use")
    return "not reported by this device" if peak is None else f"{peak / 2**30:.2f} GiB"


def median_seconds(function: Callable[[], object], repeats: int) -> float:
    """Median wall time of ``function``, which returns arrays to wait for; it must have been compiled before."""
    import jax

    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function())
        times.append(time.perf_counter() - start)
    return statistics.median(times)


# --- checks -------------------------------------------------------------------------------------------------------


@check("device", limit_s=60)
def device(tiny: bool) -> Rows:
    """Names the device and measures a large bf16 matmul, the ceiling for every MFU below."""
    import jax
    import jax.numpy as jnp

    size = 256 if tiny else 8192
    a, b = (jax.random.normal(jax.random.key(seed), (size, size), jnp.bfloat16) for seed in (0, 1))
    product = jax.jit(jnp.matmul)
    jax.block_until_ready(product(a, b))
    tflops = 2 * size**3 / median_seconds(lambda: product(a, b), 10) / 1e12
    first = jax.devices()[0]
    return [
        (
            "device",
            f"{first.device_kind} ({first.platform}), jax {jax.__version__}, Python {sys.version.split()[0]}",
        ),
        ("data-sheet bf16 peak", f"{peak_tflops() or 'unknown'} TFLOP/s"),
        (f"bf16 matmul {size} x {size} x {size}", f"{tflops:.3g} TFLOP/s"),
    ]


@check("log-probs", limit_s=90)
def log_probs(tiny: bool) -> Rows:
    """Chunked token log-probs against the dense ones: values, gradient, time and memory of one over the other."""
    import jax
    import jax.numpy as jnp

    from jaxrl.ops.logprobs import token_logprobs

    rows, columns, width, vocabulary = (4, 16, 32, 128) if tiny else (8, 512, 896, 151_936)
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (rows, columns, width), jnp.bfloat16)
    head = 0.02 * jax.random.normal(keys[1], (vocabulary, width), jnp.bfloat16)
    targets = jax.random.randint(keys[2], (rows, columns), 0, vocabulary)
    mask = (jnp.arange(columns) >= columns // 2) * jnp.ones((rows, 1), jnp.int32)

    def chunked(hidden: jax.Array) -> jax.Array:
        return token_logprobs(hidden, head, targets, mask)[0]

    def dense(hidden: jax.Array) -> jax.Array:
        logits = jnp.einsum("nsd,vd->nsv", hidden, head, preferred_element_type=jnp.float32)
        return jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)[..., 0] * mask

    measured = {}
    for name, function in (("chunked", chunked), ("dense", dense)):
        value_and_grad = jax.jit(jax.value_and_grad(lambda h, function=function: function(h).sum()))
        compiled = value_and_grad.lower(hidden).compile()
        values = jax.jit(function)(hidden)
        jax.block_until_ready(compiled(hidden))
        seconds = median_seconds(lambda compiled=compiled: compiled(hidden), 5)
        temporary = compiled.memory_analysis().temp_size_in_bytes / 2**20
        measured[name] = values, compiled(hidden)[1], seconds, temporary
    gap = float(jnp.abs(measured["chunked"][0] - measured["dense"][0]).max())
    grads = [measured[name][1].astype(jnp.float32) for name in ("chunked", "dense")]
    grad_gap = float(jnp.linalg.norm(grads[0] - grads[1]) / jnp.linalg.norm(grads[1]))
    if gap > 1e-3 or grad_gap > 2e-2:
        raise AssertionError(
            f"chunked log-probs differ from dense ones: value {gap:.1e}, gradient {grad_gap:.1e}"
        )
    return [
        (f"[{rows}, {columns}] tokens, half masked, vocabulary {vocabulary}", "forward and backward"),
        (
            "chunked",
            f"{measured['chunked'][2] * 1e3:.2f} ms, {measured['chunked'][3]:.0f} MiB of temporaries",
        ),
        ("dense", f"{measured['dense'][2] * 1e3:.2f} ms, {measured['dense'][3]:.0f} MiB of temporaries"),
        ("largest value difference", f"{gap:.1e}"),
        ("relative gradient difference", f"{grad_gap:.1e}"),
    ]


def _language_model(tiny: bool, **changes: str) -> Any:
    """A Qwen2.5-0.5B-shaped model, or a small one of the same family (biases, grouped queries, tied head)."""
    from jaxrl.models import PRESETS, LanguageModel

    config = PRESETS["Qwen/Qwen2.5-0.5B-Instruct"]
    if tiny:
        small = {"vocab_size": 512, "d_model": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
        config = config.replace(**small, head_dim=16, d_ff=128)
    return LanguageModel(config.replace(**changes))


@check("sampler", limit_s=180)
def sampler(tiny: bool) -> Rows:
    """Speed of the slot engine, recompilations when the load changes, and its log-probs against the trainer's."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from benchmarks.peers.compile_counter import CompileCounter
    from jaxrl.ops.logprobs import token_logprobs
    from jaxrl.rollout import Engine, EngineConfig, Request, SamplingParams

    prompts, samples, prompt, new = (2, 2, 8, 16) if tiny else (32, 4, 256, 512)
    # The same model in float32 would agree to 1e-5; bfloat16 has 8 bits of mantissa, and other shapes round otherwise.
    dtype, limit = ("float32", 1e-4) if tiny else ("bfloat16", 0.1)
    model = _language_model(tiny, dtype=dtype, param_dtype=dtype, scan_layers=False)
    params = model.init(jax.random.key(0))
    config = EngineConfig(
        max_prompt_len=prompt, max_len=prompt + new, slots=prompts * samples, eos_token_ids=()
    )
    engine = Engine(model, config)
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, (prompts, prompt))
    counter = CompileCounter()

    def generate(seed: int, count: int = prompts, temperature: float = 1.0) -> tuple[list[Any], float]:
        settings = SamplingParams(max_tokens=new, temperature=temperature)
        requests = [Request(ids[p], p, s, settings) for p in range(count) for s in range(samples)]
        start = time.perf_counter()
        completions = engine.generate(params, requests, jax.random.key(seed))
        return completions, time.perf_counter() - start

    _, first = generate(0)
    compiled_first = counter.take()[0]
    seconds = statistics.median(generate(seed)[1] for seed in range(1, 4))
    generate(4, count=prompts // 2)
    generate(5, temperature=0.7)
    recompiled = counter.take()[0]
    completions, _ = generate(6)

    tokens = np.concatenate(
        [np.repeat(ids, samples, 0), np.stack([c.token_ids for c in completions])], axis=1
    )
    mask = np.broadcast_to(np.arange(prompt + new) >= prompt, tokens.shape)

    @jax.jit
    def score(params: Any, tokens: jax.Array, mask: jax.Array) -> jax.Array:
        hidden = model.forward(params, tokens[:, :-1]).hidden
        return token_logprobs(hidden, model.head(params), tokens[:, 1:], mask[:, 1:])[0][:, prompt - 1 :]

    rows = samples * 2  # a few rows at a time: only their log-probs are wanted here
    parts = [
        score(params, jnp.asarray(tokens[i : i + rows]), jnp.asarray(mask[i : i + rows]))
        for i in range(0, len(tokens), rows)
    ]
    gap = np.abs(np.concatenate(parts) - np.stack([c.logprobs for c in completions]))
    if recompiled:
        raise AssertionError(f"{recompiled} programs were compiled after another batch size and temperature")
    if gap.mean() > limit:
        raise AssertionError(
            f"rollout and trainer log-probs differ by {gap.mean():.1e} on average, limit {limit:.0e}"
        )
    total = prompts * samples * new
    return [
        ("model", f"{model.config.num_parameters() / 1e6:.1f} M parameters, {dtype}"),
        (f"{prompts} prompts x {samples} samples, {prompt} + {new} tokens", f"{seconds:.2f} s"),
        ("sampled tokens/s", f"{total / seconds:,.0f}"),
        ("time per decode step", f"{seconds / new * 1e3:.2f} ms"),
        ("first call, with compilation", f"{first:.1f} s, {compiled_first} programs"),
        ("compiled after another batch size and temperature", str(recompiled)),
        ("rollout vs trainer log-prob gap", f"mean {gap.mean():.1e}, max {gap.max():.1e}"),
        ("peak memory", peak_memory()),
    ]


@check("train-step", limit_s=180)
def train_step(tiny: bool) -> Rows:
    """The GRPO optimizer step: time, model flops utilisation, memory, and that a second batch compiles nothing."""
    import jax
    import numpy as np

    from benchmarks.peers.compile_counter import CompileCounter
    from jaxrl.objectives import Objective, PolicyBatch, policy_batch, policy_gradient
    from jaxrl.runtime.optimizer import OptimizerConfig, make_optimizer
    from jaxrl.runtime.state import TrainState
    from jaxrl.runtime.update import apply_gradients, check_finite

    rows, prompt, new, micro_batches = (4, 8, 8, 2) if tiny else (32, 512, 512, 2)
    dtype = "float32" if tiny else "bfloat16"
    model = _language_model(tiny, dtype=dtype, remat="none" if tiny else "dots")
    config, columns = model.config, prompt + new
    optimizer = make_optimizer(OptimizerConfig(name="adamw", learning_rate=1e-5, clip_norm=1.0))
    state = TrainState.create(model.init(jax.random.key(0)), optimizer, jax.random.key(1))

    # What systems.grpo.train_step does; that module is not imported because a bare image lacks what its host side needs.
    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: TrainState, batch: PolicyBatch) -> tuple[TrainState, dict[str, jax.Array]]:
        grads, metrics = policy_gradient(
            model, Objective(), state.params, {}, batch, micro_batches=micro_batches
        )
        return apply_gradients(optimizer, state, grads, metrics)

    counter = CompileCounter()

    def run(seed: int) -> tuple[float, dict[str, float]]:
        nonlocal state
        rng = np.random.default_rng(seed)
        ids = rng.integers(0, config.vocab_size, (rows, columns))
        batch = policy_batch(ids[:, :prompt], ids[:, prompt:], rng.normal(size=rows), columns=columns).put(
            None
        )
        start = time.perf_counter()
        state, raw = step(state, batch)
        metrics = check_finite(raw, state.params)  # waits for the step, and raises if it is not finite
        jax.block_until_ready(state.params)
        return time.perf_counter() - start, metrics

    first, metrics = run(0)
    run(1)
    counter.take()
    seconds = statistics.median(run(seed)[0] for seed in range(2, 7))
    recompiled = counter.take()[0]
    if recompiled:
        raise AssertionError(f"{recompiled} programs were compiled after the second step")
    if not metrics["grad_norm"] > 0:
        raise AssertionError(f"gradient norm is {metrics['grad_norm']}")
    # Forward and backward are three forward passes; attention sees half the row on average; only completion tokens
    # go through the head. Recomputed activations are not counted, by the usual definition of MFU.
    forward = rows * columns * config.flops_per_token(columns / 2, head=False)
    forward += rows * new * 2.0 * config.d_model * config.vocab_size
    tflops = 3 * forward / seconds / 1e12
    peak = peak_tflops()
    return [
        ("model", f"{config.num_parameters() / 1e6:.1f} M parameters, float32, computing in {dtype}"),
        (f"{rows} rows of {prompt} + {new} tokens, {micro_batches} micro-batches", f"{seconds * 1e3:.1f} ms"),
        ("tokens/s", f"{rows * columns / seconds:,.0f}"),
        ("model TFLOP/s", f"{tflops:.3g}"),
        ("MFU", "unknown peak" if peak is None else f"{100 * tflops / peak:.1f} %"),
        ("first step, with compilation", f"{first:.1f} s"),
        ("compiled after the second step", str(recompiled)),
        ("gradient norm, first step", f"{metrics['grad_norm']:.4g}"),
        ("peak memory", peak_memory()),
    ]


# --- running ------------------------------------------------------------------------------------------------------


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
