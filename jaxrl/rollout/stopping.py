"""Stop strings: finding, while tokens arrive, the one that completes a given text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jaxrl.rollout.types import Decodes

#: Tokens of context beyond the longest stop string: whatever a tokenizer does to the first tokens of a text
#: (a dropped space, half a character) happens in these.
_MARGIN = 8


class StopWatch:
    """Watches one completion. Every token is at least one byte of text, so a match that ends in the newest
    tokens starts at most as many tokens earlier as the stop string has bytes; only that window is decoded."""

    def __init__(self, tokenizer: Decodes, stop_strings: Sequence[str]):
        self._tokenizer = tokenizer
        self._stops = tuple(stop_strings)
        self._context = max(len(stop.encode()) for stop in self._stops) + _MARGIN
        self._ids: list[int] = []

    def feed(self, ids: Iterable[int]) -> int | None:
        """Take new tokens; returns how many of them belong to the completion if one completes a stop string.

        The answer for a completion does not depend on how its tokens are cut into calls.
        """
        seen = self._ids[-self._context :]
        new = [int(i) for i in ids]
        self._ids.extend(new)
        if not self._stopped(seen + new):
            return None
        return next(n for n in range(1, len(new) + 1) if self._stopped(seen + new[:n]))

    def _stopped(self, ids: Sequence[int]) -> bool:
        text = self._tokenizer.decode(ids)
        return any(stop in text for stop in self._stops)
