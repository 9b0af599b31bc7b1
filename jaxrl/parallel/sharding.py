"""Logical axis names to mesh axes, in one table.

Every dimension of a parameter, a batch or a cache has a logical name. The rules map names to mesh axes; a name that
is not in the table, and a dimension that its mesh axes do not divide, is replicated (``Sharding.replicated`` lists
the latter, so that a launch can print them).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl.errors import ConfigError

Axes = tuple[str | None, ...]

#: (logical name, mesh axes). Activations: batch, seq. Parameters: embed, heads, kv_heads, mlp, vocab, layers, lora.
DEFAULT_RULES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("batch", ("data", "fsdp")),
    ("embed", ("fsdp",)),
    ("heads", ("tensor",)),
    ("kv_heads", ("tensor",)),
    ("mlp", ("tensor",)),
    ("vocab", ("tensor",)),
)


@dataclasses.dataclass(frozen=True)
class Sharding:
    """A mesh with the rules that place logical axes on it; hashable."""

    mesh: Mesh
    rules: tuple[tuple[str, tuple[str, ...]], ...] = DEFAULT_RULES

    def mesh_axes(self, name: str | None) -> tuple[str, ...]:
        return dict(self.rules).get(name, ()) if name is not None else ()

    def spec(self, axes: Axes, shape: tuple[int, ...] | None = None) -> PartitionSpec:
        """PartitionSpec of an array with these logical axes; dimensions that do not divide are replicated."""
        entries: list[Any] = []
        used: set[str] = set()
        for i, name in enumerate(axes):
            mesh_axes = tuple(a for a in self.mesh_axes(name) if a not in used and self.mesh.shape[a] > 1)
            ways = math.prod(self.mesh.shape[a] for a in mesh_axes)
            if not mesh_axes or (shape is not None and shape[i] % ways):
                entries.append(None)
                continue
            used.update(mesh_axes)
            entries.append(mesh_axes if len(mesh_axes) > 1 else mesh_axes[0])
        return PartitionSpec(*entries)

    def named(self, axes: Axes, shape: tuple[int, ...] | None = None) -> NamedSharding:
        return NamedSharding(self.mesh, self.spec(axes, shape))

    def tree(self, axes_tree: Any, shapes: Any) -> Any:
        """NamedShardings for a tree of logical axes (tuples) and the matching tree of arrays or abstract arrays."""
        return jax.tree.map(
            lambda axes, leaf: self.named(axes, tuple(leaf.shape)), axes_tree, shapes, is_leaf=lambda x: type(x) is tuple
        )

    def constrain(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """``with_sharding_constraint`` by logical names, for use inside jit."""
        return jax.lax.with_sharding_constraint(x, self.named(axes, x.shape))

    def batch(self) -> NamedSharding:
        """Rows over all batch axes, other dimensions replicated."""
        return NamedSharding(self.mesh, self.spec(("batch",)))

    def replicate(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def batch_ways(self) -> int:
        """Number of shards of the batch dimension."""
        return math.prod(self.mesh.shape[a] for a in self.mesh_axes("batch"))

    def check_batch(self, rows: int, what: str = "batch") -> None:
        """Raise unless the mesh divides a number of rows.

        Raises:
          ConfigError: names the mesh axes and the nearest sizes that fit.
        """
        ways = self.batch_ways
        if rows % ways:
            names = {a: self.mesh.shape[a] for a in self.mesh_axes("batch")}
            raise ConfigError(
                f"{what} of {rows} rows cannot be split over mesh axes {names} ({ways} shards); "
                f"use a multiple of {ways}, for example {max(ways, rows // ways * ways)} or {(rows // ways + 1) * ways}"
            )

    def replicated(self, axes_tree: Any, shapes: Any) -> list[str]:
        """Paths of leaves with a dimension that its rule would split but its size does not allow."""
        found = []
        leaves = jax.tree_util.tree_leaves_with_path(axes_tree, is_leaf=lambda x: type(x) is tuple)
        for (path, axes), leaf in zip(leaves, jax.tree.leaves(shapes)):
            if self.spec(axes) != self.spec(axes, tuple(leaf.shape)):
                found.append(jax.tree_util.keystr(path, simple=True, separator="/"))
        return found
