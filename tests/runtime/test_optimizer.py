"""Optimizers against their formulas."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl.errors import ConfigError
from jaxrl.runtime.config import from_config_dict
from jaxrl.runtime.optimizer import OptimizerConfig, decay_mask, make_optimizer, make_schedule

PARAMS = {
    "attn": {"q": {"kernel": jnp.full((2, 2), 2.0), "bias": jnp.full(2, 2.0)}},
    "norm": {"scale": jnp.full((3, 2), 2.0)},  # stacked layers: rank 2, yet not decayed
}
ZEROS = jax.tree.map(jnp.zeros_like, PARAMS)
ONES = jax.tree.map(jnp.ones_like, PARAMS)


def updates(config, grads, steps=1):
    optimizer = make_optimizer(config)
    state = optimizer.init(PARAMS)
    for _ in range(steps):
        result, state = optimizer.update(grads, state, PARAMS)
    return result


def test_adamw_two_steps_by_hand():
    config = OptimizerConfig(learning_rate=0.1, b1=0.8, b2=0.9, eps=1e-3, weight_decay=0.5, clip_norm=None)
    m = v = 0.0
    for t in (1, 2):
        m, v = 0.8 * m + 0.2 * 0.3, 0.9 * v + 0.1 * 0.3**2
        step = (m / (1 - 0.8**t)) / (math.sqrt(v / (1 - 0.9**t)) + 1e-3)
    result = updates(config, jax.tree.map(lambda p: 0.3 * p, ONES), steps=2)
    np.testing.assert_allclose(result["attn"]["q"]["kernel"], -0.1 * (step + 0.5 * 2.0), rtol=1e-5)
    np.testing.assert_allclose(result["norm"]["scale"], -0.1 * step, rtol=1e-5)


def test_decay_mask_leaves_out_scales_and_biases():
    assert decay_mask(PARAMS) == {"attn": {"q": {"kernel": True, "bias": False}}, "norm": {"scale": False}}


def test_clip_by_global_norm():
    config = OptimizerConfig(name="sgd", b1=0.0, learning_rate=1.0, clip_norm=0.5)
    assert float(optax.tree.norm(updates(config, ONES))) == pytest.approx(0.5, rel=1e-6)
    small = jax.tree.map(lambda x: 1e-3 * x, ONES)
    np.testing.assert_allclose(updates(config, small)["norm"]["scale"], -1e-3, rtol=1e-6)


def test_sgd_momentum():
    config = OptimizerConfig(name="sgd", b1=0.5, learning_rate=1.0, clip_norm=None)
    np.testing.assert_allclose(updates(config, ONES, steps=3)["norm"]["scale"], -(1 + 0.5 + 0.25), rtol=1e-6)


@pytest.mark.parametrize("name", ["lion", "adafactor", "adam"])
def test_other_rules_move_against_the_gradient(name):
    result = updates(OptimizerConfig(name=name, learning_rate=0.1), ONES)
    assert all(bool((leaf < 0).all()) for leaf in jax.tree.leaves(result))


def test_learning_rates_by_path():
    rates = (("bias$", 0.0), ("attn", 0.25))
    config = OptimizerConfig(name="sgd", b1=0.0, learning_rate=1.0, clip_norm=None, learning_rates=rates)
    result = updates(config, ONES)
    assert float(result["attn"]["q"]["kernel"][0, 0]) == -0.25
    assert float(result["attn"]["q"]["bias"][0]) == 0.0
    assert float(result["norm"]["scale"][0, 0]) == -1.0


def test_group_rates_keep_the_schedule_and_the_common_norm():
    """Groups scale the update only: with equal rates the split must change nothing."""
    shape = {
        "schedule": "linear",
        "warmup_steps": 2,
        "decay_steps": 6,
        "learning_rate": 0.3,
        "clip_norm": 0.1,
    }
    plain = updates(OptimizerConfig(**shape), ONES, steps=4)
    split = updates(OptimizerConfig(**shape, learning_rates=(("attn", 0.3),)), ONES, steps=4)
    jax.tree.map(np.testing.assert_array_equal, plain, split)


def test_pattern_without_a_parameter_is_refused():
    with pytest.raises(ConfigError, match="'lora_' selects no trainable parameter.*attn/q/bias"):
        make_optimizer(OptimizerConfig(learning_rates=(("lora_", 1e-4),))).init(PARAMS)


def test_schedules():
    linear = make_schedule(
        OptimizerConfig(learning_rate=2.0, schedule="linear", warmup_steps=4, decay_steps=8)
    )
    np.testing.assert_allclose(
        [linear(s) for s in (0, 1, 3, 4, 6, 8, 9)], [0.5, 1.0, 2.0, 2.0, 1.0, 0.0, 0.0]
    )
    cosine = make_schedule(
        OptimizerConfig(learning_rate=1.0, schedule="cosine", decay_steps=4, final_fraction=0.2)
    )
    expected = [0.2 + 0.8 * (1 + math.cos(math.pi * x)) / 2 for x in (0, 0.25, 0.5, 1, 1)]
    np.testing.assert_allclose([cosine(s) for s in (0, 1, 2, 4, 7)], expected, rtol=1e-6, atol=1e-7)
    constant = make_schedule(OptimizerConfig(learning_rate=3.0))
    assert [float(constant(s)) for s in (0, 1000)] == [3.0, 3.0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learning_rate": -1.0}, "learning_rate is -1.0"),
        ({"b2": 1.0}, "b2 is 1.0"),
        ({"clip_norm": 0.0}, "None for no clipping"),
        ({"schedule": "cosine"}, "set decay_steps above warmup_steps"),
        ({"name": "adam", "weight_decay": 0.1}, "use adamw or lion"),
        ({"learning_rates": {"(": 1.0}}, "give a valid regex"),
        ({"name": "adamv"}, "did you mean"),
    ],
)
def test_refusals(changes, message):
    with pytest.raises(ConfigError, match=message):
        from_config_dict(OptimizerConfig, changes, "config.optimizer")
