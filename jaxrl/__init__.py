"""jaxrl: recent reinforcement-learning research as JAX train steps for GPU and TPU meshes.

Not related to ikostrikov/jaxrl, which shares the import name. ``MARKER`` tells the two apart.
"""

__version__ = "0.1.0"
MARKER = "jaxrl-train"
