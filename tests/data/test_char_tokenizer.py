"""The character tokenizer."""

from __future__ import annotations

import pytest

from jaxrl.data import SUM_ALPHABET, CharTokenizer, column_sums
from jaxrl.errors import DataError


def test_round_trip_and_special_tokens(tmp_path):
    tokenizer = CharTokenizer(SUM_ALPHABET)
    assert tokenizer.vocab_size == len(tokenizer) == 14
    for example in column_sums(1):
        assert (
            tokenizer.decode(tokenizer.encode(example.prompt + example.answer))
            == example.prompt + example.answer
        )
    assert sorted(tokenizer.encode(SUM_ALPHABET)) == list(range(2, 14))
    assert tokenizer.decode([2, 1, 0]) == "0<eos><pad>"
    assert tokenizer.decode([2, 1, 0], skip_special_tokens=True) == "0"
    tokenizer.save(tmp_path / "t.json")
    assert CharTokenizer.load(tmp_path / "t.json").encode("1=") == tokenizer.encode("1=")


def test_errors(tmp_path):
    tokenizer = CharTokenizer("ab")
    with pytest.raises(DataError, match="character 'c' of 'abc'"):
        tokenizer.encode("abc")
    for bad in (-1, 4):
        with pytest.raises(DataError, match=f"token id {bad}"):
            tokenizer.decode([bad])
    for bad in ("", "aba"):
        with pytest.raises(DataError, match="each character once"):
            CharTokenizer(bad)
    with pytest.raises(DataError, match="no readable tokenizer file"):
        CharTokenizer.load(tmp_path / "none.json")
    (tmp_path / "other.json").write_text('{"model": 1}')
    with pytest.raises(DataError, match="holds no character tokenizer"):
        CharTokenizer.load(tmp_path / "other.json")
