"""State of a run: what a checkpoint holds, and the train state that most systems put in it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class RunState:
    """Everything a resume needs.

    Attributes:
      device: any pytree of arrays and typed keys.
      host: dict that JSON can hold exactly (dict with string keys, list, str, int, float, bool, None): data
        positions, controllers, counters.
    """

    device: Any
    host: dict[str, Any] = dataclasses.field(default_factory=dict)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Device state of a system that trains one network.

    Attributes:
      step: [] int32, optimizer steps taken.
      params: trainable parameters, nested dict of arrays.
      frozen: parameters that never change (base weights under LoRA), nested dict; saved once per run folder.
      opt_state: optax state for ``params``.
      key: [] typed key; the randomness of a step is a function of it and of ``step``.
    """

    step: jax.Array
    params: Params
    frozen: Params
    opt_state: Any
    key: jax.Array

    def replace(self, **changes: Any) -> TrainState:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    @classmethod
    def create(
        cls, params: Params, optimizer: Any, key: jax.Array, frozen: Params | None = None
    ) -> TrainState:
        """State before the first step; ``optimizer`` is an optax transformation."""
        return cls(
            jnp.zeros((), jnp.int32), params, {} if frozen is None else frozen, optimizer.init(params), key
        )


def count_parameters(tree: Any) -> int:
    """Number of array elements in a pytree (abstract or real)."""
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(tree))


def canonical(tree: Any) -> Any:
    """The tree with every leaf a strongly typed ``jax.Array``, as a restored tree has it.

    A weakly typed leaf would make the first steps of a fresh run promote and compile differently from a
    resumed one.
    """

    def leaf(x: Any) -> jax.Array:
        is_key = isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
        if is_key or (isinstance(x, jax.Array) and not x.weak_type):
            return x
        x = jnp.asarray(x)
        return jax.lax.convert_element_type(x, x.dtype)

    return jax.tree.map(leaf, tree)
