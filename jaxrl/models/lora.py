"""Low-rank adapters: merging them into the weights, and choosing which parameters train.

The adapters themselves are two more leaves of ``models.layers.Linear`` (some ten lines). A general
interceptor such as qwix rewrites a module by rules over its path; here parameters are plain nested dicts, and
two leaves beside each kernel already give sharding by logical axes, checkpoints, optimizer masks and export
without another layer of machinery.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jaxrl.errors import ConfigError
from jaxrl.models.decoder import LanguageModel, Params
from jaxrl.models.weights import ADAPTER_LEAVES

Predicate = Callable[[tuple[str, ...]], bool]


def merge_lora(model: LanguageModel, params: Params) -> tuple[LanguageModel, Params]:
    """The model without adapters, with ``W + (alpha / rank) A B`` for each adapted W.

    Products are formed in float32 (or wider) and rounded to the dtype of W once. Works on stacked and
    unstacked layers; a model without adapters is returned as it is.
    """
    if model.config.lora is None:
        return model, params
    scale = model.config.lora.alpha / model.config.lora.rank

    def merge(tree: Any) -> Any:
        if not isinstance(tree, dict):
            return tree
        out = {name: merge(value) for name, value in tree.items() if name not in ADAPTER_LEAVES}
        if "lora_a" in tree:
            wide = jnp.promote_types(tree["kernel"].dtype, jnp.float32)
            product = jnp.matmul(
                tree["lora_a"].astype(wide), tree["lora_b"].astype(wide), precision="highest"
            )
            out["kernel"] = (tree["kernel"].astype(wide) + scale * product).astype(tree["kernel"].dtype)
        return out

    return LanguageModel(model.config.replace(lora=None), model.sharding), merge(params)


def trainable_predicate(kind: str, model: LanguageModel | None = None) -> Predicate:
    """Which parameters train, as a predicate over paths.

    Args:
      kind: ``"all"``; ``"lora"`` (adapters only); ``"last:<k>"`` (every leaf of the last k layers, the final
        norm, and an untied head).
      model: needed by ``"last:<k>"``; its layers must not be stacked.

    Returns:
      A function of a path such as ``("layers", "3", "attn", "q", "kernel")``.

    Raises:
      ConfigError: an unknown kind, k out of range, stacked layers, or "lora" for a model without adapters.
    """
    if kind == "all":
        return lambda path: True
    if kind == "lora":
        if model is not None and model.config.lora is None:
            raise ConfigError("trainable='lora' but the model has no adapters; set model.lora")
        return lambda path: path[-1] in ADAPTER_LEAVES
    name, _, number = kind.partition(":")
    if name != "last" or not number.isdecimal():
        raise ConfigError(f"trainable={kind!r} is unknown; use 'all', 'lora' or 'last:<k>'")
    if model is None:
        raise ConfigError(f"trainable={kind!r} depends on the number of layers; pass the model")
    if model.config.scan_layers:
        raise ConfigError(f"trainable={kind!r} needs scan_layers=False: stacked layers train together")
    count, total = int(number), model.config.num_layers
    if not 1 <= count <= total:
        raise ConfigError(f"trainable={kind!r} is out of range; the model has {total} layers")

    def last(path: tuple[str, ...]) -> bool:
        return path[0] in ("final_norm", "head") or (path[0] == "layers" and int(path[1]) >= total - count)

    return last
