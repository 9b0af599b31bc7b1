"""Settings of the loop, the same for every system."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxrl.errors import ConfigError
from jaxrl.runtime.config import field, suggest
from jaxrl.runtime.metrics import LOGGERS
from jaxrl.runtime.profiler import parse_steps


@dataclass(frozen=True)
class RunConfig:
    """How long to run, what to write and when."""

    total_steps: int = field(doc="number of steps of the whole run, resumed parts included")
    run_dir: str = field("", "run folder; --run_dir on the command line wins")
    seed: int = field(0, "seed of the run key; everything random derives from it")
    eval_every: int = field(0, "evaluate after each such number of steps; 0 never")
    eval_at_start: bool = field(True, "also evaluate before the first step (needs eval_every > 0)")
    checkpoint_every: int = field(100, "save after each such number of steps; 0 only at the end")
    keep: int = field(2, "newest checkpoints to keep")
    keep_best: str | None = field(None, "metric whose best checkpoint is kept too, for example 'eval/reward'")
    best_mode: Literal["max", "min"] = field("max", "whether a larger or a smaller keep_best is better")
    async_checkpoints: bool = field(True, "write checkpoints in the background")
    on_save_error: Literal["stop", "continue"] = field(
        "stop", "what to do when a checkpoint cannot be written"
    )
    resume: Literal["auto", "must", "never"] = field(
        "auto", "continue from the run folder: if possible, always, never"
    )
    loggers: tuple[str, ...] = field(
        (), "outside loggers: tensorboard, wandb, trackio; metrics.jsonl is always written"
    )
    project: str = field("jaxrl", "project name for wandb and trackio")
    progress: bool = field(True, "show a progress bar")
    progress_metrics: tuple[str, ...] = field((), "metrics in the progress bar; empty: reward or loss")
    plot_metrics: tuple[str, ...] = field(
        (), "metrics plotted in the report; empty: rewards, losses, KL, entropy, length"
    )
    recompile_guard: Literal["warn", "error", "off"] = field(
        "warn", "what to do when a function compiles again"
    )
    warmup_steps: int = field(2, "steps of this process during which compilations are expected")
    profile_steps: str = field("", "FIRST:LAST steps to trace with the profiler, LAST excluded; empty: none")

    def validate(self) -> None:
        """Refuse values that cannot work, by name."""
        for name, low in (
            ("total_steps", 1),
            ("eval_every", 0),
            ("checkpoint_every", 0),
            ("keep", 1),
            ("warmup_steps", 1),
        ):
            if getattr(self, name) < low:
                raise ConfigError(f"{name} is {getattr(self, name)}; give a value >= {low}")
        for name in self.loggers:
            if name not in LOGGERS:
                raise ConfigError(f"loggers has {name!r}; {suggest(name, LOGGERS)}")
        evaluated = self.eval_every and self.checkpoint_every and self.checkpoint_every % self.eval_every == 0
        if self.keep_best is not None and self.keep_best.startswith("eval/") and not evaluated:
            raise ConfigError(
                f"keep_best={self.keep_best!r} needs an evaluation at each checkpoint, but eval_every="
                f"{self.eval_every} and checkpoint_every={self.checkpoint_every}; make checkpoint_every a "
                "multiple of eval_every"
            )
        parse_steps(self.profile_steps)
