"""Clean stop on SIGTERM and Ctrl-C: finish the step, save, exit; a second signal stops at once."""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType
from typing import Any, Self

import jax
import numpy as np

logger = logging.getLogger("jaxrl")


class Interrupted(SystemExit):
    """The run stopped on a signal after saving. The exit code is 128 + signal number, as a shell reports it.
    """

    def __init__(self, number: int, message: str):
        super().__init__(128 + number)
        self.message = message


class StopSignal:
    """Context manager that turns the first SIGTERM or SIGINT into a flag, and gives later ones their usual
    effect.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._old: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers only there
            for number in (signal.SIGTERM, signal.SIGINT):
                self._old[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def requested(self) -> int | None:
        """Number of the signal that any process of the run has received, or None. All processes get one
        answer.
        """
        if jax.process_count() == 1:
            return self.number
        from jax.experimental import multihost_utils

        number = int(multihost_utils.process_allgather(np.asarray(self.number or 0)).max())
        return number or None

    def _handle(self, number: int, _: FrameType | None) -> None:
        self.number = number
        self._restore()
        name = signal.Signals(number).name
        logger.warning("%s: finishing this step and saving; the same signal again stops at once", name)

    def _restore(self) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        self._old = {}
