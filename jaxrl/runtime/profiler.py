"""Profiler traces of chosen steps, written into the run folder (read them with xprof or TensorBoard)."""

from __future__ import annotations

import logging
import os

import jax

from jaxrl.errors import ConfigError

logger = logging.getLogger("jaxrl")


def parse_steps(text: str) -> tuple[int, int] | None:
    """``"10:13"`` to ``(10, 13)``: the trace covers steps 10, 11 and 12, counted from 0. Empty text: None.

    Raises:
      ConfigError: not two numbers, or an empty range.
    """
    if not text:
        return None
    try:
        first, last = (int(part) for part in text.split(":"))
    except ValueError as error:
        raise ConfigError(
            f"profile_steps is {text!r}; give FIRST:LAST such as 10:13 (LAST is excluded)"
        ) from error
    if not 0 <= first < last:
        raise ConfigError(f"profile_steps is {text!r}; FIRST must be >= 0 and below LAST")
    return first, last


class StepProfiler:
    """Starts a trace before step ``first`` and stops it before step ``last``."""

    def __init__(self, steps: tuple[int, int] | None, folder: str | os.PathLike[str]):
        self._steps, self._folder, self._active = steps, os.fspath(folder), False

    def before_step(self, step: int) -> None:
        """Call before each step; ``step`` steps are complete."""
        if self._steps is None:
            return
        first, last = self._steps
        if self._active and step >= last:
            self.stop()
        if not self._active and first <= step < last:
            jax.profiler.start_trace(self._folder)
            self._active = True

    def stop(self) -> None:
        """End the trace if one is running."""
        if self._active:
            jax.profiler.stop_trace()
            self._active = False
            logger.info("profile of steps %d:%d is in %s", *self._steps, self._folder)
