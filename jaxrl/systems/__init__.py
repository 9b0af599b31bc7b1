"""The systems, one file each: configuration, pure steps, and ``build(config, mesh)`` for the loop."""
