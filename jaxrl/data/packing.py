"""Token sequences to arrays: several to a row (packed) or one to a row (padded to a bucket)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from jaxrl.errors import ConfigError, DataError

Sequences = Sequence[tuple[Sequence[int], Sequence[int]]]
"""Pairs of token ids and a 0/1 mask of the tokens to train on."""


@dataclass(frozen=True)
class Rows:
    """Sequences laid out in rows; padding is on the right.

    Attributes:
      tokens: ``[N, S]`` int32; the pad id where nothing lies.
      positions: ``[N, S]`` int32, from 0 in each sequence; 0 on padding.
      segment_ids: ``[N, S]`` int32, 1, 2, ... for the sequences of a row; 0 on padding.
      loss_mask: ``[N, S]`` float32. 0 on the first token of every sequence, which nothing predicts.
      sources: for each row the indices of its sequences, in order of their segment ids.
      dropped: sequences left out for being longer than a row.
      truncated: sequences cut at the end of a row.
    """

    tokens: np.ndarray
    positions: np.ndarray
    segment_ids: np.ndarray
    loss_mask: np.ndarray
    sources: tuple[tuple[int, ...], ...]
    dropped: int = 0
    truncated: int = 0

    @property
    def fill(self) -> float:
        """Fraction of the columns that hold a token."""
        return float((self.segment_ids > 0).mean())


def pack(
    sequences: Sequences,
    row_length: int,
    pad_id: int,
    method: Literal["first_fit_decreasing", "sequential"] = "first_fit_decreasing",
    on_long: Literal["error", "drop", "truncate"] = "error",
) -> Rows:
    """Packs sequences into rows of one length. A sequence is never split over rows.

    Args:
      sequences: ids and masks.
      row_length: S.
      pad_id: token id of the padding.
      method: "first_fit_decreasing": longest first, each into the first row with room (at most 11/9 of the
        fewest possible rows, plus one). "sequential": in the given order, a new row when the current one is
        full.
      on_long: what to do with a sequence longer than a row.

    Raises:
      DataError: a sequence is empty, differs in length from its mask, or is too long under "error"; or none
        is left.
      ConfigError: unknown method or row length below 1.
    """
    if method not in ("first_fit_decreasing", "sequential"):
        raise ConfigError(f"packing method {method!r} is unknown; use 'first_fit_decreasing' or 'sequential'")
    lengths, dropped, truncated = _fit(sequences, row_length, on_long)
    assign = _first_fit_decreasing if method == "first_fit_decreasing" else _sequential
    return _lay_out(sequences, lengths, assign(lengths, row_length), row_length, pad_id, dropped, truncated)


def pad_rows(
    sequences: Sequences,
    buckets: Sequence[int],
    pad_id: int,
    on_long: Literal["error", "drop", "truncate"] = "error",
) -> Rows:
    """One sequence a row, all rows as long as the smallest bucket that holds the longest sequence.

    Few bucket lengths mean few compiled programs.

    Args:
      sequences: ids and masks.
      buckets: allowed row lengths, in any order.
      pad_id: token id of the padding.
      on_long: what to do with a sequence longer than the largest bucket.

    Raises:
      DataError: as in ``pack``.
      ConfigError: no bucket, or one below 1.
    """
    if not buckets:
        raise ConfigError("there is no bucket; give at least one row length")
    lengths, dropped, truncated = _fit(sequences, max(buckets), on_long)
    row_length = bucket_length(max(lengths.values()), buckets)
    return _lay_out(sequences, lengths, [[i] for i in lengths], row_length, pad_id, dropped, truncated)


def bucket_length(length: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds ``length`` tokens.

    Raises:
      DataError: none does.
    """
    fitting = [bucket for bucket in buckets if bucket >= length]
    if not fitting:
        raise DataError(f"{length} tokens exceed the largest bucket, {max(buckets)}; add a larger bucket")
    return min(fitting)


def _fit(sequences: Sequences, limit: int, on_long: str) -> tuple[dict[int, int], int, int]:
    """Index -> length of the sequences kept, in order; counts of dropped and truncated ones."""
    if limit < 1:
        raise ConfigError(f"the row length is {limit}; give 1 or more")
    if on_long not in ("error", "drop", "truncate"):
        raise ConfigError(f"on_long={on_long!r} is unknown; use 'error', 'drop' or 'truncate'")
    lengths: dict[int, int] = {}
    dropped = truncated = 0
    for index, (ids, mask) in enumerate(sequences):
        if len(ids) == 0 or len(ids) != len(mask):
            raise DataError(
                f"sequence {index} has {len(ids)} tokens and a mask of {len(mask)}; both must be equal and "
                "above 0"
            )
        if len(ids) <= limit:
            lengths[index] = len(ids)
        elif on_long == "truncate":
            lengths[index] = limit
            truncated += 1
        elif on_long == "drop":
            dropped += 1
        else:
            raise DataError(
                f"sequence {index} has {len(ids)} tokens, more than a row of {limit}; lengthen the rows, or "
                "set on_long to 'drop' or 'truncate'"
            )
    if not lengths:
        raise DataError(f"no sequence is left of {len(sequences)} ({dropped} are longer than {limit} tokens)")
    return lengths, dropped, truncated


def _first_fit_decreasing(lengths: dict[int, int], row_length: int) -> list[list[int]]:
    rows: list[list[int]] = []
    room = np.zeros(len(lengths), np.int64)
    for index in sorted(lengths, key=lambda i: (-lengths[i], i)):
        fits = room[: len(rows)] >= lengths[index]
        row = int(fits.argmax()) if fits.any() else len(rows)
        if row == len(rows):
            rows.append([])
            room[row] = row_length
        rows[row].append(index)
        room[row] -= lengths[index]
    return rows


def _sequential(lengths: dict[int, int], row_length: int) -> list[list[int]]:
    rows: list[list[int]] = []
    room = 0
    for index, length in lengths.items():
        if length > room:
            rows.append([])
            room = row_length
        rows[-1].append(index)
        room -= length
    return rows


def _lay_out(
    sequences: Sequences,
    lengths: dict[int, int],
    rows: list[list[int]],
    row_length: int,
    pad_id: int,
    dropped: int,
    truncated: int,
) -> Rows:
    shape = (len(rows), row_length)
    tokens = np.full(shape, pad_id, np.int32)
    positions, segment_ids = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    loss_mask = np.zeros(shape, np.float32)
    for row, members in enumerate(rows):
        start = 0
        for segment, index in enumerate(members, start=1):
            ids, mask = sequences[index]
            length = lengths[index]
            columns = slice(start, start + length)
            tokens[row, columns] = ids[:length]
            positions[row, columns] = np.arange(length)
            segment_ids[row, columns] = segment
            loss_mask[row, columns] = mask[:length]
            loss_mask[row, start] = 0.0
            start += length
    return Rows(tokens, positions, segment_ids, loss_mask, tuple(map(tuple, rows)), dropped, truncated)
