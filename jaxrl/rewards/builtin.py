"""Cheap rewards that run in the main process: matching, formats, lengths."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation

from jaxrl.errors import ConfigError
from jaxrl.rewards.base import RewardFn, RewardInput
from jaxrl.rewards.extract import check_extractor, extract, last_boxed, numbers
from jaxrl.rewards.registry import register


def per_row(score: Callable[[RewardInput], float | None]) -> RewardFn:
    """A reward function from a function of one row."""

    def reward(inputs: Sequence[RewardInput]) -> list[float | None]:
        return [score(row) for row in inputs]

    return reward


@register("exact_match")
def exact_match(*, extract_from: str = "whole", ignore_case: bool = False) -> RewardFn:
    """1 if the extracted text equals the gold answer, else 0; runs of white space count as one space.

    Args:
      extract_from: where the answer stands; see ``jaxrl.rewards.extract.EXTRACTORS``.
      ignore_case: compare case-folded.
    """
    check_extractor(extract_from)

    def normal(text: str) -> str:
        text = " ".join(text.split())
        return text.casefold() if ignore_case else text

    def score(row: RewardInput) -> float:
        gold = row.gold()
        found = extract(row.completion_text, extract_from)
        return float(found is not None and normal(found) == normal(gold))

    return per_row(score)


@register("number_match")
def number_match(*, which: str = "last", tolerance: float = 0.0) -> RewardFn:
    """1 if the chosen number of the completion equals the gold number, else 0.

    Args:
      which: "last" or "first" number of the text; "single": the text must hold exactly one number; "only":
        the text must be that number and nothing else.
      tolerance: largest absolute difference that still counts as equal.
    """
    if which not in ("last", "first", "single", "only"):
        raise ConfigError(f"number_match: which={which!r} is unknown; use last, first, single or only")
    if not tolerance >= 0:
        raise ConfigError(f"number_match: tolerance={tolerance} must be 0 or more")
    allowed = Decimal(str(tolerance))

    def score(row: RewardInput) -> float:
        gold = _gold_number(row)
        text = row.completion_text.strip()
        if which == "only":
            try:
                found = [Decimal(text.replace(",", ""))]
            except InvalidOperation:
                return 0.0
            if not found[0].is_finite():
                return 0.0
        else:
            found = numbers(text)
        if not found or (which == "single" and len(found) != 1):
            return 0.0
        chosen = found[0] if which == "first" else found[-1]
        return float(chosen == gold or abs(chosen - gold) <= allowed)

    return per_row(score)


@register("gsm8k")
def gsm8k(*, mode: str = "flexible") -> RewardFn:
    """Final-answer match for grade-school mathematics, where gold answers end in "#### 42".

    Args:
      mode: "strict": the completion must itself hold "#### number". "flexible": that, else the last
        ``\\boxed{number}``, else the last number of the text.
    """
    if mode not in ("strict", "flexible"):
        raise ConfigError(f"gsm8k: mode={mode!r} is unknown; use strict or flexible")

    def final(text: str) -> Decimal | None:
        _, mark, tail = text.rpartition("####")
        if mark:
            found = numbers(tail)
            return found[0] if found else None
        if mode == "strict":
            return None
        found = numbers(last_boxed(text) or "") or numbers(text)
        return found[-1] if found else None

    def score(row: RewardInput) -> float:
        return float(final(row.completion_text) == _gold_number(row, after="####"))

    return per_row(score)


@register("regex_format")
def regex_format(*, pattern: str, dot_matches_newline: bool = True) -> RewardFn:
    """1 if the whole completion matches a regular expression, else 0.

    A pattern with nested repetitions can take exponential time on text that a model writes; run such a
    pattern with ``isolate=True``.

    Args:
      pattern: Python regular expression, matched with ``fullmatch``.
      dot_matches_newline: whether "." matches a line break.
    """
    try:
        compiled = re.compile(pattern, re.DOTALL if dot_matches_newline else 0)
    except re.error as error:
        raise ConfigError(f"regex_format: {pattern!r} is no regular expression: {error}") from error
    return per_row(lambda row: float(compiled.fullmatch(row.completion_text) is not None))


@register("tag_format")
def tag_format(*, tags: Sequence[str] = ("think", "answer"), opened: bool = False) -> RewardFn:
    """1 if the completion is exactly ``<think>...</think><answer>...</answer>``, else 0.

    White space may surround the blocks. Each tag occurs once, and the last block is not empty.

    Args:
      tags: tag names, in their order.
      opened: the prompt already ends in the first opening tag, so the completion starts inside it.
    """
    if not tags:
        raise ConfigError("tag_format: tags is empty; name at least one tag")
    blocks = [rf"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>" for tag in tags]
    if opened:
        blocks[0] = blocks[0].removeprefix(f"<{re.escape(tags[0])}>")
    compiled = re.compile(r"\s*" + r"\s*".join(blocks) + r"\s*", re.DOTALL)
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    if opened:
        marks = marks[1:]

    def score(row: RewardInput) -> float:
        text = row.completion_text
        if any(text.count(mark) != 1 for mark in marks) or (opened and f"<{tags[0]}>" in text):
            return 0.0
        match = compiled.fullmatch(text)
        return float(match is not None and bool(match.groups()[-1].strip()))

    return per_row(score)


@register("length")
def length(*, max_length: int | None = None, buffer: int | None = None, unit: str = "tokens") -> RewardFn:
    """Length of the completion, or the soft overlong penalty (DAPO, arXiv 2503.14476, equation 13).

    Without arguments the plain count, useful with weight 0 as a metric. With both arguments 0 up to
    ``max_length - buffer``, then falling linearly to -1 at ``max_length``, and -1 beyond.

    Args:
      max_length: length from which the penalty is -1.
      buffer: width of the slope.
      unit: "tokens" (stop token included) or "characters".
    """
    if unit not in ("tokens", "characters"):
        raise ConfigError(f"length: unit={unit!r} is unknown; use tokens or characters")
    if (max_length is None) != (buffer is None):
        raise ConfigError("length: max_length and buffer go together; give both or neither")
    if max_length is not None and buffer is not None and not 0 < buffer <= max_length:
        raise ConfigError(f"length: buffer={buffer} must lie in 1..max_length={max_length}")

    def score(row: RewardInput) -> float:
        count = len(row.completion_ids) if unit == "tokens" else len(row.completion_text)
        if max_length is None or buffer is None:
            return float(count)
        return float(min(0.0, max(-1.0, (max_length - buffer - count) / buffer)))

    return per_row(score)


@register("finished")
def finished() -> RewardFn:
    """1 if the model stopped by itself, 0 if it ran into the length limit; declines aborted rows."""
    return per_row(lambda row: None if row.finish_reason == "abort" else float(row.finish_reason != "length"))


def _gold_number(row: RewardInput, after: str | None = None) -> Decimal:
    gold = row.gold()
    if after is not None:
        gold = gold.rpartition(after)[2]
    found = numbers(gold)
    if len(found) != 1:
        raise ValueError(f"the gold answer {gold!r} holds {len(found)} numbers; it must hold one")
    return found[0]
