"""Parameters and requests to completions: the slot engine and its sampling."""

from jaxrl.rollout.engine import Engine
from jaxrl.rollout.types import Completion, EngineConfig, EngineStats, Request, SamplingParams

__all__ = ["Completion", "Engine", "EngineConfig", "EngineStats", "Request", "SamplingParams"]
