"""Architecture of a decoder-only transformer of the Llama / SmolLM / Qwen2 / Qwen2.5 / Qwen3 family."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp

from jaxrl.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Change of the rotary frequencies for long contexts, by the names of Hugging Face ``rope_scaling``.

    ``linear`` divides every frequency by ``factor``; ``llama3`` does so for long wavelengths only, with a smooth
    passage between ``high_freq_factor`` and ``low_freq_factor``; ``yarn`` (arXiv 2309.00071) blends by ``beta_fast``
    and ``beta_slow`` and multiplies cos and sin by an attention factor.

    Attributes:
      kind: which of the rules.
      factor: by how much the context grows.
      original_max_position: context length before that, in tokens.
      low_freq_factor, high_freq_factor: passage of ``llama3``, in wavelengths per original context.
      beta_fast, beta_slow: passage of ``yarn``, in rotations per original context.
      attention_factor: of ``yarn``; None: 0.1 ln(factor) + 1.
    """

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    original_max_position: int = 8192
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters (arXiv 2106.09685): ``y = x W + (alpha / rank) (x A) B``, B zero at the start.

    Attributes:
      rank: inner width r of A ``[in, r]`` and B ``[r, out]``.
      alpha: scale; the product is multiplied by ``alpha / rank``.
      targets: names of the linear layers that get an adapter, out of q, k, v, o, gate, up, down.
      last_layers: adapters only in this many last layers (all when None); needs ``scan_layers=False``.
    """

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ("q", "k", "v", "o", "gate", "up", "down")
    last_layers: int | None = None

    def validate(self) -> None:
        unknown = set(self.targets) - {"q", "k", "v", "o", "gate", "up", "down"}
        if unknown:
            raise ConfigError(f"lora.targets has unknown names {sorted(unknown)}; use q, k, v, o, gate, up, down")
        if self.rank < 1:
            raise ConfigError(f"lora.rank is {self.rank}; it must be at least 1 (leave `lora` out for none)")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape and numerics of a model; hashable, so it can be a static argument of jit.

    Attributes:
      vocab_size, d_model, num_layers, num_heads, num_kv_heads, head_dim, d_ff: sizes.
      max_position: longest sequence the weights were made for (the context length).
      rope_theta, rope_scaling: rotary position embedding.
      norm_eps: epsilon of every RMSNorm.
      tie_embeddings: the output head is the transposed embedding.
      qkv_bias: biases on q, k and v (Qwen2, Qwen2.5).
      qk_norm: RMSNorm over head_dim on q and k before the rotary embedding (Qwen3).
      causal: False gives a bidirectional model (masked diffusion).
      scan_layers: one traced block and stacked parameters (short compile time) instead of an unrolled loop.
      remat: which activations the backward pass recomputes: "none", "block" (all of a block), "dots" (keep matmul
        outputs without batch dimensions).
      dtype: activations and matmuls. Norms, softmax and losses are float32.
      param_dtype: storage.
      lora: adapters beside the linear layers.
    """

    vocab_size: int
    d_model: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    d_ff: int
    max_position: int = 8192
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tie_embeddings: bool = True
    qkv_bias: bool = False
    qk_norm: bool = False
    causal: bool = True
    scan_layers: bool = True
    remat: Literal["none", "block", "dots"] = "none"
    dtype: str = "float32"
    param_dtype: str = "float32"
    lora: LoraConfig | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}; "
                "grouped-query attention needs whole groups"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim={self.head_dim} is odd; the rotary embedding needs an even one")
        for name in ("dtype", "param_dtype"):
            value = getattr(self, name)
            if value not in ("float32", "bfloat16", "float16", "float64"):
                raise ConfigError(f"{name}={value!r} is not one of float32, bfloat16, float16, float64")
        if self.lora is not None:
            self.lora.validate()
            if self.lora.last_layers is not None and self.scan_layers:
                raise ConfigError("lora.last_layers needs scan_layers=False: stacked layers all have the same adapters")

    @property
    def compute_dtype(self) -> jnp.dtype:
        return jnp.dtype(self.dtype)

    @property
    def storage_dtype(self) -> jnp.dtype:
        return jnp.dtype(self.param_dtype)

    def num_parameters(self) -> int:
        """Number of parameters without adapters."""
        d, h, k = self.d_model, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = d * h + 2 * d * k + h * d
        attention += (h + 2 * k) if self.qkv_bias else 0
        attention += 2 * self.head_dim if self.qk_norm else 0
        block = attention + 3 * d * self.d_ff + 2 * d
        head = 0 if self.tie_embeddings else d * self.vocab_size
        return self.vocab_size * d + self.num_layers * block + d + head

    def flops_per_token(self, context: int, head: bool = True) -> float:
        """Multiply-add flops (2 per pair) of a forward pass for one token that sees ``context`` positions."""
        d, h, k = self.d_model, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        block = d * h + 2 * d * k + h * d + 3 * d * self.d_ff + 2 * h * context
        return 2.0 * (self.num_layers * block + (d * self.vocab_size if head else 0))

    def replace(self, **changes: Any) -> ModelConfig:
        return dataclasses.replace(self, **changes)


#: Published shapes, by the name of the repository that holds the weights.
PRESETS: dict[str, ModelConfig] = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": ModelConfig(
        vocab_size=49152, d_model=576, num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64, d_ff=1536,
        max_position=8192, rope_theta=100000.0, norm_eps=1e-5,
    ),
    "Qwen/Qwen2.5-0.5B-Instruct": ModelConfig(
        vocab_size=151936, d_model=896, num_layers=24, num_heads=14, num_kv_heads=2, head_dim=64, d_ff=4864,
        max_position=32768, rope_theta=1000000.0, norm_eps=1e-6, qkv_bias=True,
    ),
    "Qwen/Qwen3-8B": ModelConfig(
        vocab_size=151936, d_model=4096, num_layers=36, num_heads=32, num_kv_heads=8, head_dim=128, d_ff=12288,
        max_position=40960, rope_theta=1000000.0, norm_eps=1e-6, tie_embeddings=False, qk_norm=True,
    ),
}  # fmt: skip
