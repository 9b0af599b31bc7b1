"""Evaluation with several samples per problem: pass@k and maj@k (host-side)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np

from jaxrl.errors import DataError


def pass_at_k(num_samples: np.ndarray | int, num_correct: np.ndarray, k: int) -> np.ndarray:
    """Unbiased estimate of the chance that at least one of k samples is right: 1 - C(n-c, k) / C(n, k).

    Chen et al., arXiv 2107.03374, equation 1, in the product form that cannot overflow.

    Args:
      num_samples: [P] (or scalar) samples drawn per problem, n >= k.
      num_correct: [P] (or scalar) right ones among them.
      k: >= 1.

    Returns:
      float64 [P]; average it over problems.
    """
    n, c = np.broadcast_arrays(np.asarray(num_samples), np.asarray(num_correct))
    if k < 1 or (n < k).any():
        raise DataError(f"pass@{k} needs at least k >= 1 samples per problem; the fewest here are {n.min()}")
    if (c < 0).any() or (c > n).any():
        raise DataError("num_correct must lie between 0 and num_samples; check the order of the arguments")
    # Chance that k draws without replacement are all wrong: prod_j (n - c - j) / (n - j).
    all_wrong = np.ones(n.shape)
    for j in range(k):
        all_wrong = all_wrong * np.maximum(n - c - j, 0) / (n - j)
    return 1.0 - all_wrong


def majority_at_k(
    answers: Sequence[Sequence[Hashable | None]], correct: Sequence[Sequence[bool]], k: int
) -> np.ndarray:
    """maj@k: is the most frequent of the first k answers right? Ties give the share of the tied that are right.

    Args:
      answers: per problem, the extracted answers (equal answers must compare equal); None casts no vote.
      correct: per problem, whether each answer is right.
      k: >= 1 votes.

    Returns:
      float64 [P] in [0, 1]; 0 where nobody votes.
    """
    scores = np.zeros(len(answers))
    for problem, (given, right) in enumerate(zip(answers, correct, strict=True)):
        if k < 1 or len(given) < k or len(given) != len(right):
            raise DataError(f"maj@{k}: problem {problem} has {len(given)} answers and {len(right)} verdicts; need k of each")
        votes = Counter(answer for answer in given[:k] if answer is not None)
        if not votes:
            continue
        most = max(votes.values())
        verdict = dict(zip(reversed(given[:k]), reversed(right[:k]), strict=True))  # the first occurrence decides
        tied = [answer for answer, number in votes.items() if number == most]
        scores[problem] = np.mean([bool(verdict[answer]) for answer in tied])
    return scores
