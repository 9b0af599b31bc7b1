"""Supervised fine-tuning: cross-entropy on the assistant's tokens, with sequences packed into rows.

The device step is the policy step with advantage 1 and the surrogate ``-A log p``: its gradient is that of the
cross-entropy. A step takes the next ``rows`` packed rows of a reshuffled, endless stream.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from jaxrl.data.chat import render_sft
from jaxrl.data.packing import Rows, pack
from jaxrl.data.pipeline import Stream
from jaxrl.data.prompts import PromptExample
from jaxrl.data.source import PromptSource, load_prompts
from jaxrl.errors import ConfigError, DataError, NonFiniteError
from jaxrl.models.decoder import LanguageModel
from jaxrl.models.load import ModelSource
from jaxrl.objectives import Objective, PolicyBatch, policy_gradient, score
from jaxrl.ops.loss import LossConfig
from jaxrl.ops.policy_loss import PolicyLossConfig
from jaxrl.runtime import compilation
from jaxrl.runtime.config import field
from jaxrl.runtime.optimizer import OptimizerConfig, make_schedule
from jaxrl.runtime.state import RunState, TrainState
from jaxrl.runtime.update import apply_gradients, check_finite
from jaxrl.systems._language import PromptFormat, Setup, setup

#: Cross-entropy as a policy loss: -A log p with A = 1, averaged over all trained tokens of the step.
CROSS_ENTROPY = LossConfig(policy=PolicyLossConfig("reinforce"))


@dataclasses.dataclass(frozen=True)
class Config:
    """An SFT run. The data's ``answer`` is what the assistant should say to its ``prompt``."""

    model: ModelSource
    data: PromptSource
    trainable: str = field("all", "all, lora, or last:K (the last K layers)")
    prompt: PromptFormat = field(PromptFormat(), "prompt format; max_prompt_len limits the whole sequence")
    append_eos: bool = field(True, "without a chat template: end the answer with EOS")
    row_length: int = field(512, "columns of a packed row")
    rows: int = field(8, "packed rows per step")
    micro_batches: int = field(1, "pieces of a step computed one after the other; never changes the gradient")
    chunk_tokens: int = field(512, "tokens whose logits are in memory at once")
    optimizer: OptimizerConfig = field(OptimizerConfig(learning_rate=1e-5), "optimizer")
    export: bool = field(True, "write a Hugging Face directory at the end of the run")

    def validate(self) -> None:
        for name in ("row_length", "rows", "micro_batches", "chunk_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; give at least 1")
        if self.rows % self.micro_batches:
            raise ConfigError(f"micro_batches={self.micro_batches} does not divide rows={self.rows}; use a divisor")


# --- the pure part -----------------------------------------------------------------------------------------------


def train_step(
    model: LanguageModel,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    state: TrainState,
    batch: PolicyBatch,
    *,
    micro_batches: int = 1,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One optimizer step on packed rows; pure. ``batch`` as from ``sft_batch``; ``objective.loss`` CROSS_ENTROPY."""
    grads, metrics = policy_gradient(model, objective, state.params, state.frozen, batch, micro_batches=micro_batches)
    return apply_gradients(optimizer, state, grads, metrics)


def sft_batch(rows: Rows, index: Sequence[int] | np.ndarray | None = None) -> PolicyBatch:
    """Packed rows (all, or those of ``index``) as a batch with advantage 1 on the trained tokens."""
    pick = (lambda x: x) if index is None else (lambda x: x[np.asarray(index)])
    mask = pick(rows.loss_mask) > 0
    return PolicyBatch(
        pick(rows.tokens), mask, mask.astype(np.float32), positions=pick(rows.positions), segment_ids=pick(rows.segment_ids)
    )


# --- the host part -----------------------------------------------------------------------------------------------


def tokenize(
    tokenizer: Any, examples: Sequence[PromptExample], prompt: PromptFormat, append_eos: bool = True
) -> list[tuple[list[int], list[int]]]:
    """Token ids and train mask of each example: through the chat template, or prompt + answer without one.

    Raises:
      DataError: an example has no answer.
    """
    template = prompt.template()
    has_template = template is not None or getattr(tokenizer, "chat_template", None) is not None
    sequences = []
    for example in examples:
        if example.answer is None:
            raise DataError(f"example {example.id} has no answer to train on; give one, or set data.answer_field")
        if has_template:
            turn = {"role": "assistant", "content": example.answer}
            opening = [{"role": "user", "content": example.prompt}] if isinstance(example.prompt, str) else example.prompt
            sequences.append(render_sft(tokenizer, [*opening, turn], prompt.system, template))
        else:
            head, tail = list(tokenizer.encode(example.text)), list(tokenizer.encode(example.answer))
            tail += [tokenizer.eos_token_id] if append_eos else []
            sequences.append((head + tail, [0] * len(head) + [1] * len(tail)))
    return sequences


class Sft:
    """The system: packed data, and the host side of a step."""

    def __init__(self, config: Config, parts: Setup):
        self.config, self.parts = config, parts
        self.model, self.tokenizer = parts.model, parts.tokenizer
        self.objective = Objective(loss=CROSS_ENTROPY, chunk_tokens=config.chunk_tokens)
        if parts.sharding is not None:
            parts.sharding.check_batch(config.rows // config.micro_batches, "a micro-batch (rows / micro_batches)")
        train, heldout = load_prompts(config.data)
        self.rows = self._pack(train)
        self.heldout = self._pack(heldout) if heldout else None
        self.stream = Stream(range(len(self.rows.tokens)), config.data.seed)
        bound = functools.partial(
            train_step, self.model, self.objective, parts.optimizer, micro_batches=config.micro_batches
        )
        self._train = parts.jit_step(bound)
        self._score = compilation.jit(functools.partial(score, self.model, self.objective), name="score")
        self._schedule = make_schedule(config.optimizer)

    def _pack(self, examples: Sequence[PromptExample]) -> Rows:
        c = self.config
        sequences = tokenize(self.tokenizer, examples, c.prompt, c.append_eos)
        return pack(sequences, c.row_length, getattr(self.tokenizer, "pad_token_id", None) or 0, on_long=c.prompt.on_long)

    def init(self, key: jax.Array) -> RunState:
        return RunState(self.parts.init(key), {"position": 0})

    def step(self, state: RunState) -> tuple[RunState, dict[str, float]]:
        position = state.host["position"]
        batch = sft_batch(self.rows, self.stream.batch(position, self.config.rows))
        train, raw = self._train(state.device, batch.put(self.parts.sharding))
        try:
            metrics = check_finite(raw, train.params, f"rows {position}..{position + self.config.rows - 1}")
        except NonFiniteError as error:
            error.state = RunState(train, state.host)
            raise
        kept = ("loss", "grad_norm", "update_norm", "entropy")
        metrics = {name: metrics[name] for name in kept} | {"tokens": metrics["loss_tokens"]}
        metrics["epoch"] = (position + self.config.rows) / len(self.stream)
        metrics["learning_rate"] = float(self._schedule(int(train.step) - 1))
        return RunState(train, {"position": position + self.config.rows}), metrics

    def evaluate(self, state: RunState) -> dict[str, float]:
        """Loss and perplexity on the held-out examples, over all trained tokens."""
        if self.heldout is None:
            return {}
        total, number, rows = 0.0, 0, self.config.rows
        count = len(self.heldout.tokens)
        for start in range(0, count, rows):
            index = np.arange(start, start + rows)
            batch = sft_batch(self.heldout, np.minimum(index, count - 1))
            batch = batch.replace(loss_mask=batch.loss_mask & (index < count)[:, None])  # same shape for the last piece
            train: TrainState = state.device
            logp, _ = self._score(train.params, train.frozen, batch.put(self.parts.sharding))
            total -= float(np.sum(np.asarray(logp), dtype=np.float64))
            number += int(np.sum(batch.loss_mask))
        return {"loss": total / number, "perplexity": float(np.exp(min(total / number, 700.0)))}

    def finish(self, state: RunState, run_dir: str | pathlib.Path) -> None:
        if self.config.export:
            self.parts.export(state.device, run_dir)

    def describe(self) -> dict[str, Any]:
        return self.parts.describe() | {"packed rows": len(self.rows.tokens), "row fill": f"{self.rows.fill:.0%}"}


def build(config: Config, mesh: Mesh | None = None, tokenizer: Any = None) -> Sft:
    """The system of a configuration, on a mesh (None: one device)."""
    return Sft(config, setup(config.model, config.trainable, config.optimizer, mesh, tokenizer))
