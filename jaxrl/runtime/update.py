"""The optimizer step, guarded: a loss or gradient that is not finite leaves the state as it was."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl.errors import NonFiniteError
from jaxrl.runtime.state import TrainState

#: Bookkeeping that ``check_finite`` takes out of the metrics.
FINITE, LEAVES = "finite", "finite_leaves"


def apply_gradients(
    optimizer: optax.GradientTransformation, state: TrainState, grads: Any, metrics: Mapping[str, jax.Array]
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One optimizer step; pure.

    Args:
      optimizer: optax transformation that ``state.opt_state`` belongs to.
      state: donated by the caller if it likes: on a non-finite loss or gradient the returned state holds the old
        parameters and optimizer state.
      grads: tree like ``state.params``.
      metrics: scalars with at least ``loss``.

    Returns:
      The new state, and the metrics with ``grad_norm``, ``update_norm``, and the flags that ``check_finite`` reads.
    """
    grad_norm = optax.tree.norm(grads)
    leaves = jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)])
    finite = jnp.isfinite(metrics["loss"]) & jnp.all(leaves)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    keep = lambda new, old: jnp.where(finite, new, old)  # noqa: E731
    new = state.replace(
        step=state.step + finite.astype(state.step.dtype),
        params=jax.tree.map(keep, params, state.params),
        opt_state=jax.tree.map(keep, opt_state, state.opt_state),
    )
    extra = {"grad_norm": grad_norm, "update_norm": optax.tree.norm(updates), FINITE: finite, LEAVES: leaves}
    return new, {**metrics, **extra}


def check_finite(metrics: Mapping[str, Any], params: Any, where: str = "step") -> dict[str, float]:
    """Metrics as floats, without the flags.

    Raises:
      NonFiniteError: the update was not taken; names the loss or the first parameters with a bad gradient.
    """
    values = {name: np.asarray(value) for name, value in jax.device_get(dict(metrics)).items()}
    finite, leaves = values.pop(FINITE), values.pop(LEAVES)
    if not finite:
        paths = [jax.tree_util.keystr(p, simple=True, separator="/") for p, _ in jax.tree_util.tree_leaves_with_path(params)]
        bad = [path for path, good in zip(paths, leaves, strict=True) if not good]
        culprit = f"the gradient of {', '.join(bad[:3])}" + (f" and {len(bad) - 3} more" if len(bad) > 3 else "")
        if not np.isfinite(values["loss"]):
            culprit = f"the loss ({values['loss']})"
        raise NonFiniteError(
            f"{where}: {culprit} is not finite; the optimizer step was not taken and the state is intact. "
            "Look at the log-probability and ratio metrics of the last steps; lower the learning rate, or check the data"
        )
    return {name: float(value) for name, value in values.items()}
