"""A tokenizer of single characters, for models trained from scratch on tiny alphabets."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable
from typing import Protocol

from jaxrl.errors import DataError


class TextTokenizer(Protocol):
    """What this library needs of any tokenizer; transformers tokenizers have it too."""

    eos_token_id: int | None
    pad_token_id: int | None
    vocab_size: int

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """Text of token ids."""


class CharTokenizer:
    """One token a character. Id 0 pads, id 1 ends a text, characters follow from id 2 in the order given.

    Attributes:
      alphabet: the characters.
      pad_token_id: 0.
      eos_token_id: 1.
      vocab_size: ``len(alphabet) + 2``.
    """

    pad_token_id = 0
    eos_token_id = 1
    pad_token = "<pad>"
    eos_token = "<eos>"

    def __init__(self, alphabet: str) -> None:
        """Builds the tokenizer.

        Args:
          alphabet: its characters, each once.

        Raises:
          DataError: the alphabet is empty or repeats a character.
        """
        repeated = sorted({c for c in alphabet if alphabet.count(c) > 1})
        if not alphabet or repeated:
            raise DataError(f"the alphabet {alphabet!r} must hold each character once; it repeats {repeated}")
        self.alphabet = alphabet
        self.vocab_size = len(alphabet) + 2
        self._ids = {character: index for index, character in enumerate(alphabet, start=2)}

    def __len__(self) -> int:
        return self.vocab_size

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without EOS.

        Raises:
          DataError: a character is not in the alphabet.
        """
        try:
            return [self._ids[character] for character in text]
        except KeyError as error:
            raise DataError(
                f"the character {error.args[0]!r} of {text[:40]!r} is not in the alphabet "
                f"{self.alphabet!r}; add it there"
            ) from error

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """Text of token ids; special tokens appear as "<pad>" and "<eos>" unless skipped.

        Raises:
          DataError: an id is outside the vocabulary.
        """
        parts = []
        for token in map(int, ids):
            if not 0 <= token < self.vocab_size:
                raise DataError(f"token id {token} is outside the vocabulary of {self.vocab_size}")
            if token >= 2:
                parts.append(self.alphabet[token - 2])
            elif not skip_special_tokens:
                parts.append((self.pad_token, self.eos_token)[token])
        return "".join(parts)

    def save(self, path: str | pathlib.Path) -> None:
        """Writes the tokenizer as JSON."""
        content = {"type": "char", "alphabet": self.alphabet}
        pathlib.Path(path).write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | pathlib.Path) -> CharTokenizer:
        """Reads what ``save`` wrote.

        Raises:
          DataError: the file is missing or something else.
        """
        try:
            content = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(f"{str(path)!r} is no readable tokenizer file: {error}") from error
        if (
            not isinstance(content, dict)
            or content.get("type") != "char"
            or not isinstance(content.get("alphabet"), str)
        ):
            raise DataError(
                f"{str(path)!r} holds no character tokenizer; expected the keys 'type' and 'alphabet'"
            )
        return cls(content["alphabet"])
