"""Flax nnx model definitions, weight import and export, tokenizers."""

from jaxrl.models.config import PRESETS, LoraConfig, ModelConfig, RopeScaling
from jaxrl.models.decoder import LanguageModel, Outputs, stack_layers, unstack_layers

__all__ = [
    "PRESETS",
    "LanguageModel",
    "LoraConfig",
    "ModelConfig",
    "Outputs",
    "RopeScaling",
    "stack_layers",
    "unstack_layers",
]
