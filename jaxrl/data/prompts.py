"""Prompts with their gold answers: files, procedural tasks, and a split without leaks."""

from __future__ import annotations

import difflib
import hashlib
import json
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxrl.errors import ConfigError, DataError, require

Message = Mapping[str, str]
"""``{"role": "user", "content": "..."}``; roles are those of the chat template."""


@dataclass(frozen=True)
class PromptExample:
    """One prompt.

    Attributes:
      id: where it comes from, for example "train.jsonl:12" or "chain_sum:3". For logs; the random key of a
        completion is made from the position in the stream instead, which differs from epoch to epoch.
      prompt: plain text, or the messages of a conversation.
      answer: gold answer, or None.
      metadata: all other fields; rewards get them.
      prompt_ids: token ids, once encoded.
    """

    id: str
    prompt: str | tuple[Message, ...]
    answer: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    prompt_ids: tuple[int, ...] | None = None

    @property
    def text(self) -> str:
        """The prompt as plain text; identical text means identical prompt."""
        if isinstance(self.prompt, str):
            return self.prompt
        return "\n".join(f"{message['role']}: {message['content']}" for message in self.prompt)


def check_messages(messages: object, where: str) -> tuple[Message, ...]:
    """Checks a conversation read from outside.

    Args:
      messages: should be a non-empty sequence of mappings with text under "role" and "content".
      where: how to name the conversation in the error.

    Raises:
      DataError: it is something else.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise DataError(f"{where} must be text or a non-empty list of messages, but is {_short(messages)}")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise DataError(f"{where}: message {index} must be a mapping, but is {_short(message)}")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise DataError(
                    f"{where}: message {index} must hold text under {key!r}, but holds "
                    f"{_short(message.get(key))}"
                )
    return tuple(messages)


def fill_template(template: str, fields: Mapping[str, Any]) -> str:
    """Replaces ``{name}`` by ``fields[name]``; braces around anything else stay as they are.

    Raises:
      ConfigError: the template uses none of the fields, so that every prompt would be the same.
    """
    used = False

    def value(match: re.Match[str]) -> str:
        nonlocal used
        if match[1] not in fields:
            return match[0]
        used = True
        return str(fields[match[1]])

    filled = re.sub(r"\{(\w+)\}", value, template)
    if not used:
        raise ConfigError(
            f"the template {template!r} uses no field of the data; write one of "
            + ", ".join("{" + name + "}" for name in fields)
        )
    return filled


def load_jsonl(
    path: str | pathlib.Path,
    prompt_field: str = "prompt",
    answer_field: str | None = "answer",
    template: str | None = None,
) -> list[PromptExample]:
    """Reads prompts from a file with one JSON object a line. Blank lines are skipped.

    Args:
      path: the file, UTF-8.
      prompt_field: field with the prompt: text, or a list of messages.
      answer_field: field with the gold answer, text or a number; None when there is none.
      template: for prompts that are text, the prompt to send; ``{name}`` stands for a field of the row.

    Raises:
      DataError: the file cannot be read, a line is no JSON object, or a field is missing or of a wrong type;
        the message starts with ``file:line``.
      ConfigError: the template uses no field.
    """
    path = pathlib.Path(path)
    examples = []
    try:
        with path.open("rb") as lines:
            for number, raw in enumerate(lines, start=1):
                where = f"{path}:{number}"
                try:
                    line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                except UnicodeDecodeError as error:
                    raise DataError(f"{where}: this line is not UTF-8 ({error}); convert the file") from error
                if not line:
                    continue
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise DataError(
                        f"{where}: this line is no JSON ({error.msg} at column {error.colno}); mend or "
                        "remove it"
                    ) from error
                if not isinstance(row, dict):
                    raise DataError(f"{where}: a line must be a JSON object, but this one is {_short(row)}")
                examples.append(
                    _example(row, where, f"{path.name}:{number}", prompt_field, answer_field, template)
                )
    except OSError as error:
        raise DataError(
            f"the prompt file {str(path)!r} cannot be read: {error.strerror}; check the path"
        ) from error
    if not examples:
        raise DataError(f"the prompt file {str(path)!r} holds no row; give it at least one line")
    return examples


def load_parquet(
    path: str | pathlib.Path,
    prompt_field: str = "prompt",
    answer_field: str | None = "answer",
    template: str | None = None,
) -> list[PromptExample]:
    """Reads prompts from a Parquet file, rows counted from 0; arguments and errors as in ``load_jsonl``."""
    parquet = require("pyarrow.parquet", "data")
    arrow = require("pyarrow", "data")
    path = pathlib.Path(path)
    try:
        rows = parquet.read_table(path).to_pylist()
    except (OSError, arrow.ArrowException) as error:
        raise DataError(f"the prompt file {str(path)!r} is no readable Parquet file: {error}") from error
    if not rows:
        raise DataError(f"the prompt file {str(path)!r} holds no row; give it at least one")
    return [
        _example(row, f"{path}: row {number}", f"{path.name}:{number}", prompt_field, answer_field, template)
        for number, row in enumerate(rows)
    ]


def reasoning_gym_examples(
    task: str,
    size: int,
    seed: int,
    template: str = "{question}",
    params: Mapping[str, Any] | None = None,
) -> list[PromptExample]:
    """Procedural prompts of a reasoning-gym task.

    Args:
      task: name of the task, for example "chain_sum", "countdown", "spell_backward".
      size: number of items to draw. Repeated questions are dropped, so fewer examples may come back.
      seed: seed of the task.
      template: the prompt to send. ``{question}`` is the task's own wording; plain fields of its metadata
        can be used as well, for example "What is {expression}? Reply with only the number." with "chain_sum".
      params: parameters of the task, for example ``{"min_terms": 2, "max_terms": 2, "max_digits": 1}``.

    Returns:
      Examples whose metadata holds "task" and "entry", as the ``reasoning_gym`` reward needs them.

    Raises:
      ConfigError: unknown task or parameter, or values that the task refuses.
    """
    factory = require("reasoning_gym.factory", "rewards")
    if task not in factory.DATASETS:
        close = difflib.get_close_matches(task, factory.DATASETS, n=3, cutoff=0.4)
        raise ConfigError(f"reasoning-gym has no task {task!r}; closest: {', '.join(close) or 'none'}")
    if size < 1:
        raise ConfigError(f"the task {task!r} is to give {size} prompts; ask for 1 or more")
    params = dict(params or {})
    known = factory.DATASETS[task][1].__dataclass_fields__
    for key in params:
        if key not in known or key in ("size", "seed"):
            usable = sorted(set(known) - {"size", "seed"})
            raise ConfigError(f"the task {task!r} takes no parameter {key!r}; it takes {', '.join(usable)}")
    try:
        dataset = factory.create_dataset(task, size=size, seed=seed, **params)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"the task {task!r} refuses its parameters {params}: {error}") from error
    examples: dict[str, PromptExample] = {}
    for index in range(size):
        entry = dataset[index]
        fields = {
            key: value for key, value in entry["metadata"].items() if isinstance(value, str | int | float)
        }
        text = fill_template(template, {**fields, "question": entry["question"]})
        if text not in examples:
            metadata = {"task": task, "entry": dict(entry)}
            examples[text] = PromptExample(f"{task}:{index}", text, str(entry["answer"]), metadata)
    return list(examples.values())


def split_prompts(
    examples: Sequence[PromptExample], heldout: int, seed: int = 0
) -> tuple[list[PromptExample], list[PromptExample]]:
    """Splits off a held-out set that shares no prompt text with the rest.

    Which prompts are held out depends on their text and the seed alone, not on their order or number of
    repetitions.

    Args:
      examples: all prompts.
      heldout: number of different prompt texts to hold out; each appears there once.
      seed: another seed holds out other prompts.

    Returns:
      The training prompts (repetitions kept) and the held-out prompts, both in their original order.

    Raises:
      DataError: nothing would be left for training.
    """
    first: dict[str, PromptExample] = {}
    for example in examples:
        first.setdefault(example.text, example)
    if heldout < 0 or heldout >= len(first):
        raise DataError(
            f"{heldout} prompts are to be held out of {len(first)} different ones; hold out fewer, or bring "
            "more prompts"
        )
    ranked = sorted(first, key=lambda text: hashlib.sha256(f"{seed}\0{text}".encode()).digest())
    chosen = set(ranked[:heldout])
    train = [example for example in examples if example.text not in chosen]
    return train, [example for text, example in first.items() if text in chosen]


def _example(
    row: Mapping[str, Any],
    where: str,
    identity: str,
    prompt_field: str,
    answer_field: str | None,
    template: str | None,
) -> PromptExample:
    for name in (prompt_field, answer_field):
        if name is not None and name not in row:
            raise DataError(f"{where}: there is no field {name!r}; the fields are {_names(row)}")
    prompt = row[prompt_field]
    if isinstance(prompt, str):
        if not prompt:
            raise DataError(f"{where}: field {prompt_field!r} is empty; give it text or remove the row")
        prompt = prompt if template is None else fill_template(template, row)
    else:
        prompt = check_messages(prompt, f"{where}: field {prompt_field!r}")
    answer = None
    if answer_field is not None:
        answer = row[answer_field]
        if isinstance(answer, bool) or not isinstance(answer, str | int | float):
            raise DataError(
                f"{where}: field {answer_field!r} must be text or a number, but is {_short(answer)}"
            )
    metadata = {key: value for key, value in row.items() if key not in (prompt_field, answer_field)}
    return PromptExample(identity, prompt, None if answer is None else str(answer), metadata)


def _names(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names) or "(none)"


def _short(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
