"""The prompts of a run, as written in a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxrl.data.arithmetic import column_sums
from jaxrl.data.prompts import PromptExample, load_jsonl, load_parquet, reasoning_gym_examples, split_prompts
from jaxrl.errors import ConfigError


@dataclass(frozen=True)
class PromptSource:
    """Where prompts come from and which of them are held out.

    Attributes:
      kind: "jsonl", "parquet", "reasoning_gym", or "column_sums" (for a character model).
      path: file of the training prompts (jsonl, parquet).
      heldout_path: file of the held-out prompts; excludes ``heldout``.
      prompt_field: field with the prompt (jsonl, parquet).
      answer_field: field with the gold answer, or None (jsonl, parquet).
      template: prompt to send, with ``{field}`` for a field of the row, ``{question}`` for a procedural task.
      task: name of the procedural task (reasoning_gym).
      params: parameters of the task (reasoning_gym) or of ``column_sums``.
      size: number of prompts to draw (reasoning_gym).
      seed: seed of the procedural task and of the split.
      heldout: number of prompts to hold out.
    """

    kind: Literal["jsonl", "parquet", "reasoning_gym", "column_sums"]
    path: str | None = None
    heldout_path: str | None = None
    prompt_field: str = "prompt"
    answer_field: str | None = "answer"
    template: str | None = None
    task: str | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    size: int = 2000
    seed: int = 0
    heldout: int = 0

    def validate(self) -> None:
        """Raises ConfigError for options that are missing or exclude each other."""
        needed = {"jsonl": "path", "parquet": "path", "reasoning_gym": "task", "column_sums": None}
        if self.kind not in needed:
            raise ConfigError(f"prompts of kind {self.kind!r} are unknown; use one of {', '.join(needed)}")
        name = needed[self.kind]
        if name is not None and getattr(self, name) is None:
            raise ConfigError(f"prompts of kind {self.kind!r} need {name!r}; set it")
        if self.heldout_path is not None and (name != "path" or self.heldout):
            raise ConfigError("heldout_path goes with a file and without heldout; drop one of them")
        if self.kind == "column_sums" and self.template is not None:
            raise ConfigError("column_sums has a fixed prompt; drop the template")


def load_prompts(source: PromptSource) -> tuple[list[PromptExample], list[PromptExample]]:
    """Training and held-out prompts; no prompt text is in both.

    Raises:
      ConfigError: the source contradicts itself.
      DataError: a file is wrong, or too few prompts are left for training.
    """
    source.validate()
    if source.kind in ("jsonl", "parquet"):
        load = load_jsonl if source.kind == "jsonl" else load_parquet
        fields = (source.prompt_field, source.answer_field, source.template)
        examples = load(str(source.path), *fields)
        if source.heldout_path is not None:
            heldout = load(source.heldout_path, *fields)
            texts = {example.text for example in heldout}
            return [example for example in examples if example.text not in texts], heldout
    elif source.kind == "reasoning_gym":
        template = source.template or "{question}"
        examples = reasoning_gym_examples(str(source.task), source.size, source.seed, template, source.params)
    else:
        try:
            examples = column_sums(**source.params)
        except TypeError as error:
            raise ConfigError(f"column_sums refuses its parameters: {error}") from error
    return split_prompts(examples, source.heldout, source.seed)
