"""Where a model comes from (a file, a directory, a hub, a random start); loads it with its tokenizer."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import pathlib
from collections.abc import Callable
from typing import Any, Literal

import jax

from jaxrl.errors import ConfigError, ModelLoadError, require
from jaxrl.models.config import PRESETS, LoraConfig, ModelConfig
from jaxrl.models.decoder import LanguageModel, Params
from jaxrl.models.gguf import GGUFWeights, gguf_config, open_gguf
from jaxrl.models.hf import open_hf
from jaxrl.models.tokenizer import check_tokenizer, load_tokenizer
from jaxrl.models.weights import WeightFile, assemble
from jaxrl.parallel.sharding import Sharding


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """Weights and numerics of a model. Exactly one of ``source``, ``preset`` and ``architecture`` is set.

    Attributes:
      source: pretrained weights: a Hugging Face directory, a .gguf file, ``package:NAME`` (the GGUF file
        inside an installed Python package) or a hub id ``owner/name``, ``owner/name@revision``.
      preset: name of a published shape in ``models.PRESETS``, started at random.
      architecture: an explicit shape, started at random.
      tokenizer: where the tokenizer is, in the same spellings as ``source``; None takes that of ``source``.
      dtype: activations; None keeps that of the architecture (float32 for files).
      param_dtype: storage; None keeps that of the architecture (float32 for files).
      scan_layers: stacked parameters and one traced block; None keeps that of the architecture (True for
        files).
      remat: what the backward pass recomputes; None keeps that of the architecture ("none" for files).
      max_position: another context length than the weights were made for; None keeps theirs.
      lora: fresh adapters on top of the weights.
    """

    source: str | None = None
    preset: str | None = None
    architecture: ModelConfig | None = None
    tokenizer: str | None = None
    dtype: str | None = None
    param_dtype: str | None = None
    scan_layers: bool | None = None
    remat: Literal["none", "block", "dots"] | None = None
    max_position: int | None = None
    lora: LoraConfig | None = None

    def validate(self) -> None:
        given = [name for name in ("source", "preset", "architecture") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ConfigError(
                f"a model needs exactly one of source, preset, architecture; got {given or 'none'}"
            )
        if self.preset is not None and self.preset not in PRESETS:
            raise ConfigError(f"preset {self.preset!r} is unknown; known are {', '.join(PRESETS)}")

    def changes(self) -> dict[str, Any]:
        """The fields of ``ModelConfig`` that are set here."""
        names = ("dtype", "param_dtype", "scan_layers", "remat", "max_position", "lora")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


def load_pretrained(
    source: ModelSource | str, key: jax.Array, sharding: Sharding | None = None
) -> tuple[LanguageModel, Params, Any]:
    """A model, its parameters and its tokenizer: ``open_model``, and its ``load`` called with ``key``."""
    model, tokenizer, load = open_model(source, sharding)
    return model, load(key), tokenizer


def open_model(
    source: ModelSource | str, sharding: Sharding | None = None, tokenizer: Any = None
) -> tuple[LanguageModel, Any, Callable[[jax.Array], Params]]:
    """A model and its tokenizer, without reading weights.

    Args:
      source: what to open; a string is short for ``ModelSource(source=...)``.
      sharding: mesh and rules; parameters are created or read directly on their shards.
      tokenizer: used instead of the one in the files, which need not have any.

    Returns:
      model, tokenizer (None for a fresh start without ``tokenizer``), and ``load(key) -> params`` with a
      typed key for everything random: a fresh start, or fresh adapters on pretrained weights.

    Raises:
      ModelLoadError: weights or tokenizer are missing, unreadable, unsupported or do not fit each other.
      ConfigError: the source itself is contradictory.
    """
    if isinstance(source, str):
        source = ModelSource(source=source)
    source.validate()
    own: Any = None  # what holds the tokenizer of the source
    weights: WeightFile | None = None
    if source.source is not None:
        path = resolve(source.source)
        if path.suffix == ".gguf":
            own = open_gguf(path)
            base, weights = gguf_config(own), GGUFWeights(own)
        else:
            own = path
            base, weights = open_hf(path)
    else:
        base = source.architecture or PRESETS[source.preset or ""]
    model = LanguageModel(base.replace(**source.changes()), sharding)
    if tokenizer is None:
        where = own if source.tokenizer is None else resolve(source.tokenizer)
        tokenizer = None if where is None else load_tokenizer(where)
    if tokenizer is not None:  # before the weights: a mismatch should not take minutes to show
        check_tokenizer(model.config, tokenizer)
    load = model.init if weights is None else lambda key: assemble(model, weights, key)
    return model, tokenizer, load


def resolve(source: str) -> pathlib.Path:
    """Local directory or .gguf file of a source.

    Args:
      source: a directory, a .gguf file, ``package:NAME``, or a hub id ``owner/name`` with an optional
        ``@revision`` (downloaded, or taken from the cache when there is no network).

    Raises:
      ModelLoadError: nothing is there; the message says what was tried.
    """
    if source.startswith("package:"):
        return _in_package(source.removeprefix("package:"))
    path = pathlib.Path(source).expanduser()
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if path.is_file():
        raise ModelLoadError(
            f"{path} is a file but not a .gguf; give the directory that holds it and its config.json"
        )
    if (
        path.suffix == ".gguf"
        or path.is_absolute()
        or source.startswith((".", "~"))
        or source.count("/") != 1
    ):
        raise ModelLoadError(
            f"{source!r} does not exist; give a directory, a .gguf file, package:NAME, or a hub id owner/name"
        )
    return _from_hub(source)


def _in_package(name: str) -> pathlib.Path:
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError as error:
        raise ModelLoadError(f"the package {name!r} is not installed; `pip install {name}`") from error
    found = [file for file in distribution.files or [] if file.suffix == ".gguf"]
    if len(found) != 1:
        raise ModelLoadError(
            f"the package {name!r} holds {len(found)} .gguf files {[str(file) for file in found]}, not one; "
            "give the path of the file instead"
        )
    return pathlib.Path(str(distribution.locate_file(found[0])))


def _from_hub(source: str) -> pathlib.Path:
    hub = require("huggingface_hub", "hf")
    repository, _, revision = source.partition("@")
    try:
        return pathlib.Path(
            hub.snapshot_download(
                repository,
                revision=revision or None,
                allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"],
            )
        )
    except (
        hub.errors.HfHubHTTPError,
        hub.errors.LocalEntryNotFoundError,
        hub.errors.HFValidationError,
        OSError,
    ) as error:
        raise ModelLoadError(
            f"{source!r} is not a local path, and could not be had from the hub ({type(error).__name__}: "
            f"{error}); "
            "check the name and the network, or download it elsewhere and give its directory"
        ) from error
