"""``python launch_and_stop.py EVENT STEP ARGUMENTS...``: the command line, with a signal in the middle of a step.

EVENT is none, KILL or TERM; the signal arrives while the process takes its step number STEP (counted from 0), after
the update and before anything of it is written.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from jaxrl import launch


def interrupt(system: Any, event: str, at: int) -> Any:
    original, steps = system.step, []

    def step(state):
        result = original(state)
        if len(steps) == at:
            os.kill(os.getpid(), getattr(signal, f"SIG{event}"))
        steps.append(1)
        return result

    system.step = step
    return system


if __name__ == "__main__":
    event, at = sys.argv[1], int(sys.argv[2])
    build = launch.build
    if event != "none":
        launch.build = lambda resolved: interrupt(build(resolved), event, at)
    sys.exit(launch.main(["launch", *sys.argv[3:]]))
