"""One tiny model for all rollout tests, so that they share its compiled programs."""

import jax
import pytest

from engine_cases import TINY
from jaxrl.models.decoder import LanguageModel, unstack_layers


@pytest.fixture(scope="session")
def model():
    return LanguageModel(TINY)


@pytest.fixture(scope="session")
def params(model):
    """Unstacked, with logits spread enough that tokens differ in probability."""
    made = unstack_layers(model.init(jax.random.key(0)), TINY.num_layers)
    return {**made, "embed": {"embedding": made["embed"]["embedding"] * 20}}
