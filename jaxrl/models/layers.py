"""Building blocks of the decoder as flax nnx modules: linear with optional LoRA, RMSNorm, rotary, attention, MLP.

Parameters have plain names and two dimensions at most; see ``docs/architecture.md`` for the paths.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl.models.config import ModelConfig, RopeScaling

#: One layer's cache. Keys are stored transposed so that a decode step's scores are plain matrix products
#: (on CPU six times faster than scores against ``[B, C, K, d]``). k: [B, K, d, C]; v: [B, K, C, d].
LayerCache = dict[str, jax.Array]


class Linear(nnx.Module):
    """``y = x W (+ b) (+ alpha / r (x A) B)``; W is ``[in, out]``, computed in ``config.dtype``."""

    def __init__(self, config: ModelConfig, d_in: int, d_out: int, *, bias: bool, lora: bool, rngs: nnx.Rngs):
        dtype = config.storage_dtype
        self.compute_dtype = config.compute_dtype
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (d_in, d_out), dtype) * dtype.type(d_in**-0.5))
        if bias:
            self.bias = nnx.Param(jnp.zeros((d_out,), dtype))
        self.use_bias, self.use_lora = bias, lora
        if lora:
            rank = config.lora.rank
            self.scale = config.lora.alpha / rank
            self.lora_a = nnx.Param(jax.random.normal(rngs.params(), (d_in, rank), dtype) * dtype.type(d_in**-0.5))
            self.lora_b = nnx.Param(jnp.zeros((rank, d_out), dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        # As matrices: with a batch and a sequence dimension the weight gradient would contract two dimensions, for
        # which XLA's CPU backend makes transposed copies and takes a slow product (measured: 1.6 times the time).
        flat = x.reshape(-1, x.shape[-1])
        y = flat @ self._cast(self.kernel)
        if self.use_bias:
            y = y + self._cast(self.bias)
        if self.use_lora:
            y = y + (flat @ self._cast(self.lora_a)) @ self._cast(self.lora_b) * self.scale
        return y.reshape(*x.shape[:-1], y.shape[-1])

    def _cast(self, p: nnx.Param) -> jax.Array:
        return p[...].astype(self.compute_dtype)


class RMSNorm(nnx.Module):
    """``x / sqrt(mean(x^2) + eps) * scale`` over the last dimension, in float32 (arXiv 1910.07467)."""

    def __init__(self, config: ModelConfig, size: int):
        self.eps = config.norm_eps
        self.scale = nnx.Param(jnp.ones((size,), config.storage_dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * self.scale[...].astype(wide.dtype)).astype(x.dtype)


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> tuple[jax.Array, float]:
    """Rotary frequencies ``[head_dim / 2]`` in float32 and the factor on cos and sin (1 except for yarn)."""
    exponent = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    base = 1.0 / theta**exponent
    if scaling is None:
        return base, 1.0
    if scaling.kind == "linear":
        return base / scaling.factor, 1.0
    length = scaling.original_max_position
    if scaling.kind == "llama3":
        wavelength = 2 * math.pi / base
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        smooth = jnp.clip((length / wavelength - low) / (high - low), 0.0, 1.0)
        return (1 - smooth) * base / scaling.factor + smooth * base, 1.0

    def correction(rotations: float) -> float:
        return head_dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low_dim = max(math.floor(correction(scaling.beta_fast)), 0)
    high_dim = min(math.ceil(correction(scaling.beta_slow)), head_dim - 1)
    ramp = (jnp.arange(head_dim // 2, dtype=jnp.float32) - low_dim) / max(high_dim - low_dim, 1e-3)
    keep = 1.0 - jnp.clip(ramp, 0.0, 1.0)
    factor = scaling.attention_factor
    if factor is None:
        factor = 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
    return (1 - keep) * base / scaling.factor + keep * base, factor


def rope_tables(config: ModelConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin ``[..., S, 1, head_dim / 2]`` of integer positions ``[..., S]``, ready to broadcast over heads."""
    frequencies, factor = rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    angles = positions[..., None, None].astype(jnp.float32) * frequencies
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate ``x [..., S, heads, head_dim]``; the halves of head_dim are the pairs (the Hugging Face convention)."""
    half = x.shape[-1] // 2
    a, b = x[..., :half].astype(cos.dtype), x[..., half:].astype(cos.dtype)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention, without a cache (training) or reading and writing one (generation)."""

    def __init__(self, config: ModelConfig, *, lora: bool, rngs: nnx.Rngs):
        self.config = config
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

        def linear(name: str, d_in: int, d_out: int, bias: bool) -> Linear:
            use = lora and name in config.lora.targets
            return Linear(config, d_in, d_out, bias=bias, lora=use, rngs=rngs)

        self.q = linear("q", config.d_model, q_size, config.qkv_bias)
        self.k = linear("k", config.d_model, kv_size, config.qkv_bias)
        self.v = linear("v", config.d_model, kv_size, config.qkv_bias)
        self.o = linear("o", q_size, config.d_model, False)
        if config.qk_norm:
            self.q_norm = RMSNorm(config, config.head_dim)
            self.k_norm = RMSNorm(config, config.head_dim)

    def _qkv(self, x: jax.Array, rope: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        c = self.config
        heads = lambda y, n: y.reshape(*y.shape[:-1], n, c.head_dim)  # noqa: E731
        q, k, v = heads(self.q(x), c.num_heads), heads(self.k(x), c.num_kv_heads), heads(self.v(x), c.num_kv_heads)
        if c.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        return apply_rope(q, *rope), apply_rope(k, *rope), v

    def __call__(self, x: jax.Array, rope: tuple[jax.Array, jax.Array], mask: jax.Array | None) -> jax.Array:
        """x ``[N, S, D]``; mask ``[N, 1, S, S]`` (True = may attend) or None for all of what causality allows."""
        q, k, v = self._qkv(x, rope)
        out = jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=self.config.causal)
        return self.o(out.reshape(*x.shape[:-1], -1))

    def cached(
        self, x: jax.Array, rope: tuple[jax.Array, jax.Array], cache: LayerCache, positions: jax.Array
    ) -> tuple[jax.Array, LayerCache]:
        """x ``[B, T, D]`` is written at columns ``positions [B, T]`` and attends to every column up to its own.

        Columns outside the cache are dropped, so a finished slot may run on harmlessly.
        """
        c = self.config
        b, t, _ = x.shape
        q, k, v = self._qkv(x, rope)
        row = jnp.arange(b)[:, None]
        keys = cache["k"].at[row, :, :, positions].set(k.astype(cache["k"].dtype), mode="drop")
        values = cache["v"].at[row, :, positions].set(v.astype(cache["v"].dtype), mode="drop")
        groups = c.num_heads // c.num_kv_heads
        # [B, K, G * T, d]: the queries of one key/value head are one matrix.
        q = q.reshape(b, t, c.num_kv_heads, groups, c.head_dim).transpose(0, 2, 3, 1, 4)
        q = q.reshape(b, c.num_kv_heads, groups * t, c.head_dim)
        wide = jnp.promote_types(x.dtype, jnp.float32)
        scores = jnp.einsum("bkqd,bkdc->bkqc", q, keys, preferred_element_type=wide) * c.head_dim**-0.5
        visible = jnp.arange(keys.shape[-1]) <= positions[:, :, None]  # [B, T, C]
        scores = scores.reshape(b, c.num_kv_heads, groups, t, -1)
        scores = jnp.where(visible[:, None, None], scores, jnp.finfo(wide).min)
        weights = jax.nn.softmax(scores, axis=-1).reshape(b, c.num_kv_heads, groups * t, -1)
        out = jnp.einsum("bkqc,bkcd->bkqd", weights.astype(values.dtype), values)
        out = out.reshape(b, c.num_kv_heads, groups, t, c.head_dim).transpose(0, 3, 1, 2, 4).reshape(b, t, -1)
        return self.o(out.astype(x.dtype)), {"k": keys, "v": values}


class MLP(nnx.Module):
    """SwiGLU feed-forward: ``down(silu(gate(x)) * up(x))`` (arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig, *, lora: bool, rngs: nnx.Rngs):
        def linear(name: str, d_in: int, d_out: int) -> Linear:
            use = lora and name in config.lora.targets
            return Linear(config, d_in, d_out, bias=False, lora=use, rngs=rngs)

        self.gate = linear("gate", config.d_model, config.d_ff)
        self.up = linear("up", config.d_model, config.d_ff)
        self.down = linear("down", config.d_ff, config.d_model)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    """Pre-norm residual block: attention, then feed-forward."""

    def __init__(self, config: ModelConfig, *, lora: bool, rngs: nnx.Rngs):
        self.attn_norm = RMSNorm(config, config.d_model)
        self.attn = Attention(config, lora=lora, rngs=rngs)
        self.mlp_norm = RMSNorm(config, config.d_model)
        self.mlp = MLP(config, lora=lora, rngs=rngs)

    def __call__(self, x: jax.Array, rope: tuple[jax.Array, jax.Array], mask: jax.Array | None) -> jax.Array:
        x = x + self.attn(self.attn_norm(x), rope, mask)
        return x + self.mlp(self.mlp_norm(x))

    def cached(
        self, x: jax.Array, rope: tuple[jax.Array, jax.Array], cache: LayerCache, positions: jax.Array
    ) -> tuple[jax.Array, LayerCache]:
        attended, cache = self.attn.cached(self.attn_norm(x), rope, cache, positions)
        x = x + attended
        return x + self.mlp(self.mlp_norm(x)), cache


class Embedding(nnx.Module):
    """Token table ``[V, D]``; also the output head, tied or of its own."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        dtype = config.storage_dtype
        shape = (config.vocab_size, config.d_model)
        self.embedding = nnx.Param(jax.random.normal(rngs.params(), shape, dtype) * dtype.type(0.02))
