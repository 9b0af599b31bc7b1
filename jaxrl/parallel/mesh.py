"""The device mesh: axes `data`, `fsdp` and `tensor`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxrl.errors import ConfigError

AXES = ("data", "fsdp", "tensor")


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Sizes of the mesh axes; one of them may be -1 ("all devices that are left").

    Attributes:
      data: replicas that hold whole parameters and different rows of the batch.
      fsdp: shards of parameters and optimizer state; also splits the batch.
      tensor: shards of heads, feed-forward width and vocabulary.
    """

    data: int = -1
    fsdp: int = 1
    tensor: int = 1

    def validate(self) -> None:
        sizes = (self.data, self.fsdp, self.tensor)
        if sum(size == -1 for size in sizes) > 1:
            raise ConfigError(f"mesh has more than one axis of size -1 ({dict(zip(AXES, sizes))}); fix all but one")
        if any(size == 0 or size < -1 for size in sizes):
            raise ConfigError(f"mesh axis sizes must be positive or -1, got {dict(zip(AXES, sizes))}")

    def sizes(self, num_devices: int) -> tuple[int, int, int]:
        """Axis sizes for ``num_devices`` devices, with -1 resolved.

        Raises:
          ConfigError: the sizes do not multiply to the number of devices.
        """
        self.validate()
        sizes = [self.data, self.fsdp, self.tensor]
        known = math.prod(size for size in sizes if size != -1)
        if -1 in sizes:
            if num_devices % known:
                raise ConfigError(
                    f"mesh {dict(zip(AXES, sizes))} does not divide {num_devices} devices; "
                    f"choose sizes whose product divides {num_devices}"
                )
            sizes[sizes.index(-1)] = num_devices // known
        elif known != num_devices:
            raise ConfigError(
                f"mesh {dict(zip(AXES, sizes))} needs {known} devices but {num_devices} are visible; "
                "set one axis to -1 to take what there is"
            )
        return sizes[0], sizes[1], sizes[2]


def make_mesh(config: MeshConfig = MeshConfig(), devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh with axes ``data``, ``fsdp``, ``tensor`` of type Auto over ``devices`` (all visible ones by default)."""
    devices = jax.devices() if devices is None else list(devices)
    sizes = config.sizes(len(devices))
    if len(devices) == len(jax.devices()):
        return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * 3, devices=devices)
    return Mesh(np.asarray(devices).reshape(sizes), AXES, axis_types=(AxisType.Auto,) * 3)
