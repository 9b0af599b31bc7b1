"""Counts the programs XLA compiles, for the workers that run on JAX."""

from __future__ import annotations

import jax

_BACKEND_COMPILE = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Number of backend compilations in this process and the seconds they took, since the last ``take()``."""

    def __init__(self) -> None:
        self._count, self._seconds = 0, 0.0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration: float, **_: object) -> None:
        if event == _BACKEND_COMPILE:
            self._count += 1
            self._seconds += duration

    def take(self) -> tuple[int, float]:
        """Return (compilations, seconds) since the last call, and start again from zero."""
        taken = self._count, self._seconds
        self._count, self._seconds = 0, 0.0
        return taken
