"""Recompilation guard: after warm-up no function should compile again; if one does, say which argument
changed.

Systems make their steps with ``compilation.jit`` instead of ``jax.jit``. It costs nothing per call; argument
signatures are looked at only when XLA really compiled.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import jax

from jaxrl.errors import JaxrlError

logger = logging.getLogger("jaxrl")

# One backend compilation, reported by jax.monitoring with the name of the function.
COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
Mode = Literal["warn", "error", "off"]


class RecompilationError(JaxrlError, RuntimeError):
    """A function compiled again after warm-up, and the guard is in mode ``error``."""


@dataclass(frozen=True)
class Recompilation:
    """One compilation after warm-up."""

    function: str
    changes: tuple[str, ...] = ()
    watched: bool = False

    def __str__(self) -> str:
        if self.changes:
            return f"{self.function} compiled again: " + "; ".join(self.changes)
        if self.watched:
            return f"{self.function} compiled again for known arguments: a global setting changed"
        return f"{self.function} compiled again; make it with compilation.jit to see which argument changed"


class _Thread(threading.local):
    """Watched calls in progress on this thread; XLA reports a compilation on the thread that called the
    function.
    """

    def __init__(self) -> None:
        self.calls: list[WatchedFunction] = []


# jax.monitoring listeners are global to the process, hence so is the list of guards that listen.
_guards: list[RecompilationGuard] = []
_thread = _Thread()


def jit(fun: Callable[..., Any], *, name: str | None = None, **options: Any) -> WatchedFunction:
    """``jax.jit(fun, **options)`` whose recompilations are explained.

    Args:
      fun: function to compile.
      name: name in messages; the function's own by default.
      **options: options of ``jax.jit``.
    """
    _listen()
    return WatchedFunction(fun, name or getattr(fun, "__name__", type(fun).__name__), options)


class WatchedFunction:
    """A jitted function that remembers the argument signatures it was compiled for."""

    def __init__(self, fun: Callable[..., Any], name: str, options: dict[str, Any]):
        self.name = name
        self.jitted = jax.jit(fun, **options)
        self.compiled: list[dict[str, str]] = []
        self._pending = False
        self._compiled_as = f"jit({getattr(fun, '__name__', '')})"
        self._signature = inspect.signature(fun)
        self._static = _static_names(self._signature, options)
        functools.update_wrapper(self, fun, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _thread.calls.append(self)
        try:
            result = self.jitted(*args, **kwargs)
        finally:
            _thread.calls.pop()
        if self._pending:
            self._pending = False
            self._explain(args, kwargs)
        return result

    def __getattr__(self, name: str) -> Any:
        if name == "jitted":  # not set yet: __init__ failed
            raise AttributeError(name)
        return getattr(self.jitted, name)

    def _explain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        new = self._describe(args, kwargs)
        if self.compiled:
            nearest = min((_difference(old, new) for old in self.compiled), key=len)
            for guard in _guards:
                guard.report(Recompilation(self.name, tuple(nearest), watched=True))
        if new not in self.compiled:
            self.compiled.append(new)

    def _describe(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, str]:
        """Path of each argument leaf -> what compilation depends on. Works on donated arrays."""
        bound = self._signature.bind(*args, **kwargs)
        rows: dict[str, str] = {}
        for name, value in bound.arguments.items():
            if name in self._static:
                rows[name] = f"static {value!r}"
                continue
            for path, leaf in jax.tree_util.tree_leaves_with_path(value):
                rows[name + jax.tree_util.keystr(path)] = _leaf_signature(leaf)
        return rows


@dataclass
class RecompilationGuard:
    """Counts compilations and reports those after warm-up. Use as a context manager around a run.

    Attributes:
      mode: ``"warn"`` logs each report, ``"error"`` makes ``check`` raise, ``"off"`` does nothing.
      compilations: number of compilations by function, warm-up included.
      reports: recompilations after warm-up.
    """

    mode: Mode = "warn"
    compilations: Counter[str] = field(default_factory=Counter)
    reports: list[Recompilation] = field(default_factory=list)
    _warm: int = 1
    _checked: int = 0

    def __enter__(self) -> Self:
        if self.mode != "off":
            _listen()
            _guards.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        if self.mode != "off":
            _guards.remove(self)

    def end_warm_up(self) -> None:
        """From now on each compilation of a function that has been compiled before is reported."""
        self._warm = 0

    @contextlib.contextmanager
    def expected(self) -> Iterator[None]:
        """Compilations inside are part of warm-up (the first evaluation, the first checkpoint)."""
        self._warm += 1
        try:
            yield
        finally:
            self._warm -= 1

    def report(self, recompilation: Recompilation) -> None:
        """Record a recompilation unless warm-up is still going on."""
        if self._warm <= 0:
            self.reports.append(recompilation)

    def check(self, where: str) -> None:
        """Log, or raise, what has been reported since the last check.

        Args:
          where: for the message, for example ``"step 12"``.

        Raises:
          RecompilationError: in mode ``error``.
        """
        new, self._checked = self.reports[self._checked :], len(self.reports)
        if not new:
            return
        # Each further report of one function says the same, so three are enough.
        seen = Counter(r.function for r in self.reports[: self._checked - len(new)])
        messages = [str(r) for r in new if seen[r.function] < 3]
        if self.mode == "error":
            raise RecompilationError(
                f"{where}: "
                + " | ".join(str(r) for r in new)
                + "; pad to a fixed shape, or set run.recompile_guard='warn'"
            )
        for message in messages:
            logger.warning("%s: %s", where, message)


@functools.cache
def _listen() -> None:
    """Hear of compilations from now on. Once per process: signatures of functions compiled outside a guard
    count too.
    """
    jax.monitoring.register_event_duration_secs_listener(_on_event)


def _on_event(event: str, duration_secs: float, **details: str | int) -> None:
    if event != COMPILE_EVENT:
        return
    name = str(details.get("fun_name", "?"))
    watched = _thread.calls[-1] if _thread.calls else None
    if watched is not None and name == watched._compiled_as:
        watched._pending = True
        for guard in _guards:
            guard.compilations[watched.name] += 1
        return
    for guard in _guards:
        guard.compilations[name] += 1
        if guard.compilations[name] > 1 and watched is None:
            guard.report(Recompilation(name))


def _static_names(signature: inspect.Signature, options: dict[str, Any]) -> set[str]:
    names = options.get("static_argnames") or ()
    numbers = options.get("static_argnums")
    numbers = () if numbers is None else numbers
    positions = list(signature.parameters)
    named = {names} if isinstance(names, str) else set(names)
    return named | {positions[i] for i in ((numbers,) if isinstance(numbers, int) else numbers)}


def _leaf_signature(leaf: Any) -> str:
    if not hasattr(leaf, "dtype"):
        return f"Python {type(leaf).__name__}"
    text = f"{leaf.dtype}{list(leaf.shape)}"
    if getattr(leaf, "weak_type", False):
        text += " (weakly typed)"
    if isinstance(leaf, jax.Array) and leaf.committed:
        text += f" on {leaf.sharding}"
    return text


def _difference(old: dict[str, str], new: dict[str, str]) -> list[str]:
    changes = [
        f"argument {p} changed from {old[p]} to {new[p]}" for p in new if p in old and old[p] != new[p]
    ]
    changes += [f"argument {p} is new ({new[p]})" for p in new if p not in old]
    changes += [f"argument {p} is gone (was {old[p]})" for p in old if p not in new]
    return changes
