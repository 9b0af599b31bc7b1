"""Named algorithms and other libraries' presets, run as systems."""

from __future__ import annotations

import numpy as np
import pytest

from jaxrl.errors import ConfigError
from jaxrl.systems._algorithm import AlgorithmConfig
from tiny_systems import copied, fresh, leaves, make_grpo

GAMMA = dict(adv_estimator="reinforce_plus_plus", gamma=0.9)
RUNS = {
    "gspo": dict(name="gspo"),
    "gmpo": dict(name="gmpo"),
    "cispo": dict(name="cispo"),
    "luspo": dict(name="luspo"),
    "token advantages": dict(name="reinforce_plus_plus_baseline"),
    "trl": dict(name="trl"),
    "trl grpo": dict(
        name="trl", options=dict(loss_type="grpo", beta=0.04, top_entropy_quantile=0.5, entropy_coef=0.01)
    ),
    "trl dr_grpo": dict(
        name="trl", options=dict(loss_type="dr_grpo", scale_rewards=False, off_policy_mask_threshold=1.0)
    ),
    "verl": dict(name="verl", options=dict(use_kl_loss=True, rollout_is="token", entropy_coeff=0.01)),
    "verl returns": dict(name="verl", options=dict(loss_agg_mode="seq-mean-token-sum-norm", **GAMMA)),
    "verl rejection": dict(
        name="verl",
        options=dict(
            rollout_is="sequence",
            rollout_is_batch_normalize=True,
            rollout_rs="token_k1,seq_max_k3",
            rollout_rs_threshold="2.0",
        ),
    ),
    "verl bypass": dict(name="verl", options=dict(bypass_mode=True, loss_mode="gspo")),
    "tunix": dict(name="tunix"),
    "tunix dapo": dict(
        name="tunix",
        options=dict(
            loss_agg_mode="token-mean", epsilon_high=0.28, beta=0.0, sampler_is="token", epsilon_c=3.0
        ),
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_two_batches_of_two_minibatches(name):
    system = make_grpo(algorithm=RUNS[name], update__minibatches=2, update__micro_batches=2)
    state = fresh(system)
    before = leaves(state.device["train"].params)
    for _ in range(2):
        state, metrics = system.step(state)
        for key, value in metrics.items():
            assert np.isfinite(value), (key, value)
    after = leaves(state.device["train"].params)
    assert all((before[k] != after[k]).any() for k in before)
    assert system._train.jitted._cache_size() == 1
    options = RUNS[name].get("options", {})
    assert ("kl_loss" in metrics) == bool(state.device["reference"])
    if options.get("rollout_is") == "token" or name in ("trl", "tunix dapo"):
        assert metrics["mismatch_weight/min"] == pytest.approx(1, abs=1e-4)
        assert metrics["mismatch_weight/effective_sample_share"] == pytest.approx(1, abs=1e-4)
    if "top_entropy_quantile" in options:
        assert 0.4 < metrics["high_entropy_share"] < 0.7


def one_update(algorithm):
    system = make_grpo(algorithm=algorithm)
    return leaves(system.step(copied(fresh(system)))[0].device["train"].params)


def test_on_the_first_update_presets_with_the_same_normaliser_are_one_algorithm():
    dapo = one_update(dict(name="dapo"))
    others = [
        dict(name="grpo", aggregation="token-mean"),
        dict(name="verl"),
        dict(name="tunix", options=dict(loss_agg_mode="token-mean", beta=0.0)),
        dict(name="verl", options=dict(bypass_mode=True)),
        dict(name="trl", options=dict(vllm_importance_sampling_mode="token_truncate")),
    ]
    for algorithm in others:
        tolerance = 2e-3 if algorithm["name"] == "trl" else 1e-5  # 1e-4, not 1e-6, is added to its deviation
        for path, x in one_update(algorithm).items():
            np.testing.assert_allclose(
                x, dapo[path], rtol=tolerance, atol=tolerance * np.abs(dapo[path]).max()
            )


def test_rejection_removes_what_fails_and_weights_multiply(monkeypatch):
    """Sampler log-probabilities that are off by a known amount, through the system's own correction."""
    options = dict(
        rollout_is="token", rollout_is_threshold=1.5, rollout_rs="seq_mean_k1", rollout_rs_threshold="1.8"
    )
    system = make_grpo(algorithm=dict(name="verl", options=options))
    state = fresh(system)
    train = state.device["train"]
    batch = system._batch(system._rollout(train, 0)[0])
    shift = np.zeros(16)
    shift[0], shift[1] = 0.5, 1.0  # ratios 1.65: over the cap, row kept; 2.7: row rejected
    shifted = batch.replace(
        sampler_logp=np.where(batch.loss_mask, batch.sampler_logp - shift[:, None], 0).astype(np.float32)
    )
    corrected = system._with_old_and_reference(shifted, train, {})
    kept = corrected.loss_mask.any(axis=1)
    assert list(kept) == [True, False] + [True] * 14
    np.testing.assert_array_equal(corrected.loss_mask[kept], batch.loss_mask[kept])
    np.testing.assert_allclose(corrected.weights[0][batch.loss_mask[0]], 1.5, rtol=1e-5)
    np.testing.assert_allclose(corrected.weights[2:][batch.loss_mask[2:]], 1.0, rtol=1e-4)


def test_truncated_sampling_with_a_correction_trains():
    system = make_grpo(
        rollout__top_k=5, rollout__top_p=0.9, algorithm__mismatch_level="token", algorithm__mismatch_upper=1.0
    )
    state, metrics = system.step(fresh(system))
    # The sampler's probabilities are larger by the mass that was cut, so every weight is below 1.
    assert metrics["mismatch_weight"] < 0.95 and metrics["mismatch_weight/max"] <= 1
    assert metrics["sampler_logp_difference"] > 0.05 and metrics["grad_norm"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(name="grop"), "algorithm.name is 'grop'; did you mean 'grpo'"),
        (
            dict(name="grpo", options=dict(beta=1)),
            "algorithm.options are for trl, verl, tunix; 'grpo' takes none",
        ),
        (dict(name="trl", options=dict(betta=1)), "algorithm.options do not fit trl: .*betta"),
        (dict(name="verl", options=dict(loss_agg_mode="mean")), "loss_agg_mode.*'mean'.*token-mean"),
        (dict(advantage_rule="gae"), "algorithm.advantage_rule is 'gae'"),
        (dict(scale_rewards="groups"), "scale.*'groups'.*group"),
        (dict(kl_target=0.1), "algorithm.kl_target adapts algorithm.kl_coef, which is 0"),
        (dict(kl_coef=0.1, kl_target=-0.1), "algorithm.kl_target is -0.1; give a value above 0"),
        (dict(kl_coef=0.1, kl_target=0.1, kl_horizon=0.0), "algorithm.kl_horizon is 0.0"),
        (dict(ratio_against="sampler", mismatch_level="token"), "correct the mismatch twice"),
        (
            dict(
                name="verl",
                mismatch_level="token",
                options=dict(rollout_is="token", rollout_is_batch_normalize=True),
            ),
            "would weight every token twice",
        ),
    ],
)
def test_contradictions_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        AlgorithmConfig(**options).validate()
