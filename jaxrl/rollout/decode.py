"""The jitted pieces of the slot engine: prefill prompts, insert them into slots, decode a chunk of tokens.

Device state is two pytrees, both donated from call to call:

* the cache, ``model.init_cache(B, C)``: slots over the batch axes of the mesh, key/value heads over the
  tensor axis;
* the slots, a dict of replicated arrays ``[B, ...]`` (``empty_slots``): what each samples, how, how far.

Column ``c`` of a slot holds the key and value of the token at position ``c``. Columns beyond a slot's tokens
hold left-overs; each is overwritten before any token attends to it. A slot that is not running decodes its
last token again at its own column, which changes nothing.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.models.decoder import Cache, LanguageModel, Params, unrolled, unstack_layers
from jaxrl.rollout.sampling import draw, token_keys

Slots = dict[str, jax.Array]

#: Values of ``slots["finish"]``.
RUNNING, EOS, STOP, LENGTH, IDLE = range(5)

#: Parameters that every use casts to the compute dtype (norm scales are used in float32 and stay so).
_CAST = ("kernel", "bias", "embedding", "lora_a", "lora_b")


@functools.partial(jax.tree_util.register_dataclass, data_fields=["cache", "logits"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Prefilled:
    """Prompts that have been through the model once, ready to be copied into any number of slots.

    Attributes:
      cache: as ``model.init_cache(R, P)`` for R prompts in a bucket of P columns.
      logits: ``[R, V]`` after the last token of each prompt.
    """

    cache: Cache
    logits: jax.Array


def empty_slots(slots: int, length: int, stop_width: int) -> Slots:
    """State of ``slots`` idle slots of ``length`` columns.

    Streams ``[B, C]`` are aligned with token positions. ``column`` is the position of the newest token, which
    is not in the cache yet; ``end`` the position after the last one allowed; the first ``eos_count`` of
    ``stop_ids [B, W]`` are EOS ids, and -1 fills the rest.
    """
    row = lambda dtype, *shape: jnp.zeros((slots, *shape), dtype)  # noqa: E731
    return {
        "tokens": row(jnp.int32, length),
        "logprobs": row(jnp.float32, length),
        "policy_logprobs": row(jnp.float32, length),
        "last": row(jnp.int32),
        "column": row(jnp.int32),
        "end": row(jnp.int32),
        "finish": jnp.full((slots,), IDLE, jnp.int32),
        "prompt_id": row(jnp.uint32),
        "sample_id": row(jnp.uint32),
        "temperature": row(jnp.float32),
        "top_k": row(jnp.int32),
        "top_p": jnp.ones((slots,), jnp.float32),
        "min_p": row(jnp.float32),
        "stop_ids": jnp.full((slots, stop_width), -1, jnp.int32),
        "eos_count": row(jnp.int32),
    }


def emit(slots: Slots, logits: jax.Array, rows: jax.Array, run_key: jax.Array) -> Slots:
    """Sample the next token of the given rows and record it.

    Args:
      slots: state.
      logits: ``[B, V]`` for the position after ``column``.
      rows: bool ``[B]``, slots to advance; the others are left as they are.
      run_key: typed key of the run.
    """
    position = slots["column"] + 1
    keys = token_keys(run_key, slots["prompt_id"], slots["sample_id"], position)
    uniforms = jax.vmap(lambda key: jax.random.uniform(key, (2,), jnp.float32))(keys)
    new = draw(logits, uniforms, *(slots[name] for name in ("temperature", "top_k", "top_p", "min_p")))

    matches = new.token[:, None] == slots["stop_ids"]
    is_eos = (matches & (jnp.arange(matches.shape[1]) < slots["eos_count"][:, None])).any(axis=1)
    finish = jnp.where(position + 1 >= slots["end"], LENGTH, RUNNING)
    finish = jnp.where(is_eos, EOS, jnp.where(matches.any(axis=1), STOP, finish))

    row, length = jnp.arange(rows.size), slots["tokens"].shape[1]
    column = jnp.where(rows, position, length)  # out of range: dropped
    write = lambda stream, value: stream.at[row, column].set(value, mode="drop")  # noqa: E731
    return {
        **slots,
        "tokens": write(slots["tokens"], new.token),
        "logprobs": write(slots["logprobs"], new.logprob),
        "policy_logprobs": write(slots["policy_logprobs"], new.policy_logprob),
        "last": jnp.where(rows, new.token, slots["last"]),
        "column": jnp.where(rows, position, slots["column"]),
        "finish": jnp.where(rows, finish, slots["finish"]),
    }


def prefill(
    model: LanguageModel, piece: int, params: Params, tokens: jax.Array, lengths: jax.Array
) -> Prefilled:
    """Run prompts ``tokens [R, P]`` (padded on the right) of ``lengths [R]`` through the model, P columns at
    once or, where P is a longer multiple of ``piece``, in pieces."""
    rows, bucket = tokens.shape
    tokens = _constrain(model, tokens, "batch", None)
    cache = model.init_cache(rows, bucket)
    columns = jnp.broadcast_to(jnp.arange(bucket, dtype=jnp.int32), tokens.shape)
    width = piece if bucket > piece and bucket % piece == 0 else bucket

    def step(i: int | jax.Array, carry: tuple[Cache, jax.Array]) -> tuple[Cache, jax.Array]:
        cache, last = carry
        cut = lambda x: jax.lax.dynamic_slice_in_dim(x, i * width, width, axis=1)  # noqa: E731
        hidden, cache = model.forward_cached(params, cache, cut(tokens), cut(columns))
        here = lengths - 1 - i * width
        found = jnp.take_along_axis(hidden, jnp.clip(here, 0, width - 1)[:, None, None], axis=1)[:, 0]
        return cache, jnp.where(((here >= 0) & (here < width))[:, None], found, last)

    carry = cache, jnp.zeros((rows, model.config.d_model), model.config.compute_dtype)
    cache, last = step(0, carry) if width == bucket else jax.lax.fori_loop(0, bucket // width, step, carry)
    return Prefilled(cache, model.logits(params, last))


def insert(
    cache: Cache, slots: Slots, prefilled: Prefilled, source: jax.Array, new: Slots, run_key: jax.Array
) -> tuple[Cache, Slots]:
    """Copy prefilled prompts into slots and sample the first token of each.

    Args:
      cache, slots: state.
      prefilled: prompts.
      source: int32 ``[B]``, row of ``prefilled`` that a slot gets, -1 for a slot that stays as it is.
      new: values of the per-slot entries for the slots that get one; ``column`` is the last one of the
        prompt.
    """
    rows, index = source >= 0, jnp.maximum(source, 0)

    def copy(old: jax.Array, prompts: jax.Array, axis: int) -> jax.Array:
        there = jax.lax.slice_in_dim(old, 0, prompts.shape[axis], axis=axis)
        merged = jnp.where(rows[:, None, None, None], prompts[index], there)
        return jax.lax.dynamic_update_slice_in_dim(old, merged, 0, axis=axis)

    cache = tuple(
        {"k": copy(old["k"], got["k"], 3), "v": copy(old["v"], got["v"], 2)}
        for old, got in zip(cache, prefilled.cache)
    )
    chosen = {name: jnp.where(_like(rows, value), value, slots[name]) for name, value in new.items()}
    return cache, emit({**slots, **chosen}, prefilled.logits[index], rows, run_key)


def decode(
    model: LanguageModel,
    params: Params,
    cache: Cache,
    slots: Slots,
    run_key: jax.Array,
    max_steps: jax.Array,
    leave_at: jax.Array,
) -> tuple[Cache, Slots, jax.Array, jax.Array]:
    """Decode until ``max_steps`` are done, no slot runs, or ``leave_at`` slots do not run.

    Returns:
      cache, slots, the number of steps, and the sum over steps of running slots.
    """

    def proceed(carry: tuple[jax.Array, jax.Array, Cache, Slots]) -> jax.Array:
        step, _, _, slots = carry
        running = jnp.sum(slots["finish"] == RUNNING)
        return (step < max_steps) & (running > 0) & (slots["finish"].size - running < leave_at)

    def advance(
        carry: tuple[jax.Array, jax.Array, Cache, Slots],
    ) -> tuple[jax.Array, jax.Array, Cache, Slots]:
        step, busy, cache, slots = carry
        rows = slots["finish"] == RUNNING
        tokens = _constrain(model, slots["last"][:, None], "batch", None)
        hidden, cache = model.forward_cached(params, cache, tokens, slots["column"][:, None])
        logits = model.logits(params, _constrain(model, hidden[:, 0], "batch", None))
        slots = emit(slots, logits, rows, run_key)
        return step + 1, busy + jnp.sum(rows, dtype=jnp.int32), cache, slots

    zero = jnp.int32(0)
    step, busy, cache, slots = jax.lax.while_loop(proceed, advance, (zero, zero, cache, slots))
    return cache, slots, step, busy


def release(slots: Slots, rows: jax.Array) -> Slots:
    """Make the slots in ``rows`` (bool ``[B]``) idle."""
    return {**slots, "finish": jnp.where(rows, IDLE, slots["finish"])}


def read(slots: Slots, rows: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Tokens, logprobs and policy logprobs ``[n, C]`` of the slots ``rows [n]``."""
    return slots["tokens"][rows], slots["logprobs"][rows], slots["policy_logprobs"][rows]


@dataclasses.dataclass(frozen=True)
class Programs:
    """The functions above, jitted for one model and number of slots; shared by all engines that have both."""

    start: Callable[[int, int], tuple[Cache, Slots]]
    prepare: Callable[[Params], Params]
    prefill: Callable[..., Prefilled]
    insert: Callable[..., tuple[Cache, Slots]]
    decode: Callable[..., tuple[Cache, Slots, jax.Array, jax.Array]]
    release: Callable[..., Slots]
    read: Callable[..., Any]


@functools.lru_cache(maxsize=16)
def programs(model: LanguageModel, slots: int, piece: int, gather_weights: bool = True) -> Programs:
    """Jit the device functions for a model, a number of slots, a width of prefill pieces, and a placement of
    weights (see ``EngineConfig``)."""
    cache_at = slots_at = prefilled_at = scalar = weights_at = None
    if model.sharding is not None:
        cache_at = model.cache_shardings(slots, 1)  # length plays no part in it
        slots_at = scalar = model.sharding.replicate()
        one_layer = model.sharding.named((None, "kv_heads", None, None), (1, model.config.num_kv_heads, 1, 1))
        prefilled_at = Prefilled(cache=one_layer, logits=slots_at)  # type: ignore[arg-type]  # a prefix tree
        weights_at = _weights_model(model, gather_weights).param_shardings()

    def start(length: int, stop_width: int) -> tuple[Cache, Slots]:
        return model.init_cache(slots, length), empty_slots(slots, length, stop_width)

    state_at = None if cache_at is None else (cache_at, slots_at)
    decode_at = None if cache_at is None else (cache_at, slots_at, scalar, scalar)
    return Programs(
        start=jax.jit(start, static_argnums=(0, 1), out_shardings=state_at),
        prepare=jax.jit(functools.partial(_prepare, model), out_shardings=weights_at),
        prefill=jax.jit(functools.partial(prefill, model, piece), out_shardings=prefilled_at),
        insert=jax.jit(insert, donate_argnums=(0, 1), out_shardings=state_at),
        decode=jax.jit(functools.partial(decode, model), donate_argnums=(1, 2), out_shardings=decode_at),
        release=jax.jit(release, donate_argnums=(0,), out_shardings=slots_at),
        read=jax.jit(read, out_shardings=slots_at),
    )


def _prepare(model: LanguageModel, params: Params) -> Params:
    dtype = model.config.compute_dtype

    def cast(path: Any, leaf: jax.Array) -> jax.Array:
        return leaf.astype(dtype) if path[-1].key in _CAST else leaf

    return jax.tree_util.tree_map_with_path(cast, unstack_layers(params, model.config.num_layers))


def needs_preparation(model: LanguageModel, params: Params, gather_weights: bool = True) -> bool:
    """Whether layers are stacked, or weights have another dtype or placement than decoding wants."""
    if "0" not in params["layers"] or (model.sharding is not None and gather_weights):
        return True
    leaves, dtype = jax.tree_util.tree_leaves_with_path(params), model.config.compute_dtype
    return any(path[-1].key in _CAST and leaf.dtype != dtype for path, leaf in leaves)


def _weights_model(model: LanguageModel, gather_weights: bool) -> LanguageModel:
    """The unrolled model with rules that place its weights for decoding."""
    sharding = model.sharding
    if gather_weights:
        batch = sharding.mesh_axes("batch")
        rules = ((name, axes if name == "batch" else _without(axes, batch)) for name, axes in sharding.rules)
        sharding = dataclasses.replace(sharding, rules=tuple(rules))
    return LanguageModel(unrolled(model).config, sharding)


def _without(axes: tuple[str, ...], dropped: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(axis for axis in axes if axis not in dropped)


def _constrain(model: LanguageModel, x: jax.Array, *axes: str | None) -> jax.Array:
    return x if model.sharding is None else model.sharding.constrain(x, *axes)


def _like(rows: jax.Array, value: jax.Array) -> jax.Array:
    return rows.reshape(rows.shape + (1,) * (value.ndim - 1))
