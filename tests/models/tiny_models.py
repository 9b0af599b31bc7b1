"""Tiny models of every family, with parameters drawn by numpy (no compilation)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.models import LanguageModel, ModelConfig, RopeScaling

TINY = ModelConfig(
    vocab_size=61, d_model=24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=40, max_position=64
)
VARIANTS = {
    "llama": TINY,
    "llama_untied_llama3": TINY.replace(
        tie_embeddings=False,
        rope_scaling=RopeScaling(
            "llama3", 4.0, original_max_position=16, low_freq_factor=1.0, high_freq_factor=4.0
        ),
    ),
    "qwen2": TINY.replace(qkv_bias=True),
    "qwen2_untied_yarn": TINY.replace(
        qkv_bias=True, tie_embeddings=False, rope_scaling=RopeScaling("yarn", 4.0, original_max_position=16)
    ),
    "qwen3": TINY.replace(qk_norm=True, head_dim=10),
    "qwen3_untied_linear": TINY.replace(
        qk_norm=True,
        tie_embeddings=False,
        rope_scaling=RopeScaling("linear", 2.0, original_max_position=8192),
    ),
}

forward = jax.jit(LanguageModel.forward, static_argnames=("self", "want"))
forward_cached = jax.jit(LanguageModel.forward_cached, static_argnames=("self",))


def random_like(abstract, seed: int = 0):
    """Parameters like an abstract tree, nowhere zero or one, so that biases and norms count."""
    rng = np.random.default_rng(seed)

    def leaf(path, shape):
        value = 0.15 * rng.standard_normal(shape.shape)
        return jnp.asarray(1.0 + value if path[-1].key == "scale" else value, shape.dtype)

    return jax.tree_util.tree_map_with_path(leaf, abstract)


@functools.lru_cache
def start(config: ModelConfig, seed: int = 0):
    model = LanguageModel(config)
    return model, random_like(model.abstract(), seed)


def tokens_of(config: ModelConfig, rows: int = 2, length: int = 12, seed: int = 7) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, config.vocab_size, (rows, length)), jnp.int32)


def max_difference(a, b) -> float:
    return float(np.max(np.abs(np.asarray(a, np.float32) - np.asarray(b, np.float32))))


def assert_trees_equal(a, b) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)
