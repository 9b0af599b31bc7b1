"""Numeric reference cases of the GRPO family: every case and key found in the files, through the public functions.

The directory is ``$JAXRL_REFERENCE_DIR/grpo`` (default: this folder). Files are inputs plus expected numbers, with
"nan" and "inf" as strings; names of cases and their number are free, a key without a setting below is an error.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl import ops
from jaxrl.ops import advantages as advantage_ops
from jaxrl.ops import tabular

FOLDER = pathlib.Path(os.environ.get("JAXRL_REFERENCE_DIR", pathlib.Path(__file__).parent)) / "grpo"
Comparison = tuple[str, Any, Any]  # (what, actual, expected)


def decode(value: Any) -> Any:
    """Strings "nan", "inf", "-inf" to floats, at any depth."""
    if isinstance(value, dict):
        return {key: decode(item) for key, item in value.items()}
    if isinstance(value, list):
        return [decode(item) for item in value]
    return float(value) if value in ("nan", "inf", "-inf") else value


def only(mapping: dict, known: set[str], what: str) -> None:
    unknown = set(mapping) - known
    assert not unknown, f"{what} has keys that this test does not run: {sorted(unknown)}"


# Advantages (always float64 on the host)

ADVANTAGES = {
    "verl_grpo": ops.verl().advantage,
    "verl_grpo_no_std": ops.verl(norm_adv_by_std_in_grpo=False).advantage,
    "rloo": ops.verl(adv_estimator="rloo").advantage,
    "opo": ops.verl(adv_estimator="opo").advantage,
    "gpg": ops.verl(adv_estimator="gpg").advantage,
    "grpo_passk": ops.verl(adv_estimator="grpo_passk").advantage,
    "reinforce_plus_plus_baseline": ops.verl(adv_estimator="reinforce_plus_plus_baseline").advantage,
    "trl_group": ops.trl(scale_rewards="group").advantage,
    "trl_batch": ops.trl(scale_rewards="batch").advantage,
    "trl_none": ops.trl(scale_rewards="none").advantage,
    "tunix_grpo": ops.tunix().advantage,
    "tunix_drgrpo": ops.tunix(advantage_estimator="drgrpo").advantage,
}
RETURNS_GAMMA = 0.97


def run_advantages(case: dict, dtype: str) -> Iterator[Comparison]:
    del dtype
    only(case, {"name", "rewards", "group_ids", "lengths", "expected"}, "case")
    for key, expected in case["expected"].items():
        discounted = re.fullmatch(r"reinforce_plus_plus_gamma([\d.]+)", key)
        if key == "reinforce_plus_plus_returns":
            mask = np.arange(max(case["lengths"])) < np.array(case["lengths"])[:, None]
            placed = ops.place_rewards(case["rewards"], mask)
            yield key, advantage_ops.discounted_returns(placed, mask, RETURNS_GAMMA), expected
            continue
        if discounted:
            config = ops.verl(adv_estimator="reinforce_plus_plus", gamma=float(discounted[1])).advantage
        else:
            config = ADVANTAGES[key]
        yield key, ops.compute_advantages(config, case["rewards"], case["group_ids"], case["lengths"]), expected


def run_nan_rewards(case: dict, dtype: str) -> Iterator[Comparison]:
    del dtype
    only(case, {"name", "group_size", "grpo", "rloo"}, "case")
    for section in ("grpo", "rloo"):
        if section not in case:
            continue
        only(case[section], {"rewards", "kl_sum_per_sequence", "expected"}, section)
        rewards = np.array(case[section]["rewards"], float)
        group_ids = np.arange(len(rewards)) // case["group_size"]
        for key, expected in case[section]["expected"].items():
            if section == "grpo":
                config, used = ADVANTAGES[key], rewards
            else:
                beta, normalize = re.fullmatch(r"beta=([\d.e-]+)/normalize=([01])", key).groups()
                config = ops.AdvantageConfig("rloo", normalize=normalize == "1")
                used = rewards - float(beta) * np.array(case[section]["kl_sum_per_sequence"], float)
            yield f"{section}/{key}", ops.compute_advantages(config, used, group_ids), expected


def run_exact_expectation(case: dict, dtype: str) -> Iterator[Comparison]:
    del dtype
    rules = {
        "none": ops.AdvantageConfig("reinforce"),
        "mean": ops.AdvantageConfig("grpo", scale="none"),
        "loo": ops.AdvantageConfig("rloo"),
        "std": ops.AdvantageConfig("grpo"),
    }
    logits, rewards, size = np.array(case["logits"]), np.array(case["reward"], float), case["group_size"]
    value, gradient = tabular.expected_reward_gradient(logits, rewards)

    def update(rule: str) -> np.ndarray:
        scaled = re.fullmatch(r"std_eps([\d.e+-]+)", rule)
        config = ops.AdvantageConfig("grpo", epsilon=float(scaled[1])) if scaled else rules[rule]
        return tabular.expected_update(
            logits, rewards, size, lambda r, g: ops.compute_advantages(config, r, g)
        )

    for key, expected in case.items():
        ratio = re.fullmatch(r"ratio_(.+)_over_true", key)
        if key in ("name", "logits", "reward", "group_size"):
            continue
        if key == "probs":
            yield key, tabular.softmax(logits), expected
        elif key == "J":
            yield key, value, expected
        elif key == "grad_J":
            yield key, gradient, expected
        elif key == "prob_zero_variance_group":
            yield key, tabular.zero_variance_probability(logits, rewards, size), expected
        elif key == "expected_update":
            for rule, numbers in expected.items():
                yield f"{key}/{rule}", update(rule), numbers
        else:
            assert ratio, f"unknown key {key!r}"
            yield key, update(ratio[1]) @ gradient / (gradient @ gradient), expected


def run_length_bias(case: dict, dtype: str) -> Iterator[Comparison]:
    """Exact expected ascent direction, enumerating the number of right rows among the others of the group."""
    only(case, {"name", "prob_right", "length_logits_right", "length_logits_wrong", "group_size", "expected"}, "case")
    size, p = case["group_size"], case["prob_right"]
    lengths = {
        True: tabular.softmax(np.array(case["length_logits_right"])),
        False: tabular.softmax(np.array(case["length_logits_wrong"])),
    }
    longest = len(lengths[True])
    others = np.arange(size)
    binomial = np.array([_choose(size - 1, k) for k in others]) * p**others * (1.0 - p) ** (size - 1 - others)
    # One row of every length; the row's log-probability sits on its first token.
    mask = (np.arange(longest) < np.arange(1, longest + 1)[:, None]).astype(dtype)
    group_mask = np.zeros((size, longest), dtype)
    group_mask[:, 0] = 1
    denominators = ops.count(jnp.asarray(group_mask))
    for key, expected in case["expected"].items():
        scaling, aggregation = key.split("/")
        config = ops.AdvantageConfig("grpo", scale={"std": "group", "no_std": "none"}[scaling])
        direction = {}
        for right in (True, False):
            groups = np.array([[right, *(np.arange(size - 1) < k)] for k in others], float)
            ids = np.repeat(others, size)
            first = ops.compute_advantages(config, groups.reshape(-1), ids).reshape(size, size)[:, 0]
            mean_advantage = float(binomial @ first)

            advantages = jnp.full(longest, mean_advantage, dtype)
            gradient = _row_gradient(jnp.zeros(longest, dtype), advantages, jnp.asarray(mask), denominators, aggregation)
            direction[right] = -np.asarray(gradient, float)  # w A, per length
        # E over the row itself; grad log p(row) = grad log P(right) + grad log P(length | right), G equal rows.
        score_right = {True: 1.0 - p, False: -p}
        chance = {True: p, False: 1.0 - p}
        gradient = sum(
            size * chance[r] * (lengths[r] @ direction[r]) * score_right[r] for r in (True, False)
        )
        actual = {"grad_logit_right": gradient}
        for name, r in (("grad_length_right", True), ("grad_length_wrong", False)):
            q = lengths[r]
            actual[name] = size * chance[r] * q * (direction[r] - q @ direction[r])
        for name, numbers in expected.items():
            yield f"{key}/{name}", actual[name], numbers


@functools.partial(jax.jit, static_argnames="aggregation")
@jax.grad
def _row_gradient(row_logp, advantages, mask, denominators, aggregation):
    logp = jnp.zeros(mask.shape, row_logp.dtype).at[:, 0].set(row_logp)
    surrogate = ops.policy_loss(ops.PolicyLossConfig("reinforce"), logp, logp, advantages, mask)
    return ops.aggregate(aggregation, surrogate.per_token, mask, denominators)


def _choose(n: int, k: int) -> float:
    return float(np.prod([(n - j) / (j + 1) for j in range(k)]))


# Losses

_TRL_SEQUENCE = {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.03, "epsilon_high": 0.04}
_TRL_LOSSES = {
    "dapo_default": {},
    "dapo_clip_higher": {"epsilon_high": 0.28},
    "grpo_kl": {"loss_type": "grpo", "beta": 0.04},
    "bnpo": {"loss_type": "bnpo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "cispo_cap1.3": {"loss_type": "cispo", "epsilon_high": 1.3},
    "sapo": {"loss_type": "sapo"},
    "two_sided_delta": {"delta": 1.5, "epsilon_high": 0.28},
    "gspo_sequence_grpo": _TRL_SEQUENCE,
    "luspo_sequence": {**_TRL_SEQUENCE, "loss_type": "luspo", "epsilon": 0.02, "epsilon_high": 0.025},
    "bias_corrected_kl": {"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": True},
    "opsm_0.05": {"loss_type": "grpo", "off_policy_mask_threshold": 0.05},
    "token_truncate_is": {
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_max": 1.1,
    },
    "sequence_mask_is": {
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": "sequence_mask",
        "vllm_importance_sampling_clip_min": 0.7,
        "vllm_importance_sampling_clip_max": 1.3,
    },
}
_VERL_LOSSES = {
    "vanilla": {},
    "vanilla_clip_higher": {"clip_ratio_high": 0.28},
    "vanilla_is": {"rollout_is": "token", "rollout_is_threshold": 1.1},
    "gspo": {"loss_mode": "gspo", "clip_ratio_low": 0.03, "clip_ratio_high": 0.04},
    "cispo": {"loss_mode": "cispo"},
    "sapo": {"loss_mode": "sapo"},
    "gpg": {"loss_mode": "gpg"},
    "geo_mean": {"loss_mode": "geo_mean"},
}
_TUNIX_LOSSES = {
    "grpo_default": {},
    "grpo_token_mean_dapo": {"loss_agg_mode": "token-mean", "epsilon_high": 0.28},
    "gspo_token": {"loss_algo": "gspo-token", "epsilon": 0.03, "epsilon_high": 0.04},
    "dual_clip_3": {"epsilon_c": 3.0},
    "kl_k1_beta": {"beta": 0.04},
    "kl_low_var_beta": {"beta": 0.04, "kl_loss_mode": "low_var_kl"},
    "dr_grpo_scale": {"loss_agg_mode": "sequence-mean-token-scale"},
}


def loss_config(key: str) -> ops.LossConfig:
    library, name, *rest = key.split("/")
    if library == "trl":
        return ops.trl(**{"vllm_importance_sampling_correction": False} | _TRL_LOSSES[name]).loss
    if library == "verl":
        return ops.verl(loss_agg_mode=rest[0], **_VERL_LOSSES[name]).loss
    assert library == "tunix", f"unknown library in {key!r}"
    return ops.tunix(**{"beta": 0.0} | _TUNIX_LOSSES[name]).loss


def run_losses(case: dict, dtype: str) -> Iterator[Comparison]:
    only(case, {"name", "inputs", "expected"}, "case")
    only(case["inputs"], {"logp", "old_logp", "ref_logp", "sampling_logp", "mask", "adv"}, "inputs")
    x = {name: jnp.asarray(np.array(value), dtype) for name, value in case["inputs"].items()}
    for key, expected in case["expected"].items():
        only(expected, {"loss", "grad_logp"}, key)
    configs = {key: loss_config(key) for key in case["expected"]}

    # One compiled program for all keys: compilation dominates otherwise.
    @jax.jit
    def losses_and_gradients(x: dict[str, jax.Array]) -> dict[str, tuple[jax.Array, jax.Array]]:
        return {key: jax.value_and_grad(_loss, argnums=1)(config, x["logp"], x) for key, config in configs.items()}

    results = losses_and_gradients(x)
    for key, expected in case["expected"].items():
        value, gradient = results[key]
        assert value.dtype == dtype, f"{key}: {value.dtype} instead of {dtype}"
        yield f"{key}/loss", value, expected["loss"]
        yield f"{key}/grad_logp", gradient, expected["grad_logp"]


def _loss(config: ops.LossConfig, logp: jax.Array, x: dict[str, jax.Array]) -> jax.Array:
    loss, _ = ops.policy_objective(
        config,
        logp=logp,
        advantages=x["adv"],
        mask=x["mask"],
        denominators=ops.count(x["mask"]),
        old_logp=x["old_logp"],
        ref_logp=x["ref_logp"] if config.kl_coef else None,
        sampler_logp=x["sampling_logp"] if config.mismatch else None,
    )
    return loss


# KL

_KL_NAMES = {"k3_verl_clamped": "k3_clamped"}


def run_kl(case: dict, dtype: str) -> Iterator[Comparison]:
    only(case, {"name", "logp", "ref_logp", "estimators", "exact"}, "case")
    if "estimators" in case:
        logp, ref_logp = jnp.asarray(case["logp"], dtype), jnp.asarray(case["ref_logp"], dtype)
        for key, expected in case["estimators"].items():
            only(expected, {"value", "grad_logp"}, key)

        @jax.jit
        def values_and_gradients(logp: jax.Array) -> dict[str, tuple[jax.Array, jax.Array]]:
            def one(key: str) -> tuple[jax.Array, jax.Array]:
                value, pullback = jax.vjp(lambda lp: ops.kl_penalty(_KL_NAMES.get(key, key), lp, ref_logp), logp)
                return value, pullback(jnp.ones_like(value))[0]

            return {key: one(key) for key in case["estimators"]}

        for key, (value, gradient) in values_and_gradients(logp).items():
            yield f"{key}/value", value, case["estimators"][key]["value"]
            yield f"{key}/grad_logp", gradient, case["estimators"][key]["grad_logp"]
    if "exact" in case:
        yield from _run_exact_kl(case["exact"], dtype)


def _run_exact_kl(exact: dict, dtype: str) -> Iterator[Comparison]:
    only(exact, {"logits", "ref_logits", "kl", "grad_kl_logits", "expect"}, "exact")
    logits = jnp.asarray(exact["logits"], dtype)
    q = jax.nn.log_softmax(jnp.asarray(exact["ref_logits"], dtype))

    @functools.partial(jax.jit, static_argnums=(1, 2))
    @functools.partial(jax.value_and_grad, argnums=0)
    def mean(logits: jax.Array, name: str, differentiate_sampling: bool) -> jax.Array:
        logp = jax.nn.log_softmax(logits)
        p = jnp.exp(logp) if differentiate_sampling else jax.lax.stop_gradient(jnp.exp(logp))
        return jnp.sum(p * ops.kl_penalty(name, logp, q))

    value, gradient = mean(logits, "k1", True)
    yield "kl", value, exact["kl"]
    yield "grad_kl_logits", gradient, exact["grad_kl_logits"]
    for key, expected in exact["expect"].items():
        only(expected, {"mean_value", "mean_grad_logits"}, key)
        value, gradient = mean(logits, _KL_NAMES.get(key, key), False)
        yield f"{key}/mean_value", value, expected["mean_value"]
        yield f"{key}/mean_grad_logits", gradient, expected["mean_grad_logits"]


# Sampler mismatch


def run_mismatch(case: dict, dtype: str) -> Iterator[Comparison]:
    only(case, {"name", "trainer_logp", "sampler_logp", "mask", "expected"}, "case")
    old, sampler, mask = (jnp.asarray(case[name], dtype) for name in ("trainer_logp", "sampler_logp", "mask"))
    for key, expected in case["expected"].items():
        library, option, *settings = key.split("/")
        values = dict(setting.split("=") for setting in settings)
        if library == "trl":
            only(values, {"min", "max"}, key)
            low, high = (None if values[name] == "None" else float(values[name]) for name in ("min", "max"))
            config = ops.trl(
                vllm_importance_sampling_mode=option,
                vllm_importance_sampling_clip_min=low,
                vllm_importance_sampling_clip_max=high,
            ).loss.mismatch
            yield key, ops.mismatch_weights(config, old, sampler, mask), expected
            continue
        only(values, {"upper", "lower", "batch_normalize"}, key)
        upper, lower = values["upper"], values.get("lower", "None")
        threshold = upper if lower == "None" else f"{lower}_{upper}"
        if library == "verl":
            preset = ops.verl(
                rollout_is=option,
                rollout_is_threshold=threshold,
                rollout_is_batch_normalize=values["batch_normalize"] == "1",
            )
            config = preset.correction or preset.loss.mismatch
            yield key, ops.correct_mismatch(config, old, sampler, mask).weights, expected
        else:
            assert library == "verl_rs_mask", f"unknown key {key!r}"
            config = ops.verl(rollout_rs=option, rollout_rs_threshold=threshold).correction
            yield key, ops.correct_mismatch(config, old, sampler, mask).mask, expected


def run_shaping(case: dict, dtype: str) -> Iterator[Comparison]:
    del dtype
    only(case, {"name", "overlong", "filter"}, "case")
    if "overlong" in case:
        x = case["overlong"]
        only(x, {"lengths", "max_length", "buffer", "trl_soft_overlong", "verl_overlong"}, "overlong")
        arguments = (x["lengths"], x["max_length"], x["buffer"])
        yield "trl_soft_overlong", ops.soft_overlong_penalty(*arguments), x["trl_soft_overlong"]
        for factor, expected in x["verl_overlong"].items():
            actual = ops.linear_overlong_penalty(*arguments, factor=float(factor))
            yield f"verl_overlong/{factor}", actual, expected
    if "filter" in case:
        x = case["filter"]
        only(x, {"metric", "keep_group", "frac_zero_std"}, "filter")
        metric = np.array(x["metric"], float)
        ids = np.repeat(np.arange(metric.shape[0]), metric.shape[1])
        keep = ops.keep_groups(metric.reshape(-1), ids).reshape(metric.shape)
        yield "keep_group", keep, np.broadcast_to(np.array(x["keep_group"])[:, None], metric.shape)
        yield "frac_zero_std", ops.zero_std_fraction(metric.reshape(-1), ids), x["frac_zero_std"]


Runner = Callable[[dict, str], Iterator[Comparison]]
RUNNERS: dict[str, tuple[Runner, tuple[str, ...]]] = {
    "advantages.json": (run_advantages, ("float64",)),
    "nan_rewards.json": (run_nan_rewards, ("float64",)),
    "exact_expectation.json": (run_exact_expectation, ("float64",)),
    "shaping.json": (run_shaping, ("float64",)),
    "length_bias.json": (run_length_bias, ("float64", "float32")),
    "losses.json": (run_losses, ("float64", "float32")),
    "kl.json": (run_kl, ("float64", "float32")),
    "mismatch.json": (run_mismatch, ("float64", "float32")),
}
TOLERANCES = {"float64": {"rtol": 1e-9, "atol": 1e-9}, "float32": {"rtol": 2e-5, "atol": 2e-6}}


def _cases() -> list:
    found = []
    for path in sorted(FOLDER.glob("*.json")):
        data = decode(json.loads(path.read_text()))
        dtypes = RUNNERS[path.name][1] if path.name in RUNNERS else ("float64",)
        for index, case in enumerate(data.get("cases", [data])):
            for dtype in dtypes:
                name = f"{path.stem}-{case.get('name', index)}-{dtype}"
                found.append(pytest.param(path.name, case, dtype, id=name))
    return found


def test_there_are_reference_files():
    files = {path.name for path in FOLDER.glob("*.json")}
    assert files, f"no reference files in {FOLDER}"
    assert files <= set(RUNNERS), f"files that no runner reads: {sorted(files - set(RUNNERS))}"


@pytest.mark.parametrize(("file", "case", "dtype"), _cases())
def test_reference(file: str, case: dict, dtype: str):
    compared, failures = 0, []
    with jax.enable_x64(dtype == "float64"):
        for what, actual, expected in RUNNERS[file][0](case, dtype):
            compared += 1
            expected = np.asarray(expected, float)
            actual = np.asarray(actual, float)
            try:
                assert actual.shape == expected.shape, f"shape {actual.shape} instead of {expected.shape}"
                np.testing.assert_allclose(actual, expected, **TOLERANCES[dtype])
            except AssertionError as error:
                failures.append(f"{what}: {error}")
    assert compared > 0, "the case holds no expected numbers"
    assert not failures, "\n\n".join(failures)
