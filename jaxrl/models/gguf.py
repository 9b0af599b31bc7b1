"""Reading GGUF files (llama.cpp's format) of the Llama, Qwen2 and Qwen3 architectures, quantised or not.

``GGUFReader`` maps the file into memory; ``gguf.quants`` turns quantised blocks into float32. Files of the
``llama`` architecture store the rows of the q and k projections with the two rotary halves of each head
interleaved; the rows are put back in the half-split order that the decoder and Hugging Face weights use.
"""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import numpy as np

from jaxrl.errors import ModelLoadError, require
from jaxrl.models.config import ModelConfig, RopeScaling
from jaxrl.models.decoder import LanguageModel, Params
from jaxrl.models.weights import Style, assemble
from jaxrl.parallel.sharding import Sharding

ARCHITECTURES = ("llama", "qwen2", "qwen3")


def open_gguf(path: str | pathlib.Path) -> Any:
    """A ``gguf.GGUFReader`` on a file; opening takes seconds, so weights and tokenizer may share it.

    Raises:
      ModelLoadError: the file is missing or is not a GGUF file.
    """
    gguf = require("gguf", "gguf")
    path = pathlib.Path(path)
    if not path.is_file():
        raise ModelLoadError(f"{path} does not exist; give the path of a .gguf file")
    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError) as error:
        raise ModelLoadError(f"{path} is not a readable GGUF file ({error}); download it again") from error
    reader.path = path
    return reader


def metadata(reader: Any, key: str, default: Any = None) -> Any:
    """Value of a metadata key as plain Python, or the default."""
    found = reader.get_field(key)
    return default if found is None else found.contents()


def gguf_config(reader: Any) -> ModelConfig:
    """The architecture that a GGUF file describes in its metadata.

    Raises:
      ModelLoadError: the architecture, its rotary scaling or a needed key is not supported or missing.
    """
    where = reader.path
    arch = metadata(reader, "general.architecture")
    if arch not in ARCHITECTURES:
        raise ModelLoadError(f"{where} has architecture {arch!r}; supported are {', '.join(ARCHITECTURES)}")

    def need(name: str) -> Any:
        value = metadata(reader, f"{arch}.{name}")
        if value is None:
            raise ModelLoadError(f"{where} lacks the metadata key {arch}.{name}; convert the model again")
        return value

    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if "token_embd.weight" not in tensors:
        raise ModelLoadError(
            f"{where} has no tensor token_embd.weight; give a file of a whole language model"
        )
    d_model, heads = need("embedding_length"), need("attention.head_count")
    head_dim = metadata(reader, f"{arch}.attention.key_length", d_model // heads)
    rotated = metadata(reader, f"{arch}.rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise ModelLoadError(
            f"{where} rotates {rotated} of {head_dim} dimensions of a head; only full rotary is supported"
        )
    return ModelConfig(
        vocab_size=int(tensors["token_embd.weight"].shape[1]),
        d_model=d_model,
        num_layers=need("block_count"),
        num_heads=heads,
        num_kv_heads=metadata(reader, f"{arch}.attention.head_count_kv", heads),
        head_dim=head_dim,
        d_ff=need("feed_forward_length"),
        max_position=need("context_length"),
        rope_theta=float(metadata(reader, f"{arch}.rope.freq_base", 10000.0)),
        rope_scaling=_rope_scaling(reader, arch, tensors),
        # The file holds a float32; its shortest decimal is what was meant: 1e-05, not 9.99999975e-06.
        norm_eps=float(str(np.float32(need("attention.layer_norm_rms_epsilon")))),
        tie_embeddings="output.weight" not in tensors,
        qkv_bias=arch == "qwen2",
        qk_norm=arch == "qwen3",
    )


def _rope_scaling(reader: Any, arch: str, tensors: dict[str, Any]) -> RopeScaling | None:
    if "rope_freqs.weight" in tensors:
        raise ModelLoadError(
            f"{reader.path} stores its rotary scaling as a table of factors (rope_freqs.weight), which is "
            "not supported; load the safetensors files of the model instead"
        )
    kind = metadata(reader, f"{arch}.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ModelLoadError(
            f"{reader.path} has rotary scaling {kind!r}; supported in GGUF files are linear and yarn"
        )
    factor = float(metadata(reader, f"{arch}.rope.scaling.factor", 1.0))
    original = metadata(reader, f"{arch}.rope.scaling.original_context_length")
    if kind == "linear":
        return RopeScaling("linear", factor)
    if original is None:
        raise ModelLoadError(
            f"{reader.path} has yarn scaling without {arch}.rope.scaling.original_context_length"
        )
    return RopeScaling("yarn", factor, original_max_position=original)


class GGUFWeights:
    """The tensors of a GGUF file, dequantised to float32 when opened (see ``WeightFile``)."""

    style: Style = "gguf"

    def __init__(self, reader: Any):
        self.where = str(reader.path)
        self._quants = require("gguf.quants", "gguf")
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._heads: dict[str, int] = {}
        if metadata(reader, "general.architecture") == "llama":
            heads = metadata(reader, "llama.attention.head_count")
            self._heads = {
                "attn_q": heads,
                "attn_k": metadata(reader, "llama.attention.head_count_kv", heads),
            }
        # GGUF lists the fastest dimension first.
        self.shapes = {
            name: tuple(int(n) for n in tensor.shape[::-1]) for name, tensor in self._tensors.items()
        }

    def open(self, name: str) -> np.ndarray:
        tensor = self._tensors[name]
        data = np.asarray(tensor.data)  # a plain view: indexing an np.memmap is slow
        heads = self._heads.get(name.split(".")[-2])
        if (
            heads is not None
        ):  # Rows are whole quantised units, so they can be put in order before dequantising.
            data = data.reshape(heads, data.shape[0] // heads // 2, 2, *data.shape[1:]).swapaxes(1, 2)
            data = np.ascontiguousarray(data).reshape(tensor.data.shape)
        try:
            return self._quants.dequantize(data, tensor.tensor_type).reshape(self.shapes[name])
        except NotImplementedError as error:
            raise ModelLoadError(
                f"{self.where}: tensor {name} is stored as {tensor.tensor_type.name}, which the gguf "
                "package cannot "
                "dequantise; use another quantisation of the model"
            ) from error


def load_gguf(
    source: str | pathlib.Path | Any,
    *,
    key: jax.Array | None = None,
    sharding: Sharding | None = None,
    **changes: Any,
) -> tuple[ModelConfig, Params]:
    """Configuration and parameters of a GGUF file.

    Args:
      source: path of the file, or a reader from ``open_gguf``.
      key: typed key for fresh adapters; needed with ``lora``.
      sharding: mesh and rules; parameters are placed on their shards.
      **changes: fields of ``ModelConfig`` to set, such as ``dtype``, ``param_dtype``, ``scan_layers``,
        ``remat``, ``lora``.

    Raises:
      ModelLoadError: the file is missing, unreadable, unsupported, or its tensors do not fit its metadata.
    """
    reader = open_gguf(source) if isinstance(source, (str, pathlib.Path)) else source
    config = gguf_config(reader).replace(**changes)
    model = LanguageModel(config, sharding)
    return config, assemble(model, GGUFWeights(reader), key)
