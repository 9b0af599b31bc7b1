"""The run folder: where each file of a run lives, and the lock that gives the folder one owner."""

from __future__ import annotations

import fcntl
import logging
import os
import pathlib
from typing import IO, Self

from jaxrl.errors import ConfigError

logger = logging.getLogger("jaxrl")


class RunDir:
    """Paths of one run.

    ==================  ===============================================  ==================
    file                content                                          written by
    ==================  ===============================================  ==================
    ``config.json``     resolved configuration                           launch
    ``metrics.jsonl``   one line per step                                metrics.MetricsLog
    ``checkpoints/``    one folder per saved step                        checkpoint
    ``frozen/``         arrays that never change, saved once             checkpoint
    ``samples/``        ``step_<n>.jsonl``: what the system produced     loop
    ``plots/``          PNG curves                                       plots
    ``profile/``        profiler traces                                  profiler
    ``tensorboard/``    event files, if asked for                        metrics
    ``report.md``       one page about the run                           report
    ``run.lock``        held while a process writes here                 rundir
    ==================  ===============================================  ==================
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = pathlib.Path(path).expanduser().absolute()
        self.config = self.path / "config.json"
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.samples = self.path / "samples"
        self.plots = self.path / "plots"
        self.profile = self.path / "profile"
        self.tensorboard = self.path / "tensorboard"
        self.report = self.path / "report.md"
        self._lock_file: IO[str] | None = None

    def create(self) -> RunDir:
        """Make the folder. Raises ConfigError if that is impossible."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"run_dir {self.path} cannot be made ({error}); choose another run_dir"
            ) from error
        return self

    def sample_file(self, step: int) -> pathlib.Path:
        """File of the samples made after ``step`` steps."""
        return self.samples / f"step_{step:08d}.jsonl"

    def __enter__(self) -> Self:
        """Take the folder for this process; the lock goes away with the process, however it ends."""
        lock = open(self.path / "run.lock", "a+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            holder = lock.read().strip()
            lock.close()
            raise ConfigError(
                f"run_dir {self.path} is in use by process {holder or '?'}; stop that run or choose another"
            ) from error
        except OSError as error:  # file systems without locks (some NFS mounts)
            logger.warning(
                "%s cannot be locked (%s); make sure that no other process writes there", self.path, error
            )
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        self._lock_file = lock
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock_file is not None:
            self._lock_file.close()
            self._lock_file = None
