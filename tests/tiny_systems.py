"""Tiny configurations of the language-model systems, a dense reward, and crafted completions, shared by tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl.data.prompts import PromptExample
from jaxrl.parallel.mesh import MeshConfig, make_mesh
from jaxrl.rewards.base import RewardInput, RewardResult
from jaxrl.rollout.types import Completion
from jaxrl.runtime.config import from_config_dict
from jaxrl.systems import grpo, sft
from jaxrl.systems.grpo import Scored

ALPHABET = "0123456789+="
ARCHITECTURE = dict(
    vocab_size=14,  # twelve characters, padding, EOS
    d_model=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    d_ff=32,
    max_position=32,
    tie_embeddings=False,
    scan_layers=False,
)
GRPO: dict[str, Any] = dict(
    model=dict(architecture=ARCHITECTURE, tokenizer=f"chars:{ALPHABET}"),
    data=dict(kind="column_sums", params=dict(num_digits=1), heldout=10),
    prompt=dict(max_prompt_len=6),
    rewards=(dict(name="tiny_systems:low_digits"),),
    rollout=dict(prompts=4, group_size=4, max_tokens=4, slots=8),
    optimizer=dict(name="sgd", b1=0.0, learning_rate=0.5, clip_norm=None),
    eval=dict(prompts=0),
)
SFT: dict[str, Any] = dict(
    model=GRPO["model"],
    data=GRPO["data"],
    row_length=20,
    rows=4,
    optimizer=dict(name="adam", learning_rate=1e-2),
)


def low_digits(rows: Sequence[RewardInput]) -> list[float]:
    """Share of completion tokens that are one of the digits 0 to 4 (ids 2 to 6); a dense, easily learnt reward."""
    return [float(np.mean([2 <= i <= 6 for i in row.completion_ids])) for row in rows]


def settings(base: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """A configuration with some settings changed; ``rollout__prompts=2`` sets ``rollout.prompts``."""
    result = {k: dict(v) if isinstance(v, Mapping) else v for k, v in base.items()}
    for path, value in changes.items():
        node = result
        *parents, name = path.split("__")
        for parent in parents:
            node[parent] = dict(node.get(parent, {}))
            node = node[parent]
        node[name] = value
    return result


def grpo_config(**changes: Any) -> grpo.Config:
    return from_config_dict(grpo.Config, settings(GRPO, **changes))


def sft_config(**changes: Any) -> sft.Config:
    return from_config_dict(sft.Config, settings(SFT, **changes))


def make_grpo(mesh: jax.sharding.Mesh | None = None, **changes: Any) -> grpo.Grpo:
    return grpo.build(grpo_config(**changes), mesh)


def make_sft(mesh: jax.sharding.Mesh | None = None, **changes: Any) -> sft.Sft:
    return sft.build(sft_config(**changes), mesh)


def mesh_of(data: int = 1, fsdp: int = 1, tensor: int = 1) -> jax.sharding.Mesh:
    """A mesh over the first simulated devices."""
    return make_mesh(MeshConfig(data, fsdp, tensor), jax.devices()[: data * fsdp * tensor])


def completion(
    ids: Sequence[int], finish_reason: str = "length", logprobs: Sequence[float] | None = None
) -> Completion:
    """A completion as the engine returns it; log-probabilities -1 unless given."""
    logp = np.full(len(ids), -1.0, np.float32) if logprobs is None else np.asarray(logprobs, np.float32)
    return Completion(0, 0, 0, np.asarray(ids, np.int32), logp, logp, finish_reason)


def scored(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Completion],
    rewards: Sequence[float],
    group_size: int,
) -> Scored:
    """Rows as ``Grpo`` has them after scoring, groups in order."""
    examples = [PromptExample("", "", None, prompt_ids=tuple(p)) for p in prompts]
    values = np.asarray(rewards, np.float64)
    groups = np.arange(len(values)) // group_size
    return Scored(examples, list(completions), groups, values[:, None], values)


def leaves(tree: Any) -> dict[str, np.ndarray]:
    """Arrays of a tree by path, on the host; keys as their data."""
    found = {}
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        found[jax.tree_util.keystr(path, simple=True, separator="/")] = np.asarray(x)
    return found


class FixedRewards:
    """Stands for a ``RewardSet``: each ``collect`` returns the next of a list of score lists (nan: no score)."""

    names, weights = ("fixed",), (1.0,)

    def __init__(self, *batches):
        self.batches = list(batches)

    def submit(self, row):
        return row

    def collect(self, pending):
        values = np.asarray(self.batches.pop(0), np.float64)[:, None]
        assert len(values) == len(pending)
        return RewardResult(values, self.names, self.weights, {})

    def close(self):
        pass


def fresh(system, seed=0, scale=3.0):
    """A first state whose policy is far from uniform."""
    state = system.init(jax.random.key(seed))
    train = state.device["train"]
    params = jax.tree.map(lambda x: scale * x if x.ndim == 2 else x, train.params)
    reference = jax.tree.map(lambda x: x.copy(), params) if state.device["reference"] else {}
    return type(state)({"train": train.replace(params=params), "reference": reference}, state.host)


def copied(state):
    """The same state in buffers of its own; a step gives those of its argument away."""
    return type(state)(jax.tree.map(lambda x: x.copy(), state.device), dict(state.host))
