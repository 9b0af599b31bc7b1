"""Systems in the loop: no compilation after warm-up, and a loss that is not finite."""

from __future__ import annotations

import functools
import json
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.errors import NonFiniteError
from jaxrl.runtime import loop
from jaxrl.runtime.checkpoint import load_arrays
from jaxrl.runtime.metrics import read_metrics
from jaxrl.runtime.optimizer import OptimizerConfig, make_optimizer
from jaxrl.runtime.run_config import RunConfig
from jaxrl.runtime.state import TrainState
from jaxrl.runtime.update import apply_gradients, check_finite
from tiny_systems import leaves, make_grpo

QUIET = dict(progress=False, async_checkpoints=False)


@pytest.fixture
def ragged(tmp_path):
    """Prompts of 1 to 40 tokens, in an order that meets long ones late."""
    rng = np.random.default_rng(0)
    lengths = [1, 2, 3, 4, 5, 6, 7, 8, 20, 40, 33, 12] * 2
    rows = [{"prompt": "".join(rng.choice(list("0123456789"), n)), "answer": "1"} for n in lengths]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return dict(kind="jsonl", path=str(path))


def test_no_compilation_after_warm_up_whatever_the_lengths(tmp_path, ragged):
    """Each step brings prompts and completions of other lengths, and four optimizer steps; the guard is strict."""
    system = make_grpo(
        data=ragged,
        model__max_position=64,
        prompt__max_prompt_len=40,
        rollout__prompts=2,
        rollout__max_tokens=8,
        update__minibatches=2,
        update__epochs=2,
        update__order="rows",
    )
    config = RunConfig(total_steps=8, recompile_guard="error", warmup_steps=2, checkpoint_every=3, **QUIET)
    loop.run(system, config, tmp_path / "run")
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert len(rows) == 8 and len({row["tokens"] for row in rows}) > 1
    assert all(row["sampler_logp_difference/max"] < 1e-5 for row in rows)


def poison(system, monkeypatch, at):
    """From step ``at`` the advantages are infinite."""
    original, calls = system._batch, []

    def batch(scored):
        made = original(scored)
        calls.append(1)
        bad = len(calls) > at
        return (
            made.replace(advantages=np.where(made.loss_mask, np.inf, 0).astype(np.float32)) if bad else made
        )

    monkeypatch.setattr(system, "_batch", batch)


def test_a_loss_that_is_not_finite_stops_before_the_step(tmp_path, monkeypatch, caplog):
    system = make_grpo(optimizer=dict(name="adam", learning_rate=0.01))
    config = RunConfig(total_steps=4, checkpoint_every=0, **QUIET)
    good = leaves(
        loop.run(system, RunConfig(total_steps=2, checkpoint_every=0, **QUIET), tmp_path / "good").device
    )
    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR, logger="jaxrl"):
        poison(system, patch, at=2)
        message = r"position 8: the loss \((nan|-?inf)\) is not finite; the optimizer step was not taken.*learning rate"
        with pytest.raises(NonFiniteError, match=message):
            loop.run(system, config, tmp_path / "run")
    assert "the last good state is saved as the checkpoint of step 2" in caplog.text
    for part in ("train/params", "train/opt_state"):
        for name, x in leaves(load_arrays(tmp_path / "run", prefix=part)).items():
            np.testing.assert_array_equal(x, good[f"{part}/{name}"], err_msg=name)
    # With the cause removed the same command goes on from there, and ends as if nothing had happened.
    resumed = loop.run(system, config, tmp_path / "run")
    whole = loop.run(system, config, tmp_path / "whole")
    for name, x in leaves(whole.device).items():
        np.testing.assert_array_equal(leaves(resumed.device)[name], x, err_msg=name)


def test_a_bad_gradient_under_a_finite_loss_names_the_parameters():
    """The loss is finite, one leaf of the gradient is not: nothing moves, not even the moments of the optimizer."""
    params = {"a": jnp.ones(2), "b": {"kernel": jnp.ones((2, 2))}}
    optimizer = make_optimizer(OptimizerConfig(name="adam", learning_rate=0.1))
    state = TrainState.create(params, optimizer, jax.random.key(0))
    grads = {"a": jnp.ones(2), "b": {"kernel": jnp.array([[0.0, 1.0], [jnp.nan, 1.0]])}}
    new, metrics = jax.jit(functools.partial(apply_gradients, optimizer))(
        state, grads, {"loss": jnp.float32(1.0)}
    )
    for name, x in leaves(state).items():
        np.testing.assert_array_equal(leaves(new)[name], x, err_msg=name)
    with pytest.raises(
        NonFiniteError, match="row 3: the gradient of b/kernel is not finite; .* the state is intact"
    ):
        check_finite(metrics, new.params, "row 3")
    good, metrics = apply_gradients(
        optimizer, state, jax.tree.map(jnp.ones_like, params), {"loss": jnp.float32(1.0)}
    )
    assert int(good.step) == 1 and set(check_finite(metrics, good.params)) == {
        "loss",
        "grad_norm",
        "update_norm",
    }
