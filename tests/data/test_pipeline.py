"""Streams resume from one integer; prompts that do not fit are reported."""

from __future__ import annotations

import pytest

from jaxrl.data import CharTokenizer, PromptExample, PromptStream, Stream, encode_prompts, prompt_encoder
from jaxrl.errors import ConfigError, DataError

EXAMPLES = [PromptExample(f"e:{i}", f"q{i}") for i in range(7)]


def test_resume_gives_the_same_items_for_any_batch_size():
    whole = PromptStream(EXAMPLES, seed=5).batch(0, 30)
    for cut in (1, 6, 7, 11):
        again = PromptStream(EXAMPLES, seed=5)
        assert again.batch(0, cut) + again.batch(cut, 30 - cut) == whole
    assert PromptStream(EXAMPLES, seed=6).batch(0, 30) != whole


def test_each_epoch_is_a_new_permutation():
    stream = PromptStream(EXAMPLES, seed=0)
    epochs = [stream.batch(7 * e, 7) for e in range(4)]
    for items in epochs:
        assert sorted(e.id for e in items) == sorted(e.id for e in EXAMPLES)
    assert len({tuple(e.id for e in items) for items in epochs}) > 1
    assert [stream.epoch(p) for p in (0, 6, 7, 20)] == [0, 0, 1, 2] and len(stream) == 7


def test_unshuffled_stream_keeps_order():
    assert Stream([1, 2, 3], shuffle=False).batch(2, 5) == [3, 1, 2, 3, 1]


@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_processes_share_the_global_batch(count):
    stream = PromptStream(EXAMPLES, seed=1)
    shares = [stream.batch(9, 6, index, count) for index in range(count)]
    assert [e for share in shares for e in share] == stream.batch(9, 6)


def test_stream_errors():
    stream = PromptStream(EXAMPLES)
    with pytest.raises(DataError, match="empty"):
        PromptStream([])
    with pytest.raises(ConfigError, match="6 prompts cannot be shared evenly by 4"):
        stream.batch(0, 6, 0, 4)
    for bad in [(-1, 1), (0, 0), (0, 2, 2, 2)]:
        with pytest.raises(ConfigError, match="does not exist"):
            stream.batch(*bad)


def test_length_filter_reports():
    encode = prompt_encoder(CharTokenizer("ab"))
    examples = [PromptExample("e:0", "ab"), PromptExample("e:1", "a" * 9), PromptExample("e:2", "a" * 4)]
    kept, report = encode_prompts(examples, encode, 4)
    assert [e.prompt_ids for e in kept] == [(2, 3), (2, 2, 2, 2)]
    assert (report.kept, report.dropped, report.longest, report.longest_id) == (2, 1, 9, "e:1")
    assert str(report) == "2 prompts kept, 1 dropped for having more than 4 tokens; the longest is e:1 with 9"
    with pytest.raises(DataError, match="prompt e:1 has 9 tokens, more than the 4"):
        encode_prompts(examples, encode, 4, on_long="error")
    with pytest.raises(DataError, match="no prompt is left: 0 prompts kept, 3 dropped"):
        encode_prompts(examples, encode, 1)
    with pytest.raises(DataError, match="prompt e:3 has no token"):
        encode_prompts([PromptExample("e:3", "")], encode, 4)
    with pytest.raises(ConfigError, match="on_long"):
        encode_prompts(examples, encode, 4, on_long="cut")
