"""The slot engine: a fixed number of slots on the device, and a host loop that keeps them busy.

The host orders the requests by prompt, prefills distinct prompts in batches, copies each prefilled prompt
into as many free slots as it has requests, decodes in chunks, and refills the slots that finished. Shapes are
static: requests differ only in the arrays they fill.

Three seams carry what a caller may want to change: the order of admission is ``by_prompt``, a plain list of
indices; prompts computed once and used by many slots are a ``decode.Prefilled``; and a slot's whole state is
a row of the two pytrees of ``decode``, so that a fork of a slot is a gather of rows.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np

from jaxrl.errors import ConfigError, DataError, NonFiniteError
from jaxrl.models.decoder import LanguageModel, Params
from jaxrl.rollout import decode as device
from jaxrl.rollout.stopping import StopWatch
from jaxrl.rollout.types import Completion, Decodes, EngineConfig, EngineStats, FinishReason, Request

OnFinish = Callable[[Request, Completion], None]
OnToken = Callable[[Request, np.ndarray], None]

_REASONS: dict[int, FinishReason] = {device.EOS: "eos", device.STOP: "stop", device.LENGTH: "length"}
#: Rows fetched by one call of ``read``.
_READ = 8


@dataclasses.dataclass
class _Occupant:
    """A request in a slot: its index, how many of its tokens the host has seen, and its stop strings."""

    index: int
    request: Request
    seen: int = 0
    watch: StopWatch | None = None


@dataclasses.dataclass
class _Bank:
    """The prefilled prompts that still have requests waiting: row of each by the bytes of its ids."""

    prefilled: device.Prefilled
    rows: dict[bytes, int]


class Engine:
    """Samples completions with a fixed number of slots.

    A completion depends on the parameters, its request and the run key only; not on the slot, on the other
    requests, their order or number, or on the number of slots (up to the rounding of matrix products of
    different shapes). Compiled code is shared by all engines with the same model, slots and buckets.

    Attributes:
      model: the language model, with its mesh if it has one.
      config: static sizes.
      stats: work done by the last ``generate``.
    """

    def __init__(self, model: LanguageModel, config: EngineConfig, tokenizer: Decodes | None = None):
        if model.sharding is not None:
            model.sharding.check_batch(config.slots, "engine.slots")
        if config.max_len > model.config.max_position:
            raise ConfigError(
                f"engine.max_len={config.max_len} is more than the {model.config.max_position} positions "
                "of the model; lower it, or configure rope_scaling and max_position"
            )
        self.model, self.config, self.stats = model, config, EngineStats()
        self._tokenizer = tokenizer
        self._eos = _eos_ids(config, tokenizer)
        self._device = device.programs(model, config.slots, config.prefill_chunk, config.gather_weights)
        self._aborted: set[tuple[int, int]] = set()

    def abort(self, prompt_id: int, sample_id: int) -> None:
        """End a request of the running ``generate``, from a callback or another thread.

        A waiting request is not started; a running one keeps the tokens it has at the end of the next chunk.
        """
        self._aborted.add((prompt_id, sample_id))

    def generate(
        self,
        params: Params,
        requests: Sequence[Request],
        key: jax.Array,
        on_finish: OnFinish | None = None,
        on_token: OnToken | None = None,
    ) -> list[Completion]:
        """Sample one completion per request.

        Args:
          params: of the model, layers stacked or not (stacked ones are unstacked, once per call).
          requests: in any order and number.
          key: typed run key. The key of a token is ``fold_in(fold_in(fold_in(key, prompt_id), sample_id),
            position)`` with the position counted from the first token of the prompt.
          on_finish: called with each request and its completion, while the device decodes the others.
          on_token: called with a request and its next tokens ``[n]``, in order, once per chunk.

        Returns:
          completions in the order of the requests.

        Raises:
          DataError: a request does not fit (named, with lengths and limits).
          NonFiniteError: the model's logits are not finite.
        """
        began = time.perf_counter()
        self._check(requests)
        self._aborted.clear()
        self.stats = EngineStats()
        run = _Run(self, self._prepared(params), requests, self._placed(key), on_finish, on_token)
        completions = run.loop() if requests else []
        self.stats.sampled_tokens = sum(c.token_ids.size for c in completions)
        self.stats.seconds = time.perf_counter() - began
        return completions

    def _prepared(self, params: Params) -> Params:
        needed = device.needs_preparation(self.model, params, self.config.gather_weights)
        return self._device.prepare(params) if needed else params

    def _placed(self, key: jax.Array) -> jax.Array:
        return key if self.model.sharding is None else jax.device_put(key, self.model.sharding.replicate())

    def _check(self, requests: Iterable[Request]) -> None:
        c = self.config
        for request in requests:
            length, params = request.prompt_ids.size, request.params
            if length > c.max_prompt_len:
                raise DataError(
                    f"{request.name} has a prompt of {length} tokens, "
                    f"more than max_prompt_len={c.max_prompt_len}; "
                    "shorten or filter the prompt, or raise engine.max_prompt_len"
                )
            if length + params.max_tokens > c.max_len:
                raise DataError(
                    f"{request.name} may take {length} prompt + {params.max_tokens} new tokens, more than "
                    f"max_len={c.max_len}; lower max_tokens or raise engine.max_len"
                )
            if request.prompt_ids.min() < 0 or request.prompt_ids.max() >= self.model.config.vocab_size:
                raise DataError(
                    f"{request.name} has token ids outside the vocabulary of {self.model.config.vocab_size}; "
                    "check that tokenizer and model belong together"
                )
            if len(self._stop_ids(request)[0]) > c.max_stop_ids:
                raise DataError(
                    f"{request.name} has more EOS and stop ids than max_stop_ids={c.max_stop_ids}; "
                    "raise engine.max_stop_ids"
                )
            if params.stop_strings and self._tokenizer is None:
                raise DataError(f"{request.name} has stop_strings, which need Engine(..., tokenizer=...)")

    def _stop_ids(self, request: Request) -> tuple[tuple[int, ...], int]:
        """EOS and stop ids of a request, and how many of them are EOS ids."""
        eos = () if request.params.ignore_eos else self._eos
        return (*eos, *request.params.stop_token_ids), len(eos)


def _eos_ids(config: EngineConfig, tokenizer: Decodes | None) -> tuple[int, ...]:
    if config.eos_token_ids is not None:
        return config.eos_token_ids
    found = getattr(tokenizer, "eos_token_id", None)
    return () if found is None else (int(found),)


class _Run:
    """One call of ``generate``: the device state, who is in which slot, and who waits."""

    def __init__(
        self,
        engine: Engine,
        params: Params,
        requests: Sequence[Request],
        key: jax.Array,
        on_finish: OnFinish | None,
        on_token: OnToken | None,
    ):
        self.engine, self.params, self.requests, self.key = engine, params, requests, key
        self.on_finish, self.on_token = on_finish, on_token
        self.completions: list[Completion | None] = [None] * len(requests)
        self.occupants: list[_Occupant | None] = [None] * engine.config.slots
        self.queue = deque(by_prompt(requests))
        self.bank: _Bank | None = None
        self.events: list[Callable[[], None]] = []

    def loop(self) -> list[Completion]:
        config, stats = self.engine.config, self.engine.stats
        longest = max(r.prompt_ids.size + r.params.max_tokens for r in self.requests)
        widest = max(config.prompt_bucket(r.prompt_ids.size) for r in self.requests)
        stats.cache_len = config.cache_bucket(max(longest, widest))
        self.cache, self.slots = self.engine._device.start(stats.cache_len, config.max_stop_ids)
        while True:
            self._admit()
            if not any(self.occupants):
                break
            leave_at = config.free_slots_to_refill if self.queue else config.slots + 1
            self.cache, self.slots, steps, busy = self.engine._device.decode(
                self.params,
                self.cache,
                self.slots,
                self.key,
                np.int32(config.decode_chunk),
                np.int32(leave_at),
            )
            self._tell()  # callbacks run while the device decodes
            stats.chunks += 1
            stats.decode_steps += int(steps)
            stats.busy_slot_steps += int(busy)
            self._collect()
        self._tell()
        return self.completions

    def _admit(self) -> None:
        """Put waiting requests into free slots, prefilling prompts as they are needed."""
        while self.queue and not all(self.occupants):
            if self._is_aborted(self.queue[0]):
                self._finish(
                    self.queue.popleft(), np.zeros(0, np.int32), np.zeros((2, 0), np.float32), "abort"
                )
                continue
            if self.bank is None or self._prompt(self.queue[0]) not in self.bank.rows:
                self.bank = self._prefill()
            source = np.full(len(self.occupants), -1, np.int32)
            for slot, occupant in enumerate(self.occupants):
                if occupant is None and self.queue and self._prompt(self.queue[0]) in self.bank.rows:
                    source[slot] = self.bank.rows[self._prompt(self.queue[0])]
                    self.occupants[slot] = self._occupy(self.queue.popleft())
            self.cache, self.slots = self.engine._device.insert(
                self.cache, self.slots, self.bank.prefilled, source, self._entries(source >= 0), self.key
            )
        if not self.queue:
            self.bank = None

    def _prefill(self) -> _Bank:
        """Run the next distinct prompts of the queue through the model."""
        config, stats = self.engine.config, self.engine.stats
        rows: dict[bytes, int] = {}
        prompts = []
        for index in self.queue:
            if self._prompt(index) not in rows:
                if len(rows) == config.prefill_batch:
                    break
                rows[self._prompt(index)] = len(rows)
                prompts.append(self.requests[index].prompt_ids)
        lengths = np.ones(config.prefill_batch, np.int32)
        lengths[: len(prompts)] = [p.size for p in prompts]
        tokens = np.zeros((config.prefill_batch, config.prompt_bucket(lengths.max())), np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : prompt.size] = prompt
        stats.prefills += 1
        stats.prefilled_prompts += len(prompts)
        return _Bank(self.engine._device.prefill(self.params, tokens, lengths), rows)

    def _occupy(self, index: int) -> _Occupant:
        request = self.requests[index]
        stops = request.params.stop_strings
        return _Occupant(index, request, watch=StopWatch(self.engine._tokenizer, stops) if stops else None)

    def _entries(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Per-slot arrays for the slots in ``rows``; the others are never read."""
        count, width = rows.size, self.engine.config.max_stop_ids
        new = {name: np.zeros(count, np.int32) for name in ("column", "end", "top_k", "eos_count")}
        new |= {name: np.zeros(count, np.uint32) for name in ("prompt_id", "sample_id")}
        new |= {name: np.zeros(count, np.float32) for name in ("temperature", "top_p", "min_p")}
        new |= {
            "stop_ids": np.full((count, width), -1, np.int32),
            "finish": np.full(count, device.RUNNING, np.int32),
        }
        for slot in np.flatnonzero(rows):
            request = self.occupants[slot].request
            params, length = request.params, request.prompt_ids.size
            new["column"][slot], new["end"][slot] = length - 1, length + params.max_tokens
            new["prompt_id"][slot], new["sample_id"][slot] = request.prompt_id, request.sample_id
            for name in ("temperature", "top_k", "top_p", "min_p"):
                new[name][slot] = min(getattr(params, name), np.iinfo(np.int32).max)
            ids, new["eos_count"][slot] = self.engine._stop_ids(request)
            new["stop_ids"][slot, : len(ids)] = ids
        return new

    def _collect(self) -> None:
        """Look at the slots after a chunk: pass tokens on, take completions out, free their slots."""
        finish, column = np.asarray(self.slots["finish"]), np.asarray(self.slots["column"])
        looked_at, released = [], np.zeros(finish.size, bool)
        for slot, occupant in enumerate(self.occupants):
            if occupant is not None:
                ended = finish[slot] != device.RUNNING or self._is_aborted(occupant.index)
                if ended or self.on_token is not None or occupant.watch is not None:
                    looked_at.append(slot)
        for slot, tokens, streams in self._rows(looked_at):
            occupant = self.occupants[slot]
            start = occupant.request.prompt_ids.size
            length = int(column[slot]) + 1 - start
            fresh = tokens[start + occupant.seen : start + length]
            reason = _REASONS.get(int(finish[slot]), "abort" if self._is_aborted(occupant.index) else None)
            kept = occupant.watch.feed(fresh) if occupant.watch is not None else None
            if kept is not None:
                reason, fresh, length = "stop", fresh[:kept], occupant.seen + kept
            occupant.seen += fresh.size
            if self.on_token is not None and fresh.size:
                self.events.append(functools.partial(self.on_token, occupant.request, fresh))
            if reason is not None:
                self.occupants[slot] = None
                released[slot] = finish[slot] == device.RUNNING
                cut = slice(start, start + length)
                self._finish(occupant.index, tokens[cut], streams[:, cut], reason)
        if released.any():
            self.slots = self.engine._device.release(self.slots, released)

    def _rows(self, rows: list[int]) -> Iterable[tuple[int, np.ndarray, np.ndarray]]:
        """Slot, tokens ``[C]`` and both log-prob streams ``[2, C]`` of some slots."""
        for first in range(0, len(rows), _READ):
            part = rows[first : first + _READ]
            index = np.asarray(part + [part[-1]] * (_READ - len(part)), np.int32)
            tokens, logprobs, policy = jax.device_get(self.engine._device.read(self.slots, index))
            for i, slot in enumerate(part):
                yield slot, tokens[i], np.stack([logprobs[i], policy[i]])

    def _finish(self, index: int, tokens: np.ndarray, streams: np.ndarray, reason: FinishReason) -> None:
        request = self.requests[index]
        if not np.isfinite(streams).all():
            at = request.prompt_ids.size + int(np.argmin(np.isfinite(streams).all(axis=0)))
            raise NonFiniteError(
                f"the model's logits are not finite for {request.name} at position {at}; "
                "check the parameters (a diverged update, a wrong checkpoint) and the compute dtype"
            )
        completion = Completion(
            request.prompt_id,
            request.sample_id,
            request.prompt_ids.size,
            tokens,
            streams[0],
            streams[1],
            reason,
        )
        self.completions[index] = completion
        if self.on_finish is not None:
            self.events.append(lambda: self.on_finish(request, completion))

    def _tell(self) -> None:
        events, self.events = self.events, []
        for event in events:
            event()

    def _prompt(self, index: int) -> bytes:
        return self.requests[index].prompt_ids.tobytes()

    def _is_aborted(self, index: int) -> bool:
        request = self.requests[index]
        return (request.prompt_id, request.sample_id) in self.engine._aborted


def by_prompt(requests: Sequence[Request]) -> list[int]:
    """Order of admission: first come first served, with requests of equal prompts together so that each
    prompt is prefilled once and its cache can go when the last of them has started."""
    first: dict[bytes, int] = {}
    for index, request in enumerate(requests):
        first.setdefault(request.prompt_ids.tobytes(), index)
    return sorted(range(len(requests)), key=lambda i: first[requests[i].prompt_ids.tobytes()])
