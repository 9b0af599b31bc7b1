"""The GRPO step: what is trained on, what it is a function of, and odd batches."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxrl import ops
from jaxrl.objectives import score
from jaxrl.rollout.types import Request, SamplingParams
from jaxrl.runtime.state import RunState
from tiny_systems import FixedRewards, completion, copied, fresh, leaves, make_grpo, scored

PAD, EOS = 0, 1


def assert_bits(a: RunState, b: RunState) -> None:
    assert a.host == b.host
    a, b = leaves(a.device), leaves(b.device)
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


# --- one distribution, and a step that depends on its state alone


def test_trainer_and_sampler_agree_on_every_token(plain):
    state = fresh(plain)
    train = state.device["train"]
    rows, _, position = plain._rollout(train, 0)
    assert position == plain.config.rollout.prompts
    batch = plain._batch(rows)
    logp, _ = score(plain.model, plain.objective, train.params, {}, batch)
    assert np.abs(batch.sampler_logp[batch.loss_mask]).max() > 1  # not a flat policy
    assert np.abs(np.asarray(logp) - batch.sampler_logp)[batch.loss_mask].max() < 1e-5
    _, metrics = plain.step(state)
    assert 0 < metrics["sampler_logp_difference/max"] < 1e-5
    assert (
        metrics["ratio"] == metrics["ratio/min"] == metrics["ratio/max"] == 1
        and metrics["clip_fraction"] == 0
    )


def test_a_step_is_a_function_of_its_state(adaptive):
    state = fresh(adaptive)
    once, metrics = adaptive.step(copied(state))
    again, other = adaptive.step(copied(state))
    assert_bits(once, again)
    time_free = lambda row: {k: v for k, v in row.items() if not k.startswith("time/")}  # noqa: E731
    assert time_free(metrics) == time_free(other)
    assert int(once.device["train"].step) == 4 and once.host["position"] == 4


def test_a_step_continues_the_stream_of_prompts(plain):
    first, _, _ = plain._rollout(fresh(plain).device["train"], 0)
    second, _, _ = plain._rollout(fresh(plain).device["train"], 4)
    ids = lambda rows: [p.id for p in rows.prompts]  # noqa: E731
    assert ids(first) == [p.id for p in plain.stream.batch(0, 4) for _ in range(4)]
    assert ids(second) == [p.id for p in plain.stream.batch(4, 4) for _ in range(4)]


def test_samples_of_a_group_differ_and_requests_repeat(plain):
    params = fresh(plain).device["train"].params
    options = SamplingParams(max_tokens=4)
    requests = [Request([3, 4], prompt, sample, options) for prompt in (0, 1) for sample in range(6)]
    key = jax.random.key(5)
    tokens = [tuple(c.token_ids) for c in plain.engine.generate(params, requests, key)]
    assert len(set(tokens)) > 6
    again = [tuple(c.token_ids) for c in plain.engine.generate(params, requests[::-1], key)]
    assert again[::-1] == tokens
    assert [tuple(c.token_ids) for c in plain.engine.generate(params, requests, jax.random.key(6))] != tokens


def test_rollout_evaluation_and_shuffling_use_different_keys(monkeypatch):
    """The key of a rollout token must not come up again in the evaluation or in the order of rows."""
    system = make_grpo(
        eval__prompts=4, eval__samples=4, eval__k=(1,), update__order="rows", update__minibatches=2
    )
    state = system.init(jax.random.key(0))
    seen = []
    monkeypatch.setattr(
        system.engine, "generate", lambda params, requests, key, *rest: seen.append(key) or 1 / 0
    )
    for call in (lambda: system._rollout(state.device["train"], 0), lambda: system.evaluate(state)):
        with pytest.raises(ZeroDivisionError):
            call()
    monkeypatch.setattr(jax.random, "permutation", lambda key, rows: seen.append(key) or np.arange(rows))
    system._minibatches(state.device["train"], 16)
    derived = [tuple(np.asarray(jax.random.key_data(k))) for k in seen]
    for key in seen[:2]:  # all keys that two more foldings by small numbers can reach
        derived += [
            tuple(np.asarray(jax.random.key_data(jax.random.fold_in(jax.random.fold_in(key, i), j))))
            for i in range(4)
            for j in range(4)
        ]
    assert len(set(derived)) == len(derived) == 3 + 32


# --- flags, not ids


def test_pad_and_eos_ids_inside_a_completion_are_trained_on(plain):
    rows = scored(
        [[5, 6], [5, 6], [7], [7]],
        [
            completion([PAD, 4, PAD], "length"),
            completion([EOS], "eos"),
            completion([EOS, 3, EOS, 4], "length"),
            completion([3, PAD, EOS], "eos"),
        ],
        [1.0, 0.0, 0.25, 0.75],
        group_size=2,
    )
    batch = plain._batch(rows)
    np.testing.assert_array_equal(batch.loss_mask.sum(axis=1), [3, 1, 4, 3])
    np.testing.assert_array_equal(batch.tokens[0, :6], [5, 6, PAD, 4, PAD, PAD])
    np.testing.assert_array_equal(batch.loss_mask[0], [0, 0, 1, 1, 1, 0, 0, 0])
    np.testing.assert_array_equal(batch.loss_mask[2], [0, 1, 1, 1, 1, 0, 0, 0])
    expected = np.repeat([[2**-0.5], [-(2**-0.5)]], 2, axis=1).T.reshape(-1)
    np.testing.assert_allclose(
        batch.advantages.max(axis=1) + batch.advantages.min(axis=1),
        [expected[0], expected[1], expected[1], expected[0]],
        rtol=1e-5,
    )  # noqa: E501
    assert (batch.advantages[~batch.loss_mask] == 0).all()
    assert batch.tokens.shape == (
        4,
        4 + plain.config.rollout.max_tokens,
    )  # the longest prompt of the data has 4


def test_masking_of_truncated_rows_reads_the_flag():
    system = make_grpo(rollout__mask_truncated=True)
    full = [
        completion([2, 3, 4, EOS], "eos"),
        completion([2, 3, EOS, EOS], "length"),
        completion([2], "stop"),
    ]
    batch = system._batch(scored([[5]] * 3, full, [1.0, 0.0, 0.5], group_size=3))
    np.testing.assert_array_equal(batch.loss_mask.sum(axis=1), [4, 0, 1])
    # The truncated row stays in the baseline of its group.
    np.testing.assert_allclose(batch.advantages[[0, 2], [1, 1]], [1, 0], atol=1e-5)


def test_unscorable_rows_are_out_of_everything(plain):
    rows = scored([[5]] * 4, [completion([2, 3])] * 4, [1.0, np.nan, 0.0, 0.5], group_size=4)
    batch = plain._batch(rows)
    np.testing.assert_array_equal(batch.loss_mask.sum(axis=1), [2, 0, 2, 2])
    np.testing.assert_allclose(batch.advantages[:, 1], [1, 0, -1, 0], atol=1e-5)


# --- odd rewards


@pytest.mark.parametrize("value", [0.7, 1e6, np.nan])
def test_equal_or_missing_rewards_leave_the_parameters_alone(plain, monkeypatch, value):
    state = fresh(plain)
    before = leaves(state.device["train"].params)
    monkeypatch.setattr(plain, "rewards", FixedRewards([value] * 16))
    state, metrics = plain.step(state)
    after = leaves(state.device["train"].params)
    assert all((before[name] == after[name]).all() for name in before)
    assert metrics["grad_norm"] == 0 and metrics["loss"] == 0
    if np.isnan(value):
        assert (
            metrics["unscorable_rows"] == 16 and metrics["loss_tokens"] == 0 and np.isnan(metrics["reward"])
        )
    else:
        assert metrics["frac_reward_zero_std"] == 1 and metrics["loss_tokens"] == metrics["tokens"]


def test_one_scorable_row_per_group_teaches_nothing(plain, monkeypatch):
    state = fresh(plain)
    monkeypatch.setattr(plain, "rewards", FixedRewards([1.0, np.nan, np.nan, np.nan] * 4))
    _, metrics = plain.step(state)
    assert metrics["grad_norm"] == 0 and metrics["unscorable_rows"] == 12 and metrics["reward"] == 1


def test_same_program_for_any_rewards(plain, monkeypatch):
    state = fresh(plain)
    rng = np.random.default_rng(0)
    batches = [rng.normal(size=16) * scale for scale in (1e-6, 1.0, 1e6)]
    monkeypatch.setattr(plain, "rewards", FixedRewards(*batches, rng.choice([0.0, np.nan], 16)))
    for _ in range(4):
        state, metrics = plain.step(state)
        assert np.isfinite(metrics["loss"])
    assert plain._train.jitted._cache_size() == 1


def test_shifting_and_scaling_rewards_changes_nothing(plain, monkeypatch):
    state = fresh(plain)
    rewards = np.random.default_rng(1).integers(0, 8, 16).astype(float)
    results = []
    for values in (rewards, rewards + 100, rewards * 16):
        monkeypatch.setattr(plain, "rewards", FixedRewards(values))
        results.append(leaves(plain.step(copied(state))[0].device["train"].params))
    for other in results[1:]:
        for name in other:
            np.testing.assert_allclose(other[name], results[0][name], rtol=1e-5, atol=1e-6)


def test_completions_of_one_token():
    system = make_grpo(
        rollout__max_tokens=1,
        update__minibatches=2,
        update__epochs=2,
        update__order="rows",
        update__micro_batches=4,
    )
    state, metrics = system.step(fresh(system))
    assert metrics["completion_length"] == metrics["completion_length/max"] == 1 and metrics["tokens"] == 16
    assert metrics["loss_tokens"] == 8 and np.isfinite(metrics["loss"]) and metrics["grad_norm"] > 0
    assert metrics["sampler_logp_difference/max"] < 1e-5


# --- schedule of updates


def test_minibatches_cover_every_row_once_per_pass(adaptive):
    train = fresh(adaptive).device["train"]
    parts = adaptive._minibatches(train, 16)
    assert [len(p) for p in parts] == [8] * 4
    passes = [np.concatenate(parts[:2]), np.concatenate(parts[2:])]
    for order in passes:
        assert sorted(order) == list(range(16)) and list(order) != list(range(16))
    assert list(passes[0]) != list(passes[1])
    later = adaptive._minibatches(train.replace(step=train.step + 4), 16)
    assert [list(p) for p in later] != [list(p) for p in parts]


def test_minibatches_of_prompts_keep_groups_whole():
    system = make_grpo(update__minibatches=4, update__epochs=2)
    parts = system._minibatches(None, 16)
    assert [list(p) for p in parts] == [list(range(i, i + 4)) for i in (0, 4, 8, 12)] * 2


def test_old_log_probabilities_are_those_of_the_sampling_policy(adaptive):
    state = fresh(adaptive)
    train = state.device["train"]
    batch = adaptive._batch(adaptive._rollout(train, 0)[0])
    batch = adaptive._with_old_and_reference(batch, train, state.device["reference"])
    mask = batch.loss_mask
    assert np.abs(batch.old_logp - batch.sampler_logp)[mask].max() < 1e-5
    np.testing.assert_array_equal(batch.ref_logp, batch.old_logp)  # the reference is the first policy
    _, metrics = adaptive.step(state)
    assert metrics["ratio/min"] < 1 < metrics["ratio/max"]  # later minibatches are off-policy
    assert metrics["sampler_logp_difference/max"] < 1e-5


# --- KL to the first policy


def test_adaptive_kl(adaptive):
    state = fresh(adaptive)
    reference = leaves(state.device["reference"])
    coefficient = state.host["kl_coef"]
    assert coefficient == 0.5
    for _ in range(3):
        state, metrics = adaptive.step(state)
        expected = coefficient * (1 + np.clip(metrics["kl"] / 0.01 - 1, -0.2, 0.2) * 16 / 1000.0)
        assert metrics["kl_coef"] == state.host["kl_coef"] == pytest.approx(expected)
        coefficient = expected
    assert coefficient != 0.5 and metrics["kl"] > 0
    after = leaves(state.device["reference"])
    assert all((reference[name] == after[name]).all() for name in reference)
    assert adaptive._train.jitted._cache_size() == 1  # a new coefficient compiles nothing


def test_kl_starts_at_zero_and_grows():
    system = make_grpo(algorithm__kl_coef=1e-3, algorithm__kl_estimator="k3")
    state = fresh(system)
    kl = []
    for _ in range(3):
        state, metrics = system.step(state)
        kl.append(metrics["kl"])
    assert abs(kl[0]) < 1e-9 and kl[2] > kl[1] > 1e-5
    assert "kl_coef" not in state.host


# --- dynamic sampling


@pytest.fixture(scope="module")
def dynamic():
    return make_grpo(rollout__dynamic_sampling=True, rollout__max_batches=3, rollout__temperature=0.7)


FLAT, SPREAD = [1.0] * 4, [0.0, 1.0, 1.0, 1.0]


def test_dynamic_sampling_fills_the_batch_with_informative_groups(dynamic, monkeypatch):
    monkeypatch.setattr(
        dynamic, "rewards", FixedRewards(FLAT + SPREAD + FLAT + FLAT, SPREAD + SPREAD + FLAT + SPREAD)
    )
    rows, metrics, position = dynamic._rollout(fresh(dynamic).device["train"], 8)
    assert list(dict.fromkeys(rows.group_ids)) == [9, 12, 13, 15] and position == 16
    assert len(rows.rewards) == 16 and ops.zero_std_fraction(rows.rewards, rows.group_ids) == 0
    stream = {8 + i: p.id for i, p in enumerate(dynamic.stream.batch(8, 8))}
    assert all(stream[g] == p.id for g, p in zip(rows.group_ids, rows.prompts))
    assert metrics["dynamic_sampling/batches"] == 2 and metrics["dynamic_sampling/flat_groups"] == 0
    # Rollout statistics are of all that was sampled.
    assert metrics["reward"] == pytest.approx((15 + 13) / 32) and metrics[
        "frac_reward_zero_std"
    ] == pytest.approx(0.5)
    assert 32 <= metrics["tokens"] <= 32 * 4


def test_dynamic_sampling_drops_the_surplus(dynamic, monkeypatch):
    monkeypatch.setattr(dynamic, "rewards", FixedRewards(FLAT + SPREAD * 3, SPREAD * 4))
    rows, metrics, position = dynamic._rollout(fresh(dynamic).device["train"], 0)
    assert list(dict.fromkeys(rows.group_ids)) == [1, 2, 3, 4] and position == 8


def test_dynamic_sampling_gives_up_with_flat_groups(dynamic, monkeypatch):
    unscorable = [np.nan] * 4
    monkeypatch.setattr(dynamic, "rewards", FixedRewards(FLAT * 4, unscorable + SPREAD + FLAT * 2, FLAT * 4))
    state = fresh(dynamic)
    before = leaves(state.device["train"].params)
    state, metrics = dynamic.step(state)
    assert metrics["dynamic_sampling/batches"] == 3 and metrics["dynamic_sampling/flat_groups"] == 3
    assert metrics["unscorable_rows"] == 4 and state.host["position"] == 12
    assert metrics["grad_norm"] > 0 and any(
        (before[k] != v).any() for k, v in leaves(state.device["train"].params).items()
    )


# --- it learns


def test_a_learnable_reward_is_learnt():
    system = make_grpo(
        rollout__prompts=8, rollout__group_size=8, rollout__slots=64, optimizer__name="adam", optimizer__b1=0.9,
        optimizer__learning_rate=0.01,
    )  # fmt: skip
    state = system.init(jax.random.key(0))
    rewards = []
    for _ in range(30):
        state, metrics = system.step(state)
        rewards.append(metrics["reward"])
    assert np.mean(rewards[:3]) < 0.5 and np.mean(rewards[-3:]) > 0.9, rewards
