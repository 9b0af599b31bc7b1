"""What a reward sees, what it returns, and how a configuration names it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from jaxrl.errors import ConfigError

OnError = Literal["raise", "decline"]


@dataclass(frozen=True)
class RewardInput:
    """One finished completion, as text and as flags.

    Attributes:
      prompt_text: the prompt, as the model saw it or as the user wrote it.
      completion_text: the decoded completion without its stop token.
      completion_ids: token ids of the completion, the stop token included.
      answer: gold answer, or None when the data has none.
      metadata: whatever else the data set says about the prompt. Must pickle when a reward runs in a worker.
      finish_reason: "eos", "length", "stop" or "abort", as reported by the sampler.
    """

    prompt_text: str
    completion_text: str
    completion_ids: Sequence[int] = ()
    answer: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    finish_reason: str = "eos"

    def gold(self) -> str:
        """The gold answer.

        Raises:
          ValueError: the row has none.
        """
        if self.answer is None:
            raise ValueError("the row has no gold answer; give the prompts an `answer` field")
        return self.answer


RewardFn = Callable[[Sequence[RewardInput]], Sequence["float | None"]]
"""Scores rows. Returns one number a row; None (or nan) means "I cannot judge this row"."""


@dataclass(frozen=True)
class RewardSpec:
    """One reward of a run, as written in a configuration.

    Attributes:
      name: a registered name ("math_verify") or an import path ("my_package.my_module:my_function").
      weight: factor of this reward in the combined reward. The weights are not applied here.
      kwargs: keyword arguments of the reward.
      label: column and metric name; by default ``name`` (for an import path, the part behind the colon).
      isolate: run row by row in a worker process under ``time_limit``. None: what the reward itself asks for.
      time_limit: seconds that one row may take in a worker before the worker is killed. Must be None unless
        the reward is isolated. None: what the reward itself asks for.
      on_error: "raise" stops with a RewardError when the reward raises; "decline" counts the error and
        treats the row as unscorable. None: what the reward itself asks for. A time-out is always counted and
        declined.
      max_failed: largest fraction of a batch that may fail (errors and time-outs together) before a
        RewardError is raised, because a verifier that fails everywhere is broken. Checked on batches of 16
        rows or more.
    """

    name: str
    weight: float = 1.0
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    label: str | None = None
    isolate: bool | None = None
    time_limit: float | None = None
    on_error: OnError | None = None
    max_failed: float = 0.5

    def __post_init__(self) -> None:
        if not np.isfinite(self.weight):
            raise ConfigError(f"reward {self.name!r} has weight {self.weight}; give a finite number")
        if self.on_error not in (None, "raise", "decline"):
            raise ConfigError(
                f"reward {self.name!r} has on_error={self.on_error!r}; use 'raise', 'decline' or leave it out"
            )
        if self.time_limit is not None and not self.time_limit > 0:
            raise ConfigError(f"reward {self.name!r} has time_limit={self.time_limit}; give seconds above 0")
        if not 0.0 <= self.max_failed <= 1.0:
            raise ConfigError(
                f"reward {self.name!r} has max_failed={self.max_failed}; give a fraction from 0 to 1"
            )

    @property
    def column(self) -> str:
        """Name of this reward's column and metrics."""
        return self.label or self.name.rpartition(":")[2]


@dataclass(frozen=True)
class RewardResult:
    """Scores of a batch.

    Attributes:
      R: ``[N, K]`` float64, one row a completion and one column a reward; nan where a reward declined the
        row.
      names: the K column names.
      weights: the K weights, in the same order.
      metrics: per reward ``reward/<name>/{mean,std,declined,errors,timeouts}``: mean and population standard
        deviation over the scored rows (absent when no row was scored), and counts of rows. ``declined``
        counts every nan, whatever its cause.
      failures: one sentence for each row that failed, for logs.
    """

    R: np.ndarray
    names: tuple[str, ...]
    weights: tuple[float, ...]
    metrics: dict[str, float]
    failures: tuple[str, ...] = ()
