"""Parity with transformers on torch: every layer of every family, and exported directories.

Not part of the default run. JAXRL_TORCH_PYTHON is a Python with torch and transformers (default: this one):

    JAXRL_TORCH_PYTHON=/path/to/python pytest -m parity tests/models/test_parity.py -rP
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from jaxrl.models import LanguageModel, LoraConfig
from jaxrl.models.hf import load_hf, save_hf
from tiny_models import VARIANTS, forward, max_difference, random_like, start, tokens_of

pytestmark = pytest.mark.parity

SCRIPT = pathlib.Path(__file__).with_name("torch_reference.py")
CASES = (
    "llama", "llama_llama3_untied", "llama_linear", "qwen2", "qwen2_yarn_untied", "qwen3",
    "qwen3_yarn_untied",
)  # fmt: skip
EXPORTS = {
    **VARIANTS,
    "lora": VARIANTS["qwen2"].replace(lora=LoraConfig(rank=2)),
    "shards": VARIANTS["llama"],
}


def torch_run(*arguments: object) -> None:
    python = os.environ.get("JAXRL_TORCH_PYTHON", sys.executable)
    done = subprocess.run(
        [python, str(SCRIPT), *map(str, arguments)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    out = tmp_path_factory.mktemp("golden")
    torch_run("make", out)
    return out


@pytest.mark.parametrize("scan", [True, False], ids=["scan", "unrolled"])
@pytest.mark.parametrize("name", CASES)
def test_every_layer_equals_transformers(golden, name, scan):
    config, params = load_hf(golden / name, scan_layers=scan)
    model = LanguageModel(config)
    expected = np.load(golden / f"{name}.npz")
    tokens = expected["tokens"].astype(np.int32)
    layers = config.num_layers
    want = tuple(f"layer:{i}" for i in range(layers - 1))
    out = forward(model, params, tokens, want=want)
    differences = {
        i + 1: max_difference(out.extras[f"layer:{i}"], expected[f"hidden_{i + 1}"])
        for i in range(layers - 1)
    }
    differences["final"] = max_difference(
        out.hidden, expected[f"hidden_{layers}"]
    )  # transformers gives it normed
    differences["logits"] = max_difference(model.logits(params, out.hidden), expected["logits"])
    scale = float(np.abs(expected["logits"]).max())
    print(f"{name}: max |difference| {differences}, max |logit| {scale:.2f}")
    assert scale > 1
    assert max(differences.values()) < 2e-5 * max(1.0, scale)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Logits that transformers computes from exported directories; one process reads all of them."""
    root = tmp_path_factory.mktemp("exported")
    arguments = []
    for name, config in EXPORTS.items():
        model, params = start(config)
        save_hf(root / name, model, params, dtype="float32", max_shard_gb=8e-6 if name == "shards" else 5.0)
        np.save(root / f"{name}.tokens.npy", np.asarray(tokens_of(config, 2, 40), np.int64))
        arguments += [root / name, root / f"{name}.tokens.npy", root / f"{name}.logits.npy"]
    torch_run("read", *arguments)
    return root


@pytest.mark.parametrize("name", EXPORTS)
def test_transformers_reads_what_we_write(exported, name):
    config = EXPORTS[name]
    model, params = start(config)
    logits = model.logits(params, forward(model, params, tokens_of(config, 2, 40)).hidden)
    theirs = np.load(exported / f"{name}.logits.npy")
    difference = max_difference(logits, theirs)
    print(f"{name}: max |difference| {difference:.2e}, max |logit| {np.abs(theirs).max():.2f}")
    assert difference < 2e-5 * max(1.0, float(np.abs(theirs).max()))


def test_bfloat16_export(tmp_path):
    config = VARIANTS["qwen3"]
    model, _ = start(config)
    params = random_like(LanguageModel(config.replace(param_dtype="bfloat16")).abstract())
    tokens = tokens_of(config, 2, 40)
    save_hf(tmp_path / "m", model, params, dtype="bfloat16")
    np.save(tmp_path / "t.npy", np.asarray(tokens, np.int64))
    torch_run("read", tmp_path / "m", tmp_path / "t.npy", tmp_path / "l.npy")
    ours = model.logits(params, forward(model, params, tokens).hidden)
    assert max_difference(ours, np.load(tmp_path / "l.npy")) < 1e-4
