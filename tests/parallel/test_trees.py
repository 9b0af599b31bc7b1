"""Splitting and joining nested dicts of parameters."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxrl.parallel.trees import combine, partition

PARAMS = {
    "layers": {
        "0": {"q": {"kernel": jnp.ones((4, 4)), "lora_a": jnp.ones((4, 2)), "lora_b": jnp.zeros((2, 4))}},
        "1": {"norm": {"scale": jnp.ones(4)}},
    },
    "embed": {"embedding": jnp.ones((5, 4))},
}


def test_partition_prunes_and_combine_is_its_inverse():
    trainable, frozen = partition(PARAMS, lambda path: path[-1].startswith("lora_"))
    assert set(trainable) == {"layers"} and set(trainable["layers"]) == {"0"}
    assert set(trainable["layers"]["0"]["q"]) == {"lora_a", "lora_b"}
    assert set(frozen["layers"]["0"]["q"]) == {"kernel"}
    whole = combine(trainable, frozen)
    assert jax.tree.structure(whole) == jax.tree.structure(PARAMS)


def test_partition_sees_the_whole_path():
    trainable, _ = partition(PARAMS, lambda path: path == ("layers", "1", "norm", "scale"))
    assert list(trainable["layers"]) == ["1"]


def test_combine_refuses_overlap():
    with pytest.raises(ValueError, match="layers/1/norm/scale is in both"):
        combine(PARAMS, {"layers": {"1": {"norm": {"scale": jnp.ones(4)}}}})
