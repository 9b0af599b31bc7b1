"""Writes tiny GGUF files from parameters of the decoder, in the layout of llama.cpp."""

from __future__ import annotations

import gguf
import numpy as np
from flax.traverse_util import flatten_dict

from jaxrl.models import LanguageModel, ModelConfig
from jaxrl.models.weights import leaves

SPECIAL = ["<|end|>", "<|start|>", "<tool>"]
TYPES = [3, 3, 4]


def byte_alphabet() -> list[str]:
    """One printable character for each byte, as byte-level BPE spells them."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def vocabulary() -> tuple[list[str], list[int], list[str]]:
    """Tokens, their types, and merges: bytes, "he", "ll", " w"."""
    merges = ["h e", "l l", "Ġ w", "1 2"]
    tokens = [*SPECIAL, *byte_alphabet(), *(merge.replace(" ", "") for merge in merges)]
    return tokens, TYPES + [1] * (len(tokens) - len(TYPES)), merges


def write_gguf(path, arch, config: ModelConfig, params, *, pre="smollm", quantise=(), drop=(), extra=None):
    """A file of ``arch``; the tensors whose names contain a word of ``quantise`` are stored as Q8_0."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.d_model)
    writer.add_feed_forward_length(config.d_ff)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    if config.rope_scaling is not None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(config.rope_scaling.kind))
        writer.add_rope_scaling_factor(config.rope_scaling.factor)
        writer.add_rope_scaling_orig_ctx_len(config.rope_scaling.original_max_position)
    tokens, types, merges = vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_chat_template(
        "{% for m in messages %}{{ '<|start|>' + m['content'] + '<|end|>' }}{% endfor %}"
    )
    for key, value in (extra or {}).items():
        writer.add_bool(key, value) if isinstance(value, bool) else writer.add_string(key, value)
    flat = flatten_dict(params)
    for leaf, _ in leaves(LanguageModel(config), "gguf"):
        for i, name in enumerate(leaf.names):
            if name in drop:
                continue
            value = np.asarray(flat[leaf.path][i] if leaf.stacked else flat[leaf.path], np.float32)
            value = np.ascontiguousarray(value.T if leaf.transposed else value)
            heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(name.split(".")[-2])
            if arch == "llama" and heads:  # llama.cpp interleaves the two rotary halves of a head
                value = value.reshape(heads, 2, -1, value.shape[1]).swapaxes(1, 2).reshape(value.shape)
            if any(word in name for word in quantise):
                kind = gguf.GGMLQuantizationType.Q8_0
                writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
            else:
                writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
