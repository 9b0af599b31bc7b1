"""GGUF files of every supported architecture, written here in llama.cpp's layout and read back."""

from __future__ import annotations

import numpy as np
import pytest

from jaxrl.errors import ModelLoadError
from jaxrl.models import LanguageModel, RopeScaling
from jaxrl.models.gguf import load_gguf, open_gguf
from jaxrl.parallel import MeshConfig, Sharding, make_mesh
from tiny_gguf import write_gguf
from tiny_models import TINY, assert_trees_equal, max_difference, start

WIDE = TINY.replace(vocab_size=264, d_model=32, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=64)
CASES = {
    "llama": WIDE,
    "qwen2": WIDE.replace(qkv_bias=True, tie_embeddings=False, rope_scaling=RopeScaling("yarn", 4.0, 16)),
    "qwen3": WIDE.replace(qk_norm=True, head_dim=12, rope_theta=1e6, norm_eps=1e-6),
}


@pytest.mark.parametrize("arch", CASES)
def test_round_trip(arch, tmp_path):
    config = CASES[arch]
    _, params = start(config)
    path = write_gguf(tmp_path / "m.gguf", arch, config, params)
    loaded_config, loaded = load_gguf(path)
    assert loaded_config == config
    assert_trees_equal(loaded, params)


def test_quantised_rows_are_put_in_order(tmp_path):
    _, params = start(WIDE)
    path = write_gguf(tmp_path / "m.gguf", "llama", WIDE, params, quantise=("attn_q", "attn_k", "ffn_down"))
    loaded = load_gguf(path)[1]["layers"]
    for name in ("q", "k", "v"):
        kernel, exact = loaded["attn"][name]["kernel"], params["layers"]["attn"][name]["kernel"]
        assert max_difference(kernel, exact) < 0.6 / 127  # half a step of Q8_0 blocks with values below 1
        assert (max_difference(kernel, exact) == 0) == (name == "v")


def test_loads_onto_shards(tmp_path):
    _, params = start(WIDE)
    path = write_gguf(tmp_path / "m.gguf", "llama", WIDE, params)
    sharding = Sharding(make_mesh(MeshConfig(data=1, fsdp=4, tensor=2)))
    config, loaded = load_gguf(path, sharding=sharding, scan_layers=False, param_dtype="bfloat16")
    kernel = loaded["layers"]["1"]["mlp"]["up"]["kernel"]
    np.testing.assert_array_equal(kernel, params["layers"]["mlp"]["up"]["kernel"][1].astype("bfloat16"))
    expected = LanguageModel(config, sharding).param_shardings()
    assert kernel.sharding == expected["layers"]["1"]["mlp"]["up"]["kernel"]
    assert kernel.addressable_shards[0].data.shape == (8, 32)


def test_what_is_wrong_is_named(tmp_path):
    _, params = start(WIDE)
    with pytest.raises(ModelLoadError, match="does not exist"):
        load_gguf(tmp_path / "none.gguf")
    (tmp_path / "text.gguf").write_bytes(b"not a model at all, but long enough to be read as a header")
    with pytest.raises(ModelLoadError, match="not a readable GGUF"):
        load_gguf(tmp_path / "text.gguf")
    path = write_gguf(tmp_path / "lost.gguf", "llama", WIDE, params, drop=("blk.1.ffn_up.weight",))
    with pytest.raises(ModelLoadError, match=r"lacks 1 tensor.*blk.1.ffn_up.weight"):
        load_gguf(path)
    path = write_gguf(tmp_path / "arch.gguf", "gemma", WIDE, params)
    with pytest.raises(ModelLoadError, match="architecture 'gemma'; supported are llama, qwen2, qwen3"):
        load_gguf(path)
    path = write_gguf(tmp_path / "bias.gguf", "qwen2", WIDE, params)
    with pytest.raises(ModelLoadError, match="lacks 6 tensor.*attn_k.bias"):
        load_gguf(path)
    llama3 = WIDE.replace(rope_scaling=RopeScaling("linear", 2.0))
    path = write_gguf(tmp_path / "half.gguf", "llama", llama3, params, drop=("token_embd.weight",))
    with pytest.raises(ModelLoadError, match="no tensor token_embd.weight"):
        load_gguf(path)


def test_truncated_file_is_named(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", "llama", WIDE, start(WIDE)[1])
    path.write_bytes(path.read_bytes()[:-9000])
    with pytest.raises(ModelLoadError, match="not a readable GGUF"):
        open_gguf(path)
