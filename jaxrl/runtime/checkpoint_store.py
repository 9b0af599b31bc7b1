"""Numbered Orbax checkpoints in one directory: the file level under ``checkpoint.Checkpointer``."""

from __future__ import annotations

import logging
import math
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxrl.errors import CheckpointError

logger = logging.getLogger("jaxrl")
FORMAT = 1


class Store:
    """Numbered Orbax checkpoints of (flat dict of arrays, JSON record, optional metrics) in one directory."""

    def __init__(
        self,
        directory: pathlib.Path,
        preserve: Any,
        asynchronous: bool,
        read_only: bool = False,
        best: Callable[[Any], float] | None = None,
    ):
        self._directory, self._preserve, self._asynchronous = directory, preserve, asynchronous
        self._best = best
        self._read_only = read_only  # a reader beside a live writer must not clean up the write in progress
        self._pending: tuple[int, int] | None = None  # step and bytes of the write in the background
        self._manager: ocp.CheckpointManager | None = None

    def steps(self) -> list[int]:
        """Numbers of the complete checkpoints, ascending."""
        return sorted(self._open().all_steps()) if self._directory.is_dir() else []

    def save(
        self, step: int, arrays: dict[str, Any], record: dict[str, Any], metrics: dict[str, float] | None
    ) -> None:
        """Start a write (and finish it, if not asynchronous). Raises CheckpointError."""
        items = ocp.args.Composite(state=ocp.args.PyTreeSave(arrays), record=ocp.args.JsonSave(record))
        self._pending = (step, sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays.values()))
        try:
            self._open().save(step, args=items, metrics=metrics, force=True)
        except Exception as error:
            raise self._failed(error) from error
        if not self._asynchronous:
            self.wait()

    def wait(self) -> None:
        """Finish the write in the background. Raises CheckpointError if it failed."""
        if self._pending is None:
            return
        try:
            self._open().wait_until_finished()
        except Exception as error:
            raise self._failed(error) from error
        self._pending = None

    def read_json(self, step: int) -> dict[str, Any]:
        """The record of a checkpoint; raises whatever Orbax raises on broken files."""
        record = self._open().restore(step, args=ocp.args.Composite(record=ocp.args.JsonRestore())).record
        if record.get("format") != FORMAT:
            raise CheckpointError(f"it has format {record.get('format')}, this version reads {FORMAT}")
        return record

    def read_arrays(self, step: int, abstract: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        """The named arrays onto the given shardings; an array without one stays uncommitted."""
        here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        placed = {
            path: a if a.sharding is not None else jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here)
            for path, a in abstract.items()
        }
        args = ocp.args.PyTreeRestore(
            item=placed,
            restore_args=ocp.checkpoint_utils.construct_restore_args(placed),
            partial_restore=True,
        )
        arrays = self._open().restore(step, args=ocp.args.Composite(state=args)).state
        # An uncommitted leaf (a step counter made by jnp.zeros) must stay uncommitted: a committed one could
        # not be used in one computation with arrays of a larger mesh.
        return {
            path: x if abstract[path].sharding is not None else jax.numpy.asarray(np.asarray(x))
            for path, x in arrays.items()
        }

    def set_aside(self, step: int) -> None:
        """Rename a broken checkpoint to ``<step>.corrupt``, so that its number is free again."""
        self._reset()
        if jax.process_index() == 0:
            source, target = self._directory / str(step), self._directory / f"{step}.corrupt"
            if target.exists():
                shutil.rmtree(target)
            if source.exists():
                source.rename(target)
        barrier(f"set_aside_{step}")

    def best_step(self, metric: str | None, mode: str) -> int | None:
        """Number of the checkpoint with the best value of a metric, or None."""
        if metric is None or not self._directory.is_dir():
            return None
        manager = self._open()
        scored = [
            (score(m[metric], mode), s)
            for s in manager.all_steps()
            if (m := manager.metrics(s)) and metric in m
        ]
        return max(scored)[1] if scored else None

    def close(self) -> None:
        """Release the directory."""
        if self._manager is not None:
            manager, self._manager = self._manager, None
            manager.close()

    def _open(self) -> ocp.CheckpointManager:
        if self._manager is None:
            if self._read_only:
                options = ocp.CheckpointManagerOptions(create=False, cleanup_tmp_directories=False)
            else:
                options = ocp.CheckpointManagerOptions(
                    preservation_policy=self._preserve,
                    best_fn=self._best,  # Orbax writes metrics only when this is set
                    enable_async_checkpointing=self._asynchronous,
                    cleanup_tmp_directories=True,
                )
            self._manager = ocp.CheckpointManager(self._directory, options=options)
        return self._manager

    def _failed(self, error: Exception) -> CheckpointError:
        step, size = self._pending or (-1, 0)
        self._pending = None
        self._reset()
        if jax.process_index() == 0:
            for leftover in self._directory.glob(f"{step}.orbax-checkpoint-tmp*"):
                shutil.rmtree(leftover, ignore_errors=True)
        text = str(error).lower()
        full = any(
            sign in text for sign in ("no space left", "file too large", "disk quota", "os_error_code='28'")
        )
        remedy = (
            f"the disk is full: free about {max(size / 2**20, 1):.0f} MiB, or lower run.keep"
            if full
            else "check the folder"
        )
        return CheckpointError(
            f"the checkpoint of step {step} could not be written to {self._directory} "
            f"({first_line(error)}); earlier checkpoints are intact; {remedy}"
        )

    def _reset(self) -> None:
        """Drop a manager whose background write failed, or whose directory changed under it."""
        try:
            self.close()
        except Exception as error:  # noqa: BLE001 - close() repeats the failure that is being reported already
            logger.debug("closing the checkpoint manager: %s", error)


def score(value: float, mode: str) -> float:
    value = float(value)
    if math.isnan(value):
        return -math.inf
    return value if mode == "max" else -value


def first_line(error: BaseException) -> str:
    text = (str(error).strip().splitlines() or [""])[0]
    text = text if len(text) <= 300 else text[:297] + "..."
    return text if isinstance(error, CheckpointError) else f"{type(error).__name__}: {text}"


def barrier(name: str) -> None:
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)
