"""Checksums of arrays on the device: equal bits give equal sums, whatever the sharding."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def checksums(arrays: dict[str, Any]) -> dict[str, int]:
    """One 32-bit number per array: ``sum_i bits_i w_i mod 2^32`` with odd weights that depend on the
    position.

    Integer sums modulo 2^32 do not depend on the order of addition, hence not on the sharding. Any change of
    a single element changes the sum; the weights make an exchange of two elements visible as well.

    Args:
      arrays: dict of arrays of any dtype except typed keys. Arrays on different sets of devices are allowed.

    Returns:
      The checksum of each array.
    """
    groups: dict[Any, dict[str, Any]] = defaultdict(dict)
    for name, x in arrays.items():
        devices = (
            frozenset(d.id for d in x.sharding.device_set)  # type: ignore[attr-defined]
            if isinstance(x, jax.Array) and x.committed
            else None
        )
        groups[devices][name] = x
    result: dict[str, int] = {}
    for group in groups.values():
        values = np.asarray(_sums(group))  # a dict enters jit, and leaves tree order, sorted by name
        result.update({name: int(value) for name, value in zip(sorted(group), values, strict=True)})
    return result


@jax.jit
def _sums(arrays: dict[str, jax.Array]) -> jax.Array:
    return jnp.stack([_one(arrays[name]) for name in sorted(arrays)])


def _one(x: jax.Array) -> jax.Array:
    bits = _bits(x)
    weight = jnp.ones(bits.shape, jnp.uint32)
    for axis in range(bits.ndim):
        # Even multiples of the index keep every weight odd, so no change of one element can vanish modulo
        # 2^32.
        factor = jnp.uint32((2 * (0x9E3779B1 * (axis + 1) % 2**31)) % 2**32)
        weight += factor * jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
    return jnp.sum(bits * weight, dtype=jnp.uint32)


def _bits(x: jax.Array) -> jax.Array:
    """The bit pattern as uint32; 64-bit types get a trailing axis of 2."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag])
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    width = jnp.iinfo(x.dtype).bits if jnp.issubdtype(x.dtype, jnp.integer) else jnp.finfo(x.dtype).bits
    if width < 8:  # int4, uint4 and 4-bit floats are exact in float32
        x, width = x.astype(jnp.float32), 32
    unsigned = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32, 64: jnp.uint32}[width]
    return jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
