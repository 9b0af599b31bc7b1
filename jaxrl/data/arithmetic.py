"""Sums for a character model: fixed width, so that a tiny network can learn them within a minute."""

from __future__ import annotations

from jaxrl.data.prompts import PromptExample
from jaxrl.errors import ConfigError

SUM_ALPHABET = "0123456789+="
"""All characters of ``column_sums``."""


def column_sums(num_digits: int = 2, lowest_first: bool = True) -> list[PromptExample]:
    """Every sum of two numbers of ``num_digits`` digits, both zero-padded: prompt "07+45=", answer "250".

    Args:
      num_digits: digits of each operand, 1 to 3; there are ``100 ** num_digits`` prompts.
      lowest_first: write the answer from its lowest digit, the order in which carries arise; else "052".

    Returns:
      Prompts in the order of their operands. Answers have ``num_digits + 1`` digits.

    Raises:
      ConfigError: ``num_digits`` is out of range.
    """
    if num_digits not in (1, 2, 3):
        raise ConfigError(f"column_sums takes num_digits from 1 to 3, not {num_digits!r}")
    count = 10**num_digits
    examples = []
    for a in range(count):
        for b in range(count):
            text = f"{a:0{num_digits}d}+{b:0{num_digits}d}="
            answer = f"{a + b:0{num_digits + 1}d}"
            examples.append(PromptExample(text, text, answer[::-1] if lowest_first else answer))
    return examples
