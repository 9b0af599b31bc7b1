"""Train state and parameter partitions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl.runtime.state import TrainState, canonical

PARAMS = {
    "layers": {
        "0": {"q": {"kernel": jnp.ones((4, 4)), "lora_a": jnp.ones((4, 2)), "lora_b": jnp.zeros((2, 4))}},
        "1": {"norm": {"scale": jnp.ones(4)}},
    },
    "embed": {"embedding": jnp.ones((5, 4))},
}


def test_train_state_is_a_pytree_under_jit():
    state = TrainState.create(PARAMS, optax.adam(1e-3), jax.random.key(0))
    moved = jax.jit(lambda s: s.replace(step=s.step + 1))(state)
    assert int(moved.step) == 1 and moved.step.dtype == jnp.int32
    assert jax.tree.structure(moved) == jax.tree.structure(state)
    names = {jax.tree_util.keystr(p, simple=True, separator="/") for p, _ in jax.tree.leaves_with_path(moved)}
    assert {"step", "key", "params/layers/1/norm/scale", "opt_state/0/mu/embed/embedding"} <= names


def test_canonical_makes_leaves_strongly_typed_arrays():
    tree = canonical({"weak": jnp.asarray(1.0), "numpy": np.ones(2, np.float32), "key": jax.random.key(0)})
    assert not tree["weak"].weak_type and isinstance(tree["numpy"], jax.Array)
    assert (tree["weak"] * jnp.bfloat16(1)).dtype == jnp.float32
