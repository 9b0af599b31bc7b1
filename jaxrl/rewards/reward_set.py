"""The rewards of a run: rows in, a matrix of scores and its metrics out."""

from __future__ import annotations

import concurrent.futures
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from jaxrl.errors import ConfigError, RewardError
from jaxrl.rewards import builtin, verifiers
from jaxrl.rewards.base import OnError, RewardFn, RewardInput, RewardResult, RewardSpec
from jaxrl.rewards.pool import RewardPool, reward_key
from jaxrl.rewards.registry import bind, entry_of
from jaxrl.rewards.worker import Outcome, read_score, score_row

MIN_ROWS_FOR_FAILURE_LIMIT = 16


@dataclass(frozen=True)
class PendingRow:
    """A row whose isolated rewards are being scored; ``RewardSet.collect`` finishes it."""

    row: RewardInput
    futures: Mapping[int, concurrent.futures.Future]  # by column

    def cancel(self) -> None:
        """Drops the row, for example when its rollout was thrown away. It must not be collected then."""
        for future in self.futures.values():
            future.cancel()


@dataclass(frozen=True)
class _Reward:
    spec: RewardSpec
    function: RewardFn
    key: bytes | None  # set when isolated
    time_limit: float
    on_error: OnError


class RewardSet:
    """Scores rows with several rewards.

    Isolated rewards run in worker processes from the moment a row is submitted, so that scoring overlaps
    with decoding; the others run in this process when a batch is collected. Order is that of the rows given,
    whatever finished first.

    ```python
    with RewardSet([RewardSpec("math_verify"), RewardSpec("tag_format", weight=0.2)]) as rewards:
        pending = [rewards.submit(row) for row in rows]     # for example from the engine's on_finish
        result = rewards.collect(pending)                   # result.R: [N, 2]
    ```
    """

    def __init__(
        self, specs: Sequence[RewardSpec], pool: RewardPool | None = None, workers: int | None = None
    ):
        """Resolves every name, so that a misspelt one fails before any rollout.

        Args:
          specs: the rewards; their columns have different names.
          pool: a pool to share; it stays open when this set closes. By default the set owns one.
          workers: size of the own pool.

        Raises:
          ConfigError: no reward, two of one name, an unknown name or argument, or a contradictory option.
        """
        if not specs:
            raise ConfigError("there is no reward; name at least one")
        self.specs = tuple(specs)
        self.names = tuple(spec.column for spec in specs)
        self.weights = tuple(float(spec.weight) for spec in specs)
        for name in self.names:
            if self.names.count(name) > 1:
                raise ConfigError(f"two rewards are called {name!r}; give them different labels")
        self._rewards = tuple(_resolve(spec) for spec in specs)
        self._owns_pool = pool is None
        if pool is None and any(reward.key is not None for reward in self._rewards):
            isolated = [r.spec for r in self._rewards if r.key is not None]
            preload = dict.fromkeys(module for s in isolated for module in entry_of(s.name).preload)
            pool = RewardPool(workers, warm=[(s.name, s.kwargs) for s in isolated], preload=list(preload))
        self._pool = pool

    def submit(self, row: RewardInput) -> PendingRow:
        """Starts the isolated rewards of one row. Returns at once."""
        futures = {
            column: self._pool.submit(reward.key, row, reward.time_limit)
            for column, reward in enumerate(self._rewards)
            if reward.key is not None and self._pool is not None
        }
        return PendingRow(row, futures)

    def collect(self, pending: Sequence[PendingRow]) -> RewardResult:
        """Waits for the rows and scores them with the rewards that are not isolated.

        Raises:
          RewardError: a reward raised and its policy is "raise", or more rows failed than its ``max_failed``
            allows.
        """
        rows = [one.row for one in pending]
        table = np.full((len(rows), len(self._rewards)), np.nan, np.float64)
        metrics: dict[str, float] = {}
        failures: list[str] = []
        for column, reward in enumerate(self._rewards):
            if reward.key is None or self._pool is None:
                outcomes = _score_here(reward, rows)
            else:
                outcomes = [self._pool.outcome(one.futures[column], reward.time_limit) for one in pending]
            failures += _check_failures(reward, outcomes)
            table[:, column] = [np.nan if one.value is None else one.value for one in outcomes]
            metrics.update(_metrics(self.names[column], table[:, column], outcomes))
        return RewardResult(table, self.names, self.weights, metrics, tuple(failures))

    def score(self, inputs: Sequence[RewardInput]) -> RewardResult:
        """``collect`` of all rows, submitted now."""
        return self.collect([self.submit(row) for row in inputs])

    def close(self) -> None:
        """Ends the own worker processes. May be called twice."""
        if self._owns_pool and self._pool is not None:
            self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        self.close()


def _resolve(spec: RewardSpec) -> _Reward:
    entry = entry_of(spec.name)
    isolate = entry.isolate if spec.isolate is None else spec.isolate
    if spec.time_limit is not None and not isolate:
        raise ConfigError(
            f"reward {spec.column!r} has a time_limit but runs in the main process, where nothing can stop "
            "it; set isolate=True or drop the limit"
        )
    if (
        isolate
        and ":" not in spec.name
        and entry.factory.__module__ not in (builtin.__name__, verifiers.__name__)
    ):
        raise ConfigError(
            f"reward {spec.name!r} was registered by this program, so worker processes do not know it; name "
            "it by its import path, 'package.module:function', or set isolate=False"
        )
    return _Reward(
        spec=spec,
        function=bind(spec.name, spec.kwargs),
        key=reward_key(spec.name, spec.kwargs) if isolate else None,
        time_limit=spec.time_limit if spec.time_limit is not None else entry.time_limit,
        on_error=spec.on_error or entry.on_error,
    )


def _score_here(reward: _Reward, rows: Sequence[RewardInput]) -> list[Outcome]:
    if not rows:
        return []
    try:
        values = list(reward.function(rows))
    except Exception as error:
        # Scored one by one only to learn which rows are to blame.
        outcomes = [score_row(reward.function, row) for row in rows]
        if all(one.status != "error" for one in outcomes):
            raise RewardError(
                f"reward {reward.spec.column!r} raised {type(error).__name__} on the batch of {len(rows)} "
                f"rows ({error}), though it scores each row alone; look at what it does across rows"
            ) from error
        return outcomes
    if len(values) != len(rows):
        raise RewardError(
            f"reward {reward.spec.column!r} returned {len(values)} values for {len(rows)} rows; return one "
            "for each row"
        )
    return [read_score(value) for value in values]


def _check_failures(reward: _Reward, outcomes: Sequence[Outcome]) -> list[str]:
    name = reward.spec.column
    failures = []
    for index, outcome in enumerate(outcomes):
        if outcome.status == "error" and reward.on_error == "raise":
            raise RewardError(
                f"reward {name!r} failed on row {index}: {outcome.detail}; mend the reward or the row, or "
                "set on_error='decline' to leave such rows out"
            )
        if outcome.status in ("error", "timeout"):
            failures.append(f"reward {name!r} failed on row {index}: {outcome.detail}")
    limit = reward.spec.max_failed * len(outcomes)
    if len(outcomes) >= MIN_ROWS_FOR_FAILURE_LIMIT and len(failures) > limit:
        raise RewardError(
            f"{len(failures)} of {len(outcomes)} rows failed, so the reward is taken for broken. First: "
            f"{failures[0]}. Mend it, or raise max_failed ({reward.spec.max_failed:g})"
        )
    return failures


def _metrics(name: str, values: np.ndarray, outcomes: Sequence[Outcome]) -> dict[str, float]:
    scored = values[~np.isnan(values)]
    metrics = {
        f"reward/{name}/declined": float(len(values) - len(scored)),
        f"reward/{name}/errors": float(sum(one.status == "error" for one in outcomes)),
        f"reward/{name}/timeouts": float(sum(one.status == "timeout" for one in outcomes)),
    }
    if len(scored):
        metrics[f"reward/{name}/mean"] = float(scored.mean())
        metrics[f"reward/{name}/std"] = float(scored.std())
    return metrics
