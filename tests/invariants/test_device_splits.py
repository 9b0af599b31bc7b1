"""One update, whatever the mesh: simulated devices split over data, fsdp and tensor, and micro-batches on top."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from jaxrl import ops
from jaxrl.models.config import ModelConfig
from jaxrl.models.decoder import LanguageModel
from jaxrl.objectives import Objective, policy_batch
from jaxrl.parallel.sharding import Sharding
from jaxrl.runtime.optimizer import OptimizerConfig, make_optimizer
from jaxrl.runtime.state import TrainState
from jaxrl.systems.grpo import train_step
from tiny_systems import ARCHITECTURE, copied, fresh, leaves, make_grpo, mesh_of

CONFIG = ModelConfig(**{**ARCHITECTURE, "num_kv_heads": 2})
OBJECTIVE = Objective(
    loss=ops.LossConfig(
        policy=ops.PolicyLossConfig(clip_low=0.1, clip_high=0.1),
        aggregation=ops.Aggregation("seq-mean-token-mean"),
        kl_coef=0.1,
        entropy_coef=0.01,
    ),
    completion_columns=6,
    chunk_tokens=16,
)
MESHES = [(2, 1, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (8, 1, 1), (1, 8, 1), (2, 2, 2)]


def data():
    """16 ragged rows: shards differ in their numbers of rows with a loss, and of loss tokens."""
    rng = np.random.default_rng(0)
    lengths = [*rng.integers(1, 7, 8), 0, 0, 1, 1, 1, 1, 1, 1]
    batch = policy_batch(
        [rng.integers(0, 14, n) for n in rng.integers(1, 5, 16)],
        [rng.integers(0, 14, n) for n in lengths],
        rng.normal(size=16),
        columns=10,
    )
    near = lambda: np.where(batch.loss_mask, rng.normal(-2.6, 0.3, batch.tokens.shape), 0).astype(np.float32)  # noqa: E731
    return batch.replace(old_logp=near(), ref_logp=near())


def update(mesh, micro_batches=1):
    sharding = None if mesh is None else Sharding(mesh_of(*mesh))
    model = LanguageModel(CONFIG, sharding)
    optimizer = make_optimizer(OptimizerConfig(name="adam", learning_rate=1e-2, eps=1e-3))
    state = TrainState.create(model.init(jax.random.key(0)), optimizer, jax.random.key(1))
    step = jax.jit(functools.partial(train_step, model, OBJECTIVE, optimizer, micro_batches=micro_batches))
    new, metrics = step(state, data().put(sharding))
    if sharding is not None:
        assert len(jax.tree.leaves(new.params)[0].sharding.device_set) == mesh_of(*mesh).size
    return leaves((new.params, new.opt_state)), {
        name: float(x) for name, x in metrics.items() if np.ndim(x) == 0
    }


@pytest.fixture(scope="module")
def alone():
    return update(None)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_an_update_does_not_depend_on_the_mesh(alone, mesh):
    compare(alone, update(mesh))


def test_nor_on_micro_batches_on_a_mesh(alone):
    compare(alone, update((2, 2, 1), micro_batches=4))


def compare(expected, found):
    for name, x in expected[0].items():
        np.testing.assert_allclose(found[0][name], x, rtol=1e-4, atol=1e-5, err_msg=name)
    for name, x in expected[1].items():
        assert found[1][name] == pytest.approx(x, rel=1e-4, abs=1e-6), name


def test_a_whole_step_on_a_mesh():
    """Rollout, rewards, advantages and four optimizer steps: the same tokens, the same update."""
    changes = dict(
        model__architecture={**ARCHITECTURE, "num_kv_heads": 2},
        update__minibatches=2,
        update__epochs=2,
        update__order="rows",
        algorithm__kl_coef=0.1,
        optimizer__learning_rate=0.1,
    )
    results = []
    for mesh in (None, mesh_of(2, 2, 2)):
        system = make_grpo(mesh, **changes)
        state = fresh(system)
        rows = system._rollout(state.device["train"], 0)[0]
        state, metrics = system.step(copied(state))
        results.append(
            ([tuple(c.token_ids) for c in rows.completions], leaves(state.device["train"].params), metrics)
        )
    (tokens, params, metrics), (other_tokens, other_params, other_metrics) = results
    assert tokens == other_tokens
    for name, x in params.items():
        np.testing.assert_allclose(other_params[name], x, rtol=1e-4, atol=1e-5, err_msg=name)
    assert other_metrics["sampler_logp_difference/max"] < 1e-5
    for name in ("reward", "tokens", "loss", "kl", "grad_norm", "clip_fraction"):
        assert other_metrics[name] == pytest.approx(metrics[name], rel=1e-3, abs=1e-6), name
