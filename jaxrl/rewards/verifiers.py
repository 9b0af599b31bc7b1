"""Verifiers that parse what a model wrote: symbolic mathematics and procedural tasks.

Both run in worker processes by default. They evaluate expressions taken from completions, so they may hang,
need a lot of memory or raise; the pool turns each of these into a counted event.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from jaxrl.errors import ConfigError, require
from jaxrl.rewards.base import RewardFn, RewardInput
from jaxrl.rewards.builtin import per_row
from jaxrl.rewards.extract import check_extractor, extract
from jaxrl.rewards.registry import near_misses, register


@register("math_verify", isolate=True, time_limit=5.0, on_error="decline", preload=("math_verify", "sympy"))
def math_verify(*, precision: int = 6, strict: bool = True, require_boxed: bool = False) -> RewardFn:
    """1 if the completion's final expression equals the gold one, else 0, as the math-verify package judges.

    A completion without any expression scores 0: it gives no answer. An exception while parsing or comparing
    is no verdict and is raised, so that it is counted. Neither is a time-out: a policy may learn to escape a
    verdict with expressions that take for ever (``9^{9^{9^9}}``), so watch ``reward/math_verify/timeouts``.

    Args:
      precision: decimal places that must agree.
      strict: variables must have the same names, and sets are not tuples.
      require_boxed: only ``\\boxed{...}`` counts as an answer.
    """
    package = require("math_verify", "rewards")
    # The pool limits time from outside, so the package's own alarm is off; each worker would warn of that.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    parse = functools.partial(package.parse, parsing_timeout=None, raise_on_error=True)
    only_boxed = [
        package.LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False),
    ]

    @functools.lru_cache(maxsize=1024)
    def parse_gold(gold: str) -> list[Any]:
        parsed = parse(gold)
        if all(isinstance(one, str) for one in parsed):
            parsed = parse(f"${gold}$") or parsed
        if not parsed:
            raise ValueError(
                f"the gold answer {gold!r} holds no expression; write it as LaTeX or as a number"
            )
        return parsed

    def score(row: RewardInput) -> float:
        gold = parse_gold(row.gold())
        text = row.completion_text
        if require_boxed:
            if "\\boxed" not in text:
                return 0.0
            found = parse(text, extraction_config=only_boxed)
        else:
            found = parse(text)
        failure: Exception | None = None
        for wanted in gold:
            for candidate in found:
                try:
                    if package.verify(
                        wanted,
                        candidate,
                        float_rounding=precision,
                        strict=strict,
                        timeout_seconds=None,
                        raise_on_error=True,
                    ):
                        return 1.0
                except Exception as error:  # noqa: BLE001  raised below unless another pair agrees
                    failure = error
        if failure is not None:
            raise failure
        return 0.0

    return per_row(score)


@register("reasoning_gym", isolate=True, time_limit=5.0, on_error="decline", preload=("reasoning_gym",))
def reasoning_gym(*, task: str | None = None, extract_from: str = "whole") -> RewardFn:
    """The score that a reasoning-gym data set gives to an answer, from 0 to 1.

    Rows need ``metadata["entry"]``, which ``jaxrl.data.prompts.reasoning_gym_examples`` sets.

    Args:
      task: name of the data set; by default each row's ``metadata["task"]``.
      extract_from: where the answer stands; see ``jaxrl.rewards.extract.EXTRACTORS``.
    """
    check_extractor(extract_from)
    factory = require("reasoning_gym.factory", "rewards")

    def check_task(name: str) -> None:
        if name not in factory.DATASETS:
            raise ConfigError(
                f"reasoning-gym has no task {name!r}; {near_misses(name, list(factory.DATASETS))}"
            )

    if task is not None:
        check_task(task)

    @functools.lru_cache(maxsize=128)
    def scorer(name: str) -> Any:
        check_task(name)
        return factory.get_score_answer_fn(name)

    def score(row: RewardInput) -> float:
        name = task or row.metadata.get("task")
        entry = row.metadata.get("entry")
        if name is None or entry is None:
            raise ValueError(
                "the row's metadata lacks 'task' or 'entry'; make the prompts with reasoning_gym_examples"
            )
        return float(scorer(name)(extract(row.completion_text, extract_from), entry))

    return per_row(score)
