"""Meshes, logical-axis rules and sharding helpers."""

from jaxrl.parallel.mesh import MeshConfig, make_mesh
from jaxrl.parallel.sharding import DEFAULT_RULES, Sharding

__all__ = ["DEFAULT_RULES", "MeshConfig", "Sharding", "make_mesh"]
