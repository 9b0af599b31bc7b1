"""A bounded pool of worker processes with a hard time limit for each row.

A row that exceeds its limit costs only its own worker, which is killed and replaced; the rows behind it go
on. The pool never runs a user's code twice: workers do not import the main script, so a script needs no
``if __name__ == "__main__"`` guard. The price is that a reward must be importable by name; a function
defined in the main script or in a notebook cell cannot run isolated.

Workers are forked from a small server process that was itself started afresh, never from the training
process: JAX runs threads, and forking a process with threads can deadlock.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import multiprocessing.context
import os
import pickle
import sys
import threading
import types
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

from jaxrl.errors import ConfigError, RewardError, require
from jaxrl.rewards.base import RewardInput
from jaxrl.rewards.worker import Outcome, score_pickled, start

_MAIN_LOCK = threading.Lock()


@contextmanager
def _without_main_script() -> Iterator[None]:
    """Hides the path of the main script, so that a starting worker does not import it.

    Only for the moment in which a process is launched: multiprocessing reads the path there and has no
    option to leave it out.
    """
    main = sys.modules["__main__"]
    with _MAIN_LOCK:
        spec, path = getattr(main, "__spec__", None), main.__dict__.pop("__file__", None)
        main.__spec__ = None
        try:
            yield
        finally:
            main.__spec__ = spec
            if path is not None:
                main.__file__ = path


class WorkerProcess(multiprocessing.context.ForkServerProcess):
    """A process of the fork server that does not import the main script."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        with _without_main_script():
            return multiprocessing.context.ForkServerProcess._Popen(process_obj)


class _WorkerContext(multiprocessing.context.ForkServerContext):
    Process = WorkerProcess


def reward_key(name: str, kwargs: Mapping[str, Any]) -> bytes:
    """The form in which a reward travels to a worker.

    Raises:
      ConfigError: the keyword arguments cannot be pickled.
    """
    try:
        return pickle.dumps((name, dict(kwargs)))
    except Exception as error:
        raise ConfigError(
            f"reward {name!r} cannot run isolated: its kwargs do not pickle ({error}); use plain values, or "
            "isolate=False"
        ) from error


class RewardPool:
    """Scores rows in worker processes. Starts at the first row; safe to share between rewards and threads.

    Use as a context manager or call ``close``. Workers also end when the process that owns the pool ends,
    even when it is killed.
    """

    def __init__(
        self,
        workers: int | None = None,
        memory_limit_mb: int | None = 4096,
        rows_per_worker: int = 2000,
        warm: Sequence[tuple[str, Mapping[str, Any]]] = (),
        preload: Sequence[str] = (),
    ) -> None:
        """Sets the pool up; no process starts yet.

        Args:
          workers: number of processes; by default one a core, at most 8.
          memory_limit_mb: address space of a worker in MiB; a row beyond it raises MemoryError or loses its
            worker, and is counted as an error. None: no limit.
          rows_per_worker: rows after which a worker is replaced, so that caches of a verifier cannot grow
            for ever.
          warm: (name, kwargs) of rewards that a new worker prepares before it takes a row.
          preload: modules that a new worker imports before it takes a row.

        Raises:
          ConfigError: a number is not positive.
          MissingExtraError: the ``rewards`` extra is not installed.
        """
        count = workers if workers is not None else min(os.cpu_count() or 1, 8)
        for label, value in (
            ("workers", count),
            ("rows_per_worker", rows_per_worker),
            ("memory_limit_mb", memory_limit_mb),
        ):
            if value is not None and value < 1:
                raise ConfigError(f"the reward pool has {label}={value}; give 1 or more")
        self.workers = count
        self._pebble = require("pebble", "rewards")
        keys = tuple(reward_key(name, kwargs) for name, kwargs in warm)
        limit = None if memory_limit_mb is None else memory_limit_mb * 2**20
        self._preload = tuple(preload)
        self._settings = {
            "max_workers": count,
            "max_tasks": rows_per_worker,
            "initializer": start,
            "initargs": (keys, self._preload, limit),
        }
        self._lock = threading.Lock()
        self._pool: Any = None
        self._closed = False
        self._finalizer: weakref.finalize | None = None

    def submit(self, key: bytes, row: RewardInput, time_limit: float) -> concurrent.futures.Future:
        """Starts scoring one row.

        Args:
          key: the reward, from ``reward_key``.
          row: the row.
          time_limit: seconds, counted from the moment a worker takes the row.

        Returns:
          A future for ``outcome``.

        Raises:
          RewardError: the pool is closed.
        """
        try:
            return self._started().schedule(score_pickled, args=(key, row, time_limit), timeout=time_limit)
        except RuntimeError as error:
            raise RewardError(f"the reward pool takes no more rows ({error}); make a new pool") from error

    def outcome(self, future: concurrent.futures.Future, time_limit: float) -> Outcome:
        """Waits for a row and says what became of it.

        Raises:
          RewardError: the pool itself broke down or was closed with the row still in it.
        """
        try:
            return future.result()
        except concurrent.futures.TimeoutError:
            return Outcome(
                "timeout", detail=f"it took longer than {time_limit:g} s, and its worker was killed"
            )
        except self._pebble.ProcessExpired as error:
            return Outcome("error", detail=f"its worker process died (exit code {error.exitcode})")
        except concurrent.futures.CancelledError as error:
            raise RewardError(
                "the row was cancelled before it was scored; do not collect cancelled rows"
            ) from error
        except concurrent.futures.process.BrokenProcessPool as error:
            raise RewardError(f"the reward pool broke down ({error}); make a new pool") from error
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            return Outcome("error", detail=f"the row cannot be sent to a worker: {error}")

    def close(self) -> None:
        """Kills the workers and forgets rows not yet scored. May be called twice."""
        with self._lock:
            self._closed = True
            if self._finalizer is not None:
                self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        self.close()

    def _started(self) -> Any:
        with self._lock:
            if self._closed:
                raise RewardError("the reward pool is closed; make a new one")
            if self._pool is None:
                context = _WorkerContext()
                # Imported once by the server, so that a replaced worker is ready in milliseconds.
                context.set_forkserver_preload([*self._preload, "jaxrl.rewards.worker"])
                self._pool = self._pebble.ProcessPool(context=context, **self._settings)
                self._finalizer = weakref.finalize(self, _stop, self._pool)
            return self._pool


def _stop(pool: Any) -> None:
    pool.stop()
    pool.join()
