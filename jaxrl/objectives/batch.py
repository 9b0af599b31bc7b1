"""What a language-model train step sees: tokens and per-token streams. No algorithm's name appears here."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxrl.errors import DataError
from jaxrl.parallel.sharding import Sharding

#: A jax.Array on the devices, a numpy.ndarray on the host.
Array = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PolicyBatch:
    """A pytree of ``[N, S]`` arrays; column t of every stream belongs to ``tokens[:, t]``.

    Rows are filled from the left: prompt, completion, padding. Optional streams are None, which is part of the
    compiled signature: a run uses the same ones in every step.

    Attributes:
      tokens: int32.
      loss_mask: bool; True on tokens that the policy sampled (or, for SFT, should have), EOS included.
      advantages: float32; 0 outside the mask.
      positions: int32 rotary positions of packed rows; None: the column number.
      segment_ids: int32, 1.. per sequence of a packed row, 0 on padding; None: one sequence per row.
      weights: float32 factors of the policy term.
      sampler_logp: float32 log-probabilities that the sampler reported.
      old_logp: float32, of the parameters that sampled, recomputed by the trainer; None: those of this very step.
      ref_logp: float32, of the reference.
    """

    tokens: Array
    loss_mask: Array
    advantages: Array
    positions: Array | None = None
    segment_ids: Array | None = None
    weights: Array | None = None
    sampler_logp: Array | None = None
    old_logp: Array | None = None
    ref_logp: Array | None = None

    @property
    def rows(self) -> int:
        return self.tokens.shape[0]

    def replace(self, **changes: Any) -> PolicyBatch:
        return dataclasses.replace(self, **changes)

    def take(self, rows: np.ndarray) -> PolicyBatch:
        """The batch of these rows (host arrays only)."""
        return jax.tree.map(lambda x: x[rows], self)

    def put(self, sharding: Sharding | None) -> PolicyBatch:
        """The batch on the devices, rows over the batch axes.

        Raises:
          ConfigError: the mesh does not divide the rows.
        """
        if sharding is None:
            return jax.tree.map(jax.numpy.asarray, self)
        sharding.check_batch(self.rows)
        return jax.device_put(self, sharding.batch())


def policy_batch(
    prompts: Sequence[Sequence[int] | np.ndarray],
    completions: Sequence[Sequence[int] | np.ndarray],
    advantages: np.ndarray,
    *,
    columns: int,
    pad_id: int = 0,
    loss_masks: Sequence[Sequence[bool]] | None = None,
    sampler_logps: Sequence[Sequence[float] | np.ndarray] | None = None,
    weights: np.ndarray | None = None,
) -> PolicyBatch:
    """One row per completion, as host arrays.

    Args:
      prompts, completions: token ids of each row. Which tokens count is told by their number, never by their value.
      advantages: ``[N]``, or ``[N, T]`` with T counted from the first completion token.
      columns: S.
      pad_id: what fills the rest of ``tokens``; never attended to by a token of the row.
      loss_masks: per row, False on completion tokens that the policy did not sample (tool output).
      sampler_logps: per row, the sampler's log-probability of each completion token.
      weights: ``[N, T]`` like advantages.

    Raises:
      DataError: a row is longer than ``columns`` (named, with its length).
    """
    n = len(prompts)
    tokens = np.full((n, columns), pad_id, np.int32)
    mask = np.zeros((n, columns), bool)
    streams = {"advantages": np.zeros((n, columns), np.float32)}
    if sampler_logps is not None:
        streams["sampler_logp"] = np.zeros((n, columns), np.float32)
    if weights is not None:
        streams["weights"] = np.zeros((n, columns), np.float32)
    for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        start, end = len(prompt), len(prompt) + len(completion)
        if end > columns:
            raise DataError(
                f"row {i} has {start} prompt + {end - start} completion tokens, more than the {columns} columns of a "
                "train batch; lower max_tokens or raise the columns"
            )
        tokens[i, :start], tokens[i, start:end] = prompt, completion
        mask[i, start:end] = True if loss_masks is None else np.asarray(loss_masks[i], bool)
        streams["advantages"][i, start:end] = _row(advantages, i, end - start)
        if sampler_logps is not None:
            streams["sampler_logp"][i, start:end] = sampler_logps[i]
        if weights is not None:
            streams["weights"][i, start:end] = _row(weights, i, end - start)
    return PolicyBatch(tokens, mask, **{name: np.where(mask, x, 0) for name, x in streams.items()})


def _row(values: np.ndarray, i: int, length: int) -> np.ndarray:
    values = np.asarray(values)
    return values[i] if values.ndim == 1 else values[i, :length]
