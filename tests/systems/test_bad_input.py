"""What users get wrong: one message each, naming the culprit and the remedy, before any device work where possible."""

from __future__ import annotations

import json

import jax
import pytest

from jaxrl import launch
from jaxrl.errors import CheckpointError, ConfigError, DataError, JaxrlError, ModelLoadError, RewardError
from jaxrl.runtime import loop
from jaxrl.runtime.run_config import RunConfig
from tiny_systems import ALPHABET, ARCHITECTURE, GRPO, SFT, fresh, make_grpo, make_sft, mesh_of, settings


def raising(rows):
    """A reward with a bug."""
    raise KeyError("answer_key")


def no_score(rows):
    """A reward that judges nothing."""
    return [None for _ in rows]


def infinite(rows):
    return [float("inf") for _ in rows]


BUILD = {
    "group of one": (
        dict(rollout__group_size=1),
        ConfigError,
        "rollout.group_size=1 leaves nothing to compare.*at least 2",
    ),
    "minibatches of prompts": (
        dict(update__minibatches=3),
        ConfigError,
        "update.minibatches=3 does not divide the 4 prompts of a step; use a divisor",
    ),
    "minibatches of rows": (
        dict(update__minibatches=3, update__order="rows"),
        ConfigError,
        "update.minibatches=3 does not divide the 16 rows",
    ),
    "micro-batches": (
        dict(update__micro_batches=5),
        ConfigError,
        "update.micro_batches=5 does not divide the 16 rows",
    ),
    "order": (dict(update__order="groups"), ConfigError, "order is 'groups'; use 'prompts' or 'rows'"),
    "zero temperature": (dict(rollout__temperature=0.0), ConfigError, "temperature is 0.0; .*more than 0"),
    "truncated sampling": (
        dict(rollout__top_p=0.9),
        ConfigError,
        "top_p=0.9, .*cut the distribution.*set algorithm.mismatch_level=token",
    ),
    "truncated sampling, bypass": (
        dict(rollout__top_k=3, algorithm__ratio_against="sampler", algorithm__mismatch_level="none"),
        ConfigError,
        "cut the distribution",
    ),
    "context": (
        dict(rollout__max_tokens=40),
        ConfigError,
        "max_len=44 is more than the 32 positions of the model; lower it",
    ),
    "long prompt": (
        dict(prompt__max_prompt_len=3, prompt__on_long="error"),
        DataError,
        "prompt .* has 4 tokens, more than the 3 .*raise max_prompt_len",
    ),
    "only long prompts": (
        dict(prompt__max_prompt_len=3),
        DataError,
        "no prompt is left: 0 prompts kept.*raise max_prompt_len",
    ),
    "reward name": (
        dict(rewards=(dict(name="exact_mach"),)),
        ConfigError,
        "no reward named 'exact_mach'; did you mean 'exact_match'",
    ),
    "reward path": (
        dict(rewards=(dict(name="tiny_systems:low_digit"),)),
        ConfigError,
        "module 'tiny_systems' has no 'low_digit'; did you mean 'low_digits'",
    ),
    "reward module": (
        dict(rewards=(dict(name="no_such_module:f"),)),
        ConfigError,
        "no module 'no_such_module'; check the spelling",
    ),
    "reward argument": (
        dict(rewards=(dict(name="exact_match", kwargs=dict(ignore_cas=True)),)),
        ConfigError,
        "takes no argument 'ignore_cas'; did you mean 'ignore_case'",
    ),
    "two rewards of one name": (
        dict(rewards=(dict(name="exact_match"),) * 2),
        ConfigError,
        "two rewards are called",
    ),
    "no reward": (dict(rewards=()), ConfigError, "there is no reward; name at least one"),
    "alphabet": (
        dict(model__tokenizer="chars:0123456789"),
        DataError,
        r"character '\+' of .* is not in the alphabet",
    ),
    "small vocabulary": (
        dict(model__tokenizer=f"chars:{ALPHABET}abc"),
        ModelLoadError,
        "tokenizer.*17.*14|17 .*vocabulary",
    ),
    "no tokenizer": (
        dict(model__tokenizer=None),
        ConfigError,
        "the model has no tokenizer; set model.tokenizer",
    ),
    "weights": (
        dict(model=dict(source="./no/such/weights")),
        ModelLoadError,
        "'./no/such/weights' does not exist; give a directory, a .gguf file, package:NAME, or a hub id",
    ),
    "package": (
        dict(model=dict(source="package:no-such-package")),
        ModelLoadError,
        "package 'no-such-package' is not installed; `pip",
    ),
    "two sources": (
        dict(model__source="a/b"),
        ConfigError,
        r"exactly one of source, preset, architecture; got \['source', 'architecture'\]",
    ),
    "trainable": (
        dict(trainable="lora"),
        ConfigError,
        "trainable='lora' but the model has no adapters; set model.lora",
    ),
    "trainable layers": (
        dict(trainable="last:2"),
        ConfigError,
        "trainable='last:2' is out of range; the model has 1 layers",
    ),
    "heldout": (
        dict(eval__prompts=4, data__heldout=0),
        ConfigError,
        "no prompt is held out; set data.heldout, or eval.prompts=0",
    ),
    "eval reward": (
        dict(eval__prompts=4, eval__reward="acc", eval__samples=1, eval__k=(1,)),
        ConfigError,
        "eval.reward='acc' is not",
    ),
    "pass@k": (
        dict(eval__prompts=4, eval__samples=2, eval__k=(4,)),
        ConfigError,
        "eval.k has 4, but eval.samples is 2",
    ),
    "nothing to evaluate": (
        dict(eval__prompts=4, eval__samples=0, eval__greedy=False),
        ConfigError,
        "leave nothing to measure",
    ),
    "warm start without evaluation": (
        dict(warm_start=dict(max_steps=1)),
        ConfigError,
        "warm_start stops by the sampled accuracy",
    ),
}


@pytest.mark.parametrize("case", BUILD)
def test_refused_when_built(case):
    changes, error, message = BUILD[case]
    with pytest.raises(error, match=message) as caught:
        make_grpo(**changes)
    assert isinstance(caught.value, JaxrlError)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(rolout=dict(prompts=2)), "config.rolout is not a setting of Config; did you mean 'rollout'"),
        (
            dict(rollout__group_sise=2),
            "config.rollout.group_sise is not a setting.*did you mean 'group_size'",
        ),
        (dict(rollout__prompts="many"), "config.rollout.prompts.*'many'"),
        (dict(rollout__prompts=0), "prompts is 0; give at least 1"),
        (dict(algorithm__name="grop"), "algorithm.name is 'grop'; did you mean 'grpo'"),
        (dict(optimizer__learning_rate=-1.0), "learning_rate is -1.0; give a value >= 0"),
        (dict(optimizer__name="adamww"), "config.optimizer.name.*'adamww'.*adamw"),
        (dict(data__kind="csv"), "kind.*'csv'"),
    ],
)
def test_config_typos(changes, message):
    with pytest.raises(ConfigError, match=message):
        make_grpo(**changes)


def test_group_of_one_when_allowed():
    system = make_grpo(rollout__group_size=1, rollout__slots=4, algorithm__allow_singleton=True)
    _, metrics = system.step(fresh(system))
    assert metrics["grad_norm"] > 0 and metrics["reward"] > 0


def test_a_mesh_that_does_not_divide_the_batch():
    with pytest.raises(
        ConfigError, match=r"micro-batch .*of 4 rows cannot be split over .*'data': 8.*use a multiple of 8"
    ):
        make_grpo(mesh_of(8), update__micro_batches=4)
    with pytest.raises(
        ConfigError, match=r"rows / micro_batches. of 2 rows cannot be split over .*'data': 4.*multiple of 4"
    ):
        make_sft(mesh_of(4), micro_batches=2)
    with pytest.raises(ConfigError, match="slots of 6 rows cannot be split"):
        make_grpo(mesh_of(4), rollout__slots=6)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "test_bad_input:raising",
            "reward 'raising' failed on row 0: KeyError.*answer_key.*mend the reward or the row",
        ),
        ("test_bad_input:infinite", "infinite"),
    ],
)
def test_a_reward_that_breaks_stops_the_run_and_keeps_the_state(name, message):
    system = make_grpo(rewards=(dict(name=name),))
    state = fresh(system)
    with pytest.raises((RewardError, DataError), match=message):
        system.step(state)
    assert not any(x.is_deleted() for x in jax.tree.leaves(state.device))
    assert state.host == {"position": 0}


def test_a_reward_that_judges_nothing_is_reported():
    system = make_grpo(rewards=(dict(name="test_bad_input:no_score"),))
    _, metrics = system.step(fresh(system))
    assert (
        metrics["reward/no_score/declined"] == 16 == metrics["unscorable_rows"] and metrics["grad_norm"] == 0
    )


def test_a_checkpoint_of_another_shape(tmp_path):
    quiet = dict(progress=False, checkpoint_every=0)
    loop.run(make_sft(export=False), RunConfig(total_steps=1, **quiet), tmp_path)
    wider = make_sft(export=False, model__architecture={**ARCHITECTURE, "d_ff": 48})
    with pytest.raises(
        CheckpointError, match=r"params/layers/0/mlp/down/kernel|mlp/(gate|up|down)/kernel.*32.*48|48.*32"
    ):
        loop.run(wider, RunConfig(total_steps=2, **quiet), tmp_path)


def test_sft_refusals(tmp_path):
    for changes, message in (
        (dict(rows=0), "rows is 0; give at least 1"),
        (dict(micro_batches=3), "micro_batches=3 does not divide rows=4"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_sft(**changes)
    path = tmp_path / "x.jsonl"
    path.write_text('{"prompt": "1+1="}\n')
    with pytest.raises(DataError, match="has no answer to train on; give one, or set data.answer_field"):
        make_sft(data=dict(kind="jsonl", path=str(path), answer_field=None))
    with pytest.raises(DataError, match="no sequence is left"):
        make_sft(row_length=3)


def test_the_command_line_prints_one_line(tmp_path, capsys):
    file = tmp_path / "config.json"
    run = dict(total_steps=1, progress=False)
    for base, system, changes, message in (
        (GRPO, "grpo", dict(rollout__group_size=1), "rollout.group_size=1"),
        (SFT, "sft", dict(rows=-1), "rows is -1"),
    ):
        made = settings(base, **changes) | dict(system=system, run=run, mesh=dict(data=8))
        file.write_text(json.dumps(made))
        assert launch.main(["launch", f"--config={file}", f"--run_dir={tmp_path / 'run'}"]) == 2
        printed = capsys.readouterr().err.strip().splitlines()
        assert len(printed) == 1 and printed[0].startswith("error: ") and message in printed[0]
