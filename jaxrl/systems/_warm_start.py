"""A short cross-entropy phase before RL, for models that start at random: until they are right often enough to learn."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from jaxrl.data.packing import pad_rows
from jaxrl.data.pipeline import Stream
from jaxrl.data.prompts import PromptExample
from jaxrl.errors import ConfigError
from jaxrl.models.decoder import LanguageModel
from jaxrl.objectives import Objective
from jaxrl.runtime.config import field
from jaxrl.runtime.optimizer import OptimizerConfig, make_optimizer
from jaxrl.runtime.state import TrainState
from jaxrl.runtime.update import check_finite
from jaxrl.systems import sft
from jaxrl.systems._language import PromptFormat

logger = logging.getLogger("jaxrl")


@dataclasses.dataclass(frozen=True)
class WarmStart:
    """Supervised steps on the training prompts and their answers, before the first RL step."""

    max_steps: int = field(600, "most optimizer steps")
    until_accuracy: float = field(0.25, "stop when the sampled accuracy on held-out prompts reaches this")
    check_every: int = field(20, "steps between two measurements")
    rows: int = field(128, "sequences per step")
    append_eos: bool = field(False, "end answers with EOS")
    optimizer: OptimizerConfig = field(OptimizerConfig(name="adam", learning_rate=2e-3, clip_norm=None), "optimizer")

    def validate(self) -> None:
        if min(self.max_steps, self.check_every, self.rows) < 1 or not 0 < self.until_accuracy <= 1:
            raise ConfigError("warm_start needs max_steps, check_every, rows >= 1 and until_accuracy in (0, 1]")


def warm_start(
    config: WarmStart,
    model: LanguageModel,
    tokenizer: Any,
    examples: Sequence[PromptExample],
    state: TrainState,
    accuracy: Callable[[TrainState], float],
    seed: int,
) -> TrainState:
    """Train until the accuracy is reached; the optimizer state of ``state`` is left as it is (fresh for RL).

    Args:
      accuracy: sampled accuracy of a state.
      seed: of the order of the examples.
    """
    optimizer = make_optimizer(config.optimizer)
    rows = pad_rows(sft.tokenize(tokenizer, examples, PromptFormat(), config.append_eos), [_longest(tokenizer, examples)], 0)
    stream = Stream(range(len(rows.tokens)), seed)
    step = jax.jit(functools.partial(sft.train_step, model, Objective(loss=sft.CROSS_ENTROPY), optimizer), donate_argnums=0)
    # Its own copies: the step donates its state, and the caller's must stay whole.
    warm = TrainState.create(jax.tree.map(lambda x: x.copy(), state.params), optimizer, state.key.copy(), {})
    warm = warm.replace(frozen=jax.tree.map(lambda x: x.copy(), state.frozen))
    reached, loss = 0.0, float("nan")
    with tqdm(total=config.max_steps, desc="warm start", unit="step") as bar:
        for number in range(config.max_steps):
            batch = sft.sft_batch(rows, stream.batch(number * config.rows, config.rows))
            batch = batch.replace(positions=None, segment_ids=None).put(model.sharding)
            warm, raw = step(warm, batch)
            bar.update()
            if (number + 1) % config.check_every == 0 or number + 1 == config.max_steps:
                loss = check_finite(raw, warm.params, f"warm start, step {number}")["loss"]
                reached = accuracy(warm)
                bar.set_postfix(loss=f"{loss:.3f}", accuracy=f"{reached:.3f}")
                if reached >= config.until_accuracy:
                    break
    logger.info("warm start: accuracy %.3f after %d steps, loss %.3f", reached, number + 1, loss)
    if reached < config.until_accuracy:
        raise ConfigError(
            f"the warm start ended at accuracy {reached:.3f} after {config.max_steps} steps, below "
            f"until_accuracy={config.until_accuracy}; raise warm_start.max_steps or lower until_accuracy"
        )
    return state.replace(params=warm.params)


def _longest(tokenizer: Any, examples: Sequence[PromptExample]) -> int:
    return int(np.max([len(tokenizer.encode(e.text)) + len(tokenizer.encode(e.answer or "")) + 1 for e in examples]))
