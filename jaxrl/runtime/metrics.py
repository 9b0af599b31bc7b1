"""Metrics of a run: a local JSONL file that is exact across resumes, and optional outside loggers.

A line holds the metrics of one step. Everything that depends on the wall clock is named ``time/...``; all
other entries are functions of configuration and seed, so two runs are compared by ``deterministic(line)``.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from jaxrl.errors import ConfigError, DataError, MissingExtraError, require

logger = logging.getLogger("jaxrl")
TIME_PREFIX = "time/"
LOGGERS = ("tensorboard", "wandb", "trackio")


class MetricsLog:
    """Appends one JSON line per step to a file. Non-finite values are written as null (JSON has no others).
    """

    def __init__(self, path: str | os.PathLike[str], keep_until: int):
        """Open the file and drop what a resumed run will write again.

        Args:
          path: the JSONL file.
          keep_until: step of the restored state; later lines and a torn last line are removed. -1 empties the
            file.
        """
        self.path = pathlib.Path(path)
        self.last: dict[str, Any] = {}
        kept = (
            [row for row in read_metrics(self.path) if row["step"] <= keep_until]
            if self.path.exists()
            else []
        )
        if kept:
            self.last = kept[-1]
        temporary = self.path.with_name(self.path.name + ".tmp")
        temporary.write_text("".join(_line(row) for row in kept))
        os.replace(temporary, self.path)
        self._file = open(self.path, "a")  # noqa: SIM115 - stays open for the whole run

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the metrics of ``step``; the line reaches the operating system before this returns."""
        self.last = {"step": step, **metrics}
        self._file.write(_line(self.last))
        self._file.flush()

    def sync(self) -> None:
        """Force the file to disk, so that a checkpoint never has more steps than the log."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Rows of a metrics file; null becomes nan. A torn last line (the process died in a write) is left out.

    Raises:
      DataError: a line other than the last is not a JSON object with a ``step``.
    """
    lines = pathlib.Path(path).read_text().split("\n")
    rows = []
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            row = json.loads(line)
            row["step"]
        except (json.JSONDecodeError, TypeError, KeyError) as error:
            if number == len(lines):
                break
            raise DataError(f"{path}:{number} is not a metrics line ({error}); remove the line") from error
        rows.append({k: math.nan if v is None else v for k, v in row.items()})
    return rows


def deterministic(row: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a metrics row that does not depend on the wall clock."""
    return {k: v for k, v in row.items() if not k.startswith(TIME_PREFIX)}


class Writer(Protocol):
    """Where metrics go besides the local file."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of one step."""

    def close(self) -> None:
        """Finish."""


class Resilient:
    """Keeps a run alive when an outside logger fails: one warning, then nothing more is sent to it."""

    def __init__(self, name: str, make: Callable[[], Writer]):
        self._name, self._writer = name, None
        self._guarded(lambda: setattr(self, "_writer", make()))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Forward to the logger if it still works."""
        if self._writer is not None:
            self._guarded(lambda: self._writer.write(step, metrics))

    def close(self) -> None:
        """Finish the logger if it still works."""
        if self._writer is not None:
            self._guarded(self._writer.close)

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except MissingExtraError:
            raise
        except Exception as error:  # noqa: BLE001 - any failure of a remote service must leave the run alone
            self._writer = None
            logger.warning(
                "logger %s failed (%s: %s); the run goes on, metrics are in metrics.jsonl",
                self._name,
                type(error).__name__,
                error,
            )


def make_writers(
    names: tuple[str, ...], folder: pathlib.Path, project: str, config: Any, start: int
) -> list[Resilient]:
    """Outside loggers by name.

    Args:
      names: any of ``LOGGERS``.
      folder: the run folder; its name is the name of the run.
      project: project name for wandb and trackio.
      config: resolved configuration as a dict, sent along.
      start: step of the restored state; TensorBoard hides what an earlier process logged after it.

    Raises:
      ConfigError: unknown name.
      MissingExtraError: the logger is not installed.
    """
    makers: dict[str, Callable[[], Writer]] = {
        "tensorboard": lambda: _TensorBoard(folder, start),
        "wandb": lambda: _Wandb(folder, project, config),
        "trackio": lambda: _Trackio(folder, project, config),
    }
    for name in names:
        if name not in makers:
            raise ConfigError(f"run.loggers has {name!r}; use any of {', '.join(LOGGERS)}")
    return [Resilient(name, makers[name]) for name in names]


class _TensorBoard:
    def __init__(self, folder: pathlib.Path, start: int):
        module = require("tensorboardX", "tensorboard")
        self._writer = module.SummaryWriter(
            str(folder / "tensorboard"), purge_step=start + 1 if start else None
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, folder: pathlib.Path, project: str, config: Any):
        module = require("wandb", "wandb")
        identity = hashlib.sha256(str(folder).encode()).hexdigest()[
            :16
        ]  # one run folder is one run, resumed or not
        self._run = module.init(
            project=project, name=folder.name, id=identity, resume="allow", dir=str(folder), config=config
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class _Trackio:
    def __init__(self, folder: pathlib.Path, project: str, config: Any):
        self._module = require("trackio", "trackio")
        self._module.init(project=project, name=folder.name, resume="allow", config=config)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._module.log(dict(metrics), step=step)

    def close(self) -> None:
        self._module.finish()


def _line(row: Mapping[str, Any]) -> str:
    clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
    return json.dumps(clean) + "\n"
