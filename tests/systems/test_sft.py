"""Supervised fine-tuning: the loss is the cross-entropy of the trained tokens, however they are packed."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxrl.data.prompts import PromptExample
from jaxrl.ops.logprobs import dense_logprobs
from jaxrl.systems import sft
from jaxrl.systems._language import PromptFormat
from tiny_systems import leaves, make_sft, mesh_of


@pytest.fixture(scope="module")
def system():
    return make_sft(optimizer=dict(name="sgd", b1=0.0, learning_rate=0.5, clip_norm=None))


def cross_entropy(system, params, examples) -> tuple[float, int]:
    """Sum of -log p over answer tokens and EOS, one sequence at a time, and their number."""
    total, number = 0.0, 0
    for example in examples:
        prompt, answer = system.tokenizer.encode(example.text), system.tokenizer.encode(example.answer)
        ids = np.array([[*prompt, *answer, system.tokenizer.eos_token_id]])
        hidden = system.model.forward(params, ids).hidden
        logp, _ = dense_logprobs(system.model.logits(params, hidden[:, :-1]), ids[:, 1:])
        total -= float(np.asarray(logp)[0, len(prompt) - 1 :].sum())
        number += len(answer) + 1
    return total, number


def test_evaluation_is_the_cross_entropy_of_held_out_answers(system):
    from jaxrl.data.source import load_prompts

    state = system.init(jax.random.key(0))
    _, heldout = load_prompts(system.config.data)
    assert len(system.heldout.tokens) % system.config.rows  # the last piece is not full
    total, number = cross_entropy(system, state.device.params, heldout)
    found = system.evaluate(state)
    assert found["loss"] == pytest.approx(total / number, rel=1e-5)
    assert found["perplexity"] == pytest.approx(np.exp(total / number), rel=1e-5)


def test_a_step_descends_the_cross_entropy_of_its_rows(system):
    state = system.init(jax.random.key(0))
    before = jax.tree.map(lambda x: np.asarray(x), state.device.params)
    batch = sft.sft_batch(system.rows, system.stream.batch(0, system.config.rows))

    def loss(params):
        hidden = system.model.forward(params, batch.tokens, batch.positions, batch.segment_ids).hidden
        logp, _ = dense_logprobs(system.model.logits(params, hidden[:, :-1]), batch.tokens[:, 1:])
        return -(logp * batch.loss_mask[:, 1:]).sum() / batch.loss_mask.sum()

    value, grads = jax.value_and_grad(loss)(before)
    state, metrics = system.step(state)
    assert (
        metrics["loss"] == pytest.approx(float(value), rel=1e-5)
        and metrics["tokens"] == batch.loss_mask.sum()
    )
    assert state.host == {"position": 4} and int(state.device.step) == 1
    for name, x in leaves(state.device.params).items():
        step = -0.5 * leaves(grads)[name]
        np.testing.assert_allclose(
            x - leaves(before)[name], step, atol=1e-5 * max(np.abs(step).max(), 1e-2), err_msg=name
        )


def test_no_token_is_predicted_from_another_sequence(system):
    """The first token of a packed sequence has nothing before it; padding is nobody's."""
    rows = system.rows
    first = rows.positions == 0
    assert not rows.loss_mask[first].any() and not rows.loss_mask[rows.segment_ids == 0].any()
    assert max(len(members) for members in rows.sources) > 1


def test_it_learns_and_the_micro_batches_do_not_matter():
    runs = []
    for micro_batches in (1, 4):
        system = make_sft(micro_batches=micro_batches)
        state = system.init(jax.random.key(1))
        losses = []
        for _ in range(30):
            state, metrics = system.step(state)
            losses.append(metrics["loss"])
        runs.append(losses)
        assert np.mean(losses[-3:]) < 0.75 * losses[0]
        assert metrics["epoch"] == pytest.approx(30 * 4 / len(system.rows.tokens))
    np.testing.assert_allclose(runs[1][:5], runs[0][:5], rtol=1e-3)


def test_a_mesh_changes_nothing():
    alone, spread = make_sft(), make_sft(mesh_of(2, 1, 2))
    a, b = (s.step(s.init(jax.random.key(0)))[1] for s in (alone, spread))
    for name in a:
        assert b[name] == pytest.approx(a[name], rel=1e-4), name


class Template:
    """A tokenizer with a chat template, reduced to what the rendering needs."""

    chat_template = None
    eos_token_id = 1

    def encode(self, text):
        return [ord(c) for c in text]


def test_without_a_template_only_the_answer_is_trained():
    (ids, mask), (bare, _) = (
        sft.tokenize(Template(), [PromptExample("a", "1+1=", "2")], PromptFormat(), append_eos=eos)[0]
        for eos in (True, False)
    )
    assert ids == [*map(ord, "1+1=2"), 1] and mask == [0, 0, 0, 0, 1, 1]
    assert bare == ids[:-1]
