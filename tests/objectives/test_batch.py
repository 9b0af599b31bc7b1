"""Rows of a batch: masks come from counts, never from token values."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from jaxrl.errors import ConfigError, DataError
from jaxrl.objectives import PolicyBatch, policy_batch
from jaxrl.parallel.sharding import Sharding
from tiny_systems import mesh_of

PAD = EOS = 1
PROMPTS = [[5, PAD, 6], [EOS]]
COMPLETIONS = [[PAD, 7, EOS], [8, PAD]]


def make(**changes) -> PolicyBatch:
    options = dict(advantages=np.array([2.0, -1.0]), columns=7, pad_id=PAD) | changes
    return policy_batch(PROMPTS, COMPLETIONS, options.pop("advantages"), **options)


def test_layout_with_pad_equal_to_eos():
    batch = make(sampler_logps=[[-1, -2, -3], [-4, -5]])
    np.testing.assert_array_equal(batch.tokens, [[5, 1, 6, 1, 7, 1, 1], [1, 8, 1, 1, 1, 1, 1]])
    np.testing.assert_array_equal(batch.loss_mask, [[0, 0, 0, 1, 1, 1, 0], [0, 1, 1, 0, 0, 0, 0]])
    np.testing.assert_array_equal(batch.advantages, [[0, 0, 0, 2, 2, 2, 0], [0, -1, -1, 0, 0, 0, 0]])
    np.testing.assert_array_equal(batch.sampler_logp, [[0, 0, 0, -1, -2, -3, 0], [0, -4, -5, 0, 0, 0, 0]])
    assert batch.rows == 2 and batch.weights is None and batch.old_logp is None


def test_token_streams_count_from_the_first_completion_token_and_vanish_outside_the_mask():
    advantages = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    batch = make(
        advantages=advantages, weights=advantages / 2, loss_masks=[[True, False, True], [False, True]]
    )
    np.testing.assert_array_equal(batch.advantages, [[0, 0, 0, 1, 0, 3, 0], [0, 0, 5, 0, 0, 0, 0]])
    np.testing.assert_array_equal(batch.weights, batch.advantages / 2)


def test_a_row_that_is_too_long_is_named():
    with pytest.raises(
        DataError, match="row 0 has 3 prompt . 3 completion tokens, more than the 5 columns.*max_tokens"
    ):
        make(columns=5)


def test_put_and_take_keep_values(batch):
    placed = batch.put(Sharding(mesh_of(2, 2)))
    assert len(placed.tokens.sharding.device_set) == 4
    for name in (f.name for f in dataclasses.fields(batch)):
        a, b = getattr(batch, name), getattr(placed, name)
        assert (a is None) == (b is None)
        if a is not None:
            np.testing.assert_array_equal(a, b)
            assert b.dtype == a.dtype
    rows = np.array([3, 0])
    np.testing.assert_array_equal(batch.take(rows).tokens, batch.tokens[rows])
    assert isinstance(batch.put(None).tokens, jax.Array)


def test_a_mesh_that_does_not_divide_the_rows_is_refused(batch):
    with pytest.raises(
        ConfigError, match="batch of 6 rows cannot be split over mesh axes .*use a multiple of 4"
    ):
        batch.take(np.arange(6)).put(Sharding(mesh_of(2, 2)))
