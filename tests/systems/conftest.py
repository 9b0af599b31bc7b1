"""Systems that several tests use, built (and so compiled) once."""

import pytest

from tiny_systems import make_grpo


@pytest.fixture(scope="session")
def plain():
    """One update per batch, at a temperature other than 1."""
    return make_grpo(rollout__temperature=0.7)


@pytest.fixture(scope="session")
def adaptive():
    """Four updates per batch on shuffled rows, two micro-batches each, adaptive KL."""
    return make_grpo(
        update__minibatches=2,
        update__epochs=2,
        update__order="rows",
        update__micro_batches=2,
        algorithm__kl_coef=0.5,
        algorithm__kl_target=0.01,
        algorithm__kl_horizon=1000.0,
    )
