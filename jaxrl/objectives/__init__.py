"""The language-model device step: a batch of per-token streams, an objective, and its gradient in micro-batches."""

from jaxrl.objectives.batch import PolicyBatch, policy_batch
from jaxrl.objectives.gradient import Objective, TokenOutputs, policy_gradient, score

__all__ = ["Objective", "PolicyBatch", "TokenOutputs", "policy_batch", "policy_gradient", "score"]
