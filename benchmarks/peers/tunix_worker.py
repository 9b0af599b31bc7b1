"""Worker for google-tunix: its Llama model, its vanilla sampler, and the train step its trainer builds."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import pathlib
from typing import Any

import compile_counter
import jax
import jax.numpy as jnp
import numpy as np
import optax
import protocol
from flax import nnx
from tunix.generate import sampler as tunix_sampler
from tunix.models.llama3 import model as llama
from tunix.models.llama3 import params as llama_params
from tunix.rl import algo_core, common
from tunix.rl.grpo import grpo_learner

COMPILES = compile_counter.CompileCounter()
State: dict[str, Any] = {}


class IdTokenizer:
    """Text is token ids in decimal. Pad and EOS are ids outside the vocabulary, so neither can ever be sampled."""

    def __init__(self, vocab_size: int):
        self._vocab_size = vocab_size

    def encode(self, text: str, **_: Any) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int], **_: Any) -> str:
        return " ".join(str(token) for token in ids)

    def bos_id(self) -> int:
        return 0  # falsy: tunix then adds none

    def pad_id(self) -> int:
        return self._vocab_size

    def eos_id(self) -> int:
        return self._vocab_size + 1


def load(model_dir: str) -> dict[str, Any]:
    """Load the weights in float32 by tunix's own safetensors loader."""
    hf = json.loads((pathlib.Path(model_dir) / "config.json").read_text())
    config = llama.ModelConfig(
        num_layers=hf["num_hidden_layers"],
        vocab_size=hf["vocab_size"],
        embed_dim=hf["hidden_size"],
        hidden_dim=hf["intermediate_size"],
        num_heads=hf["num_attention_heads"],
        head_dim=hf["head_dim"],
        num_kv_heads=hf["num_key_value_heads"],
        rope_theta=int(hf["rope_theta"]),
        norm_eps=hf["rms_norm_eps"],
        weight_tying=hf["tie_word_embeddings"],
    )
    # tunix 0.1.7 never hands config.rope_theta to this function; without it the model would be another one.
    llama.apply_rope = functools.partial(llama.apply_rope, rope_theta=config.rope_theta)
    model = llama_params.create_model_from_safe_tensors(model_dir, config, dtype=jnp.float32)
    State.update(model=model, config=config, tokenizer=IdTokenizer(config.vocab_size))
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    jax.block_until_ready(leaves)
    version = f"tunix {importlib.metadata.version('google-tunix')}, jax {jax.__version__}"
    return {"version": version, "parameters": sum(leaf.size for leaf in leaves)}


def prepare_sampler(rows: int, prompt: int, new: int, samples: int) -> dict[str, Any]:
    config = State["config"]
    cache = tunix_sampler.CacheConfig(prompt + new, config.num_layers, config.num_kv_heads, config.head_dim)
    State["sampler"] = tunix_sampler.Sampler(State["model"], State["tokenizer"], cache)
    return {"logprobs": "yes"}


def generate(prompts: list[list[int]], samples: int, new: int, temperature: float, seed: int) -> Any:
    texts = [State["tokenizer"].decode(ids) for ids in prompts for _ in range(samples)]
    return State["sampler"](
        texts,
        max_generation_steps=new,
        max_prompt_length=len(prompts[0]),
        temperature=temperature,
        top_p=1.0,
        seed=seed,
        return_logprobs=True,
    )


def sample(prompts: list[list[int]], samples: int, new: int, temperature: float, seed: int) -> dict[str, Any]:
    """Sample ``samples`` completions per prompt; seconds of the whole call, text handling included (microseconds)."""
    COMPILES.take()
    start = protocol.clock()
    output = generate(prompts, samples, new, temperature, seed)
    tokens = [np.asarray(row).tolist() for row in output.tokens]
    return {**protocol.since(start), "compiles": COMPILES.take()[0], "tokens": tokens}


def gap(prompts: list[list[int]], samples: int, new: int, temperature: float, seed: int) -> dict[str, Any]:
    """Difference between the sampler's log-probs and those that the trainer computes for the same tokens."""
    output = generate(prompts, samples, new, temperature, seed)
    completion = np.stack([np.asarray(row) for row in output.tokens])
    trainer = log_probs(np.asarray(output.padded_prompt_tokens), completion, temperature)
    difference = np.abs(trainer - np.asarray(output.logprobs))
    return {"max": float(difference.max()), "mean": float(difference.mean())}


def log_probs(prompt_tokens: np.ndarray, completion: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    graphdef, state = nnx.split(State["model"])
    tokenizer = State["tokenizer"]
    values = common.compute_per_token_logps(
        graphdef,
        state,
        jnp.asarray(prompt_tokens),
        jnp.asarray(completion),
        pad_id=tokenizer.pad_id(),
        eos_id=tokenizer.eos_id(),
        temperature=temperature,
    )
    return np.asarray(values[0] if isinstance(values, tuple) else values)


def score(tokens: list[list[int]], prompt: int) -> dict[str, Any]:
    ids = np.asarray(tokens, np.int32)
    return {"log_probs": log_probs(ids[:, :prompt], ids[:, prompt:]).tolist()}


def prepare_training(learning_rate: float, prompt: int, new: int) -> dict[str, Any]:
    """The step of tunix's trainer: ``nnx.value_and_grad``, ``nnx.Optimizer``, ``nnx.jit`` with a cached graph."""
    config = grpo_learner.GRPOConfig(num_generations=4, num_iterations=1, beta=0.0, epsilon=0.2)
    config.temperature = 1.0
    tokenizer = State["tokenizer"]
    chain = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(learning_rate, weight_decay=0.0))
    optimizer = nnx.Optimizer(State["model"], chain, wrt=nnx.Param)

    def train_step(model: Any, optimizer: Any, example: Any) -> Any:
        def loss_fn(model: Any, example: Any) -> Any:
            return algo_core.grpo_loss_fn(
                model, example, algo_config=config, pad_id=tokenizer.pad_id(), eos_id=tokenizer.eos_id()
            )

        (loss, aux), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, example)
        grad_norm = optax.global_norm(grads)
        optimizer.update(model, grads)
        return loss, aux, grad_norm

    jitted = nnx.jit(train_step, donate_argnames=("optimizer",))
    State["train_step"] = nnx.cached_partial(jitted, State["model"], optimizer)
    return {}


def train_step(tokens: list[list[int]], prompt: int, advantages: list[float]) -> dict[str, Any]:
    """One optimizer step on one batch."""
    ids = np.asarray(tokens, np.int32)
    completion = ids[:, prompt:]
    COMPILES.take()
    start = protocol.clock()
    example = grpo_learner.TrainExample(
        prompt_ids=jnp.asarray(ids[:, :prompt]),
        prompt_mask=jnp.ones((ids.shape[0], prompt), bool),
        completion_ids=jnp.asarray(completion),
        completion_mask=jnp.ones(completion.shape, bool),
        advantages=jnp.asarray(advantages, jnp.float32),
        ref_per_token_logps=None,
        old_per_token_logps=None,
    )
    loss, _, grad_norm = State["train_step"](example)
    jax.block_until_ready(nnx.state(State["model"], nnx.Param))
    result = {"loss": float(loss), "grad_norm": float(grad_norm)}
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
