"""Prompt files with bad lines, procedural prompts, disjoint splits."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet
import pytest

from jaxrl.data import (
    PromptExample,
    PromptSource,
    column_sums,
    load_jsonl,
    load_parquet,
    load_prompts,
    reasoning_gym_examples,
    split_prompts,
)
from jaxrl.errors import ConfigError, DataError

MESSAGES = [{"role": "user", "content": "hi"}]
GOOD = json.dumps({"prompt": "1+1?", "answer": "2"})


def write(tmp_path, *lines: str | bytes):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
    return path


def test_jsonl(tmp_path):
    path = write(
        tmp_path,
        "\ufeff" + GOOD,
        "",
        json.dumps({"prompt": MESSAGES, "answer": 2.5, "level": 3}),
    )
    one, two = load_jsonl(path)
    assert (one.id, one.prompt, one.answer, one.metadata) == ("p.jsonl:1", "1+1?", "2", {})
    assert (two.id, two.prompt, two.answer, two.metadata) == (
        "p.jsonl:3",
        tuple(MESSAGES),
        "2.5",
        {"level": 3},
    )
    assert two.text == "user: hi"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt": "x",', "no JSON"),
        ("[1]", "must be a JSON object, but this one is list"),
        ('{"answer": "1"}', "no field 'prompt'; the fields are 'answer'"),
        ('{"prompt": "x"}', "no field 'answer'"),
        ('{"prompt": "", "answer": "1"}', "'prompt' is empty"),
        (
            '{"prompt": 3, "answer": "1"}',
            "'prompt' must be text or a non-empty list of messages, but is int 3",
        ),
        ('{"prompt": [], "answer": "1"}', "non-empty list"),
        ('{"prompt": ["x"], "answer": "1"}', "message 0 must be a mapping"),
        ('{"prompt": [{"role": "user"}], "answer": "1"}', "text under 'content'"),
        ('{"prompt": "x", "answer": null}', "'answer' must be text or a number, but is NoneType"),
        ('{"prompt": "x", "answer": true}', "but is bool"),
        (b'{"prompt": "\xff", "answer": "1"}', "not UTF-8"),
    ],
)
def test_bad_line_is_named(tmp_path, line, words):
    path = write(tmp_path, GOOD, line)
    with pytest.raises(DataError, match=words) as caught:
        load_jsonl(path)
    assert str(caught.value).startswith(f"{path}:2: ")


def test_files_without_rows(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        load_jsonl(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="holds no row"):
        load_jsonl(write(tmp_path, ""))
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(DataError, match="no readable Parquet"):
        load_parquet(tmp_path / "bad.parquet")
    with pytest.raises(DataError, match="no readable Parquet"):
        load_parquet(tmp_path / "none.parquet")


def test_template_and_fields(tmp_path):
    path = write(tmp_path, json.dumps({"q": "1+1", "gold": "2"}))
    (example,) = load_jsonl(path, "q", "gold", template=r"{q}? Use \boxed{answer}.")
    assert example.prompt == r"1+1? Use \boxed{answer}."
    with pytest.raises(ConfigError, match=r"uses no field of the data; write one of \{q\}, \{gold\}"):
        load_jsonl(path, "q", "gold", template="{question}")
    (example,) = load_jsonl(path, "q", None)
    assert example.answer is None and example.metadata == {"gold": "2"}


def test_parquet(tmp_path):
    path = tmp_path / "p.parquet"
    pa.parquet.write_table(
        pa.table({"prompt": [MESSAGES, MESSAGES], "answer": ["1", None], "n": [1, 2]}), path
    )
    with pytest.raises(DataError, match="row 1: field 'answer'"):
        load_parquet(path)
    one, two = load_parquet(path, answer_field=None)
    assert one.prompt == tuple(MESSAGES) and two.metadata == {"answer": None, "n": 2}
    with pytest.raises(DataError, match="no field 'question'"):
        load_parquet(path, "question")


def test_reasoning_gym_is_deterministic_and_short():
    settings = {
        "task": "chain_sum",
        "size": 40,
        "template": "What is {expression}? Reply with only the number.",
        "params": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    }
    examples = reasoning_gym_examples(seed=3, **settings)
    assert examples == reasoning_gym_examples(seed=3, **settings)
    assert examples != reasoning_gym_examples(seed=4, **settings)
    assert len({e.text for e in examples}) == len(examples)
    for example in examples:
        expression = example.prompt.removeprefix("What is ").split("?")[0]
        assert str(eval(expression)) == example.answer
        assert example.metadata["entry"]["answer"] == example.answer


@pytest.mark.parametrize(
    "task", ["countdown", "knights_knaves", "spell_backward", "letter_counting", "basic_arithmetic"]
)
def test_reasoning_gym_tasks(task):
    examples = reasoning_gym_examples(task, size=3, seed=0)
    assert len(examples) == 3 and all(e.answer and e.metadata["task"] == task for e in examples)


def test_reasoning_gym_errors():
    with pytest.raises(ConfigError, match="closest: chain_sum"):
        reasoning_gym_examples("chain_sums", 1, 0)
    with pytest.raises(ConfigError, match="no parameter 'digits'; it takes allow_negation, max_digits"):
        reasoning_gym_examples("chain_sum", 1, 0, params={"digits": 1})
    with pytest.raises(ConfigError, match="refuses its parameters"):
        reasoning_gym_examples("chain_sum", 1, 0, params={"min_terms": 5, "max_terms": 2})
    with pytest.raises(ConfigError, match="uses no field"):
        reasoning_gym_examples("chain_sum", 1, 0, template="{x}")
    with pytest.raises(ConfigError, match="0 prompts"):
        reasoning_gym_examples("chain_sum", 0, 0)


def test_split_is_disjoint_by_text_and_ignores_order():
    examples = [PromptExample(f"e:{i}", f"q{i % 50}") for i in range(120)]
    train, held = split_prompts(examples, 10, seed=1)
    assert not {e.text for e in train} & {e.text for e in held}
    assert len(held) == len({e.text for e in held}) == 10
    assert {e.text for e in train} | {e.text for e in held} == {e.text for e in examples}
    assert len(train) == sum(e.text not in {h.text for h in held} for e in examples)
    again = split_prompts(examples[::-1], 10, seed=1)[1]
    assert {e.text for e in again} == {e.text for e in held}
    assert {e.text for e in split_prompts(examples, 10, seed=2)[1]} != {e.text for e in held}
    assert split_prompts(examples, 0) == (examples, [])
    with pytest.raises(DataError, match="50 prompts are to be held out of 50"):
        split_prompts(examples, 50)


def test_column_sums():
    examples = column_sums(2)
    assert len(examples) == 100**2
    by_text = {e.prompt: e.answer for e in examples}
    assert by_text["07+45="] == "250" and by_text["99+99="] == "891"
    assert {e.prompt: e.answer for e in column_sums(1, lowest_first=False)}["9+9="] == "18"
    with pytest.raises(ConfigError, match="num_digits"):
        column_sums(4)


def test_source_from_files(tmp_path):
    train = write(tmp_path, *(json.dumps({"prompt": f"q{i}", "answer": i}) for i in range(6)))
    held = tmp_path / "held.jsonl"
    held.write_text(json.dumps({"prompt": "q2", "answer": "2"}))
    left, out = load_prompts(PromptSource("jsonl", path=str(train), heldout_path=str(held)))
    assert [e.prompt for e in left] == ["q0", "q1", "q3", "q4", "q5"] and [e.prompt for e in out] == ["q2"]
    left, out = load_prompts(PromptSource("jsonl", path=str(train), heldout=2))
    assert len(left) == 4 and len(out) == 2


def test_source_from_tasks():
    left, out = load_prompts(PromptSource("reasoning_gym", task="chain_sum", size=50, heldout=10))
    assert len(left) == 40 and len(out) == 10
    left, out = load_prompts(PromptSource("column_sums", params={"num_digits": 1}, heldout=20))
    assert len(left) == 80 and len(out) == 20


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kind": "csv"}, "kind 'csv'"),
        ({"kind": "jsonl"}, "need 'path'"),
        ({"kind": "reasoning_gym"}, "need 'task'"),
        ({"kind": "jsonl", "path": "a", "heldout_path": "b", "heldout": 3}, "heldout_path"),
        ({"kind": "column_sums", "heldout_path": "b"}, "heldout_path"),
        ({"kind": "column_sums", "template": "{x}"}, "fixed prompt"),
        ({"kind": "column_sums", "params": {"digits": 1}}, "digits"),
    ],
)
def test_source_errors(settings, words):
    with pytest.raises(ConfigError, match=words):
        load_prompts(PromptSource(**settings))
