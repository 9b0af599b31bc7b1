"""Names of weights in files, and the assembly of a parameter tree from a file, one leaf at a time.

The one table below maps every parameter of the decoder to its Hugging Face and GGUF names. A linear layer is
stored ``[out, in]`` in both kinds of file and ``[in, out]`` here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxrl.errors import ConfigError, ModelLoadError
from jaxrl.models.config import ModelConfig
from jaxrl.models.decoder import LanguageModel, Params

Style = Literal["hf", "gguf"]
Path = tuple[str, ...]

#: Last path components that belong to adapters and are never in a file of base weights.
ADAPTER_LEAVES = ("lora_a", "lora_b")

#: (parameter path below the layer, Hugging Face name, GGUF name); ``{i}`` is the layer.
NAMES: tuple[tuple[str, str, str], ...] = (
    ("embed/embedding", "model.embed_tokens.weight", "token_embd.weight"),
    ("final_norm/scale", "model.norm.weight", "output_norm.weight"),
    ("head/embedding", "lm_head.weight", "output.weight"),
    ("attn_norm/scale", "model.layers.{i}.input_layernorm.weight", "blk.{i}.attn_norm.weight"),
    ("attn/q/kernel", "model.layers.{i}.self_attn.q_proj.weight", "blk.{i}.attn_q.weight"),
    ("attn/k/kernel", "model.layers.{i}.self_attn.k_proj.weight", "blk.{i}.attn_k.weight"),
    ("attn/v/kernel", "model.layers.{i}.self_attn.v_proj.weight", "blk.{i}.attn_v.weight"),
    ("attn/o/kernel", "model.layers.{i}.self_attn.o_proj.weight", "blk.{i}.attn_output.weight"),
    ("attn/q/bias", "model.layers.{i}.self_attn.q_proj.bias", "blk.{i}.attn_q.bias"),
    ("attn/k/bias", "model.layers.{i}.self_attn.k_proj.bias", "blk.{i}.attn_k.bias"),
    ("attn/v/bias", "model.layers.{i}.self_attn.v_proj.bias", "blk.{i}.attn_v.bias"),
    ("attn/q_norm/scale", "model.layers.{i}.self_attn.q_norm.weight", "blk.{i}.attn_q_norm.weight"),
    ("attn/k_norm/scale", "model.layers.{i}.self_attn.k_norm.weight", "blk.{i}.attn_k_norm.weight"),
    ("mlp_norm/scale", "model.layers.{i}.post_attention_layernorm.weight", "blk.{i}.ffn_norm.weight"),
    ("mlp/gate/kernel", "model.layers.{i}.mlp.gate_proj.weight", "blk.{i}.ffn_gate.weight"),
    ("mlp/up/kernel", "model.layers.{i}.mlp.up_proj.weight", "blk.{i}.ffn_up.weight"),
    ("mlp/down/kernel", "model.layers.{i}.mlp.down_proj.weight", "blk.{i}.ffn_down.weight"),
)
_BY_PATH: dict[str, dict[Style, str]] = {path: {"hf": hf, "gguf": gguf} for path, hf, gguf in NAMES}


class WeightFile(Protocol):
    """A file, or a directory of files, of named tensors.

    Attributes:
      where: path for messages.
      style: which column of the table names its tensors.
      shapes: shape of every tensor by name.
    """

    where: str
    style: Style
    shapes: dict[str, tuple[int, ...]]

    def open(self, name: str) -> Any:
        """A view that reads when it is indexed with a tuple of slices, and then gives a numpy array."""


@dataclasses.dataclass(frozen=True)
class Leaf:
    """Where a parameter is in files.

    Attributes:
      path: path in the parameter tree.
      names: one tensor name, or one for each layer of a stacked parameter.
      stacked: the parameter has a leading layer axis.
      transposed: the file holds ``[out, in]``.
    """

    path: Path
    names: tuple[str, ...]
    stacked: bool
    transposed: bool


def leaves(model: LanguageModel, style: Style) -> Iterator[tuple[Leaf, jax.ShapeDtypeStruct]]:
    """Every parameter of a model except adapters, with its names in files and its abstract value."""
    config = model.config
    for path, shape in flatten_dict(model.abstract()).items():
        if path[-1] in ADAPTER_LEAVES:
            continue
        if path[0] != "layers":
            layers, below = range(1), path
        elif config.scan_layers:
            layers, below = range(config.num_layers), path[1:]
        else:
            layers, below = range(int(path[1]), int(path[1]) + 1), path[2:]
        template = _BY_PATH["/".join(below)][style]
        stacked = path[0] == "layers" and config.scan_layers
        names = tuple(template.format(i=i) for i in layers)
        yield Leaf(path, names, stacked, transposed=path[-1] == "kernel"), shape


def assemble(model: LanguageModel, file: WeightFile, key: jax.Array | None = None) -> Params:
    """Read the parameters of a model from a file.

    Each leaf goes to its devices before the next is read; with a sharded model only the slices that this
    host's devices hold are read. Values are cast to ``config.param_dtype``.

    Args:
      model: its config says what must be in the file; its sharding says where parameters go.
      file: the tensors.
      key: typed key for fresh adapters; needed when ``model.config.lora`` is set.

    Raises:
      ModelLoadError: tensors are missing, not expected, or of a wrong shape.
      ConfigError: the model has adapters but no key is given.
    """
    plan = list(leaves(model, file.style))
    _check(model.config, file, plan)
    adapters: dict[Path, jax.Array] = {}
    if model.config.lora is not None:
        if key is None:
            raise ConfigError(f"{file.where}: adapters are initialised at random; pass a key")
        adapters = fresh_adapters(model, key)
    params = {leaf.path: _read(file, leaf, shape, model.config) for leaf, shape in plan}
    return unflatten_dict({**params, **adapters})


def fresh_adapters(model: LanguageModel, key: jax.Array) -> dict[Path, jax.Array]:
    """The adapter leaves of ``model.init(key)`` by path; the other leaves are never computed."""

    def adapters(tree: Params) -> dict[Path, Any]:
        return {path: leaf for path, leaf in flatten_dict(tree).items() if path[-1] in ADAPTER_LEAVES}

    placed = None if model.sharding is None else adapters(model.param_shardings())
    return jax.jit(lambda key: adapters(model.init(key)), out_shardings=placed)(key)


def _check(config: ModelConfig, file: WeightFile, plan: list[tuple[Leaf, jax.ShapeDtypeStruct]]) -> None:
    needed = {name for leaf, _ in plan for name in leaf.names}
    missing = sorted(needed - set(file.shapes))
    if missing:
        raise ModelLoadError(
            f"{file.where} lacks {len(missing)} tensor(s): {_some(missing)}; "
            "the configuration beside the weights does not describe them, or the download is incomplete"
        )
    unexpected = sorted(name for name in set(file.shapes) - needed if not _ignorable(name, config))
    if unexpected:
        raise ModelLoadError(
            f"{file.where} has {len(unexpected)} tensor(s) that the model has no place for: "
            f"{_some(unexpected)}; check the configuration beside the weights "
            f"(num_layers={config.num_layers}, qkv_bias={config.qkv_bias}, "
            f"qk_norm={config.qk_norm}, tie_embeddings={config.tie_embeddings})"
        )
    for leaf, shape in plan:
        one = tuple(shape.shape[1:] if leaf.stacked else shape.shape)
        expected = one[::-1] if leaf.transposed else one
        for name in leaf.names:
            if tuple(file.shapes[name]) != expected:
                raise ModelLoadError(
                    f"{file.where}: tensor {name} has shape {tuple(file.shapes[name])} but the model needs "
                    f"{expected}; "
                    "weights and configuration are of different models"
                )


def _ignorable(name: str, config: ModelConfig) -> bool:
    # Old exports store the rotary frequencies, and some tied models the same table twice.
    return name.endswith("rotary_emb.inv_freq") or (config.tie_embeddings and name == "lm_head.weight")


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def _read(file: WeightFile, leaf: Leaf, abstract: jax.ShapeDtypeStruct, config: ModelConfig) -> jax.Array:
    dtype = np.dtype(config.storage_dtype)
    opened: dict[str, Any] = {}
    blocks: dict[tuple[Any, ...], np.ndarray] = {}

    def tensor(name: str, index: tuple[slice, ...]) -> np.ndarray:
        if name not in opened:
            opened[name] = file.open(name)
        value = opened[name][index[::-1] if leaf.transposed else index]
        return value.T if leaf.transposed else value

    def block(index: tuple[slice, ...] | None) -> np.ndarray:
        index = (slice(None),) * len(abstract.shape) if index is None else index
        seen = tuple((s.start, s.stop) for s in index)
        if seen not in blocks:
            if leaf.stacked:
                parts = [tensor(name, index[1:]) for name in leaf.names[index[0]]]
                out = np.empty((len(parts), *parts[0].shape), dtype)
                for i, part in enumerate(parts):
                    out[i] = part
            else:
                out = np.array(tensor(leaf.names[0], index), dtype, order="C")
            blocks[seen] = out
        return blocks[seen]

    if abstract.sharding is None:
        return jnp.array(block(None))
    return jax.make_array_from_callback(abstract.shape, abstract.sharding, block)
