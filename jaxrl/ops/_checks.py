"""Checks shared by the configuration dataclasses of this package."""

from __future__ import annotations

import math
from collections.abc import Iterable

from jaxrl.errors import ConfigError


def check_choice(owner: str, name: str, value: object, choices: Iterable[str]) -> None:
    """Raise ``ConfigError`` unless ``value`` is one of ``choices``."""
    choices = sorted(choices)
    if value not in choices:
        raise ConfigError(f"{owner}.{name} is {value!r}; choose one of {', '.join(map(repr, choices))}")


def check_number(
    owner: str,
    name: str,
    value: float | None,
    *,
    above: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    optional: bool = False,
) -> None:
    """Raise ``ConfigError`` unless ``value`` is a finite number in the stated range (or None, if optional)."""
    if value is None and optional:
        return
    bounds = []
    if above is not None:
        bounds.append(f"> {above:g}")
    if at_least is not None:
        bounds.append(f">= {at_least:g}")
    if at_most is not None:
        bounds.append(f"<= {at_most:g}")
    good = (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and math.isfinite(value)
        and (above is None or value > above)
        and (at_least is None or value >= at_least)
        and (at_most is None or value <= at_most)
    )
    if not good:
        wanted = " and ".join(bounds) or "finite"
        none = " or None" if optional else ""
        raise ConfigError(f"{owner}.{name} is {value!r}; it must be a number {wanted}{none}")
