"""Held-out evaluation of a language model: greedy accuracy, pass@1, pass@k, maj@k, and sample completions."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from jaxrl.data.prompts import PromptExample
from jaxrl.errors import ConfigError
from jaxrl.models.decoder import Params
from jaxrl.ops.evaluation import majority_at_k, pass_at_k
from jaxrl.rewards.base import RewardInput
from jaxrl.rewards.extract import check_extractor, extract
from jaxrl.rewards.reward_set import RewardSet
from jaxrl.rollout.engine import Engine
from jaxrl.rollout.types import Completion, Request, SamplingParams
from jaxrl.runtime.config import field


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """What is measured on held-out prompts. A completion is right when one chosen reward reaches a threshold."""

    prompts: int = field(64, "held-out prompts to use, the first of the split; 0 switches evaluation off")
    samples: int = field(4, "sampled completions per prompt, for pass@k and maj@k; 0: greedy only")
    k: tuple[int, ...] = field((1, 4), "values of k for pass@k; k <= samples")
    greedy: bool = field(True, "also decode greedily")
    temperature: float = field(1.0, "of the sampled completions")
    top_p: float = field(1.0, "of the sampled completions")
    reward: str | None = field(None, "column of the reward that decides what is right; None: the first")
    threshold: float = field(1.0, "a completion is right when that reward is at least this")
    answer: str | None = field(
        None, "how to extract the answer for maj@k (last_number, boxed, answer_tag, whole, ...); None: no maj@k"
    )

    def validate(self) -> None:
        if self.prompts < 0 or self.samples < 0:
            raise ConfigError(f"eval.prompts={self.prompts} and eval.samples={self.samples} must not be negative")
        if self.prompts and not (self.samples or self.greedy):
            raise ConfigError("eval.samples=0 and eval.greedy=False leave nothing to measure; set eval.prompts=0 for that")
        for k in self.k if self.samples else ():
            if not 1 <= k <= self.samples:
                raise ConfigError(f"eval.k has {k}, but eval.samples is {self.samples}; k must be in 1..samples")
        if self.answer is not None:
            check_extractor(self.answer)


class Evaluator:
    """Runs the engine on held-out prompts with random numbers of its own: the same in every evaluation."""

    def __init__(
        self,
        config: EvalConfig,
        engine: Engine,
        tokenizer: Any,
        rewards: RewardSet,
        prompts: list[PromptExample],
        sampling: SamplingParams,
    ):
        self.config, self.engine, self.tokenizer, self.rewards = config, engine, tokenizer, rewards
        self.prompts = prompts[: config.prompts]
        self.sampling = sampling
        if config.prompts and not self.prompts:
            raise ConfigError("evaluation is on but no prompt is held out; set data.heldout, or eval.prompts=0")
        column = config.reward or rewards.names[0]
        if column not in rewards.names:
            raise ConfigError(f"eval.reward={column!r} is not a reward of this run; choose one of {rewards.names}")
        self.column = rewards.names.index(column)
        self.samples: list[dict[str, Any]] = []

    def __call__(self, params: Params, key: jax.Array) -> dict[str, float]:
        """Metrics: ``accuracy_greedy``, ``accuracy_sampled`` (= pass@1), ``pass@k``, ``maj@k``, lengths, rewards."""
        c = self.config
        if not self.prompts:
            return {}
        groups: dict[str, tuple[int, SamplingParams]] = {}
        if c.greedy:
            groups["greedy"] = (1, dataclasses.replace(self.sampling, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0))
        if c.samples:
            sampled = dataclasses.replace(self.sampling, temperature=c.temperature, top_p=c.top_p, top_k=0, min_p=0.0)
            groups["sampled"] = (c.samples, sampled)
        requests, owners = [], []
        for name, (number, sampling) in groups.items():
            for i, prompt in enumerate(self.prompts):
                for s in range(number):
                    requests.append(Request(prompt.prompt_ids, i, s, sampling))
                    owners.append((name, i))
        completions = self.engine.generate(params, requests, key)
        inputs = [self._input(i, done) for (_, i), done in zip(owners, completions, strict=True)]
        result = self.rewards.score(inputs)
        right = np.nan_to_num(result.R[:, self.column], nan=-np.inf) >= c.threshold
        is_greedy = np.array([name == "greedy" for name, _ in owners])
        metrics: dict[str, float] = {}
        if c.greedy:
            metrics["accuracy_greedy"] = float(right[is_greedy].mean())
        if c.samples:
            table = right[~is_greedy].reshape(len(self.prompts), c.samples)
            metrics["accuracy_sampled"] = float(table.mean())
            for k in c.k:
                metrics[f"pass@{k}"] = float(pass_at_k(c.samples, table.sum(axis=1), k).mean())
            if c.answer is not None:
                answers = [extract(x.completion_text, c.answer) for x, g in zip(inputs, is_greedy, strict=True) if not g]
                grid = [answers[i : i + c.samples] for i in range(0, len(answers), c.samples)]
                metrics[f"maj@{c.samples}"] = float(np.mean(majority_at_k(grid, table.tolist(), c.samples)))
        metrics["completion_length"] = float(np.mean([x.token_ids.size for x in completions]))
        metrics["truncated_fraction"] = float(np.mean([x.finish_reason == "length" for x in completions]))
        self.samples = self._records(owners, inputs, result.R, right)
        return metrics

    def _input(self, index: int, completion: Completion) -> RewardInput:
        return reward_input(self.tokenizer, self.prompts[index], completion)

    def _records(self, owners: list, inputs: list[RewardInput], scores: np.ndarray, right: np.ndarray) -> list[dict]:
        """One greedy and one sampled completion of each of the first prompts, for people to read."""
        seen: set[tuple[str, int]] = set()
        records = []
        for (name, i), x, score, good in zip(owners, inputs, scores, right, strict=True):
            if i < 8 and (name, i) not in seen:
                seen.add((name, i))
                records.append(
                    {
                        "decoding": name,
                        "prompt": x.prompt_text,
                        "completion": x.completion_text,
                        "answer": x.answer,
                        "finish_reason": x.finish_reason,
                        "correct": bool(good),
                        "rewards": {n: None if np.isnan(v) else float(v) for n, v in zip(self.rewards.names, score)},
                    }
                )
        return sorted(records, key=lambda r: r["decoding"] == "greedy")  # sampled ones tell more


def reward_input(tokenizer: Any, prompt: PromptExample, completion: Completion) -> RewardInput:
    """A completion as rewards see it: text without special tokens, ids with them, and the reason it ended."""
    ids = [int(i) for i in completion.token_ids]
    text = tokenizer.decode(ids, skip_special_tokens=True)
    return RewardInput(prompt.text, text, ids, prompt.answer, prompt.metadata, completion.finish_reason)
