"""What goes into the slot engine and what comes out of it: host-side records, validated when made."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import numpy as np

from jaxrl.errors import ConfigError, DataError

FinishReason = Literal["eos", "stop", "length", "abort"]


class Decodes(Protocol):
    """The part of a tokenizer that the engine uses (stop strings)."""

    def decode(self, ids: Sequence[int]) -> str: ...


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How to sample one completion. All of it reaches the device as arrays: new values never recompile.

    Attributes:
      max_tokens: most tokens to sample, EOS included.
      temperature: divides the logits; 0 is greedy.
      top_k: keep the k most probable tokens (and those that tie with the k-th); 0 keeps all.
      top_p: keep the most probable tokens up to the one with which their mass reaches this; 1 keeps all.
      min_p: keep tokens with at least this fraction of the best one's probability; 0 keeps all.
      stop_token_ids: token ids that end the completion with reason "stop"; they are part of it.
      stop_strings: texts that end it with reason "stop" at the token that completes one (needs a tokenizer).
      ignore_eos: sample on after the engine's EOS ids (benchmarks, fixed lengths).
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_token_ids", tuple(int(i) for i in self.stop_token_ids))
        object.__setattr__(self, "stop_strings", tuple(self.stop_strings))
        checks = (
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            (
                "temperature",
                self.temperature == 0 or 1e-4 <= self.temperature <= 1e4,
                "0 (greedy) or in [1e-4, 1e4]",
            ),
            ("top_k", self.top_k >= 0, "0 (off) or positive"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1]"),
        )
        for name, good, need in checks:
            if not good:
                raise ConfigError(
                    f"sampling parameter {name}={getattr(self, name)!r} is impossible; it must be {need}"
                )
        if "" in self.stop_strings:
            raise ConfigError("stop_strings contains an empty string, which every text contains; remove it")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """One completion to sample. Its tokens depend on this record, the parameters and the run key, and on
    nothing else.

    Attributes:
      prompt_ids: token ids of the prompt, at least one; becomes an int32 array.
      prompt_id, sample_id: numbers folded into the random key (below 2**32). Requests of one group have the
        same prompt and ``prompt_id`` and different ``sample_id``.
      params: how to sample.
    """

    prompt_ids: Any
    prompt_id: int
    sample_id: int
    params: SamplingParams

    def __post_init__(self) -> None:
        ids = np.asarray(self.prompt_ids)
        if ids.ndim != 1 or ids.size == 0 or not np.issubdtype(ids.dtype, np.integer):
            raise DataError(
                f"{self.name}: prompt_ids must be a non-empty list of integers, "
                f"got shape {ids.shape} of {ids.dtype}; give at least a BOS token"
            )
        object.__setattr__(self, "prompt_ids", ids.astype(np.int32))
        for field in ("prompt_id", "sample_id"):
            value = getattr(self, field)
            if not 0 <= value < 2**32:
                raise DataError(
                    f"{field}={value} cannot be folded into a random key; use 0 <= {field} < 2**32"
                )

    @property
    def name(self) -> str:
        """How error messages call it."""
        return f"request (prompt_id={self.prompt_id}, sample_id={self.sample_id})"


@dataclasses.dataclass(frozen=True, eq=False)
class Completion:
    """What was sampled for one request.

    Attributes:
      prompt_id, sample_id, prompt_len: from the request.
      token_ids: int32 ``[T]``, EOS or stop token included. No id means padding: the length is that of the
        array.
      logprobs: float32 ``[T]``, under the distribution really sampled from (temperature and truncation
        applied; 0 for greedy).
      policy_logprobs: float32 ``[T]``, under the whole softmax at the request's temperature (1 for greedy).
      finish_reason: "eos", "stop" (stop token or stop string), "length" (max_tokens reached) or "abort".
    """

    prompt_id: int
    sample_id: int
    prompt_len: int
    token_ids: np.ndarray
    logprobs: np.ndarray
    policy_logprobs: np.ndarray
    finish_reason: FinishReason


def ladder(limit: int, smallest: int = 16) -> tuple[int, ...]:
    """Powers of two from ``smallest``, ending with ``limit``."""
    sizes = []
    while smallest < limit:
        sizes.append(smallest)
        smallest *= 2
    return (*sizes, limit)


def cache_ladder(limit: int) -> tuple[int, ...]:
    """Powers of two and the sizes half-way between them from 32, ending with ``limit``."""
    between = {n + n // 2 for n in ladder(limit, 32)}
    return tuple(sorted({n for n in (*ladder(limit, 32), *between) if n <= limit}))


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Static sizes of an engine. Each bucket compiles once; everything else about a request is data.

    Attributes:
      max_prompt_len: longest prompt.
      max_len: most columns (prompt and completion together) of a slot.
      slots: completions decoded at the same time; on a mesh, a multiple of the batch shards.
      prefill_batch: distinct prompts prefilled together.
      prompt_buckets: padded prompt lengths; powers of two up to ``max_prompt_len`` when empty.
      cache_buckets: cache lengths, of which a call takes the smallest that holds its requests; powers of two
        and their midpoints up to ``max_len`` when empty.
      decode_chunk: most decode steps between two looks of the host.
      refill_at: with requests waiting, a chunk ends early when this many slots are free (0: an eighth of the
        slots).
      prefill_chunk: a bucket that is a longer multiple of this is prefilled in pieces, which bounds attention
        memory.
      gather_weights: on a mesh, copy the weights once per call so that each batch shard holds all of them
        (split over the tensor axis only), rather than gather them in every decode step; False where they do
        not fit.
      max_stop_ids: width of the per-slot array of EOS and stop ids.
      eos_token_ids: ids that end a completion with reason "eos"; those of the tokenizer when None.
    """

    max_prompt_len: int
    max_len: int
    slots: int = 32
    prefill_batch: int = 8
    prompt_buckets: tuple[int, ...] = ()
    cache_buckets: tuple[int, ...] = ()
    decode_chunk: int = 16
    refill_at: int = 0
    prefill_chunk: int = 512
    gather_weights: bool = True
    max_stop_ids: int = 8
    eos_token_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in (
            "max_prompt_len",
            "slots",
            "prefill_batch",
            "decode_chunk",
            "prefill_chunk",
            "max_stop_ids",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"engine.{name}={getattr(self, name)} must be at least 1")
        if self.max_len <= self.max_prompt_len:
            raise ConfigError(
                f"engine.max_len={self.max_len} leaves no room after max_prompt_len={self.max_prompt_len}; "
                "it counts prompt and completion together"
            )
        if not 0 <= self.refill_at <= self.slots:
            raise ConfigError(f"engine.refill_at={self.refill_at} must be between 0 and slots={self.slots}")
        for name, limit_name in (("prompt_buckets", "max_prompt_len"), ("cache_buckets", "max_len")):
            sizes, limit = getattr(self, name), getattr(self, limit_name)
            if sizes and (sorted(set(sizes)) != list(sizes) or sizes[0] < 1 or sizes[-1] != limit):
                raise ConfigError(
                    f"engine.{name}={sizes} must be ascending and end with {limit_name}={limit}"
                )

    @property
    def free_slots_to_refill(self) -> int:
        return self.refill_at or max(1, self.slots // 8)

    def prompt_bucket(self, length: int) -> int:
        """Padded length of a prompt of ``length <= max_prompt_len`` tokens."""
        sizes = self.prompt_buckets or ladder(self.max_prompt_len)
        return sizes[bisect.bisect_left(sizes, length)]

    def cache_bucket(self, length: int) -> int:
        """Cache columns of a call whose longest request needs ``length <= max_len``."""
        sizes = self.cache_buckets or cache_ladder(self.max_len)
        return sizes[bisect.bisect_left(sizes, length)]


@dataclasses.dataclass
class EngineStats:
    """Work done by the last ``generate``.

    Attributes:
      decode_steps: decode steps of the whole batch of slots.
      busy_slot_steps: slots that sampled a token, summed over decode steps.
      chunks: returns to the host.
      prefills, prefilled_prompts: prefill calls, and distinct prompts they computed.
      sampled_tokens: tokens in the completions.
      cache_len: columns of each slot.
      seconds: wall time.
    """

    decode_steps: int = 0
    busy_slot_steps: int = 0
    chunks: int = 0
    prefills: int = 0
    prefilled_prompts: int = 0
    sampled_tokens: int = 0
    cache_len: int = 0
    seconds: float = 0.0

    def utilisation(self, slots: int) -> float:
        """Fraction of slot-steps that sampled a token."""
        return self.busy_slot_steps / max(self.decode_steps * slots, 1)

    @property
    def tokens_per_second(self) -> float:
        return self.sampled_tokens / self.seconds if self.seconds else 0.0
