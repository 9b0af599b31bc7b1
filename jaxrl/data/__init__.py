"""Prompts, chat templates, packing and resumable streams. Host-side; importing it does not import JAX."""

from jaxrl.data.arithmetic import SUM_ALPHABET, column_sums
from jaxrl.data.char_tokenizer import CharTokenizer, TextTokenizer
from jaxrl.data.chat import CHATML_TEMPLATE, prompt_encoder, render_prompt, render_sft
from jaxrl.data.packing import Rows, bucket_length, pack, pad_rows
from jaxrl.data.pipeline import LengthReport, PromptStream, Stream, encode_prompts
from jaxrl.data.prompts import (
    PromptExample,
    load_jsonl,
    load_parquet,
    reasoning_gym_examples,
    split_prompts,
)
from jaxrl.data.source import PromptSource, load_prompts

__all__ = [
    "CHATML_TEMPLATE",
    "SUM_ALPHABET",
    "CharTokenizer",
    "LengthReport",
    "PromptExample",
    "PromptSource",
    "PromptStream",
    "Rows",
    "Stream",
    "TextTokenizer",
    "bucket_length",
    "column_sums",
    "encode_prompts",
    "load_jsonl",
    "load_parquet",
    "load_prompts",
    "pack",
    "pad_rows",
    "prompt_encoder",
    "reasoning_gym_examples",
    "render_prompt",
    "render_sft",
    "split_prompts",
]
