"""Errors that users see: each message names the culprit and the remedy."""

from __future__ import annotations

import importlib
import types
from typing import Any


class JaxrlError(Exception):
    """Base class of every error this library raises on purpose."""


class ConfigError(JaxrlError, ValueError):
    """A configuration key or value is wrong, or two options exclude each other."""


class DataError(JaxrlError, ValueError):
    """A data set, one of its lines, or a batch made from it is wrong."""


class ModelLoadError(JaxrlError, ValueError):
    """Weights or tokenizer files are missing, corrupt, or do not match the model."""


class CheckpointError(JaxrlError, RuntimeError):
    """A checkpoint cannot be written or read."""


class RewardError(JaxrlError, RuntimeError):
    """A reward cannot be found, or raised an exception while scoring."""


class NonFiniteError(JaxrlError, FloatingPointError):
    """A loss or gradient is not finite; the optimizer step was not taken.

    Attributes:
      state: the last good state, for the loop to save; None if the raiser knows none.
    """

    state: Any = None


class MissingExtraError(JaxrlError, ImportError):
    """An optional dependency is not installed."""


def require(module: str, extra: str) -> types.ModuleType:
    """Import an optional dependency, or raise an error that names the extra to install.

    Args:
      module: dotted module name, for example ``"math_verify"``.
      extra: name of the extra in ``setup.cfg`` that provides it.

    Raises:
      MissingExtraError: the module cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"{module!r} is needed here but could not be imported ({error}); install it with "
            f"`pip install 'jaxrl-train[{extra}]'`"
        ) from error
