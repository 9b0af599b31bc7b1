"""Everything a run needs around a system: configuration, state, checkpoints, the loop, logs and reports."""
