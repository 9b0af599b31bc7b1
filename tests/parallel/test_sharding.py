"""Logical axes to mesh axes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl.errors import ConfigError
from jaxrl.parallel import DEFAULT_RULES, MeshConfig, Sharding, make_mesh


@pytest.fixture(scope="module")
def sharding():
    return Sharding(make_mesh(MeshConfig(data=2, fsdp=2, tensor=2)))


@pytest.mark.parametrize(
    ("axes", "shape", "expected"),
    [
        (("batch", "seq"), None, PartitionSpec(("data", "fsdp"), None)),
        (("embed", "mlp"), (8, 8), PartitionSpec("fsdp", "tensor")),
        (("embed", "mlp"), (7, 8), PartitionSpec(None, "tensor")),
        (("embed", "mlp"), (8, 9), PartitionSpec("fsdp", None)),
        (("batch",), (6,), PartitionSpec(None)),  # 6 rows over 4 shards
        (("layers", "vocab", "embed"), (3, 4, 4), PartitionSpec(None, "tensor", "fsdp")),
        (("heads", "kv_heads"), (4, 4), PartitionSpec("tensor", None)),  # a mesh axis is used once
        (("batch", None, "embed"), (4, 2, 4), PartitionSpec(("data", "fsdp"), None, None)),
        (("nothing known", None), (4, 4), PartitionSpec(None, None)),
    ],
)
def test_spec(sharding, axes, shape, expected):
    assert sharding.spec(axes, shape) == expected
    assert sharding.named(axes, shape) == NamedSharding(sharding.mesh, expected)


def test_axes_of_size_one_are_left_out():
    sharding = Sharding(make_mesh(MeshConfig(data=8)))
    assert sharding.spec(("batch", "embed")) == PartitionSpec("data", None)


def test_rules_can_be_replaced():
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    rules = (*DEFAULT_RULES, ("seq", ("tensor",)))
    assert Sharding(mesh, rules).spec(("batch", "seq")) == PartitionSpec(("data", "fsdp"), "tensor")
    assert hash(Sharding(mesh, rules)) == hash(Sharding(mesh, rules))
    assert Sharding(mesh, rules) != Sharding(mesh)


def test_tree_and_replicated(sharding):
    axes = {"a": ("embed", "mlp"), "b": {"c": ("vocab",), "d": (None,)}}
    shapes = {"a": jnp.zeros((4, 3)), "b": {"c": jnp.zeros(5), "d": jnp.zeros(2)}}
    tree = sharding.tree(axes, shapes)
    assert tree["a"].spec == PartitionSpec("fsdp", None)
    assert tree["b"]["c"].spec == tree["b"]["d"].spec == PartitionSpec(None)
    assert sharding.replicated(axes, shapes) == ["a", "b/c"]


def test_batch_rows(sharding):
    assert sharding.batch_ways == 4
    sharding.check_batch(8)
    with pytest.raises(
        ConfigError, match=r"prompts of 10 rows.*'data': 2, 'fsdp': 2.*\(4 shards\).*multiple of 4.*8 or 12"
    ):
        sharding.check_batch(10, "prompts")
    with pytest.raises(ConfigError, match="4 or 4"):
        sharding.check_batch(3)
    rows = jax.device_put(np.arange(24).reshape(8, 3), sharding.batch())
    assert rows.addressable_shards[0].data.shape == (2, 3)
    copied = jax.device_put(np.arange(3), sharding.replicate())
    assert copied.sharding.is_fully_replicated


def test_constraint_inside_jit(sharding):
    x = jax.jit(lambda x: sharding.constrain(2 * x, "batch", "mlp"))(jnp.ones((4, 6)))
    assert x.sharding.spec == PartitionSpec(("data", "fsdp"), "tensor")
    np.testing.assert_array_equal(x, 2.0)
