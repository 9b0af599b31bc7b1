"""Train state and parameter partitions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl.runtime.state import TrainState, canonical, combine, count_parameters, partition

PARAMS = {
    "layers": {
        "0": {"q": {"kernel": jnp.ones((4, 4)), "lora_a": jnp.ones((4, 2)), "lora_b": jnp.zeros((2, 4))}},
        "1": {"norm": {"scale": jnp.ones(4)}},
    },
    "embed": {"embedding": jnp.ones((5, 4))},
}


def test_partition_prunes_and_combine_is_its_inverse():
    trainable, frozen = partition(PARAMS, lambda path, leaf: "lora_" in path)
    assert set(trainable) == {"layers"} and set(trainable["layers"]) == {"0"}
    assert set(trainable["layers"]["0"]["q"]) == {"lora_a", "lora_b"}
    assert set(frozen["layers"]["0"]["q"]) == {"kernel"}
    whole = combine(trainable, frozen)
    assert jax.tree.structure(whole) == jax.tree.structure(PARAMS)
    assert count_parameters(trainable) == 16 and count_parameters(whole) == count_parameters(PARAMS) == 56


def test_partition_sees_path_and_leaf():
    trainable, _ = partition(PARAMS, lambda path, leaf: path == "layers/1/norm/scale" and leaf.ndim == 1)
    assert list(trainable["layers"]) == ["1"]


def test_combine_refuses_overlap():
    with pytest.raises(ValueError, match="layers/1/norm/scale is in both"):
        combine(PARAMS, {"layers": {"1": {"norm": {"scale": jnp.ones(4)}}}})


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
