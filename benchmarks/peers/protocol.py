"""JSON lines between a benchmark and its peer workers: one process per library, each in its own environment.

Only the standard library is used, because this file is imported by every environment. A request is one line
``{"op": name, "args": {...}}``; a reply is one line ``{"ok": true, "result": {...}}`` or ``{"ok": false, "error": text}``.
Arrays travel as nested lists: batches here are a few thousand numbers.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, TextIO

Handler = Callable[..., dict[str, Any]]


class WorkerError(RuntimeError):
    """A worker process died, or answered a request with an error."""


class Worker:
    """A persistent worker process, called synchronously.

    Args:
      name: label used in messages.
      python: interpreter of the worker's environment.
      script: worker program; it must end in ``serve({...})``.
      env: variables added to the environment of this process.
      log: file that receives the worker's stderr and whatever its libraries print.
    """

    def __init__(self, name: str, python: str, script: pathlib.Path, env: dict[str, str], log: pathlib.Path):
        self.name = name
        self._log_path = log
        with open(log, "w") as log_file:
            self._process = subprocess.Popen(
                [python, str(script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log_file,
                text=True,
                env={**os.environ, **env},
            )

    def call(self, op: str, **args: Any) -> dict[str, Any]:
        """Run one operation in the worker and return its result.

        Raises:
          WorkerError: the operation failed or the process ended; the message holds the worker's traceback or log tail.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"op": op, "args": args}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            code = self._process.wait()
            tail = "\n".join(self._log_path.read_text().splitlines()[-15:])
            raise WorkerError(
                f"worker {self.name!r} ended with code {code} during {op!r}; end of its log:\n{tail}"
            )
        reply = json.loads(line)
        if not reply["ok"]:
            raise WorkerError(f"worker {self.name!r} failed in {op!r}:\n{reply['error']}")
        return reply["result"]

    def close(self) -> None:
        """End the process (closing its input makes ``serve`` return)."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def serve(handlers: dict[str, Handler]) -> None:
    """Answer requests on stdin until it closes. ``memory`` is answered here, every other op by its handler."""
    replies = _private_stdout()
    table: dict[str, Handler] = {"memory": memory, **handlers}
    for line in sys.stdin:
        request = json.loads(line)
        try:
            result = table[request["op"]](**request["args"])
            reply: dict[str, Any] = {"ok": True, "result": result}
        except Exception:  # noqa: BLE001 - the parent must hear of every failure; it raises WorkerError
            reply = {"ok": False, "error": traceback.format_exc()}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def clock() -> tuple[float, float]:
    """Wall time and processor time of this process, all its threads together, in seconds."""
    return time.perf_counter(), time.process_time()


def since(start: tuple[float, float]) -> dict[str, float]:
    """Wall seconds and processor seconds since ``clock()``; the second hardly depends on what else is running."""
    now = clock()
    return {"seconds": now[0] - start[0], "cpu_seconds": now[1] - start[1]}


def memory(reset: bool = False) -> dict[str, Any]:
    """Resident memory of this process in bytes: now, and its peak since start or since the last reset.

    The kernel's own high-water mark is read, so short-lived buffers count. Resetting it needs Linux.
    """
    if reset:
        pathlib.Path("/proc/self/clear_refs").write_text("5")
    fields = dict(
        line.split(":", 1)
        for line in pathlib.Path("/proc/self/status").read_text().splitlines()
        if ":" in line
    )
    return {"rss": int(fields["VmRSS"].split()[0]) * 1024, "peak": int(fields["VmHWM"].split()[0]) * 1024}


def _private_stdout() -> TextIO:
    """Keep the real stdout for replies and point file descriptor 1 at stderr, so that no library can print into it."""
    private = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return private
