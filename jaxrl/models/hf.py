"""Hugging Face directories: configuration and safetensors weights, in and out, without torch.

Reading maps the files into memory and copies slice by slice; writing is atomic and shards large models. An
exported directory loads with ``transformers.AutoModelForCausalLM`` and gives the same logits.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import shutil
import uuid
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict

from jaxrl.errors import ModelLoadError, require
from jaxrl.models.config import ModelConfig, RopeScaling
from jaxrl.models.decoder import LanguageModel, Params
from jaxrl.models.lora import merge_lora
from jaxrl.models.weights import Leaf, Style, assemble, leaves
from jaxrl.parallel.sharding import Sharding

ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def hf_config(raw: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """``config.json`` of the Llama, Qwen2 or Qwen3 family as a ModelConfig (float32, scanned layers).

    Raises:
      ModelLoadError: the architecture, or an option of it, is not supported; or a key is missing.
    """
    family = raw.get("model_type")
    names = raw.get("architectures") or []
    if family not in ARCHITECTURES.values() or any(name not in ARCHITECTURES for name in names):
        raise ModelLoadError(
            f"{where}: architecture {names or family!r} is not supported; supported are "
            f"{', '.join(ARCHITECTURES)}"
        )

    def need(key: str) -> Any:
        if raw.get(key) is None:
            raise ModelLoadError(
                f"{where} lacks {key!r}; it does not describe a language model of this family"
            )
        return raw[key]

    def refuse(condition: Any, what: str) -> None:
        if condition:
            raise ModelLoadError(f"{where}: {what} is not supported; choose a model without it")

    refuse(raw.get("hidden_act", "silu") != "silu", f"hidden_act={raw.get('hidden_act')!r}")
    refuse(raw.get("attention_bias"), "attention_bias=true")
    refuse(raw.get("mlp_bias"), "mlp_bias=true")
    refuse(raw.get("use_sliding_window"), "use_sliding_window=true")
    refuse(raw.get("quantization_config"), "a quantised checkpoint (quantization_config)")
    d_model, heads = need("hidden_size"), need("num_attention_heads")
    theta, scaling = _read_rope(raw, where)
    return ModelConfig(
        vocab_size=need("vocab_size"),
        d_model=d_model,
        num_layers=need("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or d_model // heads,
        d_ff=need("intermediate_size"),
        max_position=need("max_position_embeddings"),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=need("rms_norm_eps"),
        # The default of all three families when the key is absent.
        tie_embeddings=raw.get("tie_word_embeddings", False),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
    )


def _read_rope(raw: dict[str, Any], where: str) -> tuple[float, RopeScaling | None]:
    # transformers 5 writes one `rope_parameters`; before, `rope_theta` and `rope_scaling` were separate.
    rope = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    theta = float(rope.get("rope_theta", raw.get("rope_theta", 10000.0)))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelLoadError(
            f"{where}: partial_rotary_factor is not supported; choose a model with full rotary"
        )
    if kind == "default":
        return theta, None
    if kind not in ("linear", "llama3", "yarn"):
        raise ModelLoadError(
            f"{where}: rope_type={kind!r} is not supported; supported are default, linear, llama3, yarn"
        )
    odd = [key for key in ("mscale", "mscale_all_dim") if rope.get(key)] + ["truncate"] * (
        rope.get("truncate") is False
    )
    if odd:
        raise ModelLoadError(
            f"{where}: yarn option {', '.join(odd)} is not supported; choose a model without it"
        )
    renamed = {
        "factor": "factor",
        "original_max_position": "original_max_position_embeddings",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "attention_factor": "attention_factor",
    }
    values = {ours: rope[theirs] for ours, theirs in renamed.items() if rope.get(theirs) is not None}
    if "factor" not in values:
        raise ModelLoadError(f"{where}: rope_type={kind!r} without 'factor'; add it to the rotary settings")
    if kind != "linear" and "original_max_position" not in values:
        values["original_max_position"] = (
            raw.get("original_max_position_embeddings") or raw["max_position_embeddings"]
        )
    return theta, RopeScaling(kind, **values)


def family_of(config: ModelConfig) -> str:
    """Hugging Face ``model_type`` that computes what this model computes.

    Raises:
      ModelLoadError: no supported family does.
    """
    if not config.causal:
        raise ModelLoadError(
            "a bidirectional model (causal=False) has no Hugging Face class here; keep the checkpoint"
        )
    if config.qk_norm and config.qkv_bias:
        raise ModelLoadError(
            "no supported Hugging Face family has both qk_norm and qkv_bias; keep the checkpoint"
        )
    return "qwen3" if config.qk_norm else "qwen2" if config.qkv_bias else "llama"


def to_hf_config(config: ModelConfig, dtype: str, tokenizer: Any = None) -> dict[str, Any]:
    """``config.json`` of an exported model, in the spelling that transformers 4 and 5 both read."""
    family = family_of(config)
    raw: dict[str, Any] = {
        "architectures": [name for name, kind in ARCHITECTURES.items() if kind == family],
        "model_type": family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.d_ff,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": _write_rope(config.rope_scaling),
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": dtype,
        "use_cache": True,
    }
    if family == "qwen2":
        raw["use_sliding_window"] = False
    else:
        raw["attention_bias"] = False
    return {**raw, **_special_ids(tokenizer)}


def _special_ids(tokenizer: Any) -> dict[str, int]:
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    found = {name: getattr(tokenizer, name, None) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def _write_rope(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    rope: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind != "linear":
        rope["original_max_position_embeddings"] = scaling.original_max_position
    keys = {
        "llama3": ("low_freq_factor", "high_freq_factor"),
        "yarn": ("beta_fast", "beta_slow", "attention_factor"),
    }
    rope.update({key: getattr(scaling, key) for key in keys.get(scaling.kind, ())})
    return {key: value for key, value in rope.items() if value is not None}


class SafetensorsDirectory:
    """The tensors of ``model.safetensors``, or of the shards of its index (see ``WeightFile``)."""

    style: Style = "hf"

    def __init__(self, directory: pathlib.Path):
        self.where = str(directory)
        self._safetensors = require("safetensors", "hf")
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._handles: dict[str, Any] = {}
        self._index: dict[str, str] = {}  # file of each tensor, empty for a single file
        for name in self._files(directory):
            self._add(directory / name)

    def _files(self, directory: pathlib.Path) -> list[str]:
        index = directory / INDEX
        if index.is_file():
            self._index = _read_json(index).get("weight_map") or {}
            if not self._index:
                raise ModelLoadError(f"{index} has no weight_map; download it again")
            return sorted(set(self._index.values()))
        if (directory / SINGLE).is_file():
            return [SINGLE]
        others = sorted(
            p.name for p in directory.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".safetensors")
        )
        found = f"; found only {', '.join(others[:4])}" if others else ""
        raise ModelLoadError(
            f"{directory} has neither {SINGLE} nor {INDEX}{found}; download or convert the safetensors"
        )

    def _add(self, path: pathlib.Path) -> None:
        if not path.is_file():
            raise ModelLoadError(
                f"{INDEX} names the shard {path}, which does not exist; complete the download"
            )
        try:
            handle = self._safetensors.safe_open(str(path), "numpy")
        except self._safetensors.SafetensorError as error:
            raise ModelLoadError(
                f"{path} is not a readable safetensors file ({error}); download it again"
            ) from error
        for name in handle.keys():  # noqa: SIM118 (a safe_open is not iterable)
            view = handle.get_slice(name)
            if view.get_dtype() not in ("F64", "F32", "F16", "BF16"):
                raise ModelLoadError(
                    f"{path}: tensor {name} is stored as {view.get_dtype()}; only F64, F32, F16 and BF16 "
                    "are supported"
                )
            self.shapes[name] = tuple(view.get_shape())
            self._handles[name] = handle
        lost = sorted(n for n, file in self._index.items() if file == path.name and n not in self.shapes)
        if lost:
            raise ModelLoadError(
                f"{path} lacks {', '.join(lost[:5])}, which {INDEX} places there; download it again"
            )

    def open(self, name: str) -> Any:
        return self._handles[name].get_slice(name)


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ModelLoadError(f"{path} is not valid JSON ({error}); download it again") from error


def load_hf(
    directory: str | os.PathLike[str],
    *,
    key: jax.Array | None = None,
    sharding: Sharding | None = None,
    **changes: Any,
) -> tuple[ModelConfig, Params]:
    """Configuration and parameters of a Hugging Face directory.

    Args:
      directory: holds ``config.json`` and ``model.safetensors`` or its shards with their index.
      key: typed key for fresh adapters; needed with ``lora``.
      sharding: mesh and rules; every host then reads only the slices of its own devices.
      **changes: fields of ``ModelConfig`` to set, such as ``dtype``, ``param_dtype``, ``scan_layers``,
        ``remat``, ``lora``.

    Raises:
      ModelLoadError: a file, shard or tensor is missing, unreadable, unexpected or of a wrong shape, or the
        architecture is not supported.
    """
    config, weights = open_hf(directory)
    config = config.replace(**changes)
    return config, assemble(LanguageModel(config, sharding), weights, key)


def open_hf(directory: str | os.PathLike[str]) -> tuple[ModelConfig, SafetensorsDirectory]:
    """Architecture and tensors (not read yet) of a Hugging Face directory; raises as ``load_hf`` does."""
    directory = pathlib.Path(directory)
    if not directory.is_dir():
        raise ModelLoadError(f"{directory} is not a directory; give one that holds config.json and {SINGLE}")
    if not (directory / "config.json").is_file():
        raise ModelLoadError(f"{directory} has no config.json; give the directory of a saved model")
    config = hf_config(_read_json(directory / "config.json"), str(directory / "config.json"))
    return config, SafetensorsDirectory(directory)


def save_hf(
    directory: str | os.PathLike[str],
    model: LanguageModel,
    params: Params,
    tokenizer: Any = None,
    dtype: str = "bfloat16",
    *,
    max_shard_gb: float = 5.0,
    overwrite: bool = False,
) -> pathlib.Path:
    """Export to a directory that ``transformers.AutoModelForCausalLM.from_pretrained`` loads.

    Adapters are merged into the weights. Files are written to a temporary directory beside the target, which
    is renamed at the end: a target that exists is complete. With several hosts every host must call; the
    first writes.

    Args:
      directory: target; must not exist, or be empty, unless ``overwrite``.
      model, params: the model (stacked or unstacked layers, sharded or not).
      tokenizer: saved beside the weights when given.
      dtype: storage type, float32, bfloat16 or float16.
      max_shard_gb: larger models are split into files of at most this many gigabytes (10^9 bytes), with an
        index.

    Raises:
      FileExistsError: the target has content and ``overwrite`` is False.
      ModelLoadError: no Hugging Face family computes what this model computes.
    """
    directory = pathlib.Path(directory).absolute()
    if directory.exists() and not overwrite and (not directory.is_dir() or any(directory.iterdir())):
        raise FileExistsError(f"{directory} already exists; choose another directory or pass overwrite=True")
    raw = to_hf_config(model.config, dtype, tokenizer)
    model, params = merge_lora(model, params)
    _sync("save_hf: every host has checked the target")
    temporary = directory.with_name(f".{directory.name}.{uuid.uuid4().hex[:8]}")
    writes = jax.process_index() == 0
    if writes:
        temporary.mkdir(parents=True)
    try:
        _write_weights(temporary, model, params, dtype, max_shard_gb, writes)
        if writes:
            (temporary / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
            for weights in temporary.glob(
                "*.safetensors"
            ):  # safetensors makes files that only their owner can read
                shutil.copymode(temporary / "config.json", weights)
            if tokenizer is not None:
                generation = json.dumps(_special_ids(tokenizer), indent=2)
                (temporary / "generation_config.json").write_text(generation + "\n")
                tokenizer.save_pretrained(str(temporary))
            if directory.exists():
                shutil.rmtree(directory)
            temporary.rename(directory)
    finally:
        if writes:
            shutil.rmtree(temporary, ignore_errors=True)
    _sync("save_hf: written")
    return directory


def _sync(what: str) -> None:
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(what)


def _write_weights(
    directory: pathlib.Path,
    model: LanguageModel,
    params: Params,
    dtype: str,
    max_shard_gb: float,
    writes: bool,
) -> None:
    save_file = require("safetensors.numpy", "hf").save_file
    flat = flatten_dict(params)
    storage = np.dtype(jax.numpy.dtype(dtype))
    entries = [
        (leaf, i, name, math.prod(shape.shape) // len(leaf.names) * storage.itemsize)
        for leaf, shape in leaves(model, "hf")
        for i, name in enumerate(leaf.names)
    ]
    shards: list[list[tuple[Leaf, int, str]]] = [[]]
    room = limit = max_shard_gb * 1e9
    for leaf, i, name, size in entries:
        if shards[-1] and size > room:
            shards.append([])
            room = limit
        shards[-1].append((leaf, i, name))
        room -= size
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: _to_host(flat[leaf.path], leaf, i, storage) for leaf, i, name in shard}
        if writes:
            save_file(tensors, str(directory / file), metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file))
    if writes and len(shards) > 1:
        total = sum(size for *_, size in entries)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _to_host(array: jax.Array, leaf: Leaf, layer: int, dtype: np.dtype) -> np.ndarray:
    if leaf.stacked:
        array = array[layer]
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        from jax.experimental import multihost_utils

        array = multihost_utils.process_allgather(array, tiled=True)
    value = np.asarray(array).astype(dtype)
    return np.ascontiguousarray(value.T if leaf.transposed else value)
