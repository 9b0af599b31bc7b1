"""Rewards of the main process, number reading, and the way names are resolved."""

from __future__ import annotations

from decimal import Decimal

import numpy as np
import pytest

from jaxrl.errors import ConfigError, RewardError
from jaxrl.rewards import REWARDS, RewardInput, RewardSet, RewardSpec, register
from jaxrl.rewards.extract import EXTRACTORS, extract, numbers
from jaxrl.rewards.registry import bind


def score(name: str, text: str, answer: str | None = None, ids=(), finish_reason="eos", **kwargs):
    return bind(name, kwargs)([RewardInput("p", text, ids, answer, finish_reason=finish_reason)])[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("7-3", ["7", "3"]),
        ("x = -3", ["-3"]),
        ("\u22123", ["-3"]),
        ("(-3) and (4)-5", ["-3", "4", "5"]),
        ("1,234.50 or 1,2,3", ["1234.50", "1", "2", "3"]),
        ("12,3456", ["12", "3456"]),
        ("$42.", ["42"]),
        (".5 + 2.", ["0.5", "2"]),
        ("x2 v1.2.3 3x", ["3"]),
        ("1.5e3", ["1500"]),
        ("00012", ["12"]),
        ("123456789012345678901", ["123456789012345678901"]),
        ("none", []),
    ],
)
def test_numbers(text, expected):
    assert numbers(text) == [Decimal(one) for one in expected]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("whole", "a 1\n\\boxed{\\frac{1}{2}} <answer> 7 </answer>\n\n b 3"),
        ("answer_tag", "7"),
        ("boxed", r"\frac{1}{2}"),
        ("first_line", "a 1"),
        ("last_line", "b 3"),
        ("last_number", "3"),
    ],
)
def test_extract(how, expected):
    assert extract("a 1\n\\boxed{\\frac{1}{2}} <answer> 7 </answer>\n\n b 3\n", how) == expected


def test_extract_finds_nothing():
    assert [extract("", how) for how in EXTRACTORS] == ["", None, None, None, None, None]
    assert extract(r"\boxed{1", "boxed") is None
    assert extract("</answer> 3 <answer>", "answer_tag") is None
    with pytest.raises(ConfigError, match="answer_tag"):
        extract("", "tag")


def test_exact_match():
    assert score("exact_match", " a  b\n", "a b") == 1
    assert score("exact_match", "A b", "a b") == 0
    assert score("exact_match", "A b", "a b", ignore_case=True) == 1
    assert score("exact_match", "so <answer>x</answer>.", "x", extract_from="answer_tag") == 1
    assert score("exact_match", "no tag", "no tag", extract_from="answer_tag") == 0


@pytest.mark.parametrize(
    ("which", "text", "expected"),
    [
        ("last", "3 + 4 = 7", 1),
        ("first", "3 + 4 = 7", 0),
        ("first", "7, since 3 + 4 = 7", 1),
        ("single", "it is 7.0", 1),
        ("single", "3 + 4 = 7", 0),
        ("only", " 7 ", 1),
        ("only", "7.", 1),
        ("only", "it is 7", 0),
        ("only", "nan", 0),
        ("only", "Infinity", 0),
        ("last", "no idea", 0),
    ],
)
def test_number_match(which, text, expected):
    assert score("number_match", text, "7", which=which) == expected


def test_number_match_tolerance_is_exact_decimal():
    assert score("number_match", "0.3", "0.2", tolerance=0.1) == 1
    assert score("number_match", "0.31", "0.2", tolerance=0.1) == 0
    assert score("number_match", "1,000", "1000.0") == 1


def test_gsm8k():
    gold = "She sells 16 - 3 = 13.\n#### 1,013"
    assert score("gsm8k", "thus\n#### 1013 eggs", gold) == 1
    assert score("gsm8k", r"1 2 \boxed{1,013} 5", gold) == 1
    assert score("gsm8k", "it is 1013.", gold) == 1
    assert score("gsm8k", "it is 1013.", gold, mode="strict") == 0
    assert score("gsm8k", "#### 1013", gold, mode="strict") == 1
    assert score("gsm8k", "1013 #### nothing", gold) == 0


def test_regex_and_tags():
    assert score("regex_format", "a\nb", pattern="a.b") == 1
    assert score("regex_format", "a\nb", pattern="a.b", dot_matches_newline=False) == 0
    assert score("regex_format", "xab", pattern="ab") == 0
    good = "<think>\nhm\n</think>\n<answer>3</answer>\n"
    assert score("tag_format", good) == 1
    assert score("tag_format", good + "more") == 0
    assert score("tag_format", good + good) == 0
    assert score("tag_format", "<think>a</think><answer> </answer>") == 0
    assert score("tag_format", "<think>a<answer></think>3</answer>") == 0
    assert score("tag_format", good.removeprefix("<think>"), opened=True) == 1
    assert score("tag_format", good, opened=True) == 0
    assert score("tag_format", "<a>1</a>", tags=("a",)) == 1


def test_length_is_the_soft_overlong_penalty():
    # DAPO equation 13 with a limit of 10 and a buffer of 4.
    values = [score("length", "", ids=range(n), max_length=10, buffer=4) for n in (0, 6, 7, 8, 10, 50)]
    assert values == [0, 0, -0.25, -0.5, -1, -1]
    assert score("length", "abc", ids=[1, 2]) == 2
    assert score("length", "abc", ids=[1, 2], unit="characters") == 3


def test_finished():
    assert [score("finished", "", finish_reason=r) for r in ("eos", "stop", "length", "abort")] == [
        1,
        1,
        0,
        None,
    ]


@pytest.mark.parametrize(
    ("name", "kwargs", "words"),
    [
        ("exact_mach", {}, "did you mean 'exact_match'"),
        ("number_match", {"wich": "last"}, "no argument 'wich'; did you mean 'which'"),
        ("number_match", {"which": "middle"}, "which='middle'"),
        ("number_match", {"tolerance": -1}, "tolerance=-1"),
        ("regex_format", {}, "'regex_format' needs 'pattern'"),
        ("regex_format", {"pattern": "("}, "no regular expression"),
        ("length", {"max_length": 3}, "both or neither"),
        ("length", {"max_length": 3, "buffer": 4}, "buffer=4"),
        ("tag_format", {"tags": ()}, "at least one tag"),
        ("gsm8k", {"mode": "x"}, "mode='x'"),
        ("no_such_module_of_mine:f", {}, "no module 'no_such_module_of_mine'"),
        ("sample_rewards:obediant", {}, "did you mean 'obedient'"),
        ("sample_rewards:not_callable", {}, "not a function"),
        ("sample_rewards:obedient", {"scal": 2.0}, "did you mean 'scale'"),
    ],
)
def test_bad_name_or_argument_is_named(name, kwargs, words):
    with pytest.raises(ConfigError, match=words):
        RewardSet([RewardSpec(name, kwargs=kwargs)])


def test_module_that_fails_to_import(tmp_path, monkeypatch):
    (tmp_path / "broken_reward.py").write_text("import json.nothing_here\n")
    (tmp_path / "raising_reward.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        RewardError, match=r"importing 'broken_reward' failed: No module named 'json.nothing_here'"
    ):
        RewardSet([RewardSpec("broken_reward:f")])
    with pytest.raises(RewardError, match="ZeroDivisionError"):
        RewardSet([RewardSpec("raising_reward:f")])


def test_spec_values_are_checked():
    for bad in ({"weight": float("nan")}, {"on_error": "ignore"}, {"time_limit": 0}, {"max_failed": 2}):
        with pytest.raises(ConfigError, match="'length'"):
            RewardSpec("length", **bad)
    with pytest.raises(ConfigError, match="time_limit"):
        RewardSet([RewardSpec("length", time_limit=1.0)])
    with pytest.raises(ConfigError, match="different labels"):
        RewardSet([RewardSpec("length"), RewardSpec("length")])
    with pytest.raises(ConfigError, match="no reward"):
        RewardSet([])


def test_result_table_and_metrics():
    specs = [
        RewardSpec("sample_rewards:obedient", weight=2.0, kwargs={"scale": 10.0}),
        RewardSpec("length", label="chars", weight=0.0, kwargs={"unit": "characters"}),
    ]
    result = RewardSet(specs).score([RewardInput("p", text) for text in ("1", "decline", "3")])
    np.testing.assert_array_equal(result.R, [[10, 1], [np.nan, 7], [30, 1]])
    assert result.R.dtype == np.float64
    assert result.names == ("obedient", "chars") and result.weights == (2.0, 0.0)
    assert result.metrics == {
        "reward/obedient/mean": 20,
        "reward/obedient/std": 10,
        "reward/obedient/declined": 1,
        "reward/obedient/errors": 0,
        "reward/obedient/timeouts": 0,
        "reward/chars/mean": 3,
        "reward/chars/std": pytest.approx(np.std([1, 7, 1])),
        "reward/chars/declined": 0,
        "reward/chars/errors": 0,
        "reward/chars/timeouts": 0,
    }
    assert RewardSet(specs).score([]).R.shape == (0, 2)


def test_no_mean_without_a_scored_row():
    result = RewardSet([RewardSpec("sample_rewards:obedient")]).score([RewardInput("p", "decline")])
    assert "reward/obedient/mean" not in result.metrics and result.metrics["reward/obedient/declined"] == 1


def test_raising_reward_names_the_row_or_is_counted():
    rows = [RewardInput("p", text) for text in ("1", "raise", "3")]
    with pytest.raises(RewardError, match="'obedient' failed on row 1: ValueError: I was told to"):
        RewardSet([RewardSpec("sample_rewards:obedient")]).score(rows)
    result = RewardSet([RewardSpec("sample_rewards:obedient", on_error="decline")]).score(rows)
    np.testing.assert_array_equal(result.R[:, 0], [1, np.nan, 3])
    assert result.metrics["reward/obedient/errors"] == 1
    with pytest.raises(RewardError, match="on the batch of 3 rows"):
        RewardSet([RewardSpec("sample_rewards:only_batches_of_one")]).score(rows)
    with pytest.raises(RewardError, match="2 values for 3 rows"):
        RewardSet([RewardSpec("sample_rewards:too_few")]).score(rows)


def test_missing_gold_answer_says_so():
    with pytest.raises(RewardError, match="row 0: ValueError: the row has no gold answer"):
        RewardSet([RewardSpec("number_match")]).score([RewardInput("p", "1")])
    with pytest.raises(RewardError, match="holds 2 numbers"):
        RewardSet([RewardSpec("number_match")]).score([RewardInput("p", "1", answer="1 or 2")])


def test_own_registered_reward(monkeypatch):
    monkeypatch.setattr("jaxrl.rewards.registry.REWARDS", REWARDS.copy())

    @register("constant")
    def constant(*, value: float):
        return lambda inputs: [value for _ in inputs]

    assert (
        RewardSet([RewardSpec("constant", kwargs={"value": 2})]).score([RewardInput("p", "c")]).R[0, 0] == 2
    )
    with pytest.raises(ConfigError, match="registered already"):
        register("constant")(constant)
    with pytest.raises(ConfigError, match="import path"):
        RewardSet([RewardSpec("constant", isolate=True, kwargs={"value": 2})])
