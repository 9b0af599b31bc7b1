"""The scaled-down experiments: the verdicts can fail, a shifted reward is inert for group baselines only, GRPO learns."""

from __future__ import annotations

import dataclasses
import importlib.util
import pathlib
import sys

import jax
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def _module():
    sys.path.insert(0, str(ROOT))  # for its own import of benchmarks.length_bias
    spec = importlib.util.spec_from_file_location("grpo_tiny", ROOT / "benchmarks" / "grpo_tiny.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["grpo_tiny"] = module  # dataclasses look their module up while the class is made
    spec.loader.exec_module(module)
    sys.path.remove(str(ROOT))
    return module


tiny = _module()
LOW = dict(name="regex_format", kwargs=dict(pattern="[0-4].*"), label="low")  # varies even before anything is learnt


def _run(start: float, end: float, clip_fraction: float = 0.0, params: float = 0.0):
    tracked = dict.fromkeys(tiny.TRACKED, 0.0) | {"clip_fraction": clip_fraction, "largest_ratio": 1.0}
    rows = [{"step": 0, "accuracy": start}, {"step": 1, "accuracy": end} | tracked]
    return tiny.Run(rows, {"w": np.full(3, params)}, 1.0)


def _results(**changes: list):
    """Measurements of two seeds for which every claim holds, some of them replaced; ``GRPO`` etc. by position."""
    learning = {name: [_run(0.27, 0.37), _run(0.26, 0.32)] for name in tiny.GROUP_BASELINE}
    learning["no baseline, reward 5/6"] = [_run(0.27, 0.1), _run(0.26, 0.1)]
    learning["wrong sign"] = [_run(0.27, 0.002), _run(0.26, 0.01)]
    stress = {"clip 0.2": [_run(0.27, 0.33, 0.05)] * 2, "no clip": [_run(0.27, 0.30)] * 2}
    lengths = {name: np.array([value, value]) for name, value in tiny.LENGTHS.items()}
    results = tiny.Results((0, 1), learning, stress, lengths, {"learning runs": 1.0})
    return dataclasses.replace(results, **{k: {**getattr(results, k), **v} for k, v in changes.items()})


def _failed(results) -> list[str]:
    return [claim.text for claim in tiny.judge(results) if not claim.passed]


def test_all_claims_hold_for_good_measurements():
    assert _failed(_results()) == []


@pytest.mark.parametrize(
    "changes, text",
    [
        (dict(learning={"RLOO": [_run(0.27, 0.45), _run(0.26, 0.29)]}), "RLOO: gains"),  # one seed below 0.04
        (dict(learning={"RLOO": [_run(0.27, 0.32), _run(0.26, 0.31)]}), "RLOO: gains"),  # mean below 0.06
        (dict(learning={"wrong sign": [_run(0.27, 0.06), _run(0.26, 0.0)]}), "wrong sign"),
        (dict(learning={"no baseline, reward 5/6": [_run(0.27, 0.27), _run(0.26, 0.1)]}), "no baseline"),
        (
            dict(learning={"GRPO, reward 5/6": [_run(0.27, 0.37), _run(0.26, 0.32, params=1e-3)]}),
            "GRPO, reward 5/6 against",
        ),
        (dict(stress={"no clip": [_run(0.27, 0.36)] * 2}), "off-policy stress: mean"),
        (dict(stress={"clip 0.2": [_run(0.27, 0.4, 0.05), _run(0.27, 0.4, 0.0)]}), "off-policy stress: the clip acts"),
        (dict(lengths={"dapo": np.array([[4.51, 4.49], [4.51, 4.60]])}), "length bias, dapo"),  # one seed, not the mean
        (dict(lengths={"dapo": np.array([[4.51, 4.60], [4.51, 4.60]])}), "length bias, dapo"),  # both
    ],
)
def test_each_claim_fails_on_its_own_figures_only(changes, text):
    failed = _failed(_results(**changes))
    assert failed and all(one.startswith(text) for one in failed)


def test_report_holds_every_verdict_and_the_plots(tmp_path):
    claims = tiny.write(_results(), tmp_path, "command", judged=True)
    report = (tmp_path / "grpo_tiny.md").read_text()
    assert report.count("| PASS |") == len(claims) and "FAIL" not in report
    for name in ("grpo_tiny.png", "grpo_tiny_gain.png", "grpo_tiny_off_policy.png"):
        assert f"({name})" in report and (tmp_path / name).stat().st_size > 1000


def test_a_shifted_reward_is_inert_with_a_group_baseline_and_not_without():
    scale = dataclasses.replace(tiny.QUICK, eval_every=10)
    params = tiny.build(scale, 0).template(jax.random.key(0)).device["train"].params
    plain, shifted = (tiny.RIGHT, LOW), (tiny.RIGHT, LOW, tiny.FIVE)
    bare = dict(name="grpo", advantage_rule="reinforce")

    def final(**changes):
        return tiny.run(scale, 0, params, 2, **changes).params

    group = final(rewards=plain)
    assert tiny.parameter_distance(group, params) > 1e-4  # there was something to learn from
    assert tiny.parameter_distance(group, final(rewards=shifted)) < 1e-6
    distance = tiny.parameter_distance(final(rewards=plain, algorithm=bare), final(rewards=shifted, algorithm=bare))
    assert distance > 1e-4


@pytest.mark.slow
def test_grpo_learns_and_the_wrong_sign_unlearns():
    scale = dataclasses.replace(tiny.Scale(), eval_every=100)
    params = tiny.warm_start(scale, 0)
    right = tiny.run(scale, 0, params, 100)
    wrong = tiny.run(scale, 0, params, 100, **tiny.VARIANTS["wrong sign"])
    assert right.end - right.start >= 0.04
    assert wrong.end < 0.05
