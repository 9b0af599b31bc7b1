"""Tokenizers from GGUF metadata and from directories."""

from __future__ import annotations

import pytest

from jaxrl.errors import ModelLoadError
from jaxrl.models.tokenizer import check_tokenizer, load_tokenizer, tokenizer_size
from tiny_gguf import vocabulary, write_gguf
from tiny_models import TINY, start

CONFIG = TINY.replace(vocab_size=264, num_layers=1)
TEXTS = ["hello world 1234", "  tabs\t\nand  spaces ", "é漢字🙂", "don't <|start|>x<tool>"]


@pytest.fixture
def make(tmp_path):
    def make(pre="smollm", extra=None):
        return load_tokenizer(
            write_gguf(tmp_path / f"{pre}.gguf", "llama", CONFIG, start(CONFIG)[1], pre=pre, extra=extra)
        )

    return make


@pytest.mark.parametrize("pre", ["smollm", "qwen2", "gpt-2", "llama-bpe"])
def test_text_survives_and_ids_are_those_of_the_file(make, pre):
    tokenizer = make(pre)
    tokens, _, _ = vocabulary()
    assert tokenizer_size(tokenizer) == len(tokens)
    assert tokenizer.convert_tokens_to_ids(tokens) == list(range(len(tokens)))
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 0, 0)
    assert set(tokenizer.all_special_ids) == {0, 1}


def test_merges_and_splits(make):
    def pieces(tokenizer, text):
        return tokenizer.convert_ids_to_tokens(tokenizer.encode(text))

    assert pieces(make("smollm"), "hell w12") == ["he", "ll", "Ġw", "1", "2"]  # digits stand alone
    assert pieces(make("gpt-2"), "hell w12") == ["he", "ll", "Ġw", "12"]
    assert pieces(make("qwen2"), "12<|end|>") == ["1", "2", "<|end|>"]
    assert pieces(make("smollm"), "a<tool>b") == ["a", "<tool>", "b"]


def test_special_tokens_can_be_skipped_but_user_tokens_stay(make):
    tokenizer = make()
    ids = tokenizer.encode("<|start|>he<tool><|end|>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "he<tool>"


def test_chat_template_and_bos(make):
    tokenizer = make()
    chat = [{"role": "user", "content": "he"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<|start|>he<|end|>"
    assert tokenizer.encode("he")[0] != 1
    assert make("qwen2", {"tokenizer.ggml.add_bos_token": True}).encode("he")[0] == 1


def test_directory_round_trip(make, tmp_path):
    tokenizer = make()
    tokenizer.save_pretrained(tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    for text in TEXTS:
        assert again.encode(text) == tokenizer.encode(text)
    assert again.chat_template == tokenizer.chat_template
    assert (again.eos_token_id, again.pad_token_id) == (0, 0)


def test_size_check(make):
    tokenizer = make()
    size = tokenizer_size(tokenizer)
    check_tokenizer(TINY.replace(vocab_size=size), tokenizer)
    check_tokenizer(TINY.replace(vocab_size=size + 100), tokenizer)  # padded table
    with pytest.raises(ModelLoadError, match=f"{size} ids but the model's vocabulary has {size - 1}"):
        check_tokenizer(TINY.replace(vocab_size=size - 1), tokenizer)

    class Stray:
        eos_token_id, pad_token_id, vocab_size = 70, None, 61

    with pytest.raises(ModelLoadError, match="eos_token_id=70"):
        check_tokenizer(TINY, Stray())


def test_what_is_wrong_is_named(make, tmp_path):
    with pytest.raises(ModelLoadError, match="pre-tokenizer 'unheard-of'; supported"):
        make("unheard-of")
    with pytest.raises(ModelLoadError, match="no tokenizer.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="cannot be read"):
        load_tokenizer(tmp_path)
