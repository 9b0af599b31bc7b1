"""Hugging Face directories: round trips for every family, sharded files, and what can be wrong."""

from __future__ import annotations

import json
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrl.errors import ConfigError, ModelLoadError
from jaxrl.models import LanguageModel, LoraConfig, RopeScaling, unstack_layers
from jaxrl.models.hf import INDEX, SINGLE, hf_config, load_hf, save_hf, to_hf_config
from jaxrl.models.lora import merge_lora
from jaxrl.parallel import MeshConfig, Sharding, make_mesh
from tiny_models import TINY, VARIANTS, assert_trees_equal, random_like, start


@pytest.fixture
def saved(tmp_path):
    model, params = start(VARIANTS["qwen2_untied_yarn"])
    return save_hf(tmp_path / "model", model, params, dtype="float32")


@pytest.mark.parametrize("name", VARIANTS)
def test_round_trip(name, tmp_path):
    config = VARIANTS[name]
    model, params = start(config)
    save_hf(tmp_path / "m", model, params, dtype="float32")
    loaded_config, loaded = load_hf(tmp_path / "m")
    assert loaded_config == config
    assert_trees_equal(loaded, params)
    _, flat = load_hf(tmp_path / "m", scan_layers=False)
    assert_trees_equal(flat, unstack_layers(params, config.num_layers))
    assert not [p for p in tmp_path.iterdir() if p.name != "m"]  # nothing temporary is left


def test_files_hold_out_by_in_under_hub_names(tmp_path):
    model, params = start(VARIANTS["qwen2"])
    tensors = load_file(save_hf(tmp_path / "m", model, params, dtype="float32") / SINGLE)
    gate = tensors["model.layers.1.mlp.gate_proj.weight"]
    assert gate.shape == (40, 24)
    np.testing.assert_array_equal(gate, params["layers"]["mlp"]["gate"]["kernel"][1].T)
    np.testing.assert_array_equal(
        tensors["model.layers.0.self_attn.k_proj.bias"], params["layers"]["attn"]["k"]["bias"][0]
    )
    assert "lm_head.weight" not in tensors


def test_shards_and_index(tmp_path):
    model, params = start(VARIANTS["llama_untied_llama3"])
    target = save_hf(tmp_path / "m", model, params, dtype="float32", max_shard_gb=8e-6)
    files = sorted(p.name for p in target.glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((target / INDEX).read_text())
    assert index["metadata"]["total_size"] == 4 * sum(x.size for x in jax.tree.leaves(params))
    for file in files:
        tensors = load_file(target / file)
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 8000
        assert all(index["weight_map"][name] == file for name in tensors)
    assert_trees_equal(load_hf(target)[1], params)


def test_bfloat16_round_trip_and_cast(tmp_path):
    config = TINY.replace(param_dtype="bfloat16")
    model = LanguageModel(config)
    params = random_like(model.abstract())
    save_hf(tmp_path / "m", model, params)
    loaded_config, loaded = load_hf(tmp_path / "m", param_dtype="bfloat16", dtype="bfloat16")
    assert loaded_config.dtype == "bfloat16"
    assert_trees_equal(loaded, params)
    wide = load_hf(tmp_path / "m")[1]
    np.testing.assert_array_equal(wide["embed"]["embedding"], params["embed"]["embedding"].astype("float32"))


@pytest.mark.parametrize("scan", [True, False])
def test_loads_onto_shards(saved, scan):
    sharding = Sharding(make_mesh(MeshConfig(data=2, fsdp=2, tensor=2)))
    config, params = load_hf(saved, sharding=sharding, scan_layers=scan)
    plain = load_hf(saved, scan_layers=scan)[1]
    assert_trees_equal(params, plain)
    expected = LanguageModel(config, sharding).param_shardings()
    jax.tree.map(lambda x, s: np.testing.assert_(x.sharding == s), params, expected)
    embedding = params["embed"]["embedding"]
    assert embedding.addressable_shards[0].data.shape == (61, 12)  # 61 rows do not divide: only fsdp splits


def test_sharded_parameters_export(saved, tmp_path):
    sharding = Sharding(make_mesh(MeshConfig(data=1, fsdp=4, tensor=2)))
    config, params = load_hf(saved, sharding=sharding)
    again = save_hf(tmp_path / "again", LanguageModel(config, sharding), params, dtype="float32")
    assert (again / SINGLE).read_bytes() == (saved / SINGLE).read_bytes()
    assert (again / "config.json").read_bytes() == (saved / "config.json").read_bytes()


def test_adapters_are_fresh_on_load_and_merged_on_export(saved, tmp_path):
    lora = LoraConfig(rank=2, targets=("q", "up"))
    with pytest.raises(ConfigError, match="pass a key"):
        load_hf(saved, lora=lora)
    config, params = load_hf(saved, lora=lora, key=jax.random.key(0))
    model = LanguageModel(config)
    assert jax.tree.structure(params) == jax.tree.structure(model.abstract())
    assert_trees_equal(merge_lora(model, params)[1], load_hf(saved)[1])  # B is zero
    trained = random_like(model.abstract(), seed=5)
    save_hf(tmp_path / "trained", model, trained, dtype="float32")
    assert_trees_equal(load_hf(tmp_path / "trained")[1], merge_lora(model, trained)[1])


def test_export_never_overwrites_unasked(saved):
    model, params = start(VARIANTS["llama"])
    with pytest.raises(FileExistsError, match="overwrite=True"):
        save_hf(saved, model, params)
    assert hf_config(json.loads((saved / "config.json").read_text())).qkv_bias
    save_hf(saved, model, params, overwrite=True)
    assert not hf_config(json.loads((saved / "config.json").read_text())).qkv_bias


def test_failed_export_leaves_nothing(tmp_path):
    model, params = start(TINY)
    broken = {**params, "final_norm": {}}
    with pytest.raises(KeyError):
        save_hf(tmp_path / "m", model, broken)
    assert list(tmp_path.iterdir()) == []


def edit_weights(directory, edit):
    tensors = load_file(directory / SINGLE)
    edit(tensors)
    save_file(tensors, directory / SINGLE)


def edit_config(directory, **changes):
    raw = json.loads((directory / "config.json").read_text())
    raw.update(changes)
    (directory / "config.json").write_text(json.dumps(raw))


def rename(tensors, old, new):
    tensors[new] = tensors.pop(old)


NORM = "model.layers.1.input_layernorm.weight"
DAMAGE = {
    "missing tensor": (lambda d: edit_weights(d, lambda t: t.pop(NORM)), rf"lacks 1 tensor.*{NORM}"),
    "unexpected tensor": (
        lambda d: edit_weights(d, lambda t: t.update(extra=np.zeros(3, np.float32))),
        "1 tensor.*no place for: extra",
    ),
    "renamed tensor": (lambda d: edit_weights(d, lambda t: rename(t, NORM, "x")), rf"lacks.*{NORM}"),
    "wrong shape": (
        lambda d: edit_weights(d, lambda t: t.update({"model.norm.weight": np.zeros(23, np.float32)})),
        r"model.norm.weight has shape \(23,\) but the model needs \(24,\)",
    ),
    "integer tensor": (
        lambda d: edit_weights(d, lambda t: t.update({"model.norm.weight": np.zeros(24, np.int8)})),
        "stored as I8; only",
    ),
    "other width": (
        lambda d: edit_config(d, intermediate_size=48),
        r"has shape \(24, 40\) but the model needs \(24, 48\)",
    ),
    "no weights": (lambda d: (d / SINGLE).unlink(), f"neither {SINGLE} nor"),
    "torch weights": (
        lambda d: ((d / SINGLE).unlink(), (d / "pytorch_model.bin").write_bytes(b"")),
        "found only pytorch_model.bin",
    ),
    "truncated": (
        lambda d: (d / SINGLE).write_bytes((d / SINGLE).read_bytes()[:500]),
        "not a readable safetensors",
    ),
    "no config": (lambda d: (d / "config.json").unlink(), "has no config.json"),
    "broken config": (lambda d: (d / "config.json").write_text("{"), "not valid JSON"),
    "no directory": (lambda d: shutil.rmtree(d), "is not a directory"),
    "architecture": (
        lambda d: edit_config(d, model_type="gemma", architectures=["GemmaForCausalLM"]),
        "GemmaForCausalLM.*not supported; supported are LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM",
    ),
    "missing key": (lambda d: edit_config(d, hidden_size=None), "lacks 'hidden_size'"),
    "attention bias": (lambda d: edit_config(d, attention_bias=True), "attention_bias"),
    "sliding window": (lambda d: edit_config(d, use_sliding_window=True), "use_sliding_window"),
    "activation": (lambda d: edit_config(d, hidden_act="gelu"), "hidden_act='gelu'"),
    "quantised": (lambda d: edit_config(d, quantization_config={"bits": 4}), "quantised"),
    "rotary kind": (
        lambda d: edit_config(d, rope_scaling={"rope_type": "longrope", "factor": 2.0}),
        "longrope",
    ),
    "rotary factor": (lambda d: edit_config(d, rope_scaling={"rope_type": "linear"}), "without 'factor'"),
    "yarn option": (
        lambda d: edit_config(d, rope_scaling={"rope_type": "yarn", "factor": 2.0, "mscale": 0.7}),
        "mscale",
    ),
    "partial rotary": (lambda d: edit_config(d, partial_rotary_factor=0.5), "partial_rotary_factor"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_what_is_wrong_is_named(saved, name):
    damage, message = DAMAGE[name]
    damage(saved)
    with pytest.raises(ModelLoadError, match=message):
        load_hf(saved)


def test_shard_damage_is_named(tmp_path):
    model, params = start(TINY)
    target = save_hf(tmp_path / "m", model, params, dtype="float32", max_shard_gb=8e-6)
    shards = sorted(target.glob("*.safetensors"))
    content = load_file(shards[1])
    save_file({"other": np.zeros(1, np.float32)}, shards[1])
    with pytest.raises(ModelLoadError, match=next(iter(content))):
        load_hf(target)
    shards[1].unlink()
    with pytest.raises(ModelLoadError, match=f"{shards[1].name}, which does not exist"):
        load_hf(target)
    (target / INDEX).write_text("{}")
    with pytest.raises(ModelLoadError, match="no weight_map"):
        load_hf(target)


def test_repeated_tied_head_and_rotary_buffers_are_ignored(tmp_path):
    model, params = start(TINY)
    target = save_hf(tmp_path / "m", model, params, dtype="float32")

    def repeat(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)

    edit_weights(target, repeat)
    assert_trees_equal(load_hf(target)[1], params)


@pytest.mark.parametrize(
    ("raw", "theta", "scaling"),
    [
        ({"rope_theta": 5e5}, 5e5, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 1e6, None),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}}, 5e5, RopeScaling("linear", 2)),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "beta_fast": 16.0}},
            1e6,
            RopeScaling("yarn", 4.0, original_max_position=64, beta_fast=16.0),
        ),
        (
            {
                "rope_theta": 5e5,
                "rope_scaling": {
                    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 32,
                },
            },
            5e5,
            RopeScaling("llama3", 8.0, original_max_position=32),
        ),
        ({}, 1e4, None),
    ],
)  # fmt: skip
def test_every_spelling_of_rotary_settings(raw, theta, scaling):
    base = to_hf_config(TINY, "float32")
    del base["rope_theta"], base["rope_scaling"]
    config = hf_config({**base, **raw})
    assert (config.rope_theta, config.rope_scaling) == (theta, scaling)


def test_models_without_a_family_are_refused():
    for config, message in (
        (TINY.replace(causal=False), "bidirectional"),
        (TINY.replace(qk_norm=True, qkv_bias=True), "both qk_norm and qkv_bias"),
    ):
        with pytest.raises(ModelLoadError, match=message):
            to_hf_config(config, "float32")
