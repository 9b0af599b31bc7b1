"""The loop: runs a system step by step; logs, evaluates, saves, resumes and stops cleanly."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import numpy as np
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from jaxrl.errors import CheckpointError, ConfigError, NonFiniteError
from jaxrl.runtime import report
from jaxrl.runtime.checkpoint import Checkpointer
from jaxrl.runtime.compilation import RecompilationGuard
from jaxrl.runtime.config import suggest
from jaxrl.runtime.metrics import MetricsLog, make_writers
from jaxrl.runtime.profiler import StepProfiler, parse_steps
from jaxrl.runtime.run_config import RunConfig
from jaxrl.runtime.rundir import RunDir
from jaxrl.runtime.signals import Interrupted, StopSignal
from jaxrl.runtime.state import RunState, canonical

logger = logging.getLogger("jaxrl")


class System(Protocol):
    """What the loop runs.

    Optional methods, used when present:
      ``samples(state) -> list[dict]``: JSON-able records of what the system produces, written after an
      evaluation. ``finish(state, run_dir)``: called once after the last step with the path of the run folder.
      ``template(key) -> RunState``: like ``init`` but cheap; only its structure is used, to read a checkpoint into.
      ``describe() -> dict``: facts such as the parameter count and memory estimate, shown by ``--dry_run``.
    """

    def init(self, key: jax.Array) -> RunState:
        """The state before the first step."""

    def step(self, state: RunState) -> tuple[RunState, Mapping[str, float]]:
        """One step. Randomness is a function of ``state`` alone. Metrics are scalars.

        ``NonFiniteError`` means that the update was not taken. A step that donates ``state`` to a computation
        sets the attribute ``state`` of the error to the state that it kept.
        """

    def evaluate(self, state: RunState) -> Mapping[str, float]:
        """Metrics of a state, logged under ``eval/``; must not change the state."""


def run(system: System, config: RunConfig, run_dir: str | os.PathLike[str], settings: Any = None) -> RunState:
    """Run a system to ``config.total_steps``, resuming if the run folder holds a checkpoint.

    Args:
      system: what to run.
      config: loop settings.
      run_dir: the run folder; made if needed, owned by this call.
      settings: resolved configuration as a dict, for outside loggers and the report.

    Returns:
      The final state.

    Raises:
      Interrupted: a signal arrived; the state is saved (a ``SystemExit`` with code 128 + signal number).
      NonFiniteError: from the system; the last good state is saved.
      CheckpointError: nothing could be saved or restored.
    """
    config.validate()
    folder = RunDir(run_dir).create()
    primary = jax.process_index() == 0
    with folder if primary else contextlib.nullcontext(), logging_redirect_tqdm():
        checkpointer = Checkpointer(
            folder.path,
            keep=config.keep,
            keep_best=config.keep_best,
            best_mode=config.best_mode,
            asynchronous=config.async_checkpoints,
        )
        try:
            state, step = _resume_or_init(system, config, folder, checkpointer)
            return _Run(system, config, folder, checkpointer, state, step, settings, primary).run()
        finally:
            checkpointer.close()


def _resume_or_init(
    system: System, config: RunConfig, folder: RunDir, checkpointer: Checkpointer
) -> tuple[RunState, int]:
    # Where the state comes from:
    #   1. resume="auto": the newest complete checkpoint of the run folder; if there is none,
    # system.init(seed).   2. resume="must": the same, but a folder without a checkpoint is an error.
    #   3. resume="never": system.init(seed); a folder with a checkpoint is an error, nothing is overwritten.
    # Weights from elsewhere (a pretrained model, another run) are loaded by system.init, so a resume never
    # sees them.
    found = bool(checkpointer.steps)
    if config.resume == "never" and found:
        raise ConfigError(
            f"{folder.path} already has checkpoints and run.resume='never'; choose another run_dir"
        )
    if config.resume == "must" and not found:
        raise ConfigError(f"{folder.path} has no checkpoint and run.resume='must'; check run_dir")
    # A system whose ``init`` is long (a warm start) offers ``template``: the same structure, without the work.
    make = getattr(system, "template", system.init) if found else system.init
    initial = make(jax.random.key(config.seed))
    initial = RunState(canonical(initial.device), initial.host)
    if not found:
        return initial, 0
    template = RunState(jax.tree.map(_abstract, initial.device), {})
    del initial  # its memory is needed for the restored arrays
    state, step = checkpointer.restore(template)
    logger.info("resuming %s after step %d", folder.path, step)
    if step >= config.total_steps:
        logger.warning(
            "%s is complete: step %d of run.total_steps=%d; raise total_steps to go on",
            folder.path,
            step,
            config.total_steps,
        )
    return state, step


class _Run:
    """One call of ``run``: the state and everything that is open while it lasts."""

    def __init__(
        self,
        system: System,
        config: RunConfig,
        folder: RunDir,
        checkpointer: Checkpointer,
        state: RunState,
        step: int,
        settings: Any,
        primary: bool,
    ):
        self.system, self.config, self.folder, self.checkpointer = system, config, folder, checkpointer
        self.state, self.step, self.primary = state, step, primary
        self.settings = settings
        self.log = MetricsLog(folder.metrics, keep_until=step or -1) if primary else None
        self.writers = (
            make_writers(config.loggers, folder.path, config.project, settings, step) if primary else []
        )
        self.guard = RecompilationGuard(config.recompile_guard)
        self.profiler = StepProfiler(parse_steps(config.profile_steps), folder.profile)
        self.elapsed = self.log.last.get("time/elapsed_seconds", 0.0) if self.log else 0.0
        self.last_metrics: dict[str, float] = {}

    def run(self) -> RunState:
        with StopSignal() as stop, self.guard, self._bar() as bar:
            try:
                self._loop(stop, bar)
            finally:
                self.profiler.stop()
                for writer in self.writers:
                    writer.close()
                if self.log is not None:
                    self.log.close()
        if self.primary:
            report.write(self.folder, self.settings, self.config.plot_metrics)
        return self.state

    def _loop(self, stop: StopSignal, bar: tqdm) -> None:
        config = self.config
        if self.step == 0 and config.eval_every and config.eval_at_start:
            with self.guard.expected():
                self._record(0, self._evaluate(), bar)
        first_evaluation = True
        for count in range(config.total_steps - self.step):
            if count == config.warmup_steps:
                self.guard.end_warm_up()
            self.profiler.before_step(self.step)
            row = self._step()
            if config.eval_every and self.step % config.eval_every == 0:
                with self.guard.expected() if first_evaluation else contextlib.nullcontext():
                    row.update(self._evaluate())
                first_evaluation = False
            self._record(self.step, row, bar)
            bar.update(1)
            number = stop.requested()
            last = self.step >= config.total_steps or number is not None
            due = config.checkpoint_every > 0 and self.step % config.checkpoint_every == 0
            if due:
                self._check_best(row)
            if due or last:
                self._save(row, last)
            self.guard.check(f"step {self.step}")
            if number is not None:
                self._interrupt(number)
        if hasattr(self.system, "finish"):
            self.system.finish(self.state, self.folder.path)

    def _step(self) -> dict[str, float]:
        started = time.perf_counter()
        try:
            state, metrics = self.system.step(self.state)
        except NonFiniteError as error:
            self._save_last_good(error)
            raise
        values = _scalars(metrics)  # waits for the device
        seconds = time.perf_counter() - started
        self.state, self.step = state, self.step + 1
        self.elapsed += seconds
        values |= {"time/step_seconds": seconds, "time/elapsed_seconds": self.elapsed}
        if "tokens" in values:
            values["time/tokens_per_second"] = values["tokens"] / seconds
        return values

    def _evaluate(self) -> dict[str, float]:
        started = time.perf_counter()
        values = {f"eval/{name}": value for name, value in _scalars(self.system.evaluate(self.state)).items()}
        if hasattr(self.system, "samples"):
            records = self.system.samples(self.state)
            if self.primary:
                report.write_samples(self.folder, self.step, records)
        seconds = time.perf_counter() - started
        self.elapsed += seconds
        return values | {"time/eval_seconds": seconds}

    def _record(self, step: int, row: dict[str, float], bar: tqdm) -> None:
        self.last_metrics = row
        if self.log is not None:
            self.log.write(step, row)
        for writer in self.writers:
            writer.write(step, row)
        names = self.config.progress_metrics or _main_metrics(row)
        shown = {name: f"{row[name]:.4g}" for name in names if name in row}
        if "time/tokens_per_second" in row:
            shown["tokens/s"] = f"{row['time/tokens_per_second']:,.0f}"
        bar.set_postfix(shown, refresh=False)

    def _save(self, row: Mapping[str, float], last: bool) -> None:
        """Save the present state; with ``last`` wait until it is on disk."""
        if self.log is not None:
            self.log.sync()
        with self.guard.expected():
            # A failed earlier write must not keep this one from being tried.
            self._tolerant(self.checkpointer.wait)
            self._tolerant(lambda: self.checkpointer.save(self.state, self.step, row))
            if last:
                self._tolerant(self.checkpointer.wait)

    def _tolerant(self, action: Callable[[], None]) -> None:
        try:
            action()
        except CheckpointError as error:
            if self.config.on_save_error == "stop":
                raise
            logger.error("%s; the run goes on (run.on_save_error='continue')", error)

    def _check_best(self, row: Mapping[str, float]) -> None:
        best = self.config.keep_best
        if best is not None and best not in row:
            raise ConfigError(
                f"run.keep_best is {best!r}, which step {self.step} does not report; {suggest(best, row)}"
            )

    def _save_last_good(self, error: NonFiniteError) -> None:
        """Save the state before the step that failed, so that the run can be taken up with other settings."""
        state = getattr(error, "state", None) or self.state
        if any(x.is_deleted() for x in jax.tree.leaves(state.device) if isinstance(x, jax.Array)):
            saved = self.checkpointer.steps
            logger.error(
                "the step gave its state away before it failed; the last checkpoint is of step %s", saved[-1:]
            )
            return
        if self.step in self.checkpointer.steps:
            logger.error("the last good state is the checkpoint of step %d", self.step)
            return
        self.state = state
        self._save(self.last_metrics, last=True)
        logger.error("the last good state is saved as the checkpoint of step %d", self.step)

    def _interrupt(self, number: int) -> None:
        saved = "saved" if self.step in self.checkpointer.steps else "not saved (see above)"
        message = (
            f"stopped by {signal.Signals(number).name} after step {self.step} of {self.config.total_steps}; "
            f"{saved} in {self.folder.path}; run the same command to go on"
        )
        logger.warning("%s", message)
        raise Interrupted(number, message)

    def _bar(self) -> tqdm:
        return tqdm(
            total=self.config.total_steps,
            initial=self.step,
            unit="step",
            disable=not (self.config.progress and self.primary),
            dynamic_ncols=True,
        )


def _abstract(leaf: jax.Array) -> jax.ShapeDtypeStruct | jax.Array:
    """What is needed to restore a leaf. Typed keys stay as they are: their implementation is part of the
    value.
    """
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding if leaf.committed else None)


def _scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Metrics as Python numbers; all device values are fetched together."""
    values = jax.device_get(dict(metrics))
    for name, value in values.items():
        if np.ndim(value) != 0:
            raise ValueError(f"metric {name!r} has shape {np.shape(value)}; the system must report scalars")
    return {name: value.item() if hasattr(value, "item") else value for name, value in values.items()}


def _main_metrics(row: Mapping[str, float]) -> tuple[str, ...]:
    for name in ("reward/mean", "reward", "loss", "eval/reward/mean", "eval/reward", "eval/loss"):
        if name in row:
            return (name,)
    return ()
