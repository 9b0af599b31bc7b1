"""Accelerator kernels: a package of its own that imports nothing of ``jaxrl``."""
