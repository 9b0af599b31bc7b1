"""Sizes, tokenizer and requests that the rollout tests share."""

import numpy as np

from jaxrl.models.config import ModelConfig
from jaxrl.rollout import EngineConfig, Request, SamplingParams

TINY = ModelConfig(
    vocab_size=97,
    d_model=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    d_ff=64,
    max_position=256,
)
ENGINE = EngineConfig(
    slots=4,
    max_prompt_len=16,
    max_len=48,
    prefill_batch=2,
    cache_buckets=(48,),
    decode_chunk=5,
    eos_token_ids=(),
)


class Characters:
    """Token i is one printable character; enough of a tokenizer for stop strings."""

    eos_token_id = 5

    def decode(self, ids):
        return "".join(chr(33 + int(i)) for i in ids)


def make_requests(prompts=3, samples=3, max_tokens=20, seed=0, **settings):
    """``prompts`` random prompts of 3 to 16 tokens, with ``samples`` requests each."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(3, 17, prompts)
    ids = [rng.integers(0, TINY.vocab_size, n) for n in lengths]
    chosen = SamplingParams(max_tokens=max_tokens, **settings)
    return [Request(ids[i], i, j, chosen) for i in range(prompts) for j in range(samples)]
