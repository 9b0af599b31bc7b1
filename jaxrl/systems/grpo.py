"""GRPO and its family: sample a group of answers per prompt, score them, use the group as baseline, take a step.

A step reads top to bottom in ``Grpo.step``:

    prompts -> completions (engine) -> rewards (host) -> advantages (host, whole batch) -> PolicyBatch -> train_step

What differs between GRPO, Dr. GRPO, DAPO, RLOO, GSPO, CISPO, ... is the advantage rule and the ``LossConfig``, chosen
by ``algorithm``; the train step knows none of these names. Formulas and sources: ``jaxrl.ops``.
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

from jaxrl import ops
from jaxrl.data.pipeline import PromptStream
from jaxrl.data.prompts import PromptExample
from jaxrl.data.source import PromptSource, load_prompts
from jaxrl.errors import ConfigError, NonFiniteError
from jaxrl.models.decoder import LanguageModel, Params
from jaxrl.models.load import ModelSource
from jaxrl.models.lora import merge_lora
from jaxrl.objectives import Objective, PolicyBatch, policy_batch, policy_gradient, score
from jaxrl.parallel.trees import combine
from jaxrl.rewards.base import RewardSpec
from jaxrl.rewards.reward_set import RewardSet
from jaxrl.rollout.engine import Engine
from jaxrl.rollout.types import Completion, EngineConfig, Request, SamplingParams
from jaxrl.runtime import compilation
from jaxrl.runtime.config import field
from jaxrl.runtime.optimizer import OptimizerConfig, make_schedule
from jaxrl.runtime.state import RunState, TrainState
from jaxrl.runtime.update import apply_gradients, check_finite
from jaxrl.systems._algorithm import AlgorithmConfig
from jaxrl.systems._evaluation import EvalConfig, Evaluator, reward_input
from jaxrl.systems._language import PromptFormat, Setup, setup
from jaxrl.systems._metrics import merge_parts
from jaxrl.systems._warm_start import WarmStart, warm_start

#: What the run key is folded with first, so that no two uses of it share a stream of random numbers.
ROLLOUT, EVALUATION, ORDER = range(3)


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """How completions are sampled."""

    prompts: int = field(16, "prompts per step")
    group_size: int = field(8, "completions per prompt")
    max_tokens: int = field(128, "most tokens of a completion, EOS included")
    temperature: float = field(1.0, "sampling temperature; also divides the logits of every training log-probability")
    top_k: int = field(0, "keep the k most probable tokens; 0 keeps all")
    top_p: float = field(1.0, "nucleus sampling; 1 keeps all")
    min_p: float = field(0.0, "keep tokens with this fraction of the best probability; 0 keeps all")
    stop_strings: tuple[str, ...] = field((), "texts that end a completion")
    stop_token_ids: tuple[int, ...] = field((), "ids that end a completion, besides EOS")
    slots: int = field(0, "completions decoded at once; 0: all of a step, at most 64")
    decode_chunk: int = field(16, "decode steps between two looks of the host")
    mask_truncated: bool = field(False, "do not train on completions that hit max_tokens (overlong filtering)")
    dynamic_sampling: bool = field(False, "replace groups of equal rewards by groups of further prompts (DAPO)")
    max_batches: int = field(4, "most rollout batches per step under dynamic_sampling")

    def sampling(self) -> SamplingParams:
        names = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "stop_token_ids", "stop_strings")
        return SamplingParams(**{name: getattr(self, name) for name in names})

    def validate(self) -> None:
        for name in ("prompts", "group_size", "max_tokens", "max_batches", "decode_chunk"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; give at least 1")
        if not self.temperature > 0:
            raise ConfigError(f"temperature is {self.temperature}; a policy gradient needs sampling, so give more than 0")


@dataclasses.dataclass(frozen=True)
class UpdateConfig:
    """How a rollout batch becomes optimizer steps."""

    minibatches: int = field(1, "optimizer steps per pass over the batch")
    epochs: int = field(1, "passes over the batch")
    order: str = field("prompts", "minibatches of whole groups in order (prompts), or of shuffled rows (rows)")
    micro_batches: int = field(1, "pieces of a minibatch computed one after the other; never changes the gradient")
    columns: int = field(0, "columns of a train batch; 0: those of the longest prompt + max_tokens")
    chunk_tokens: int = field(512, "tokens whose logits are in memory at once")

    def validate(self) -> None:
        for name in ("minibatches", "epochs", "micro_batches", "chunk_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; give at least 1")
        if self.order not in ("prompts", "rows"):
            raise ConfigError(f"order is {self.order!r}; use 'prompts' or 'rows'")


@dataclasses.dataclass(frozen=True)
class Config:
    """A GRPO run."""

    model: ModelSource
    data: PromptSource
    rewards: tuple[RewardSpec, ...] = field(doc="what is rewarded; their weighted sum counts")
    trainable: str = field("all", "all, lora, or last:K (the last K layers)")
    prompt: PromptFormat = field(PromptFormat(), "prompt format")
    rollout: RolloutConfig = field(RolloutConfig(), "sampling")
    algorithm: AlgorithmConfig = field(AlgorithmConfig(), "advantage rule and loss")
    update: UpdateConfig = field(UpdateConfig(), "update schedule")
    optimizer: OptimizerConfig = field(OptimizerConfig(), "optimizer")
    eval: EvalConfig = field(EvalConfig(), "held-out evaluation")
    warm_start: WarmStart | None = field(None, "supervised phase before the first step, for models that start at random")
    reward_workers: int = field(2, "processes for isolated rewards")
    export: bool = field(True, "write a Hugging Face directory at the end of the run")

    def validate(self) -> None:
        rows, minibatches = self.rollout.prompts * self.rollout.group_size, self.update.minibatches
        unit = self.rollout.prompts if self.update.order == "prompts" else rows
        if unit % minibatches:
            raise ConfigError(
                f"update.minibatches={minibatches} does not divide the {unit} {self.update.order} of a step; use a divisor"
            )
        if (rows // minibatches) % self.update.micro_batches:
            raise ConfigError(
                f"update.micro_batches={self.update.micro_batches} does not divide the {rows // minibatches} rows of a "
                "minibatch; use a divisor"
            )
        if self.warm_start is not None and not (self.eval.prompts and self.eval.samples):
            raise ConfigError("warm_start stops by the sampled accuracy; set eval.prompts and eval.samples above 0")
        if self.rollout.group_size == 1 and not self.algorithm.resolve().advantage.allow_singleton:
            raise ConfigError(
                "rollout.group_size=1 leaves nothing to compare a completion with; use at least 2, or set "
                "algorithm.allow_singleton"
            )


# --- the pure part: importable without anything else of this file ------------------------------------------------


def train_step(
    model: LanguageModel,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    state: TrainState,
    batch: PolicyBatch,
    kl_coef: jax.Array | None = None,
    *,
    micro_batches: int = 1,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One optimizer step on a scored batch; pure, to be jitted with the first three arguments bound.

    Args:
      model, objective, optimizer: static.
      state: train state; may be donated.
      batch: ALL rows of the step, with advantages.
      kl_coef: scalar from an adaptive controller.
      micro_batches: see ``policy_gradient``.

    Returns:
      New state and scalar metrics; pass the metrics through ``runtime.update.check_finite``.
    """
    grads, metrics = policy_gradient(
        model, objective, state.params, state.frozen, batch, micro_batches=micro_batches, kl_coef=kl_coef
    )
    return apply_gradients(optimizer, state, grads, metrics)


# --- the host part -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Scored:
    """Completions of whole groups with their rewards."""

    prompts: list[PromptExample]
    completions: list[Completion]
    group_ids: np.ndarray
    components: np.ndarray
    rewards: np.ndarray

    def take(self, rows: np.ndarray) -> Scored:
        pick = lambda items: [items[i] for i in rows]  # noqa: E731
        arrays = (x[rows] for x in (self.group_ids, self.components, self.rewards))
        return Scored(pick(self.prompts), pick(self.completions), *arrays)

    @staticmethod
    def join(parts: Sequence[Scored]) -> Scored:
        arrays = (np.concatenate([getattr(p, n) for p in parts]) for n in ("group_ids", "components", "rewards"))
        return Scored(sum((p.prompts for p in parts), []), sum((p.completions for p in parts), []), *arrays)


class Grpo:
    """The system: everything that is built once, and the host side of a step."""

    def __init__(self, config: Config, parts: Setup):
        self.config, self.parts = config, parts
        self.model, self.tokenizer = parts.model, parts.tokenizer
        preset = config.algorithm.resolve()
        config.algorithm.check_sampling(config.rollout.sampling(), preset)
        self.preset = preset
        self.objective = Objective(
            loss=preset.loss,
            temperature=config.rollout.temperature,
            completion_columns=config.rollout.max_tokens,
            chunk_tokens=config.update.chunk_tokens,
        )
        train, heldout = load_prompts(config.data)
        self.examples = config.prompt.encode(self.tokenizer, train, "training prompts")
        self.stream = PromptStream(self.examples, config.data.seed)
        heldout = config.prompt.encode(self.tokenizer, heldout, "held-out prompts") if heldout else []
        self.rewards = RewardSet(config.rewards, workers=config.reward_workers)
        longest = _prefill_length(
            max(len(example.prompt_ids) for example in [*self.examples, *heldout]),
            self.model.config.max_position - config.rollout.max_tokens,
        )
        self.columns = config.update.columns or longest + config.rollout.max_tokens
        rows = config.rollout.prompts * config.rollout.group_size
        pieces = config.update.minibatches * config.update.micro_batches
        ways = 1
        if parts.sharding is not None:
            ways = parts.sharding.batch_ways
            what = "a micro-batch (rollout.prompts x group_size / update.minibatches / update.micro_batches)"
            parts.sharding.check_batch(rows // pieces, what)
        # Adapters are merged into the weights for decoding: one product per matrix and rollout, not per token.
        plain = LanguageModel(self.model.config.replace(lora=None), self.model.sharding)
        engine_config = EngineConfig(
            max_prompt_len=longest,
            max_len=longest + config.rollout.max_tokens,
            # One bucket: a step whose prompts happen to be short must not compile again.
            prompt_buckets=(longest,),
            cache_buckets=(longest + config.rollout.max_tokens,),
            slots=config.rollout.slots or min(rows, max(64 // ways, 1) * ways),
            decode_chunk=config.rollout.decode_chunk,
        )
        self.engine = Engine(plain, engine_config, self.tokenizer)
        self.evaluator = Evaluator(
            config.eval, self.engine, self.tokenizer, self.rewards, heldout, config.rollout.sampling()
        )
        self._schedule = make_schedule(config.optimizer)
        bound = functools.partial(
            train_step, self.model, self.objective, parts.optimizer, micro_batches=config.update.micro_batches
        )
        self._train = parts.jit_step(bound)
        self._score = compilation.jit(
            functools.partial(score, self.model, self.objective, micro_batches=pieces), name="score"
        )
        self._merged = compilation.jit(lambda p, f: merge_lora(self.model, combine(p, f))[1], name="merge_lora")
        updates = config.update.minibatches * config.update.epochs
        # With a single update per batch the trainer's log-probabilities at sampling time are those of the step itself.
        self.needs_old = updates > 1 or preset.correction is not None
        self.needs_reference = preset.loss.kl_coef != 0 or config.algorithm.kl_target is not None
        self.adaptive_kl = config.algorithm.kl_target is not None

    # -- loop interface

    def init(self, key: jax.Array) -> RunState:
        state = self.parts.init(key)
        if self.config.warm_start is not None:
            state = warm_start(
                self.config.warm_start,
                self.model,
                self.tokenizer,
                self.examples,
                state,
                lambda warm: self._evaluate(warm)["accuracy_sampled"],
                self.config.data.seed,
            )
        return self._run_state(state)

    def template(self, key: jax.Array) -> RunState:
        """A state of the right structure for a checkpoint to be read into; no warm start."""
        return self._run_state(self.parts.init(key))

    def _run_state(self, state: TrainState) -> RunState:
        reference: Params = jax.tree.map(lambda x: x.copy(), state.params) if self.needs_reference else {}
        host: dict[str, Any] = {"position": 0}
        if self.adaptive_kl:
            host["kl_coef"] = self.preset.loss.kl_coef
        return RunState({"train": state, "reference": reference}, host)

    def step(self, state: RunState) -> tuple[RunState, dict[str, float]]:
        train: TrainState = state.device["train"]
        host = dict(state.host)
        scored, metrics, host["position"] = self._rollout(train, host["position"])
        batch = self._batch(scored)
        batch = self._with_old_and_reference(batch, train, state.device["reference"])
        kl_coef = np.float32(host["kl_coef"]) if self.adaptive_kl else None
        results = []
        for rows in self._minibatches(train, batch.rows):
            part = batch.take(rows).put(self.parts.sharding)
            train, raw = self._train(train, part, kl_coef)
            try:
                results.append(check_finite(raw, train.params, f"position {state.host['position']}"))
            except NonFiniteError as error:
                error.state = RunState({**state.device, "train": train}, state.host)
                raise
        metrics |= merge_parts(results)
        if self.adaptive_kl:
            a = self.config.algorithm
            host["kl_coef"] = ops.adapt_kl_coef(host["kl_coef"], metrics["kl"], a.kl_target, a.kl_horizon, batch.rows)
            metrics["kl_coef"] = host["kl_coef"]
        metrics["learning_rate"] = float(self._schedule(int(train.step) - 1))
        return RunState({**state.device, "train": train}, host), metrics

    def evaluate(self, state: RunState) -> dict[str, float]:
        return self._evaluate(state.device["train"])

    def _evaluate(self, train: TrainState) -> dict[str, float]:
        return self.evaluator(self._sampling_params(train), jax.random.fold_in(train.key, EVALUATION))

    def samples(self, state: RunState) -> list[dict[str, Any]]:
        del state  # the samples of the evaluation that was just made
        return self.evaluator.samples

    def finish(self, state: RunState, run_dir: str | pathlib.Path) -> None:
        if self.config.export:
            self.parts.export(state.device["train"], run_dir)
        self.rewards.close()

    def describe(self) -> dict[str, Any]:
        return self.parts.describe()

    # -- pieces of a step

    def _sampling_params(self, train: TrainState) -> Params:
        if self.model.config.lora is None:
            return combine(train.params, train.frozen)
        return self._merged(train.params, train.frozen)

    def _rollout(self, train: TrainState, position: int) -> tuple[Scored, dict[str, float], int]:
        """Whole groups for one step; under dynamic sampling, from as many batches of prompts as it takes."""
        c = self.config.rollout
        params, key = self._sampling_params(train), jax.random.fold_in(train.key, ROLLOUT)
        kept: list[Scored] = []
        spare: list[Scored] = []
        wanted = c.prompts * c.group_size
        batches: list[dict[str, float]] = []
        for _ in range(c.max_batches if c.dynamic_sampling else 1):
            scored, metrics = self._sample(params, key, position)
            position += c.prompts
            if not c.dynamic_sampling:
                return scored, metrics, position
            batches.append(metrics)
            keep = ops.keep_groups(scored.rewards, scored.group_ids)
            kept.append(scored.take(np.flatnonzero(keep)))
            spare.append(scored.take(np.flatnonzero(~keep)))
            if sum(len(part.rewards) for part in kept) >= wanted:
                break
        # Too few informative groups: fill up with flat ones. Their advantages are 0; shapes stay the same.
        useful = sum(len(part.rewards) for part in kept)
        chosen = Scored.join([*kept, *spare]).take(np.arange(wanted))
        metrics = merge_parts(batches)
        metrics["dynamic_sampling/batches"] = len(batches)
        metrics["dynamic_sampling/flat_groups"] = max(wanted - useful, 0) / c.group_size
        return chosen, metrics, position

    def _sample(self, params: Params, key: jax.Array, position: int) -> tuple[Scored, dict[str, float]]:
        """One batch of prompts, a group of completions each, scored while others are still being decoded."""
        c = self.config.rollout
        examples = self.stream.batch(position, c.prompts)
        sampling = c.sampling()
        requests = [
            Request(example.prompt_ids, position + i, s, sampling)
            for i, example in enumerate(examples)
            for s in range(c.group_size)
        ]
        pending: dict[tuple[int, int], Any] = {}

        def on_finish(request: Request, completion: Completion) -> None:
            row = reward_input(self.tokenizer, examples[request.prompt_id - position], completion)
            pending[request.prompt_id, request.sample_id] = self.rewards.submit(row)

        completions = self.engine.generate(params, requests, key, on_finish)
        result = self.rewards.collect([pending[r.prompt_id, r.sample_id] for r in requests])
        rewards, _ = ops.combine_rewards(result.R, np.asarray(result.weights))
        group_ids = np.array([r.prompt_id for r in requests])
        lengths = np.array([done.token_ids.size for done in completions])
        truncated = np.array([done.finish_reason == "length" for done in completions])
        columns = dict(zip(result.names, result.R.T, strict=True))
        metrics = {**result.metrics, **ops.batch_statistics(rewards, group_ids, lengths, truncated, columns)}
        stats = self.engine.stats
        metrics |= {
            "tokens": float(lengths.sum()),
            "rollout/slot_utilisation": stats.utilisation(self.engine.config.slots),
            "time/rollout_seconds": stats.seconds,
        }
        scored = Scored([examples[g - position] for g in group_ids], completions, group_ids, result.R, rewards)
        return scored, metrics

    def _batch(self, scored: Scored) -> PolicyBatch:
        lengths = np.array([done.token_ids.size for done in scored.completions])
        advantages = ops.compute_advantages(
            self.preset.advantage,
            scored.rewards,
            scored.group_ids,
            lengths,
            num_columns=self.config.rollout.max_tokens,
            components=scored.components,
            component_weights=np.asarray(self.rewards.weights),
        )
        batch = policy_batch(
            [prompt.prompt_ids for prompt in scored.prompts],
            [done.token_ids for done in scored.completions],
            advantages,
            columns=self.columns,
            sampler_logps=[done.logprobs for done in scored.completions],
        )
        drop = np.isnan(scored.rewards)  # no reward could judge the row
        if self.config.rollout.mask_truncated:
            drop |= np.array([done.finish_reason == "length" for done in scored.completions])
        return batch.replace(loss_mask=ops.mask_truncated(batch.loss_mask, drop))

    def _with_old_and_reference(self, batch: PolicyBatch, train: TrainState, reference: Params) -> PolicyBatch:
        """Log-probabilities that are constants of the step, each by one forward pass, and the mismatch correction."""
        if not (self.needs_old or self.needs_reference):
            return batch
        placed = batch.put(self.parts.sharding)
        if self.needs_reference:
            ref_logp, _ = self._score(reference, train.frozen, placed)
            batch = batch.replace(ref_logp=np.asarray(ref_logp))
        if self.needs_old:
            old_logp, _ = self._score(train.params, train.frozen, placed)
            batch = batch.replace(old_logp=np.asarray(old_logp))
        if self.preset.correction is not None:
            corrected = ops.correct_mismatch(
                self.preset.correction, batch.old_logp, batch.sampler_logp, batch.loss_mask
            )
            weights = None if corrected.weights is None else np.asarray(corrected.weights, np.float32)
            batch = batch.replace(loss_mask=np.asarray(corrected.mask, bool), weights=weights)
        return batch

    def _minibatches(self, train: TrainState, rows: int) -> list[np.ndarray]:
        """Row indices of each optimizer step of this batch."""
        c = self.config.update
        order = np.arange(rows)
        parts: list[np.ndarray] = []
        for epoch in range(c.epochs):
            if c.order == "rows":
                key = jax.random.fold_in(jax.random.fold_in(train.key, ORDER), int(train.step))
                order = np.asarray(jax.random.permutation(jax.random.fold_in(key, epoch), rows))
            parts += np.split(order, c.minibatches)
        return parts


def _prefill_length(longest: int, most: int) -> int:
    """Columns for prompts of up to ``longest`` tokens: whole pieces where the engine prefills in pieces."""
    piece = EngineConfig.prefill_chunk
    return longest if longest <= piece else max(longest, min(-(-longest // piece) * piece, most))


def build(config: Config, mesh: Mesh | None = None, tokenizer: Any = None) -> Grpo:
    """The system of a configuration, on a mesh (None: one device)."""
    return Grpo(config, setup(config.model, config.trainable, config.optimizer, mesh, tokenizer))
