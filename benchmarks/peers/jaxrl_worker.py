"""Worker for jaxrl: its slot engine and its GRPO device step."""

from __future__ import annotations

import functools
from typing import Any

import compile_counter
import jax
import numpy as np
import protocol

import jaxrl
from jaxrl.models import LanguageModel
from jaxrl.models.hf import load_hf
from jaxrl.objectives import Objective, PolicyBatch, policy_batch
from jaxrl.objectives import score as score_batch
from jaxrl.rollout import Engine, EngineConfig, Request, SamplingParams
from jaxrl.runtime import compilation
from jaxrl.runtime.host_memory import keep_freed_memory
from jaxrl.runtime.optimizer import OptimizerConfig, make_optimizer
from jaxrl.runtime.state import TrainState
from jaxrl.runtime.update import check_finite
from jaxrl.systems import grpo

COMPILES = compile_counter.CompileCounter()
State: dict[str, Any] = {}


def load(model_dir: str) -> dict[str, Any]:
    """Load the weights in float32."""
    keep_freed_memory()  # as jaxrl.launch does on CPU
    config, params = load_hf(
        model_dir, scan_layers=False
    )  # as configs/grpo_smollm2.py, for a model of this size
    model = LanguageModel(config)
    jax.block_until_ready(params)
    State.update(model=model, params=params)
    version = f"jaxrl {jaxrl.__version__}, jax {jax.__version__}"
    return {"version": version, "parameters": sum(leaf.size for leaf in jax.tree.leaves(params))}


def prepare_sampler(rows: int, prompt: int, new: int, samples: int) -> dict[str, Any]:
    config = EngineConfig(max_prompt_len=prompt, max_len=prompt + new, slots=rows, eos_token_ids=())
    State["engine"] = Engine(State["model"], config)
    return {"logprobs": "yes"}


def generate(prompts: list[list[int]], samples: int, new: int, temperature: float, seed: int) -> Any:
    settings = SamplingParams(max_tokens=new, temperature=temperature)
    requests = [
        Request(ids, prompt_id=p, sample_id=s, params=settings)
        for p, ids in enumerate(prompts)
        for s in range(samples)
    ]
    return State["engine"].generate(current_params(), requests, jax.random.key(seed))


def sample(prompts: list[list[int]], samples: int, new: int, temperature: float, seed: int) -> dict[str, Any]:
    """Sample ``samples`` completions per prompt; seconds of the whole call."""
    COMPILES.take()
    start = protocol.clock()
    tokens = [
        completion.token_ids.tolist() for completion in generate(prompts, samples, new, temperature, seed)
    ]
    return {**protocol.since(start), "compiles": COMPILES.take()[0], "tokens": tokens}


def gap(prompts: list[list[int]], samples: int, new: int, temperature: float, seed: int) -> dict[str, Any]:
    """Difference between the engine's log-probs and those that the trainer computes for the same tokens."""
    completions = generate(prompts, samples, new, temperature, seed)
    rows = np.repeat(np.asarray(prompts, np.int32), samples, axis=0)
    tokens = np.concatenate([rows, np.stack([completion.token_ids for completion in completions])], axis=1)
    rollout = np.stack([completion.logprobs for completion in completions])
    difference = np.abs(log_probs(tokens, rows.shape[1], temperature) - rollout)
    return {"max": float(difference.max()), "mean": float(difference.mean())}


def log_probs(tokens: np.ndarray, prompt: int, temperature: float = 1.0) -> np.ndarray:
    """Log-probs ``[N, new]`` of the tokens after the prompt, by the scoring pass of the trainer."""
    score_jit = jax.jit(functools.partial(score_batch, State["model"], Objective(temperature=temperature)))
    batch = make_batch(tokens, prompt, np.zeros(len(tokens), np.float32))
    return np.asarray(score_jit(current_params(), {}, batch.put(None))[0])[:, prompt:]


def current_params() -> Any:
    """Parameters as loaded, or as trained so far."""
    return State["train"].params if "train" in State else State["params"]


def make_batch(tokens: np.ndarray, prompt: int, advantages: np.ndarray) -> PolicyBatch:
    return policy_batch(tokens[:, :prompt], tokens[:, prompt:], advantages, columns=tokens.shape[1])


def score(tokens: list[list[int]], prompt: int) -> dict[str, Any]:
    return {"log_probs": log_probs(np.asarray(tokens, np.int32), prompt).tolist()}


def prepare_training(learning_rate: float, prompt: int, new: int) -> dict[str, Any]:
    """The jitted step of the GRPO system, with its state donated as there."""
    optimizer = make_optimizer(OptimizerConfig(name="adamw", learning_rate=learning_rate, clip_norm=1.0))
    State["train"] = TrainState.create(State.pop("params"), optimizer, jax.random.key(0))
    objective = Objective(completion_columns=new)
    bound = functools.partial(grpo.train_step, State["model"], objective, optimizer)
    State["train_step"] = compilation.jit(bound, name="train_step", donate_argnums=0)
    return {}


def train_step(tokens: list[list[int]], prompt: int, advantages: list[float]) -> dict[str, Any]:
    """One optimizer step on one batch, with the making of the batch and the reading of the metrics."""
    ids = np.asarray(tokens, np.int32)
    COMPILES.take()
    start = protocol.clock()
    batch = make_batch(ids, prompt, np.asarray(advantages, np.float32)).put(None)
    State["train"], raw = State["train_step"](State["train"], batch)
    metrics = check_finite(raw, State["train"].params)
    jax.block_until_ready(State["train"])
    result = {"loss": metrics["loss"], "grad_norm": metrics["grad_norm"]}
    return {**result, **protocol.since(start), "compiles": COMPILES.take()[0]}


if __name__ == "__main__":
    protocol.serve(
        {
            "load": load,
            "prepare_sampler": prepare_sampler,
            "sample": sample,
            "gap": gap,
            "score": score,
            "prepare_training": prepare_training,
            "train_step": train_step,
        }
    )
