"""Batches as a function of one integer, and prompts cut to what fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from jaxrl.data.prompts import PromptExample
from jaxrl.errors import ConfigError, DataError

T = TypeVar("T")


class Stream(Generic[T]):
    """An endless, reshuffled walk through a data set that holds no state.

    Item ``position`` depends on the data, the seed and ``position`` only, so a run resumes exactly from one
    integer, and no item is skipped or repeated by a change of batch size or of the number of processes.
    """

    def __init__(self, items: Sequence[T], seed: int = 0, shuffle: bool = True) -> None:
        """Builds the stream.

        Args:
          items: the data set.
          seed: seed of the order.
          shuffle: another order in each epoch; else always that of ``items``.

        Raises:
          DataError: there are no items.
        """
        import grain  # slow to import, and not needed by code that only reads prompts

        if not items:
            raise DataError("the data set is empty; give it at least one item")
        self._length = len(items)
        dataset = grain.MapDataset.source(items).seed(seed)
        self._dataset = (dataset.shuffle() if shuffle else dataset).repeat()

    def __len__(self) -> int:
        """Number of items of an epoch."""
        return self._length

    def epoch(self, position: int) -> int:
        """The epoch, from 0, that a position lies in."""
        return position // self._length

    def batch(self, position: int, n: int, process_index: int = 0, process_count: int = 1) -> list[T]:
        """Items ``position .. position + n - 1`` of the stream, or this process's contiguous share of them.

        The next batch starts at ``position + n``. Positions are unique over epochs: use them as prompt ids,
        so that a prompt that comes back gets other random numbers.

        Args:
          position: first position of the global batch, from 0.
          n: items of the global batch.
          process_index: which share.
          process_count: number of shares; divides ``n``.

        Raises:
          ConfigError: ``n`` cannot be shared evenly, or an argument is out of range.
        """
        if position < 0 or n < 1:
            raise ConfigError(
                f"a batch of {n} items from position {position} does not exist; use n >= 1, position >= 0"
            )
        if not 0 <= process_index < process_count:
            raise ConfigError(f"process {process_index} of {process_count} does not exist; count from 0")
        if n % process_count:
            raise ConfigError(
                f"a batch of {n} prompts cannot be shared evenly by {process_count} processes; use a multiple"
            )
        share = n // process_count
        start = position + process_index * share
        return [self._dataset[index] for index in range(start, start + share)]


PromptStream = Stream[PromptExample]


@dataclass(frozen=True)
class LengthReport:
    """What the length filter did.

    Attributes:
      kept: prompts kept.
      dropped: prompts dropped for being too long.
      max_prompt_len: the limit, in tokens.
      longest: tokens of the longest prompt, dropped or not.
      longest_id: its id.
    """

    kept: int
    dropped: int
    max_prompt_len: int
    longest: int
    longest_id: str

    def __str__(self) -> str:
        return (
            f"{self.kept} prompts kept, {self.dropped} dropped for having more than {self.max_prompt_len} "
            f"tokens; the longest is {self.longest_id} with {self.longest}"
        )


def encode_prompts(
    examples: Sequence[PromptExample],
    encode: Callable[[PromptExample], Sequence[int]],
    max_prompt_len: int,
    on_long: Literal["drop", "error"] = "drop",
) -> tuple[list[PromptExample], LengthReport]:
    """Fills ``prompt_ids`` and leaves out prompts that do not fit.

    Args:
      examples: the prompts.
      encode: token ids of a prompt, for example from ``jaxrl.data.chat.prompt_encoder``.
      max_prompt_len: most tokens that a prompt may have.
      on_long: "drop" a longer prompt, or raise an "error".

    Returns:
      The prompts kept, in order, and a report to print.

    Raises:
      DataError: a prompt is empty, is too long under "error", or all of them are too long.
    """
    if on_long not in ("drop", "error"):
        raise ConfigError(f"on_long={on_long!r} is unknown; use 'drop' or 'error'")
    kept: list[PromptExample] = []
    longest, longest_id = 0, ""
    for example in examples:
        ids = tuple(int(token) for token in encode(example))
        if not ids:
            raise DataError(f"prompt {example.id} has no token; remove it")
        if len(ids) > longest:
            longest, longest_id = len(ids), example.id
        if len(ids) <= max_prompt_len:
            kept.append(dataclasses.replace(example, prompt_ids=ids))
        elif on_long == "error":
            raise DataError(
                f"prompt {example.id} has {len(ids)} tokens, more than the {max_prompt_len} that the context "
                "leaves for a prompt; shorten it, raise max_prompt_len, or drop long prompts with "
                "on_long='drop'"
            )
    report = LengthReport(len(kept), len(examples) - len(kept), max_prompt_len, longest, longest_id)
    if not kept:
        raise DataError(f"no prompt is left: {report}; raise max_prompt_len")
    return kept, report
