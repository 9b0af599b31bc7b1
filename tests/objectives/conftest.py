"""One tiny model and one batch with every stream, shared by the tests of the device step."""

import jax
import numpy as np
import pytest

from jaxrl.models.config import ModelConfig
from jaxrl.models.decoder import LanguageModel
from jaxrl.objectives import policy_batch
from tiny_systems import ARCHITECTURE

COLUMNS = 10


@pytest.fixture(scope="session")
def model():
    return LanguageModel(ModelConfig(**ARCHITECTURE))


@pytest.fixture(scope="session")
def params(model):
    """Three times the usual start, so that distributions are far from flat."""
    return jax.tree.map(lambda x: 3 * x if x.ndim == 2 else x, model.init(jax.random.key(0)))


@pytest.fixture(scope="session")
def batch():
    """8 ragged rows: one without a loss token, one with completion length 1, one that fills its columns, one with
    tool tokens inside the completion, and prompt and pad ids inside completions."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 14, n) for n in (3, 1, 4, 2, 3, 6, 5, 2)]
    lengths = [4, 1, 6, 5, 3, 4, 0, 7]
    completions = [rng.integers(0, 14, n) for n in lengths]
    completions[0][1] = 0  # the pad id, sampled
    masks = [np.ones(n, bool) for n in lengths]
    masks[2][2:4] = False
    made = policy_batch(
        prompts,
        completions,
        rng.normal(size=8),
        columns=COLUMNS,
        loss_masks=masks,
        sampler_logps=[-rng.exponential(2.0, n) for n in lengths],
        weights=rng.uniform(0.5, 1.5, (8, 7)),
    )
    near = lambda scale: np.where(
        made.loss_mask, made.sampler_logp + rng.normal(0, scale, made.tokens.shape), 0
    )  # noqa: E731
    return made.replace(old_logp=near(0.1).astype(np.float32), ref_logp=near(0.3).astype(np.float32))
