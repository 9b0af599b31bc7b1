"""Length bias of loss aggregations on a tabular problem: does the length of wrong answers drift?

An answer is right or wrong by a fair coin that does not learn; its length 1..8 is drawn from one softmax for right
and one for wrong answers, both uniform at the start (mean 4.5); the reward is 1 if right. The log-probability of a
row sits on its first token, so that it counts once. Per seed: 32 prompts x 8 rows, 200 ascent steps of size 1 on
sum_i w_i A_i log p(length_i), w from the aggregation. Prints mean lengths of wrong and right answers at the end.

    python benchmarks/length_bias.py --seeds 10
"""

from __future__ import annotations

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl import ops

LONGEST, PROMPTS, GROUP, STEPS, STEP_SIZE = 8, 32, 8, 200, 1.0

# name -> (aggregation, divide advantages by the group deviation)
VARIANTS = {
    "grpo": (ops.Aggregation("seq-mean-token-mean"), True),
    "grpo, no std": (ops.Aggregation("seq-mean-token-mean"), False),
    "dr_grpo": (ops.Aggregation("seq-mean-token-sum-norm", length_scale=LONGEST), False),
    "dapo": (ops.Aggregation("token-mean"), True),
}


@functools.partial(jax.jit, static_argnames="aggregation")
@jax.grad
def loss_gradient(logits, right, lengths, advantages, aggregation):
    """Gradient wrt the length logits [2, LONGEST] (wrong, right) of the REINFORCE loss of a batch [N]."""
    row_logp = jax.nn.log_softmax(logits)[right, lengths - 1]
    mask = (jnp.arange(LONGEST) < lengths[:, None]).astype(logits.dtype)
    logp = jnp.zeros(mask.shape, logits.dtype).at[:, 0].set(row_logp)
    surrogate = ops.policy_loss(ops.PolicyLossConfig("reinforce"), logp, logp, advantages, mask)
    return ops.aggregate(aggregation, surrogate.per_token, mask, ops.count(mask))


def final_lengths(aggregation: ops.Aggregation, divide_by_std: bool, seed: int) -> tuple[float, float]:
    """(mean length of wrong answers, of right answers) under the policy after the last step."""
    rng = np.random.default_rng(seed)
    rule = ops.AdvantageConfig("grpo", scale="group" if divide_by_std else "none")
    group_ids = np.repeat(np.arange(PROMPTS), GROUP)
    logits = np.zeros((2, LONGEST))
    for _ in range(STEPS):
        probabilities = np.exp(logits - logits.max(axis=1, keepdims=True))
        probabilities /= probabilities.sum(axis=1, keepdims=True)
        right = rng.integers(0, 2, PROMPTS * GROUP)
        uniform = rng.random(PROMPTS * GROUP)[:, None]
        lengths = 1 + np.minimum((uniform > np.cumsum(probabilities[right], axis=1)).sum(axis=1), LONGEST - 1)
        advantages = ops.compute_advantages(rule, right.astype(float), group_ids)
        gradient = loss_gradient(
            jnp.asarray(logits, jnp.float32), right, lengths, jnp.asarray(advantages, jnp.float32), aggregation
        )
        logits = logits - STEP_SIZE * np.asarray(gradient, np.float64)
    probabilities = np.asarray(jax.nn.softmax(jnp.asarray(logits), axis=1), np.float64)
    wrong_length, right_length = probabilities @ np.arange(1, LONGEST + 1)
    return float(wrong_length), float(right_length)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10, help="number of seeds per variant")
    seeds = parser.parse_args().seeds
    print(f"| aggregation | wrong: mean (min..max over {seeds} seeds) | right: mean (min..max) |")
    print("|---|---|---|")
    for name, (aggregation, divide_by_std) in VARIANTS.items():
        ends = np.array([final_lengths(aggregation, divide_by_std, seed) for seed in range(seeds)])
        cells = [f"{c.mean():.2f} ({c.min():.2f}..{c.max():.2f})" for c in ends.T]
        print(f"| {name} | {cells[0]} | {cells[1]} |")


if __name__ == "__main__":
    main()
