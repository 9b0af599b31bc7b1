"""Packing loses nothing, mixes nothing, and never trains a token that has no context."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl.data import bucket_length, pack, pad_rows
from jaxrl.errors import ConfigError, DataError

PAD = 99


def make(lengths, rng=None):
    rng = rng or np.random.default_rng(0)
    return [(rng.integers(0, 50, n).tolist(), rng.integers(0, 2, n).tolist()) for n in lengths]


def check(sequences, rows):
    seen = []
    for row, members in enumerate(rows.sources):
        segments = rows.segment_ids[row]
        used = int((segments > 0).sum())
        assert (segments[:used] > 0).all() and (np.diff(segments[:used]) >= 0).all()
        assert (rows.tokens[row, used:] == PAD).all()
        assert not rows.loss_mask[row, used:].any() and not rows.positions[row, used:].any()
        for segment, index in enumerate(members, start=1):
            ids, mask = sequences[index]
            here = segments == segment
            length = int(here.sum())
            np.testing.assert_array_equal(rows.tokens[row, here], ids[:length])
            np.testing.assert_array_equal(rows.positions[row, here], np.arange(length))
            np.testing.assert_array_equal(rows.loss_mask[row, here], [0, *mask[1:length]])
            seen.append(index)
    assert len(seen) == len(set(seen))
    return sorted(seen)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=40),
    st.integers(12, 20),
    st.sampled_from(["first_fit_decreasing", "sequential"]),
)
def test_packing_is_a_partition(lengths, row_length, method):
    sequences = make(lengths)
    rows = pack(sequences, row_length, PAD, method)
    assert check(sequences, rows) == list(range(len(lengths)))
    assert rows.fill == pytest.approx(sum(lengths) / rows.tokens.size)
    if method == "sequential":
        assert [i for members in rows.sources for i in members] == list(range(len(lengths)))
    else:
        # First fit: no sequence of a later row would have fitted into an earlier one.
        room = [row_length - sum(lengths[i] for i in members) for members in rows.sources]
        for late, members in enumerate(rows.sources):
            assert all(min(lengths[i] for i in members) > free for free in room[:late])


def test_dtypes_and_known_layout():
    rows = pack([([1, 2, 3], [1, 1, 1]), ([4], [1]), ([5, 6], [0, 1])], 4, PAD)
    np.testing.assert_array_equal(rows.tokens, [[1, 2, 3, 4], [5, 6, PAD, PAD]])
    np.testing.assert_array_equal(rows.positions, [[0, 1, 2, 0], [0, 1, 0, 0]])
    np.testing.assert_array_equal(rows.segment_ids, [[1, 1, 1, 2], [1, 1, 0, 0]])
    np.testing.assert_array_equal(rows.loss_mask, [[0, 1, 1, 0], [0, 1, 0, 0]])
    assert rows.tokens.dtype == rows.positions.dtype == rows.segment_ids.dtype == np.int32
    assert rows.loss_mask.dtype == np.float32


def test_long_sequences():
    sequences = make([3, 9, 5])
    with pytest.raises(DataError, match="sequence 1 has 9 tokens, more than a row of 6"):
        pack(sequences, 6, PAD)
    dropped = pack(sequences, 6, PAD, on_long="drop")
    assert check(sequences, dropped) == [0, 2] and dropped.dropped == 1
    cut = pack(sequences, 6, PAD, on_long="truncate")
    assert check(sequences, cut) == [0, 1, 2] and cut.truncated == 1
    with pytest.raises(DataError, match="no sequence is left of 1"):
        pack(make([9]), 6, PAD, on_long="drop")


def test_pad_rows_uses_the_smallest_bucket():
    sequences = make([3, 6, 5])
    rows = pad_rows(sequences, [16, 4, 8], PAD)
    assert rows.tokens.shape == (3, 8) and check(sequences, rows) == [0, 1, 2]
    assert rows.sources == ((0,), (1,), (2,))
    assert [bucket_length(n, [16, 4, 8]) for n in (1, 4, 5, 16)] == [4, 4, 8, 16]
    with pytest.raises(DataError, match="17 tokens exceed the largest bucket, 16"):
        bucket_length(17, [16, 4, 8])
    with pytest.raises(ConfigError, match="no bucket"):
        pad_rows(sequences, [], PAD)


def test_errors():
    for bad in [([], []), ([1], [1, 0])]:
        with pytest.raises(DataError, match="sequence 0"):
            pack([bad], 4, PAD)
    with pytest.raises(ConfigError, match="method 'best'"):
        pack(make([1]), 4, PAD, "best")
    with pytest.raises(ConfigError, match="row length is 0"):
        pack(make([1]), 0, PAD)
    with pytest.raises(ConfigError, match="on_long"):
        pack(make([1]), 4, PAD, on_long="keep")
