"""What runs inside a reward worker process. Imports neither JAX nor a user's main script."""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import multiprocessing
import os
import pickle
import resource
import signal
import threading
from dataclasses import dataclass
from typing import Literal

import jaxrl.rewards.builtin
import jaxrl.rewards.verifiers  # noqa: F401  (both fill the registry)
from jaxrl.rewards.base import RewardFn, RewardInput
from jaxrl.rewards.registry import bind


@dataclass(frozen=True)
class Outcome:
    """What became of one row.

    Attributes:
      status: "ok" (``value`` counts), "declined" (the reward returned None), "error" or "timeout".
      value: the score, or None.
      detail: for an error, the exception in words and where it was raised.
    """

    status: Literal["ok", "declined", "error", "timeout"]
    value: float | None = None
    detail: str = ""


def read_score(value: object) -> Outcome:
    """Turns the value that a reward returned for a row into an Outcome."""
    if value is None:
        return Outcome("declined")
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return Outcome("error", detail=f"it returned {value!r}, which is neither a number nor None")
    if math.isnan(number):
        return Outcome("declined")
    if math.isinf(number):
        return Outcome("error", detail=f"it returned {number}; rewards must be finite")
    return Outcome("ok", number)


def describe(error: BaseException) -> str:
    """An exception in words, with the innermost line that raised it."""
    place = ""
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        place = f" ({os.path.basename(code.co_filename)}:{trace.tb_lineno})"
        trace = trace.tb_next
    try:
        words = str(error)
    except Exception:  # noqa: BLE001  printing a huge symbolic expression can itself fail
        words = "(its message cannot be printed)"
    return f"{type(error).__name__}: {words[:500]}{place}"


def score_row(function: RewardFn, row: RewardInput) -> Outcome:
    """Scores one row; an exception becomes an Outcome, so that nothing unpicklable crosses a process "
    "border."""
    try:
        values = list(function([row]))
    except Exception as error:  # noqa: BLE001  a user's code may raise anything
        return Outcome("error", detail=describe(error))
    if len(values) != 1:
        return Outcome("error", detail=f"it returned {len(values)} values for 1 row")
    return read_score(values[0])


def score_pickled(key: bytes, row: RewardInput, time_limit: float) -> Outcome:
    """Scores one row in a worker. ``key`` is the pickled (name, kwargs) of the reward."""
    _limit_cpu_time(time_limit)
    try:
        function = _function(key)
    except Exception as error:  # noqa: BLE001  a user's code may raise anything
        return Outcome("error", detail=describe(error))
    return score_row(function, row)


def start(keys: tuple[bytes, ...], preload: tuple[str, ...], memory_limit: int | None) -> None:
    """Prepares a worker: limits first, then the imports that the first row would otherwise pay for."""
    # Die at once on SIGTERM: a row that hangs in C code never reaches a Python signal handler.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_limit is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory_limit, memory_limit))
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    for module in preload:
        with contextlib.suppress(ImportError):  # the row that needs it reports the missing package
            importlib.import_module(module)
    for key in keys:
        with contextlib.suppress(Exception):  # the first row scored meets and reports the same exception
            _function(key)


@functools.lru_cache(maxsize=256)
def _function(key: bytes) -> RewardFn:
    name, kwargs = pickle.loads(key)
    return bind(name, kwargs)


def _limit_cpu_time(time_limit: float) -> None:
    """Backstop for a worker that hangs in C code when the training process, which would end it, was "
    "killed."""
    used = sum(os.times()[:2])
    allowed = used + time_limit * (os.cpu_count() or 1) + 5.0  # more than a row within its limit can use
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    if hard != resource.RLIM_INFINITY:
        allowed = min(allowed, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(allowed), hard))


def _exit_with_parent() -> None:
    """Ends the worker when the training process is gone, even if it was killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
