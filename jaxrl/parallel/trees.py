"""Nested dicts of parameters: splitting them by path, and putting the parts together again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Params = dict[str, Any]


def partition(params: Params, predicate: Callable[[tuple[str, ...]], bool]) -> tuple[Params, Params]:
    """Split a nested dict of parameters in two.

    Args:
      params: nested dict of arrays.
      predicate: takes a path such as ``("layers", "0", "attn", "q", "lora_a")``; True means trainable.

    Returns:
      ``(trainable, frozen)``: nested dicts that hold only their own leaves; empty branches are left out.
    """

    def walk(tree: Params, prefix: tuple[str, ...]) -> tuple[Params, Params]:
        trainable: Params = {}
        frozen: Params = {}
        for name, value in tree.items():
            path = (*prefix, name)
            if isinstance(value, Mapping):
                for out, inner in zip((trainable, frozen), walk(dict(value), path), strict=True):
                    if inner:
                        out[name] = inner
            else:
                (trainable if predicate(path) else frozen)[name] = value
        return trainable, frozen

    return walk(params, ())


def combine(trainable: Params, frozen: Params) -> Params:
    """Inverse of ``partition``: one nested dict with the leaves of both.

    Raises:
      ValueError: both hold a leaf at one path.
    """

    def merge(a: Params, b: Params, prefix: str) -> Params:
        merged = dict(a)
        for name, value in b.items():
            path = f"{prefix}/{name}" if prefix else str(name)
            if name not in merged:
                merged[name] = value
            elif isinstance(merged[name], Mapping) and isinstance(value, Mapping):
                merged[name] = merge(merged[name], dict(value), path)
            else:
                raise ValueError(f"parameter {path} is in both trees; partition must give it to one of them")
        return merged

    return merge(trainable, frozen, "")
