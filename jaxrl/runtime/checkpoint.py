"""Exact checkpoints of a run state, written by Orbax: atomic, asynchronous, checked on reading.

Layout under the run folder: ``checkpoints/<step>/`` (arrays, JSON and, if given, metrics) and ``frozen/0/``
(arrays under a path component named ``frozen``: base weights that never change are written once, not with
each step).

Arrays are stored under their tree path, so a checkpoint outlives renamed Python classes. Each leaf is stored
with a checksum of its bits, computed on the device before the write and again after the read.
"""

from __future__ import annotations

import functools
import json
import logging
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxrl.errors import CheckpointError
from jaxrl.runtime.checkpoint_store import FORMAT, Store, first_line, score
from jaxrl.runtime.checksum import checksums
from jaxrl.runtime.config import suggest
from jaxrl.runtime.state import RunState

logger = logging.getLogger("jaxrl")
FROZEN = "frozen"


class Checkpointer:
    """Saves and restores the ``RunState`` of one run folder. One writer per folder."""

    def __init__(
        self,
        run_dir: str | pathlib.Path,
        *,
        keep: int = 2,
        keep_best: str | None = None,
        best_mode: str = "max",
        asynchronous: bool = True,
    ):
        """Open (or create) the checkpoints of a run folder; leftovers of interrupted writes are removed.

        Args:
          run_dir: the run folder.
          keep: number of newest checkpoints to keep, >= 1.
          keep_best: name of a metric; the checkpoint with its best value is kept besides the newest ones.
          best_mode: ``"max"`` or ``"min"``.
          asynchronous: write in the background; the step loop waits only for the copy to host memory.
        """
        self._folder = pathlib.Path(run_dir).absolute()
        self._keep_best, self._best_mode = keep_best, best_mode
        policies = ocp.checkpoint_managers
        kept: list[Any] = [policies.LatestN(keep)]
        best = None if keep_best is None else functools.partial(_score_of, keep_best, best_mode)
        if best is not None:
            kept.append(policies.BestN(get_metric_fn=best, n=1, keep_checkpoints_without_metrics=False))
        preserve = policies.AnyPreservationPolicy(kept)
        self._steps = Store(self._folder / "checkpoints", preserve, asynchronous, best=best)
        self._frozen = Store(self._folder / FROZEN, None, False)

    @property
    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        return self._steps.steps()

    def save(self, state: RunState, step: int, metrics: Mapping[str, float] | None = None) -> None:
        """Save the state after ``step`` completed steps; returns when the state may change again.

        Args:
          state: what to save; ``device`` leaves must be live arrays.
          step: number of completed steps; the name of the checkpoint.
          metrics: metrics of this step; only ``keep_best`` is looked up.

        Raises:
          CheckpointError: this write or the previous asynchronous one failed, or ``state`` cannot be stored
            exactly. Checkpoints that were complete stay intact.
        """
        self.wait()
        host = _host_snapshot(state.host)
        arrays = _flatten(state.device)
        dead = [path for path, x in arrays.items() if isinstance(x, jax.Array) and x.is_deleted()]
        if dead:
            raise CheckpointError(f"{dead[0]} was donated and is gone; save the state that the step returned")
        data = {path: _to_data(x) for path, x in arrays.items()}
        sums = checksums(data)
        leaves = {
            path: {"shape": list(x.shape), "dtype": str(x.dtype), "checksum": sums[path]}
            for path, x in arrays.items()
        }
        self._save_frozen_once(
            {path: data[path] for path in data if _is_frozen(path)},
            {path: leaf for path, leaf in leaves.items() if _is_frozen(path)},
        )
        best = None
        if self._keep_best is not None and metrics is not None and self._keep_best in metrics:
            best = {self._keep_best: float(metrics[self._keep_best])}
        record = {"format": FORMAT, "step": step, "host": host, "leaves": leaves}
        self._steps.save(step, {path: x for path, x in data.items() if not _is_frozen(path)}, record, best)

    def wait(self) -> None:
        """Wait for the write in the background. Raises CheckpointError if it failed."""
        self._steps.wait()

    def restore(self, template: RunState) -> tuple[RunState, int]:
        """Restore the newest complete checkpoint.

        Args:
          template: a state of the same structure; ``device`` leaves are arrays or ``ShapeDtypeStruct``. Each
            restored array gets the sharding of its template leaf; a leaf without a sharding stays
            uncommitted.

        Returns:
          ``(state, step)``. A checkpoint that cannot be read, or whose checksums differ, is set aside with a
          logged message (renamed ``<step>.corrupt``) and the one before it is taken.

        Raises:
          CheckpointError: the checkpoint is of another structure (names path and shapes), there is none, or
            none can be read (then all are left in place).
        """
        broken: dict[int, str] = {}
        for step in reversed(self.steps):
            record, problem = self._attempt(lambda step=step: self._steps.read_json(step))
            if problem is None:
                _check_structure(
                    record["leaves"], _flatten(template.device), f"checkpoint {step} of {self._folder}"
                )
                state, problem = self._attempt(
                    lambda step=step, record=record: self._restore_arrays(step, record, template)
                )
            if problem is None:
                for newer in broken:  # out of the way of the steps to come
                    self._steps.set_aside(newer)
                return state, step
            broken[step] = problem
            logger.warning(
                "checkpoint of step %d cannot be read (%s); trying the one before it", step, problem
            )
        reasons = "; ".join(f"step {step}: {problem}" for step, problem in broken.items())
        raise CheckpointError(
            f"no checkpoint in {self._folder} can be read ({reasons or 'there is none'}); "
            "choose another run folder"
        )

    def best_step(self) -> int | None:
        """Step of the checkpoint with the best ``keep_best`` metric, or None."""
        return self._steps.best_step(self._keep_best, self._best_mode)

    def close(self) -> None:
        """Wait for pending writes and release the folder. Raises CheckpointError if the last write failed."""
        try:
            self.wait()
        finally:
            self._steps.close()
            self._frozen.close()

    def _save_frozen_once(self, data: dict[str, Any], leaves: dict[str, Any]) -> None:
        if not data:
            return
        if not self._frozen.steps():
            self._frozen.save(0, data, {"format": FORMAT, "leaves": leaves}, None)
            return
        saved = self._frozen.read_json(0)["leaves"]
        _check_structure(saved, leaves, f"the frozen arrays of {self._folder}")
        changed = [path for path in leaves if leaves[path]["checksum"] != saved[path]["checksum"]]
        if changed:
            raise CheckpointError(
                f"{changed[0]} has changed since the first checkpoint, but arrays under '{FROZEN}' are saved "
                "only once; keep arrays that change outside of it"
            )

    def _restore_arrays(self, step: int, record: dict[str, Any], template: RunState) -> RunState:
        wanted = _flatten(template.device)
        abstract = {path: _abstract_data(leaf) for path, leaf in wanted.items()}
        data = self._steps.read_arrays(step, {p: a for p, a in abstract.items() if not _is_frozen(p)})
        frozen = {p: a for p, a in abstract.items() if _is_frozen(p)}
        if frozen:
            data.update(self._frozen.read_arrays(0, frozen))
        sums = checksums(data)
        for path in wanted:
            if sums[path] != record["leaves"][path]["checksum"]:
                raise CheckpointError(f"{path} does not have the checksum it was saved with")
        leaves = [_from_data(data[path], leaf) for path, leaf in wanted.items()]
        return RunState(jax.tree.unflatten(jax.tree.structure(template.device), leaves), record["host"])

    def _attempt(self, read: Any) -> tuple[Any, str | None]:
        """Run a read on every process and agree on its success. Orbax and TensorStore raise many types."""
        try:
            value, problem = read(), None
        except Exception as error:  # noqa: BLE001 - a broken file shows up as almost any exception; it is reported
            value, problem = None, first_line(error)
        if jax.process_count() > 1:
            from jax.experimental import multihost_utils

            if not multihost_utils.process_allgather(np.asarray(problem is None)).all():
                problem = problem or "another process cannot read it"
        return value, problem


def load_arrays(
    run_dir: str | pathlib.Path, step: int | None = None, prefix: str = "params"
) -> dict[str, Any]:
    """Read one branch of a checkpoint without building the system, for export and evaluation.

    Args:
      run_dir: a run folder.
      step: which checkpoint; None for the newest.
      prefix: tree path of the branch, for example ``"params"`` or ``"frozen"``.

    Returns:
      Nested dict of arrays on the default device, keyed by the path components after ``prefix``; typed keys are
      left out.

    Raises:
      CheckpointError: there is no such checkpoint or no such branch.
    """
    folder = pathlib.Path(run_dir).absolute()
    if not (folder / "checkpoints").is_dir():
        raise CheckpointError(f"{folder} has no checkpoints; give the folder of a run that has saved one")
    store = Store(folder / "checkpoints", None, False, read_only=True)
    frozen = Store(folder / FROZEN, None, False, read_only=True)
    try:
        steps = store.steps()
        if not steps or (step is not None and step not in steps):
            raise CheckpointError(f"{folder} has no checkpoint of step {step}; it has {steps or 'none'}")
        step = steps[-1] if step is None else step
        leaves = store.read_json(step)["leaves"]
        is_key = {path: leaf["dtype"].startswith("key<") for path, leaf in leaves.items()}
        chosen = [path for path in leaves if path.startswith(prefix + "/") and not is_key[path]]
        if not chosen:
            raise CheckpointError(
                f"checkpoint {step} has no {prefix!r}; {suggest(prefix, {p.split('/')[0] for p in leaves})}"
            )
        tree: dict[str, Any] = {}
        for source, number, paths in (
            (store, step, [p for p in chosen if not _is_frozen(p)]),
            (frozen, 0, [p for p in chosen if _is_frozen(p)]),
        ):
            abstract = {p: jax.ShapeDtypeStruct(tuple(leaves[p]["shape"]), leaves[p]["dtype"]) for p in paths}
            for path, x in (source.read_arrays(number, abstract) if abstract else {}).items():
                *parents, name = path[len(prefix) + 1 :].split("/")
                branch = tree
                for parent in parents:
                    branch = branch.setdefault(parent, {})
                branch[name] = x
        return tree
    finally:
        store.close()
        frozen.close()


def _score_of(name: str, mode: str, metrics: Mapping[str, float]) -> float:
    return score(metrics[name], mode)


def _flatten(tree: Any) -> dict[str, Any]:
    flat = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name in flat:
            raise CheckpointError(
                f"two leaves of the state have the path {name!r}; do not use '/' in dictionary keys"
            )
        flat[name] = leaf
    return flat


def _is_frozen(path: str) -> bool:
    return FROZEN in path.split("/")


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _to_data(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _from_data(data: jax.Array, leaf: Any) -> jax.Array:
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf)) if _is_key(leaf) else data


def _abstract_data(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype and target sharding of the stored form of a template leaf (typed keys are stored as
    uint32).
    """
    committed = leaf.committed if isinstance(leaf, jax.Array) else getattr(leaf, "sharding", None) is not None
    if _is_key(leaf):
        data = (
            jax.random.key_data(leaf)
            if isinstance(leaf, jax.Array)
            else jax.eval_shape(jax.random.key_data, leaf)
        )
        sharding = getattr(data, "sharding", None) if committed else None
    else:
        data, sharding = leaf, leaf.sharding if committed else None
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=sharding)


def _check_structure(saved: dict[str, Any], wanted: dict[str, Any], where: str) -> None:
    """Raise CheckpointError at the first leaf that is missing, extra, or of another shape or dtype."""
    for path in wanted:
        if path not in saved:
            raise CheckpointError(
                f"{where} has no {path}; {suggest(path, saved)} Use the configuration it was made with"
            )
    for path in saved:
        if path not in wanted:
            raise CheckpointError(
                f"{where} holds {path}, which this run does not have; use the configuration it was made with"
            )
    for path, leaf in wanted.items():
        is_record = isinstance(leaf, dict)
        shape = tuple(leaf["shape"] if is_record else leaf.shape)
        dtype = str(leaf["dtype"] if is_record else leaf.dtype)
        old_shape, old_dtype = tuple(saved[path]["shape"]), saved[path]["dtype"]
        if (shape, dtype) != (old_shape, old_dtype):
            raise CheckpointError(
                f"{where} holds {path} as {old_dtype}{list(old_shape)}, this run needs {dtype}{list(shape)}; "
                "use the configuration it was made with"
            )


def _host_snapshot(host: Any) -> dict[str, Any]:
    """A JSON copy of the host state, or CheckpointError naming the entry that JSON would change."""

    def check(value: Any, path: str) -> None:
        if isinstance(value, dict) and type(value) is dict:
            for key, inner in value.items():
                if type(key) is not str:
                    raise CheckpointError(f"{path} has the key {key!r}; use string keys, JSON has no other")
                check(inner, f"{path}[{key!r}]")
        elif type(value) is list:
            for i, inner in enumerate(value):
                check(inner, f"{path}[{i}]")
        elif value is not None and type(value) not in (str, int, float, bool):
            raise CheckpointError(
                f"{path} is a {type(value).__name__}; use dict, list, str, int, float, bool or None, "
                "so that a resumed run sees the same value"
            )

    check(host, "state.host")
    return json.loads(json.dumps(host))
