"""Worker for jaxrl: its slot engine and its GRPO device step."""

from __future__ import annotations

from typing import Any

import compile_counter
import jax
import jax.numpy as jnp
import numpy as np
import protocol

import jaxrl
from jaxrl.models import LanguageModel
from jaxrl.models.hf import load_hf
from jaxrl.ops.logprobs import token_logprobs
from jaxrl.rollout import Engine, EngineConfig, Request, SamplingParams

COMPILES = compile_counter.CompileCounter()
State: dict[str, Any] = {}


def load(model_dir: str) -> dict[str, Any]:
    """Load the weights in float32."""
    config, params = load_hf(model_dir)
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
    return State["engine"].generate(State["params"], requests, jax.random.key(seed))


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


@jax.jit
def _score(params: Any, tokens: jax.Array, mask: jax.Array, temperature: jax.Array) -> jax.Array:
    model = State["model"]
    hidden = model.forward(params, tokens[:, :-1]).hidden
    return token_logprobs(hidden, model.head(params), tokens[:, 1:], mask[:, 1:], temperature=temperature)[0]


def log_probs(tokens: np.ndarray, prompt: int, temperature: float = 1.0) -> np.ndarray:
    """Log-probs ``[N, new]`` of the tokens after the prompt, as the train step computes them."""
    mask = np.arange(tokens.shape[1]) >= prompt
    values = _score(
        State["params"], jnp.asarray(tokens), jnp.asarray(mask * np.ones_like(tokens)), temperature
    )
    return np.asarray(values)[:, prompt - 1 :]


def score(tokens: list[list[int]], prompt: int) -> dict[str, Any]:
    return {"log_probs": log_probs(np.asarray(tokens, np.int32), prompt).tolist()}


if __name__ == "__main__":
    protocol.serve(
        {
            "load": load,
            "prepare_sampler": prepare_sampler,
            "sample": sample,
            "gap": gap,
            "score": score,
        }
    )
