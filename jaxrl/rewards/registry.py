"""Names of rewards, and the way from a name or an import path to a function."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxrl.errors import ConfigError, RewardError
from jaxrl.rewards.base import OnError, RewardFn


@dataclass(frozen=True)
class RewardEntry:
    """A registered reward.

    Attributes:
      factory: called with the keyword arguments of a RewardSpec; returns the reward function.
      isolate: whether it runs in worker processes unless the spec says otherwise.
      time_limit: seconds for one row when isolated.
      on_error: what happens to a row on which it raises, unless the spec says otherwise.
      preload: modules that a worker should import before its first row.
    """

    factory: Callable[..., RewardFn]
    isolate: bool = False
    time_limit: float = 10.0
    on_error: OnError = "raise"
    preload: tuple[str, ...] = ()


REWARDS: dict[str, RewardEntry] = {}


def register(name: str, **settings: Any) -> Callable[[Callable[..., RewardFn]], Callable[..., RewardFn]]:
    """Decorator: adds a reward factory to the registry. ``settings`` are the other fields of RewardEntry.

    Raises:
      ConfigError: the name is taken.
    """

    def add(factory: Callable[..., RewardFn]) -> Callable[..., RewardFn]:
        if name in REWARDS:
            raise ConfigError(f"a reward named {name!r} is registered already; choose another name")
        REWARDS[name] = RewardEntry(factory, **settings)
        return factory

    return add


def near_misses(name: str, known: list[str]) -> str:
    """A hint for an unknown name: the closest known ones, or all of them."""
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(repr(one) for one in close) + "?"
    return "known: " + ", ".join(sorted(known))


def load_path(path: str) -> Callable[..., Any]:
    """The object behind "my_package.my_module:my_function".

    Raises:
      ConfigError: the module or the function does not exist, or is not callable.
      RewardError: the module exists but raises while being imported.
    """
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise ConfigError(
                f"reward {path!r}: there is no module {error.name!r}; check the spelling and that its folder "
                "is on PYTHONPATH"
            ) from error
        raise RewardError(f"reward {path!r}: importing {module_name!r} failed: {error}") from error
    except Exception as error:
        raise RewardError(
            f"reward {path!r}: importing {module_name!r} failed: {type(error).__name__}: {error}"
        ) from error
    target = getattr(module, attribute, None)
    if target is None:
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ConfigError(
            f"reward {path!r}: module {module_name!r} has no {attribute!r}; {near_misses(attribute, known)}"
        )
    if not callable(target):
        raise ConfigError(f"reward {path!r} is a {type(target).__name__}, not a function; name a function")
    return target


def entry_of(name: str) -> RewardEntry:
    """The registry entry of a name, or one made for an import path.

    A function behind an import path is called as ``function(inputs, **kwargs)``.

    Raises:
      ConfigError: unknown name or path; the message offers near misses.
    """
    if ":" in name:
        function = load_path(name)

        def factory(**kwargs: Any) -> RewardFn:
            return functools.partial(function, **kwargs)

        factory.__signature__ = _without_first_parameter(function, name)  # type: ignore[attr-defined]
        return RewardEntry(factory)
    if name not in REWARDS:
        raise ConfigError(
            f"there is no reward named {name!r}; {near_misses(name, list(REWARDS))} A function of your own "
            "is named by its import path, 'package.module:function'"
        )
    return REWARDS[name]


def bind(name: str, kwargs: Mapping[str, Any]) -> RewardFn:
    """The reward function of a name, with its keyword arguments filled in.

    Raises:
      ConfigError: unknown name, unknown or missing keyword argument, or a value that the reward refuses.
    """
    factory = entry_of(name).factory
    signature = inspect.signature(factory)
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values())
    for key in kwargs:
        if key not in signature.parameters and not takes_any:
            known = list(signature.parameters)
            hint = near_misses(key, known) if known else "it takes none"
            raise ConfigError(f"reward {name!r} takes no argument {key!r}; {hint}")
    missing = [
        key
        for key, parameter in signature.parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and key not in kwargs
    ]
    if missing:
        raise ConfigError(
            f"reward {name!r} needs {', '.join(map(repr, missing))}; add it to the reward's kwargs"
        )
    return factory(**kwargs)


def _without_first_parameter(function: Callable[..., Any], name: str) -> inspect.Signature:
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    if not parameters:
        raise ConfigError(f"reward {name!r} takes no argument; it must take the list of rows first")
    if parameters[0].kind is inspect.Parameter.VAR_POSITIONAL:
        return signature
    return signature.replace(parameters=parameters[1:])
