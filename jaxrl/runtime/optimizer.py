"""Optimizers: one configuration to one optax transformation."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from jaxrl.errors import ConfigError
from jaxrl.runtime.config import field

# Leaves with these names get no weight decay whatever their rank: with stacked layers a norm scale is [L, D].
UNDECAYED_NAMES = ("scale", "bias")


@dataclass(frozen=True)
class OptimizerConfig:
    """Update rule, learning-rate schedule, clipping and weight decay."""

    name: Literal["adamw", "adam", "sgd", "lion", "adafactor"] = field("adamw", "update rule")
    learning_rate: float = field(1e-6, "peak learning rate")
    schedule: Literal["constant", "linear", "cosine"] = field("constant", "shape of the decay after warm-up")
    warmup_steps: int = field(
        0, "optimizer steps of linear warm-up; step s uses (s + 1) / warmup_steps of the peak"
    )
    decay_steps: int | None = field(
        None, "optimizer steps, warm-up included, after which the decay has ended"
    )
    final_fraction: float = field(0.0, "learning rate after the decay, as a fraction of the peak")
    b1: float = field(0.9, "decay of the first moment (momentum for sgd)")
    b2: float = field(0.999, "decay of the second moment")
    eps: float = field(1e-8, "added to the root of the second moment (adam, adamw)")
    weight_decay: float = field(
        0.0, "decoupled weight decay, multiplied by the learning rate; not on norms and biases"
    )
    clip_norm: float | None = field(1.0, "largest global gradient norm; None switches clipping off")
    moment_dtype: Literal["float32", "bfloat16"] | None = field(
        None, "dtype of the first moment; None: that of params"
    )
    learning_rates: tuple[tuple[str, float], ...] = field(
        (),
        "(regex, peak learning rate) pairs; a regex is searched in paths such as 'layers/0/attn/q/lora_a', "
        "the first that is found wins",
    )

    def validate(self) -> None:
        """Refuse values that cannot work, by name."""
        for name in ("learning_rate", "weight_decay", "warmup_steps", "eps"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; give a value >= 0")
        for name in ("b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; give a value in [0, 1)")
        if not 0 <= self.final_fraction <= 1:
            raise ConfigError(f"final_fraction is {self.final_fraction}; give a value in [0, 1]")
        if self.clip_norm is not None and self.clip_norm <= 0:
            raise ConfigError(f"clip_norm is {self.clip_norm}; give a value > 0, or None for no clipping")
        if self.schedule != "constant" and (
            self.decay_steps is None or self.decay_steps <= self.warmup_steps
        ):
            raise ConfigError(
                f"schedule={self.schedule!r} with decay_steps={self.decay_steps}, warmup_steps="
                f"{self.warmup_steps}; set decay_steps above warmup_steps (usually the steps of the run)"
            )
        if self.weight_decay and self.name in ("adam", "sgd", "adafactor"):
            raise ConfigError(
                f"weight_decay is set but {self.name} has none; use adamw or lion, or set it to 0"
            )
        for pattern, rate in self.learning_rates:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConfigError(
                    f"learning_rates has the pattern {pattern!r}: {error}; give a valid regex"
                ) from error
            if rate < 0:
                raise ConfigError(f"learning_rates gives {rate} for {pattern!r}; give a value >= 0")


def make_schedule(config: OptimizerConfig, peak: float | None = None) -> optax.Schedule:
    """Learning rate as a function of the optimizer step.

    Args:
      config: schedule shape.
      peak: peak learning rate; ``config.learning_rate`` if None.

    Returns:
      ``step [] int32 -> learning rate [] float32``. With W warm-up steps, D decay steps, peak p and final
      fraction f: ``p (s + 1) / W`` for s < W; then with ``x = min((s - W) / (D - W), 1)`` the rate is ``p``
      (constant), ``p (1 - (1 - f) x)`` (linear) or ``p (f + (1 - f) (1 + cos(pi x)) / 2)`` (cosine).
    """
    peak = config.learning_rate if peak is None else peak
    warmup, fraction = config.warmup_steps, config.final_fraction

    def schedule(step: Any) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)
        ramp = (step + 1) / max(warmup, 1)
        if config.schedule == "constant":
            shape = jnp.ones_like(step)
        else:
            x = jnp.clip((step - warmup) / (config.decay_steps - warmup), 0, 1)
            shape = 1 - x if config.schedule == "linear" else (1 + jnp.cos(jnp.pi * x)) / 2
            shape = fraction + (1 - fraction) * shape
        return peak * jnp.where(step < warmup, ramp, shape)

    return schedule


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """The optax transformation of a configuration: clip, rule, weight decay, learning rate, in this order.

    ``init`` raises ConfigError when a pattern of ``learning_rates`` matches no parameter.
    """
    config.validate()
    parts = []
    if config.clip_norm is not None:
        parts.append(optax.clip_by_global_norm(config.clip_norm))
    parts.append(_rule(config))
    if config.weight_decay:
        parts.append(optax.add_decayed_weights(config.weight_decay, mask=decay_mask))
    if config.learning_rates:
        rates = {str(i): rate for i, (_, rate) in enumerate(config.learning_rates)}
        groups = {"default": config.learning_rate, **rates}
        scales = {
            label: optax.scale_by_learning_rate(make_schedule(config, r)) for label, r in groups.items()
        }
        parts.append(optax.partition(scales, lambda params: _labels(config, params)))
    else:
        parts.append(optax.scale_by_learning_rate(make_schedule(config)))
    return optax.chain(*parts)


def decay_mask(params: Any) -> Any:
    """True on leaves that are decayed: rank >= 2 and not named ``scale`` or ``bias``."""

    def decayed(path: tuple[Any, ...], leaf: Any) -> bool:
        return leaf.ndim >= 2 and _name(path).rsplit("/", 1)[-1] not in UNDECAYED_NAMES

    return jax.tree_util.tree_map_with_path(decayed, params)


def _rule(config: OptimizerConfig) -> optax.GradientTransformation:
    if config.name in ("adam", "adamw"):
        return optax.scale_by_adam(config.b1, config.b2, config.eps, mu_dtype=config.moment_dtype)
    if config.name == "lion":
        return optax.scale_by_lion(config.b1, config.b2, mu_dtype=config.moment_dtype)
    if config.name == "adafactor":  # with an external learning rate: no relative step, no parameter scaling
        return optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0))
    return optax.trace(config.b1, accumulator_dtype=config.moment_dtype) if config.b1 else optax.identity()


def _labels(config: OptimizerConfig, params: Any) -> Any:
    used = set()

    def label(path: tuple[Any, ...], _: Any) -> str:
        for i, (pattern, _rate) in enumerate(config.learning_rates):
            if re.search(pattern, _name(path)):
                used.add(i)
                return str(i)
        return "default"

    labels = jax.tree_util.tree_map_with_path(label, params)
    idle = [pattern for i, (pattern, _) in enumerate(config.learning_rates) if i not in used]
    if idle:
        example = _name(next(iter(jax.tree_util.tree_leaves_with_path(params)))[0])
        raise ConfigError(
            f"learning_rates: {idle[0]!r} selects no trainable parameter that an earlier pattern has not "
            f"taken; paths look like {example!r}"
        )
    return labels


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
