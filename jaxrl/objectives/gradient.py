"""Log-probabilities of a batch, and the gradient of an objective over it, micro-batch by micro-batch.

The step knows no algorithm: what an algorithm wants is in the streams of the batch, in the ``LossConfig`` and in
optional extra terms. Every term is divided by counts of the whole optimizer step, so the number of micro-batches and
of devices never changes the gradient.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl.errors import ConfigError
from jaxrl.models.decoder import LanguageModel, Params
from jaxrl.objectives.batch import PolicyBatch
from jaxrl.ops.aggregation import count
from jaxrl.ops.logprobs import token_logprobs
from jaxrl.ops.loss import LossConfig, policy_objective
from jaxrl.ops.metrics import Metrics, merge_metrics, summarize_metrics
from jaxrl.ops.selection import entropy_quantile
from jaxrl.parallel.trees import combine


@dataclasses.dataclass(frozen=True)
class TokenOutputs:
    """What the forward pass of a micro-batch gives to loss terms; ``[N, S]`` unless said otherwise.

    Attributes:
      logp: log-probabilities of the tokens, 0 outside the loss mask.
      entropy: token entropies in nats, 0 outside the loss mask.
      hidden: ``[N, S, D]`` after the final norm.
      extras: what ``Objective.want`` asked for.
    """

    logp: jax.Array
    entropy: jax.Array
    hidden: jax.Array
    extras: dict[str, jax.Array]


#: ``term(params, batch, outputs) -> (sum, denominator)``; the term enters
#: the loss as sum / max(denominator, 1), times its weight.
Term = Callable[[Params, PolicyBatch, TokenOutputs], tuple[jax.Array, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Objective:
    """What a train step minimises; hashable, a static argument of jit.

    Attributes:
      loss: surrogate, KL, entropy and aggregation.
      temperature: of the sampler; every log-probability is of logits divided by it.
      completion_columns: the length T for aggregation modes that divide by it; None takes the columns of the batch.
      chunk_tokens: tokens whose logits are in memory at once (see ``ops.logprobs``).
      want: extra outputs of the forward pass, such as ``"layer:-2"``.
      terms: (name, weight, term) added to the loss; only with one micro-batch, as their denominators are known to
        the terms alone.
    """

    loss: LossConfig = dataclasses.field(default_factory=LossConfig)
    temperature: float = 1.0
    completion_columns: int | None = None
    chunk_tokens: int = 512
    want: tuple[str, ...] = ()
    terms: tuple[tuple[str, float, Term], ...] = ()

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ConfigError(f"objective temperature is {self.temperature}; it must be positive (greedy has no gradient)")
        if self.chunk_tokens < 1:
            raise ConfigError(f"chunk_tokens is {self.chunk_tokens}; it must be at least 1")


def token_outputs(model: LanguageModel, objective: Objective, params: Params, batch: PolicyBatch) -> TokenOutputs:
    """Forward pass; logits exist only for tokens of the loss mask, a chunk at a time."""
    out = model.forward(params, batch.tokens, batch.positions, batch.segment_ids, objective.want)
    # The hidden state at t - 1 predicts token t. Column 0 has no predecessor.
    mask = batch.loss_mask[:, 1:]
    logp, entropy = token_logprobs(
        out.hidden[:, :-1],
        model.head(params),
        batch.tokens[:, 1:],
        mask,
        temperature=objective.temperature,
        chunk_tokens=objective.chunk_tokens,
    )
    shift = lambda x: jnp.pad(x, ((0, 0), (1, 0)))  # noqa: E731
    return TokenOutputs(shift(logp), shift(entropy), out.hidden, out.extras)


def score(
    model: LanguageModel,
    objective: Objective,
    params: Params,
    frozen: Params,
    batch: PolicyBatch,
    micro_batches: int = 1,
) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities and entropies ``[N, S]`` of a batch under fixed parameters; no gradient.

    Args:
      params, frozen: the two parts of the parameters (``parallel.trees.partition``); frozen may be empty.
      micro_batches: pieces that are computed one after the other to save memory.
    """
    merged = combine(params, frozen)

    def piece(part: PolicyBatch) -> tuple[jax.Array, jax.Array]:
        outputs = token_outputs(model, objective, merged, part)
        return outputs.logp, outputs.entropy

    if micro_batches == 1:
        return piece(batch)
    results = jax.lax.map(piece, _split(batch, micro_batches))
    return jax.tree.map(_join, results)


def policy_gradient(
    model: LanguageModel,
    objective: Objective,
    params: Params,
    frozen: Params,
    batch: PolicyBatch,
    *,
    micro_batches: int = 1,
    kl_coef: jax.Array | None = None,
    entropy_coef: jax.Array | None = None,
) -> tuple[Params, dict[str, jax.Array]]:
    """Gradient of the objective with respect to ``params``, and metrics.

    Args:
      model: static handle.
      objective: static description of the loss.
      params: trainable parameters, nested dict.
      frozen: the other parameters, nested dict, may be empty.
      batch: ALL rows of the optimizer step.
      micro_batches: number of pieces; the gradient does not depend on it (except for losses that by definition
        normalise each micro-batch, ``Aggregation(scope="micro-batch")``).
      kl_coef, entropy_coef: scalars from controllers, in place of those of the objective.

    Returns:
      Gradients in the structure and dtype of ``params`` (accumulated in float32), and flat scalar metrics.

    Raises:
      ConfigError: rows do not split into the micro-batches, or the loss needs a stream that the batch lacks.
    """
    loss_config = objective.loss
    denominators = count(batch.loss_mask, batch.segment_ids, objective.completion_columns, micro_batches)
    threshold = None
    if loss_config.top_entropy_quantile is not None:
        _, entropies = score(model, objective, params, frozen, batch, micro_batches)
        threshold = entropy_quantile(entropies, batch.loss_mask, loss_config.top_entropy_quantile)
    if objective.terms and micro_batches > 1:
        raise ConfigError(
            f"extra terms {[name for name, _, _ in objective.terms]} with {micro_batches} micro-batches: their "
            "denominators are known only for the whole batch; use one micro-batch"
        )

    def loss(params: Params, part: PolicyBatch) -> tuple[jax.Array, Metrics]:
        merged = combine(params, frozen)
        outputs = token_outputs(model, objective, merged, part)
        value, metrics = policy_objective(
            loss_config,
            logp=outputs.logp,
            advantages=part.advantages,
            mask=part.loss_mask,
            denominators=denominators,
            old_logp=part.old_logp,
            ref_logp=part.ref_logp,
            sampler_logp=part.sampler_logp,
            entropy=outputs.entropy,
            weights=part.weights,
            segment_ids=part.segment_ids,
            entropy_threshold=threshold,
            kl_coef=kl_coef,
            entropy_coef=entropy_coef,
        )
        for name, weight, term in objective.terms:
            total, number = term(merged, part, outputs)
            value = value + weight * total / jnp.maximum(number, 1)
            metrics["mean"][name] = jax.lax.stop_gradient((total, number))
        metrics["sum"]["loss"] = jax.lax.stop_gradient(value)
        return value, metrics

    gradient = jax.grad(loss, has_aux=True)
    if micro_batches == 1:
        grads, metrics = gradient(params, batch)
    else:
        parts = _split(batch, micro_batches)
        # The scan carries float32 sums; its first element comes from the abstract shapes of one micro-batch.
        shapes = jax.eval_shape(gradient, params, jax.tree.map(lambda x: x[0], parts))
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, jnp.promote_types(s.dtype, jnp.float32)), shapes[0])
        neutral = {"sum": 0.0, "mean": 0.0, "min": jnp.inf, "max": -jnp.inf}
        start = {kind: jax.tree.map(lambda s: jnp.full(s.shape, neutral[kind], s.dtype), shapes[1][kind]) for kind in neutral}  # noqa: B023,E501

        def accumulate(carry: tuple[Params, Metrics], part: PolicyBatch) -> tuple[tuple[Params, Metrics], None]:
            total, merged = carry
            grads, metrics = gradient(params, part)
            total = jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, grads)
            return (total, merge_metrics(merged, metrics)), None

        (grads, metrics), _ = jax.lax.scan(accumulate, (zeros, start), parts)
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)
    flat: dict[str, Any] = summarize_metrics(metrics)
    flat["loss_tokens"] = denominators.tokens
    return grads, flat


def _split(batch: PolicyBatch, parts: int) -> PolicyBatch:
    """Leaves ``[N, S]`` to ``[parts, N / parts, S]``. Rows are dealt like cards: every micro-batch is on all shards."""
    if batch.rows % parts:
        raise ConfigError(f"{batch.rows} rows do not split into {parts} micro-batches; choose a divisor of {batch.rows}")
    return jax.tree.map(lambda x: jnp.swapaxes(x.reshape(-1, parts, *x.shape[1:]), 0, 1), batch)


def _join(x: jax.Array) -> jax.Array:
    """Inverse of the split."""
    return jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:])
