"""Conversations to token ids through a tokenizer's chat template.

Works with any tokenizer that has the methods of a transformers tokenizer; needs no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from jaxrl.data.prompts import Message, PromptExample, check_messages
from jaxrl.errors import DataError

CHATML_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['role'] == 'assistant' -%}"
    "{%- generation -%}{{ message['content'] + '<|im_end|>' }}{%- endgeneration -%}"
    "{%- else -%}{{ message['content'] + '<|im_end|>' }}{%- endif -%}"
    "{{ '\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
"""ChatML without a default system message and with the trained part marked. Fits SmolLM2, whose own template
inserts a system message where the conversation has none."""

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def with_system(prompt: str | Sequence[Message], system: str | None = None) -> list[Message]:
    """The messages of a prompt, opened by a system message unless the prompt brings its own.

    Args:
      prompt: text (one user message) or messages.
      system: content of the system message, or None.
    """
    messages: list[Message] = (
        [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    )
    if system is not None and not (messages and messages[0]["role"] == "system"):
        messages.insert(0, {"role": "system", "content": system})
    return messages


def render_prompt(
    tokenizer: Any,
    messages: str | Sequence[Message],
    system: str | None = None,
    add_generation_prompt: bool = True,
    chat_template: str | None = None,
) -> list[int]:
    """Token ids of a conversation that the model is to continue.

    Args:
      tokenizer: a tokenizer with a chat template.
      messages: text (one user message) or messages.
      system: content of a system message to put first, unless the messages bring their own.
      add_generation_prompt: end in the opening of the assistant's turn.
      chat_template: template to use instead of the tokenizer's own.

    Raises:
      DataError: malformed messages, no template, or a template that refuses the messages.
    """
    conversation = with_system(messages, system)
    check_messages(conversation, "the conversation")
    return _apply(tokenizer, conversation, add_generation_prompt, chat_template)


def prompt_encoder(
    tokenizer: Any, system: str | None = None, chat_template: str | None = None
) -> Callable[[PromptExample], list[int]]:
    """The function that turns prompts into ids: through the chat template, or plainly where there is none.

    A tokenizer without a chat template takes text prompts only, and encodes them as they are.

    Raises:
      DataError: when called on a conversation without any template, or with a system message then.
    """
    has_template = chat_template is not None or getattr(tokenizer, "chat_template", None) is not None

    def encode(example: PromptExample) -> list[int]:
        if has_template:
            return render_prompt(tokenizer, example.prompt, system, chat_template=chat_template)
        if not isinstance(example.prompt, str) or system is not None:
            raise DataError(
                f"prompt {example.id} needs a chat template, and the tokenizer has none; give chat_template, "
                "or use plain text prompts without a system message"
            )
        return [int(token) for token in tokenizer.encode(example.prompt)]

    return encode


def render_sft(
    tokenizer: Any,
    messages: Sequence[Message],
    system: str | None = None,
    chat_template: str | None = None,
    stop_token_ids: Sequence[int] | None = None,
) -> tuple[list[int], list[int]]:
    """Token ids of a finished conversation and a mask of the tokens that the assistant is trained on.

    With ``{% generation %}`` marks in the template, the mask is what they enclose. Without them each
    assistant turn is what the template adds behind the generation prompt, up to and including the last stop
    token; this needs a template under which every conversation continues the ids of its beginning, which is
    checked.

    Args:
      tokenizer: a tokenizer with a chat template; a fast one where the template has generation marks.
      messages: the conversation; at least one message is the assistant's.
      system: as in ``render_prompt``.
      chat_template: as in ``render_prompt``.
      stop_token_ids: tokens that end a turn; by default the tokenizer's EOS.

    Returns:
      Ids and a 0/1 mask of the same length.

    Raises:
      DataError: malformed messages, no assistant turn, a template that rewrites earlier turns, or a turn
        without a stop token inside its mask, from which a model could not learn to stop.
    """
    conversation = with_system(messages, system)
    check_messages(conversation, "the conversation")
    turns = [index for index, message in enumerate(conversation) if message["role"] == "assistant"]
    if not turns:
        raise DataError("the conversation has no assistant message to train on; remove it")
    stops = set(stop_token_ids if stop_token_ids is not None else [tokenizer.eos_token_id])
    template = chat_template or getattr(tokenizer, "chat_template", None) or ""
    if isinstance(template, str) and _GENERATION.search(template):
        ids, mask = _masked_by_template(tokenizer, conversation, chat_template)
    else:
        ids, mask = _masked_by_prefixes(tokenizer, conversation, turns, chat_template, stops)
    trained = _runs(mask)
    if len(trained) != len(turns):
        raise DataError(
            f"the template marks {len(trained)} trained spans for {len(turns)} assistant messages; merge "
            "neighbouring assistant messages and remove empty ones, or mend the template's generation marks"
        )
    for start, end in trained:
        if not stops & set(ids[start:end]):
            raise DataError(
                f"the trained tokens {start}..{end - 1} hold no stop token ({sorted(map(str, stops))}), so "
                "the model would not learn to stop; put the end-of-turn token inside the template's "
                "generation marks or pass stop_token_ids"
            )
    return ids, mask


def _masked_by_template(
    tokenizer: Any, conversation: Sequence[Message], chat_template: str | None
) -> tuple[list[int], list[int]]:
    encoded = _apply(
        tokenizer, conversation, False, chat_template, return_dict=True, return_assistant_tokens_mask=True
    )
    return [int(i) for i in encoded["input_ids"]], [int(m) for m in encoded["assistant_masks"]]


def _masked_by_prefixes(
    tokenizer: Any,
    conversation: Sequence[Message],
    turns: Sequence[int],
    chat_template: str | None,
    stops: set[int],
) -> tuple[list[int], list[int]]:
    if turns[0] == 0:
        raise DataError(
            "the conversation opens with an assistant message; begin with a user or system message"
        )
    ids = _apply(tokenizer, conversation, False, chat_template)
    mask = [0] * len(ids)
    for turn in turns:
        before = _apply(tokenizer, conversation[:turn], True, chat_template)
        after = _apply(tokenizer, conversation[: turn + 1], False, chat_template)
        for part, name in (
            (before, f"the prompt of message {turn}"),
            (after, f"the conversation up to message {turn}"),
        ):
            if ids[: len(part)] != part:
                raise DataError(
                    f"under this chat template {name} is not the beginning of the whole conversation (it "
                    "rewrites earlier turns), so the trained tokens cannot be told; use a template with "
                    "{% generation %} marks, or train on one turn at a time"
                )
        # White space that a template writes behind the stop token is never sampled, so it is not trained.
        ends = [column for column in range(len(before), len(after)) if ids[column] in stops]
        for column in range(len(before), ends[-1] + 1 if ends else len(after)):
            mask[column] = 1
    return ids, mask


def _apply(
    tokenizer: Any,
    conversation: Sequence[Message],
    add_generation_prompt: bool,
    chat_template: str | None,
    return_dict: bool = False,
    **options: Any,
) -> Any:
    apply = getattr(tokenizer, "apply_chat_template", None)
    if apply is None or (chat_template is None and getattr(tokenizer, "chat_template", None) is None):
        raise DataError("the tokenizer has no chat template; pass chat_template, for example CHATML_TEMPLATE")
    import jinja2

    try:
        encoded = apply(
            [dict(message) for message in conversation],
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            tokenize=True,
            return_dict=return_dict,
            **options,
        )
    except jinja2.TemplateError as error:
        roles = [message["role"] for message in conversation]
        raise DataError(f"the chat template refuses the conversation with roles {roles}: {error}") from error
    return encoded if return_dict else [int(token) for token in encoded]


def _runs(mask: Sequence[int]) -> list[tuple[int, int]]:
    """Half-open spans of ones."""
    edges = [i for i in range(len(mask) + 1) if (i > 0 and mask[i - 1]) != (i < len(mask) and mask[i])]
    return list(zip(edges[::2], edges[1::2], strict=True))
