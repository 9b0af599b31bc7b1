"""Exact expectations of policy-gradient updates for a one-step softmax policy: a microscope for advantage rules."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

AdvantageFunction = Callable[[np.ndarray, np.ndarray], np.ndarray]  # (rewards [M], group_ids [M]) -> [M]


def softmax(logits: np.ndarray) -> np.ndarray:
    """Probabilities [K] of logits [K], float64."""
    shifted = np.exp(np.asarray(logits, np.float64) - np.max(logits))
    return shifted / shifted.sum()


def expected_reward_gradient(logits: np.ndarray, rewards: np.ndarray) -> tuple[float, np.ndarray]:
    """(J, grad J wrt logits [K]) for one draw from the softmax with a fixed reward per answer."""
    p = softmax(logits)
    value = float(p @ rewards)
    return value, p * (np.asarray(rewards, np.float64) - value)


def expected_update(
    logits: np.ndarray, rewards: np.ndarray, group_size: int, advantage: AdvantageFunction
) -> np.ndarray:
    """E[(1/G) sum_i A_i grad log p(y_i)] over all groups of G independent draws: [K], wrt the logits.

    All K^G groups are enumerated, so keep K^G small. ``advantage`` is called once, with every group.

    Args:
      logits: [K] of the softmax over answers.
      rewards: [K] fixed reward of each answer.
      group_size: G.
      advantage: (rewards [M], group_ids [M]) -> [M], for example a closure over ``compute_advantages``.
    """
    p = softmax(logits)
    draws = np.array(list(itertools.product(range(len(p)), repeat=group_size)))
    chance = np.prod(p[draws], axis=1)
    group_ids = np.repeat(np.arange(len(draws)), group_size)
    values = np.asarray(rewards, np.float64)[draws].reshape(-1)
    advantages = advantage(values, group_ids).reshape(draws.shape)
    score = np.eye(len(p))[draws] - p
    return np.einsum("g,gi,gik->k", chance, advantages, score) / group_size


def zero_variance_probability(logits: np.ndarray, rewards: np.ndarray, group_size: int) -> float:
    """Probability that G independent draws all have the same reward."""
    p = softmax(logits)
    _, index = np.unique(np.asarray(rewards), return_inverse=True)
    return float((np.bincount(index.reshape(-1), weights=p) ** group_size).sum())
