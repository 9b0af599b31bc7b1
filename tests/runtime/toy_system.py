"""A small complete system for tests of the runtime: noisy linear regression with frozen features."""

from __future__ import annotations

import dataclasses
import functools
import os
import signal
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.errors import NonFiniteError
from jaxrl.runtime import compilation, loop
from jaxrl.runtime.optimizer import OptimizerConfig, make_optimizer
from jaxrl.runtime.run_config import RunConfig
from jaxrl.runtime.signals import Interrupted
from jaxrl.runtime.state import RunState, TrainState

ROWS, WIDTH = 16, 4


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the toy."""

    optimizer: OptimizerConfig = OptimizerConfig(
        learning_rate=0.05, schedule="cosine", warmup_steps=2, decay_steps=40
    )
    noise: float = 0.1
    nan_at: int = -1


@functools.cache  # compiled once for all tests
def compiled_step(config: Config) -> compilation.WatchedFunction:
    """Jitted step of a configuration; donates the state."""
    optimizer = make_optimizer(config.optimizer)

    def train_step(state: TrainState, rows: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
        noise = config.noise * jax.random.normal(jax.random.fold_in(state.key, state.step), (ROWS, 1))

        def loss(params: Any) -> jax.Array:
            x = rows @ state.frozen["base"]["kernel"]
            y = rows.sum(axis=1, keepdims=True) + noise
            return jnp.mean((x @ params["linear"]["kernel"] + params["linear"]["bias"] - y) ** 2)

        value, grads = jax.value_and_grad(loss)(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = jax.tree.map(jnp.add, state.params, updates)
        return state.replace(step=state.step + 1, params=params, opt_state=opt_state), {"loss": value}

    return compilation.jit(train_step, donate_argnums=0)


class Toy:
    """The data order lives in host state, the noise comes from the key in device state; the step donates its
    input.
    """

    def __init__(self, config: Config = Config()):
        self.config = config
        self.optimizer = make_optimizer(config.optimizer)
        self._step = compiled_step(config)
        self.hook: Any = None

    def init(self, key: jax.Array) -> RunState:
        params_key, frozen_key, run_key = jax.random.split(key, 3)
        params = {"linear": {"kernel": jax.random.normal(params_key, (WIDTH, 1)), "bias": jnp.zeros(1)}}
        frozen = {"base": {"kernel": jax.random.normal(frozen_key, (WIDTH, WIDTH))}}
        state = TrainState.create(params, self.optimizer, run_key, frozen)
        return RunState(state, {"position": 0, "baseline": 0.0, "order": [3, 1, 2]})

    def step(self, state: RunState) -> tuple[RunState, dict[str, Any]]:
        position = state.host["position"]
        if self.hook is not None:
            self.hook(position)
        if position == self.config.nan_at:
            raise NonFiniteError("loss is nan at row 3; lower the learning rate")
        rows = np.random.default_rng(position).normal(size=(ROWS, WIDTH)).astype(np.float32)
        device, metrics = self._step(state.device, rows)
        baseline = 0.9 * state.host["baseline"] + 0.1 * float(metrics["loss"])
        order = state.host["order"][1:] + state.host["order"][:1]
        host = {"position": position + 1, "baseline": baseline, "order": order}
        return RunState(device, host), metrics | {"baseline": baseline, "tokens": ROWS}

    def evaluate(self, state: RunState) -> dict[str, Any]:
        return {"norm": jnp.linalg.norm(state.device.params["linear"]["kernel"])}

    def samples(self, state: RunState) -> list[dict[str, Any]]:
        return [{"prompt": "1 + 1", "completion": "2", "reward": 1.0}]


def main(run_dir: str, total: int, event: str, at: int) -> int:
    """Run the toy in its own process; at step ``at`` the event happens: none, KILL or TERM."""
    toy = Toy()

    def hook(position: int) -> None:
        if event != "none" and position == at:
            os.kill(os.getpid(), getattr(signal, f"SIG{event}"))

    toy.hook = hook
    config = RunConfig(total_steps=total, eval_every=3, checkpoint_every=2, progress=False)
    try:
        loop.run(toy, config, run_dir)
    except Interrupted as stop:
        print(stop.message)
        return int(stop.code)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])))
