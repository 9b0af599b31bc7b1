"""Sizes of the mesh."""

from __future__ import annotations

import jax
import pytest
from jax.sharding import AxisType

from jaxrl.errors import ConfigError
from jaxrl.parallel import MeshConfig, make_mesh


@pytest.mark.parametrize(
    ("sizes", "devices", "expected"),
    [
        ((-1, 1, 1), 8, (8, 1, 1)),
        ((2, -1, 2), 8, (2, 2, 2)),
        ((1, 2, -1), 8, (1, 2, 4)),
        ((2, 2, 2), 8, (2, 2, 2)),
        ((-1, 1, 1), 1, (1, 1, 1)),
        ((-1, 16, 4), 256, (4, 16, 4)),
    ],
)
def test_sizes(sizes, devices, expected):
    assert MeshConfig(*sizes).sizes(devices) == expected


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((-1, -1, 1), "more than one axis of size -1"),
        ((0, 1, 1), "must be positive or -1"),
        ((2, -2, 1), "must be positive or -1"),
        ((-1, 3, 1), "does not divide 8 devices"),
        ((2, 2, 1), "needs 4 devices but 8 are visible"),
        ((4, 4, 1), "needs 16 devices but 8 are visible"),
    ],
)
def test_impossible_sizes_are_named(sizes, message):
    with pytest.raises(ConfigError, match=message):
        MeshConfig(*sizes).sizes(8)


def test_mesh_of_all_devices():
    mesh = make_mesh(MeshConfig(data=2, fsdp=-1, tensor=2))
    assert dict(mesh.shape) == {"data": 2, "fsdp": 2, "tensor": 2}
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert {d.id for d in mesh.devices.flat} == {d.id for d in jax.devices()}


def test_mesh_of_some_devices_keeps_their_order():
    chosen = jax.devices()[3:5]
    mesh = make_mesh(MeshConfig(data=1, fsdp=2), chosen)
    assert dict(mesh.shape) == {"data": 1, "fsdp": 2, "tensor": 1}
    assert list(mesh.devices.flat) == chosen
    assert set(mesh.axis_types) == {AxisType.Auto}
