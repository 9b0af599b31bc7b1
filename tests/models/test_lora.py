"""Adapters: no effect at the start, merging, and the choice of what trains."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxrl.errors import ConfigError
from jaxrl.models import LanguageModel, LoraConfig
from jaxrl.models.lora import merge_lora, trainable_predicate
from jaxrl.models.weights import fresh_adapters
from tiny_models import TINY, assert_trees_equal, forward, max_difference, start, tokens_of

LORA = LoraConfig(rank=3, alpha=6.0)


def test_fresh_adapters_change_nothing():
    model, params = start(TINY)
    adapted = LanguageModel(TINY.replace(lora=LORA))
    fresh = fresh_adapters(adapted, jax.random.key(3))
    assert all(float(abs(leaf).max()) == 0 for path, leaf in fresh.items() if path[-1] == "lora_b")
    assert all(float(abs(leaf).max()) > 0 for path, leaf in fresh.items() if path[-1] == "lora_a")
    params = {**flatten_dict(params), **fresh}
    whole = adapted.init(jax.random.key(3))
    for path, leaf in fresh.items():
        np.testing.assert_array_equal(leaf, flatten_dict(whole)[path])
    tokens = tokens_of(TINY)
    base = forward(model, start(TINY)[1], tokens).hidden
    np.testing.assert_array_equal(forward(adapted, unflatten_dict(params), tokens).hidden, base)


@pytest.mark.parametrize(
    "config",
    [
        TINY.replace(lora=LORA),
        TINY.replace(
            scan_layers=False, lora=LoraConfig(rank=2, alpha=3.0, targets=("q", "down"), last_layers=1)
        ),
    ],
    ids=["stacked-all", "last-q-down"],
)
def test_merged_equals_adapted(config):
    model, params = start(config)
    merged, weights = merge_lora(model, params)
    assert merged.config == config.replace(lora=None)
    assert jax.tree.structure(weights) == jax.tree.structure(merged.abstract())
    tokens = tokens_of(config)
    a, b = forward(model, params, tokens).hidden, forward(merged, weights, tokens).hidden
    assert max_difference(a, b) < 2e-5
    without = {k: v for k, v in flatten_dict(params).items() if not k[-1].startswith("lora")}
    assert max_difference(a, forward(merged, unflatten_dict(without), tokens).hidden) > 1e-2


def test_merge_by_hand_and_without_adapters():
    config = TINY.replace(scan_layers=False, lora=LORA)
    model, params = start(config)
    _, weights = merge_lora(model, params)
    layer = params["layers"]["1"]["mlp"]["up"]
    expected = layer["kernel"] + 2.0 * np.asarray(layer["lora_a"]) @ np.asarray(layer["lora_b"])
    np.testing.assert_allclose(weights["layers"]["1"]["mlp"]["up"]["kernel"], expected, rtol=1e-5, atol=1e-6)
    plain = start(TINY)
    assert merge_lora(*plain) == plain


def test_last_layers_only():
    config = TINY.replace(scan_layers=False, lora=LoraConfig(rank=2, targets=("v",), last_layers=1))
    paths = [p for p in flatten_dict(LanguageModel(config).abstract()) if p[-1].startswith("lora")]
    assert sorted(paths) == [("layers", "1", "attn", "v", "lora_a"), ("layers", "1", "attn", "v", "lora_b")]
    with pytest.raises(ConfigError, match="scan_layers=False"):
        TINY.replace(lora=LoraConfig(last_layers=1))


def test_gradient_reaches_adapters():
    config = TINY.replace(lora=LORA)
    model, params = start(config)
    tokens = tokens_of(config)
    grad = jax.jit(jax.grad(lambda p: (model.forward(p, tokens).hidden ** 3).sum()))(params)
    for path, leaf in flatten_dict(grad).items():
        if path[-1].startswith("lora"):
            assert float(abs(leaf).max()) > 0, path


def test_predicates():
    model = LanguageModel(TINY.replace(scan_layers=False, tie_embeddings=False, lora=LORA))
    paths = list(flatten_dict(model.abstract()))
    everything = trainable_predicate("all")
    assert all(everything(path) for path in paths)
    adapters = trainable_predicate("lora", model)
    assert {path[-1] for path in paths if adapters(path)} == {"lora_a", "lora_b"}
    last = trainable_predicate("last:1", model)
    assert {path[:2] if path[0] == "layers" else path[:1] for path in paths if last(path)} == {
        ("layers", "1"), ("final_norm",), ("head",)
    }  # fmt: skip
    assert sum(map(last, paths)) == sum(path[:2] == ("layers", "1") for path in paths) + 2


@pytest.mark.parametrize(
    ("kind", "config", "message"),
    [
        ("some", TINY, "unknown"),
        ("last:x", TINY, "unknown"),
        ("last:1", TINY, "scan_layers=False"),
        ("last:3", TINY.replace(scan_layers=False), "2 layers"),
        ("last:0", TINY.replace(scan_layers=False), "2 layers"),
        ("lora", TINY, "no adapters"),
    ],
)
def test_predicates_refuse(kind, config, message):
    with pytest.raises(ConfigError, match=message):
        trainable_predicate(kind, LanguageModel(config))


def test_bad_lora_settings():
    with pytest.raises(ConfigError, match="unknown names"):
        TINY.replace(lora=LoraConfig(targets=("q", "query")))
    with pytest.raises(ConfigError, match="rank"):
        TINY.replace(lora=LoraConfig(rank=0))


def test_merge_keeps_the_storage_dtype():
    config = TINY.replace(param_dtype="bfloat16", lora=LORA)
    model, params = start(config)
    _, weights = merge_lora(model, params)
    assert {str(x.dtype) for x in jax.tree.leaves(weights)} == {"bfloat16"}
    assert_trees_equal(weights["embed"], params["embed"])
