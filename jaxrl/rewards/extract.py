"""Finding the answer inside a completion: tags, boxes, lines and numbers."""

from __future__ import annotations

import re
from decimal import Decimal

from jaxrl.errors import ConfigError

EXTRACTORS = ("whole", "answer_tag", "boxed", "first_line", "last_line", "last_number")

# A sign counts only where it cannot be a binary minus: "7-3" holds 7 and 3, "x = -3" holds -3. Digits that
# continue a word or a version string ("x2", "v1.2.3") are no numbers.
_NUMBER = re.compile(
    r"(?:(?<![\w).])[-+])?(?<![\w.])(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,3})?"
)


def number_texts(text: str) -> list[str]:
    """All decimal numbers in ``text``, in order, as written but without thousands separators."""
    return [match.replace(",", "") for match in _NUMBER.findall(text.replace("\u2212", "-"))]


def numbers(text: str) -> list[Decimal]:
    """All decimal numbers in ``text``, in order.

    Exact decimals, so that "0.1" equals "0.10" and long integers keep every digit.
    """
    return [Decimal(match) for match in number_texts(text)]


def last_boxed(text: str) -> str | None:
    r"""Content of the last ``\boxed{...}`` with balanced braces, or None."""
    start = text.rfind(r"\boxed{")
    if start < 0:
        return None
    start += len(r"\boxed{")
    depth = 1
    for end in range(start, len(text)):
        depth += (text[end] == "{") - (text[end] == "}")
        if depth == 0:
            return text[start:end].strip()
    return None


def last_tag(text: str, tag: str) -> str | None:
    """Content of the last ``<tag>...</tag>``, or None."""
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, max(end, 0))
    if start < 0 or end < 0:
        return None
    return text[start + len(tag) + 2 : end].strip()


def check_extractor(how: str) -> None:
    """Raises ConfigError unless ``how`` is one of EXTRACTORS."""
    if how not in EXTRACTORS:
        raise ConfigError(f"extract={how!r} is unknown; use one of {', '.join(EXTRACTORS)}")


def extract(text: str, how: str) -> str | None:
    """The part of ``text`` that holds the answer, or None when there is none.

    Args:
      text: a completion.
      how: one of EXTRACTORS; lines are non-empty lines.
    """
    check_extractor(how)
    if how == "whole":
        return text.strip()
    if how == "answer_tag":
        return last_tag(text, "answer")
    if how == "boxed":
        return last_boxed(text)
    if how == "last_number":
        found = number_texts(text)
        return found[-1] if found else None
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return None
    return lines[0] if how == "first_line" else lines[-1]
