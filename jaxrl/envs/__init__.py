"""JAX and text environments. None is here yet; control and dialogue systems will add theirs."""
