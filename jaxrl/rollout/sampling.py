"""Sampling one token per row from logits: temperature, top-k, top-p, min-p, greedy; log-probabilities.

Three choices make this cheap for a large vocabulary, where sorting or one random number per entry would cost
more than the decoder itself: tokens are drawn by inverting the distribution function in two levels (block,
then entry) with two uniforms per row; truncation is a threshold found by bisection, never a sort; and
truncation costs nothing in a batch where no row asks for it. Parameters are arrays, so a new value never
recompiles.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

#: exp(-104) is zero in float32: a token this far below the best one has no probability.
_FARTHEST = 104.0
#: First probe of the bisection, a distance below which logits are nearly tied; spares it the tiny exponents.
_FIRST_PROBE = 2.0**-6


class Draw(NamedTuple):
    """One sampled token per row.

    Attributes:
      token: int32 ``[B]``.
      logprob: float32 ``[B]``, under the distribution really sampled from: after temperature and truncation,
        renormalised; 0 in greedy rows, whose distribution is a point mass.
      policy_logprob: float32 ``[B]``, under the softmax of ``logits / temperature`` without truncation
        (temperature 1 in greedy rows).
    """

    token: jax.Array
    logprob: jax.Array
    policy_logprob: jax.Array


def token_keys(
    run_key: jax.Array, prompt_id: jax.Array, sample_id: jax.Array, position: jax.Array
) -> jax.Array:
    """Keys of tokens: ``fold_in(fold_in(fold_in(run_key, prompt_id), sample_id), position)``.

    Args:
      run_key: one typed key.
      prompt_id, sample_id, position: non-negative integers of one shape, below 2**32.

    Returns:
      typed keys of that shape; they depend on nothing else, so neither do the tokens.
    """

    def one(*numbers: jax.Array) -> jax.Array:
        key = run_key
        for number in numbers:
            key = jax.random.fold_in(key, number)
        return key

    for _ in range(jnp.ndim(prompt_id)):
        one = jax.vmap(one)
    return one(prompt_id, sample_id, position)


def block_width(vocab_size: int) -> int:
    """Width of the two-level search's blocks: the divisor of V nearest to its root, or 256 with padding."""
    divisors = [w for w in range(32, 2049) if vocab_size % w == 0]
    root = math.sqrt(vocab_size)
    return min(divisors, key=lambda w: abs(math.log(w / root)), default=min(256, vocab_size))


def invert_cdf(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """Index drawn with probability proportional to ``weights``, by inversion of the distribution function.

    Args:
      weights: ``[B, n]``, non-negative.
      uniform: ``[B]`` in [0, 1).

    Returns:
      int32 ``[B]``. An entry of weight zero is never returned, whatever rounding does to the cumulative sums;
      a row without any positive weight gives 0.
    """
    index = jnp.arange(weights.shape[-1], dtype=jnp.int32)
    positive = weights > 0
    cumulative = jnp.cumsum(weights, axis=-1)
    reached = positive & (cumulative > uniform[:, None].astype(weights.dtype) * cumulative[:, -1:])
    first = jnp.min(jnp.where(reached, index, index.size), axis=-1)
    last = jnp.max(jnp.where(positive, index, 0), axis=-1)
    return jnp.minimum(first, last)


def _sums(inside: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Number and weight of the entries ``inside`` per row, in one pass over memory."""
    operands = inside.astype(jnp.float32), jnp.where(inside, weights, 0)
    zeros = jnp.float32(0), weights.dtype.type(0)
    count, mass = jax.lax.reduce(operands, zeros, lambda a, b: (a[0] + b[0], a[1] + b[1]), (1,))
    return count.astype(jnp.int32), mass


def _search(
    distance: jax.Array, weights: jax.Array | None, target: jax.Array, wanted: jax.Array
) -> jax.Array:
    """Smallest d per row such that the weights of tokens with ``distance <= d`` reach ``target``.

    Non-negative floats compare like their bit patterns, so bisection runs on the patterns: 31 steps are
    exact. It ends as soon as at most one token is left between the bounds of every row. ``weights=None``
    counts tokens.
    """

    def bits(x: float) -> jax.Array:
        return jax.lax.bitcast_convert_type(jnp.float32(x), jnp.int32)

    rows, size = distance.shape
    low, high = jnp.full((rows,), -1, jnp.int32), jnp.full((rows,), bits(_FARTHEST))
    few, many = jnp.zeros((rows,), jnp.int32), jnp.full((rows,), size, jnp.int32)

    def unresolved(low: jax.Array, high: jax.Array, few: jax.Array, many: jax.Array) -> jax.Array:
        return wanted & (high - low > 1) & (many - few > 1)

    def probe(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        step, low, high, few, many = carry
        middle = jnp.where(step == 0, bits(_FIRST_PROBE), low + (high - low) // 2)
        inside = distance <= jax.lax.bitcast_convert_type(middle, jnp.float32)[:, None]
        if weights is None:
            count = mass = jnp.sum(inside, axis=-1, dtype=jnp.int32)
        else:
            count, mass = _sums(inside, weights)
        enough, active = mass >= target, unresolved(low, high, few, many)
        shrink, grow = active & enough, active & ~enough
        return (
            step + 1,
            jnp.where(grow, middle, low), jnp.where(shrink, middle, high),
            jnp.where(grow, count, few), jnp.where(shrink, count, many),
        )  # fmt: skip

    start = (jnp.int32(0), low, high, few, many)
    high = jax.lax.while_loop(lambda carry: unresolved(*carry[1:]).any(), probe, start)[2]
    return jax.lax.bitcast_convert_type(high, jnp.float32)


def cutoff(distance: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array) -> jax.Array:
    """Largest distance below the best logit that truncation keeps.

    The order is that of the transformers library: top-k, then top-p of what is left, then min-p. Tokens whose
    logits tie with the last one kept are kept too, so top-k may keep more than k.

    Args:
      distance: float32 ``[B, V]``, ``max(scaled logits) - scaled logits``.
      top_k: int32 ``[B]``, 0 for no limit.
      top_p: float32 ``[B]`` in (0, 1], 1 for no limit: the most probable tokens up to and including the one
        with which their mass reaches ``top_p``.
      min_p: float32 ``[B]`` in [0, 1]: tokens with at least ``min_p`` times the probability of the best.

    Returns:
      float32 ``[B]``, infinite where nothing is cut.
    """
    infinite = jnp.float32(jnp.inf)
    by_count = jnp.where(top_k > 0, _search(distance, None, top_k, top_k > 0), infinite)
    weights = jnp.where(distance <= by_count[:, None], jnp.exp(-distance), 0)
    by_mass = _search(distance, weights, top_p * jnp.sum(weights, axis=-1), top_p < 1)
    by_mass = jnp.where(top_p < 1, by_mass, infinite)
    return jnp.minimum(jnp.minimum(by_count, by_mass), -jnp.log(min_p))


def draw(
    logits: jax.Array,
    uniforms: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
) -> Draw:
    """Sample one token per row.

    Args:
      logits: float32 or wider ``[B, V]``; ``-inf`` entries are never returned.
      uniforms: float32 ``[B, 2]`` in [0, 1): one for the block, one inside it, so that small probabilities
        are not quantised to multiples of 2**-23.
      temperature: float32 ``[B]``; 0 takes the most probable token (the first among equals).
      top_k, top_p, min_p: see ``cutoff``; ignored in greedy rows.
    """
    rows, vocab = logits.shape
    greedy = temperature <= 0
    width = block_width(vocab)
    padded = jnp.pad(logits, ((0, 0), (0, -vocab % width)), constant_values=-jnp.inf)
    scaled = padded / jnp.where(greedy, 1, temperature).astype(logits.dtype)[:, None]
    blocks = scaled.reshape(rows, -1, width)
    tops = jnp.max(blocks, axis=-1)
    best = jnp.max(tops, axis=-1)

    def weigh(block: jax.Array, cut: jax.Array) -> jax.Array:
        below = best[:, None, None] - block
        return jnp.where(below.astype(jnp.float32) <= cut[:, None, None], jnp.exp(-below), 0)

    def weigh_blocks(cut: jax.Array) -> jax.Array:
        # The barrier keeps XLA from merging this sum with the one over blocks: one long sum is less accurate
        # (on CPU by 1e-5 and more, as it adds one by one), and computes the exponentials twice.
        return jax.lax.optimization_barrier(jnp.sum(weigh(blocks, cut), axis=-1))

    truncates = ~greedy & ((top_k > 0) | (top_p < 1) | (min_p > 0))
    limits = (jnp.where(greedy, 0, top_k), jnp.where(greedy, 1, top_p), jnp.where(greedy, 0, min_p))
    uncut = jnp.full((rows,), jnp.inf, jnp.float32)
    cut = jax.lax.cond(
        truncates.any(), lambda: cutoff((best[:, None] - scaled).astype(jnp.float32), *limits), lambda: uncut
    )
    masses = weigh_blocks(cut)
    kept = jnp.sum(masses, axis=-1)
    whole = jax.lax.cond(truncates.any(), lambda: jnp.sum(weigh_blocks(uncut), axis=-1), lambda: kept)

    block = jnp.where(greedy, jnp.argmax(tops, axis=-1).astype(jnp.int32), invert_cdf(masses, uniforms[:, 0]))
    entries = jnp.take_along_axis(blocks, block[:, None, None], axis=1)
    inside = invert_cdf(weigh(entries, cut)[:, 0], uniforms[:, 1])
    inside = jnp.where(greedy, jnp.argmax(entries[:, 0], axis=-1).astype(jnp.int32), inside)
    chosen = jnp.take_along_axis(entries[:, 0], inside[:, None], axis=1)[:, 0] - best
    as_float = lambda x: x.astype(jnp.float32)  # noqa: E731
    logprob = jnp.where(greedy, 0, as_float(chosen - jnp.log(kept)))
    return Draw(block * width + inside, logprob, as_float(chosen - jnp.log(whole)))
