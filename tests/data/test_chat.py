"""Chat templates: prompts, assistant masks from generation marks and from prefixes, templates that lie."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jaxrl.data import (
    CHATML_TEMPLATE,
    CharTokenizer,
    PromptExample,
    prompt_encoder,
    render_prompt,
    render_sft,
)
from jaxrl.errors import DataError

UNMARKED = CHATML_TEMPLATE.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")
WITH_DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nBe nice<|im_end|>\\n' }}{% endif %}"
    + UNMARKED
)
# Like templates of reasoning models that drop the thinking of earlier turns.
FORGETFUL = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{{ m.content if loop.last or m.role != 'assistant' else m.content.split('</think>')[-1] }}"
    "{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TALK = [
    {"role": "user", "content": "héllo"},
    {"role": "assistant", "content": "hi there"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
]


@pytest.fixture(scope="module")
def tokenizer():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|pad|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.chat_template = CHATML_TEMPLATE
    return fast


def test_prompt(tokenizer):
    text = "<|im_start|>user\nhéllo<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(render_prompt(tokenizer, "héllo")) == text
    assert tokenizer.decode(render_prompt(tokenizer, TALK[:1])) == text
    assert (
        tokenizer.decode(render_prompt(tokenizer, TALK[:1], add_generation_prompt=False))
        == text.rsplit("<|im_s", 1)[0]
    )
    system = "<|im_start|>system\nCount.<|im_end|>\n"
    assert tokenizer.decode(render_prompt(tokenizer, "héllo", system="Count.")) == system + text
    own = [{"role": "system", "content": "Mine."}, *TALK[:1]]
    assert (
        tokenizer.decode(render_prompt(tokenizer, own, system="Count."))
        == system.replace("Count", "Mine") + text
    )


def test_default_system_message_is_suppressed_by_a_template(tokenizer):
    ids = render_prompt(tokenizer, "x", chat_template=WITH_DEFAULT_SYSTEM)
    assert "Be nice" in tokenizer.decode(ids)
    assert render_prompt(tokenizer, "x", chat_template=UNMARKED) == render_prompt(tokenizer, "x")


@pytest.mark.parametrize("template", [CHATML_TEMPLATE, UNMARKED, WITH_DEFAULT_SYSTEM])
def test_assistant_mask_covers_answers_and_their_stop_token(tokenizer, template):
    ids, mask = render_sft(tokenizer, TALK, chat_template=template)
    assert len(ids) == len(mask)
    assert (
        tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m]) == "hi there<|im_end|>4<|im_end|>"
    )
    # What is trained is what is sampled: the ids in front of an answer are those of the prompt of a rollout.
    prompt = render_prompt(tokenizer, TALK[:3], chat_template=template)
    assert ids[: len(prompt)] == prompt and mask[len(prompt)] == 1 and mask[len(prompt) - 1] == 0


def test_both_mask_paths_agree(tokenizer):
    assert render_sft(tokenizer, TALK) == render_sft(tokenizer, TALK, chat_template=UNMARKED)
    system = {"system": "Be brief."}
    assert render_sft(tokenizer, TALK, **system) == render_sft(
        tokenizer, TALK, chat_template=UNMARKED, **system
    )


def test_template_that_rewrites_the_past_is_refused(tokenizer):
    talk = [TALK[0], {"role": "assistant", "content": "<think>a</think>b"}, *TALK[2:]]
    with pytest.raises(DataError, match="the conversation up to message 1 is not the beginning"):
        render_sft(tokenizer, talk, chat_template=FORGETFUL)
    ids, mask = render_sft(tokenizer, talk[:2], chat_template=FORGETFUL)
    assert tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m]) == "<think>a</think>b<|im_end|>"


def test_template_without_the_stop_token_in_its_mask_is_refused(tokenizer):
    template = CHATML_TEMPLATE.replace(
        "{{ message['content'] + '<|im_end|>' }}{%- endgeneration -%}",
        "{{ message['content'] }}{%- endgeneration -%}{{ '<|im_end|>' }}",
    )
    assert template != CHATML_TEMPLATE
    with pytest.raises(DataError, match="no stop token"):
        render_sft(tokenizer, TALK, chat_template=template)
    with pytest.raises(DataError, match="no stop token"):
        render_sft(tokenizer, TALK, chat_template=UNMARKED, stop_token_ids=[tokenizer.pad_token_id])
    newline = tokenizer.encode("\n")
    ids, mask = render_sft(tokenizer, TALK, chat_template=UNMARKED, stop_token_ids=newline)
    assert tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m]).endswith("4<|im_end|>\n")


def test_marks_that_miss_a_turn_are_refused(tokenizer):
    template = CHATML_TEMPLATE.replace(
        "message['role'] == 'assistant'", "message['role'] == 'assistant' and loop.last"
    )
    with pytest.raises(DataError, match="1 trained spans for 2 assistant messages"):
        render_sft(tokenizer, TALK, chat_template=template)


def test_malformed_conversations(tokenizer):
    with pytest.raises(DataError, match="no assistant message"):
        render_sft(tokenizer, TALK[:1])
    with pytest.raises(DataError, match="opens with an assistant message"):
        render_sft(tokenizer, TALK[1:], chat_template=UNMARKED)
    with pytest.raises(DataError, match="message 0 must hold text under 'content'"):
        render_prompt(tokenizer, [{"role": "user", "content": None}])
    picky = "{{ raise_exception('no tools here') }}"
    with pytest.raises(DataError, match=r"refuses the conversation with roles \['user'\]: no tools here"):
        render_prompt(tokenizer, "x", chat_template=picky)


def test_prompt_encoder(tokenizer):
    assert prompt_encoder(tokenizer)(PromptExample("e", "x")) == render_prompt(tokenizer, "x")
    plain = prompt_encoder(CharTokenizer("01+="))
    assert plain(PromptExample("e", "1+0=")) == [3, 4, 2, 5]
    with pytest.raises(DataError, match="prompt e needs a chat template"):
        plain(PromptExample("e", tuple(TALK[:1])))
    with pytest.raises(DataError, match="no chat template"):
        render_prompt(CharTokenizer("x"), "x")
