"""Held-out evaluation and the warm start, with a model whose answers are known."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

from jaxrl.errors import ConfigError
from tiny_systems import completion, fresh, leaves, make_grpo

EVAL = dict(prompts=6, samples=4, k=(1, 2, 4), reward="exact_match", answer="whole")
REWARDS = (dict(name="tiny_systems:low_digits"), dict(name="exact_match"))
WARM = dict(
    until_accuracy=0.9,
    check_every=50,
    max_steps=200,
    rows=45,
    optimizer=dict(name="adam", learning_rate=0.02),
)


@pytest.fixture(scope="module")
def system():
    return make_grpo(eval=EVAL, rewards=REWARDS, rollout__max_tokens=2)


def test_metrics_of_known_answers(system, monkeypatch):
    """Prompt i of 6 is answered rightly in i of its first 4 samples (at most 4); greedy is right for the even ones."""
    answers = [p.answer for p in system.evaluator.prompts]
    encode = system.tokenizer.encode

    def generate(params, requests, key):
        done = []
        for r in requests:
            right = r.prompt_id % 2 == 0 if r.params.greedy else r.sample_id < r.prompt_id
            done.append(
                completion(encode(answers[r.prompt_id] if right else "=+"), "eos" if right else "length")
            )
        return done

    monkeypatch.setattr(system.engine, "generate", generate)
    found = system.evaluate(system.template(jax.random.key(0)))
    correct = np.minimum(np.arange(6), 4)
    assert found["accuracy_greedy"] == 0.5
    assert found["accuracy_sampled"] == found["pass@1"] == pytest.approx(correct.mean() / 4)
    assert found["pass@4"] == pytest.approx((correct > 0).mean())
    assert found["pass@2"] == pytest.approx(np.mean([1 - (4 - c) * (3 - c) / 12 for c in correct]))
    assert found["maj@4"] == pytest.approx((0 + 0 + 0.5 + 1 + 1 + 1) / 6)
    assert found["truncated_fraction"] == pytest.approx((24 - correct.sum() + 3) / 30)
    samples = system.samples(None)
    assert len(samples) == 12 and {s["decoding"] for s in samples} == {"greedy", "sampled"}
    assert [s["decoding"] for s in samples] == ["sampled"] * 6 + ["greedy"] * 6
    first = samples[6]
    assert first["correct"] is True and first["completion"] == answers[0] == first["answer"]
    assert first["rewards"]["exact_match"] == 1.0 and samples[7]["correct"] is False


def test_an_evaluation_repeats_and_changes_nothing(system):
    state = fresh(system)
    before = leaves(state.device)
    first = system.evaluate(state)
    assert system.evaluate(state) == first
    assert all((before[k] == v).all() for k, v in leaves(state.device).items())


def test_greedy_only():
    system = make_grpo(eval=dict(prompts=2, samples=0), rewards=REWARDS)
    assert set(system.evaluate(fresh(system))) == {
        "accuracy_greedy",
        "completion_length",
        "truncated_fraction",
    }


@pytest.fixture
def copying(tmp_path):
    """The answer is the first digit of the prompt: learnt in seconds."""
    path = tmp_path / "copy.jsonl"
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a)} for a in range(10) for b in range(10)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return dict(kind="jsonl", path=str(path), heldout=20)


def test_warm_start_reaches_its_accuracy_and_starts_with_a_fresh_optimizer(copying):
    system = make_grpo(
        data=copying,
        rewards=REWARDS[1:],
        rollout__max_tokens=1,
        eval=EVAL | dict(prompts=20, samples=2, k=(1,)),
        warm_start=WARM | dict(until_accuracy=0.5, check_every=10),
    )
    state = system.init(jax.random.key(0))
    assert system.evaluate(state)["accuracy_sampled"] >= 0.5
    train = state.device["train"]
    assert int(train.step) == 0 and all((x == 0).all() for x in leaves(train.opt_state).values())
    again = leaves(system.init(jax.random.key(0)).device)
    assert all((x == again[name]).all() for name, x in leaves(state.device).items())
    cold = leaves(system.template(jax.random.key(0)).device)
    assert {k: (v.shape, v.dtype) for k, v in cold.items()} == {
        k: (v.shape, v.dtype) for k, v in again.items()
    }
    name = "train/params/embed/embedding"
    assert (cold[name] != again[name]).any()


def test_warm_start_that_does_not_get_there_says_so():
    system = make_grpo(eval=EVAL, rewards=REWARDS, warm_start=WARM | dict(max_steps=1, until_accuracy=1.0))
    with pytest.raises(
        ConfigError,
        match=r"ended at accuracy 0\.\d+ after 1 steps, below until_accuracy=1.0; raise warm_start.max_steps",
    ):
        system.init(jax.random.key(0))
