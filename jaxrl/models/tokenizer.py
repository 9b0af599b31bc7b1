"""Tokenizers from Hugging Face directories and from GGUF files, through ``tokenizers`` and without torch."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence, Sized
from typing import Any, Protocol

from jaxrl.errors import ModelLoadError, require
from jaxrl.models.config import ModelConfig
from jaxrl.models.gguf import metadata, open_gguf

#: GGUF token types.
_CONTROL, _USER_DEFINED = 3, 4

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: ``tokenizer.ggml.pre`` to (single digits first, splitting pattern, Unicode normal form C, whole words
#: before merges).
_PRETOKENIZERS: dict[str, tuple[bool, str, bool, bool]] = {
    "default": (False, _GPT2, False, False),
    "gpt-2": (False, _GPT2, False, False),
    "smollm": (True, _GPT2, False, False),
    "qwen2": (False, _QWEN2, True, False),
    "llama-bpe": (False, _LLAMA3, False, True),
}


class Tokenizer(Protocol):
    """What the library needs of a tokenizer. Ids are never compared with ``eos_token_id`` to find ends or
    padding once sampled: those are flags.
    """

    eos_token_id: int | None
    pad_token_id: int | None

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


def load_tokenizer(source: str | os.PathLike[str] | Any) -> Any:
    """A ``transformers.PreTrainedTokenizerFast``.

    Args:
      source: directory with a ``tokenizer.json``, a ``.gguf`` file, or a reader from
        ``models.gguf.open_gguf``.

    Raises:
      ModelLoadError: there is no tokenizer there, or it is of a kind that is not supported.
    """
    if not isinstance(source, (str, os.PathLike)):
        return _from_gguf(source)
    path = pathlib.Path(source)
    if path.suffix == ".gguf":
        return _from_gguf(open_gguf(path))
    if not (path / "tokenizer.json").is_file():
        raise ModelLoadError(
            f"{path} holds no tokenizer.json; give a directory that was saved with a fast tokenizer"
        )
    transformers = _transformers()
    try:
        return transformers.PreTrainedTokenizerFast.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # tokenizers raises bare Exception for a malformed file
        raise ModelLoadError(
            f"the tokenizer in {path} cannot be read ({error}); save or download it again"
        ) from error


def tokenizer_size(tokenizer: Tokenizer) -> int:
    """Number of ids, special and added tokens included."""
    return len(tokenizer) if isinstance(tokenizer, Sized) else tokenizer.vocab_size


def _transformers() -> Any:
    # It announces at import that it found no torch, which is as it should be here.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    return require("transformers", "hf")


def check_tokenizer(config: ModelConfig, tokenizer: Tokenizer) -> None:
    """Raise unless every id of the tokenizer has a row in the model's embedding.

    A table with more rows than ids is normal: vocabularies are padded to round sizes.

    Raises:
      ModelLoadError: names both sizes, or the special id that is out of range.
    """
    size = tokenizer_size(tokenizer)
    if size > config.vocab_size:
        raise ModelLoadError(
            f"the tokenizer has {size} ids but the model's vocabulary has {config.vocab_size}; "
            "they are of different models: load both from one source"
        )
    for name in ("eos_token_id", "pad_token_id"):
        value = getattr(tokenizer, name)
        if value is not None and not 0 <= value < config.vocab_size:
            raise ModelLoadError(
                f"{name}={value} of the tokenizer is outside the model's vocabulary of {config.vocab_size}"
            )


def _from_gguf(reader: Any) -> Any:
    tokenizers, transformers = require("tokenizers", "hf"), _transformers()
    where = reader.path

    def get(key: str, default: Any = None) -> Any:
        return metadata(reader, f"tokenizer.ggml.{key}", default)

    if get("model") != "gpt2":
        raise ModelLoadError(
            f"{where} has a tokenizer of kind {get('model')!r}; only byte-level BPE ('gpt2') is read from "
            "GGUF files: "
            "load the tokenizer from a Hugging Face directory"
        )
    pre = get("pre", "default")
    if pre not in _PRETOKENIZERS:
        raise ModelLoadError(
            f"{where} has the pre-tokenizer {pre!r}; supported in GGUF files are "
            f"{', '.join(_PRETOKENIZERS)}: "
            "load the tokenizer from a Hugging Face directory"
        )
    digits, pattern, compose, whole_words = _PRETOKENIZERS[pre]
    tokens, types = get("tokens"), get("token_type")
    merges = [tuple(merge.split(" ")) for merge in get("merges")]
    vocab = {token: i for i, token in enumerate(tokens)}
    bpe = tokenizers.models.BPE(vocab=vocab, merges=merges, ignore_merges=whole_words)
    tokenizer = tokenizers.Tokenizer(bpe)
    if compose:
        tokenizer.normalizer = tokenizers.normalizers.NFC()
    split = tokenizers.pre_tokenizers
    steps = [split.Digits(individual_digits=True)] if digits else []
    steps.append(split.Split(tokenizers.Regex(pattern), behavior="isolated"))
    steps.append(split.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer.pre_tokenizer = split.Sequence(steps)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    added = [
        tokenizers.AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens(added)  # in order of id: they are in the vocabulary already and keep their ids
    bos, eos = get("bos_token_id"), get("eos_token_id")
    if get("add_bos_token", False) and bos is not None:
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{tokens[bos]} $A",
            pair=f"{tokens[bos]} $A {tokens[bos]} $B",
            special_tokens=[(tokens[bos], bos)],
        )
    pad = get("padding_token_id", eos)
    special = {"bos_token": bos, "eos_token": eos, "pad_token": pad}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **{name: tokens[i] for name, i in special.items() if i is not None},
        chat_template=metadata(reader, "tokenizer.chat_template"),
        model_max_length=metadata(reader, f"{metadata(reader, 'general.architecture')}.context_length"),
        clean_up_tokenization_spaces=False,
    )
