"""Configuration: conversion, refusals that name the setting, documentation rows."""

from __future__ import annotations

import dataclasses
from typing import Literal

import ml_collections
import numpy as np
import pytest

from jaxrl.errors import ConfigError
from jaxrl.runtime.config import describe, field, flatten, from_config_dict, load_json, save_json, to_dict
from jaxrl.runtime.run_config import RunConfig


@dataclasses.dataclass(frozen=True)
class Inner:
    """Inner settings.

    Attributes:
      rate: step size,
        per step.
      kind: which one.
    """

    rate: float = 1e-3
    kind: Literal["a", "b", 3] = "a"

    def validate(self) -> None:
        if self.rate < 0:
            raise ConfigError(f"rate is {self.rate}; give a value >= 0")


@dataclasses.dataclass(frozen=True)
class Outer:
    steps: int = field(doc="number of steps")
    inner: Inner = field(Inner(kind="b"), "inner settings")
    maybe: Inner | None = field(None, "optional group")
    names: tuple[str, ...] = field((), "names")
    pair: tuple[int, float] = field((1, 2.0), "a pair")
    table: dict[str, float] = field({}, "weights by name")
    pairs: tuple[tuple[str, float], ...] = field((), "pairs")
    limit: int | float | None = field(None, "a limit")
    flag: bool = field(False, "a flag")


def test_nested_conversion():
    given = ml_collections.ConfigDict(
        {
            "steps": np.int64(5),
            "inner": {"rate": 1, "kind": 3},
            "maybe": {"kind": "b"},
            "names": ["x", "y"],
            "pair": (3, 4),
            "table": {"a": 1},
            "pairs": {"regex": 2},
            "limit": 3,
        }
    )
    config = from_config_dict(Outer, given)
    expected = Outer(
        5, Inner(1.0, 3), Inner(kind="b"), ("x", "y"), (3, 4.0), {"a": 1.0}, (("regex", 2.0),), 3
    )
    assert config == expected
    assert type(config.steps) is int and type(config.inner.rate) is float and type(config.limit) is int


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"steps": 1, "stepz": 2}, r"config\.stepz is not a setting of Outer; did you mean 'steps'\?"),
        (
            {"steps": 1, "inner": {"rte": 1.0}},
            r"config\.inner\.rte is not a setting of Inner; did you mean 'rate'\?",
        ),
        (
            {"steps": 1, "maybe": {"qqq": 1.0}},
            r"config\.maybe\.qqq is not a setting of Inner; known names: kind, rate",
        ),
        ({}, r"config\.steps must be set"),
        ({"steps": "5"}, r"config\.steps is '5' \(str\); give an int"),
        ({"steps": 5.0}, r"config\.steps is 5\.0 \(float\); give an int"),
        ({"steps": True}, r"config\.steps is True \(bool\)"),
        ({"steps": 1, "flag": 1}, r"config\.flag is 1 \(int\); give a bool"),
        ({"steps": 1, "inner": {"rate": "1e-3"}}, r"config\.inner\.rate is '1e-3' \(str\); give a float"),
        (
            {"steps": 1, "inner": {"kind": "c"}},
            r"config\.inner\.kind is 'c' \(str\); use one of 'a' \| 'b' \| 3",
        ),
        ({"steps": 1, "inner": 3}, r"config\.inner is 3 \(int\); give a group of settings \(Inner\)"),
        ({"steps": 1, "names": "xy"}, r"config\.names is 'xy' \(str\); give a tuple\[str, \.\.\.\]"),
        ({"steps": 1, "names": ["x", 1]}, r"config\.names\[1\] is 1 \(int\); give a str"),
        ({"steps": 1, "pair": (1, 2, 3)}, r"config\.pair has 3 entries"),
        ({"steps": 1, "table": {"a": "x"}}, r"config\.table\.a is 'x'"),
        ({"steps": 1, "limit": "x"}, r"config\.limit is 'x' \(str\); give an int \| float \| None"),
        ({"steps": 1, "inner": {"rate": -1.0}}, r"config\.inner: rate is -1\.0; give a value >= 0"),
    ],
)
def test_refusals_name_the_setting(given, message):
    with pytest.raises(ConfigError, match=message):
        from_config_dict(Outer, given)


def test_group_given_in_part_keeps_the_defaults_of_its_field():
    assert from_config_dict(Outer, {"steps": 1, "inner": {"rate": 2}}).inner == Inner(2.0, "b")
    assert from_config_dict(Outer, {"steps": 1, "maybe": {"rate": 2}}).maybe == Inner(2.0, "a")


def test_json_round_trip(tmp_path):
    config = Outer(2, Inner(0.1 + 0.2), names=("a",), pairs=(("b", 1e-5),), table={"z": 1.5})
    save_json(config, tmp_path / "config.json")
    assert from_config_dict(Outer, load_json(tmp_path / "config.json")) == config
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot read"):
        load_json(tmp_path / "config.json")


def test_flatten_and_defaults_are_not_shared():
    assert flatten(Outer(1))["inner.rate"] == 1e-3
    first = Outer(1)
    first.table["x"] = 1.0
    assert Outer(1).table == {}
    assert to_dict(Outer(1))["pair"] == [1, 2.0]


def test_describe_has_a_row_for_each_setting():
    rows = {row.name: row for row in describe(Outer)}
    assert rows["steps"].default == "required" and rows["steps"].doc == "number of steps"
    assert rows["inner.rate"].doc == "step size, per step." and rows["inner.rate"].default == "0.001"
    assert rows["inner.kind"].type == "'a' | 'b' | 3"
    assert rows["inner.kind"].default == "'b'"  # of the field of Outer, not of Inner
    assert rows["maybe"].type == "Inner | None" and rows["maybe.rate"].type == "float"
    assert rows["pairs"].type == "tuple[tuple[str, float], ...]"
    assert all(row.doc for row in describe(RunConfig))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"total_steps": 0}, "total_steps is 0"),
        ({"keep": 0}, "keep is 0"),
        ({"loggers": ("tensorbord",)}, "did you mean 'tensorboard'"),
        ({"profile_steps": "5"}, "give FIRST:LAST"),
        ({"profile_steps": "5:5"}, "below LAST"),
        ({"keep_best": "eval/reward"}, "make checkpoint_every a multiple of eval_every"),
        ({"keep_best": "eval/reward", "eval_every": 30}, "make checkpoint_every a multiple of eval_every"),
    ],
)
def test_run_config_refuses(changes, message):
    with pytest.raises(ConfigError, match=message):
        from_config_dict(RunConfig, {"total_steps": 5} | changes, "config.run")
