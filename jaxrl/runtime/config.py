"""Configuration: ``ml_collections.ConfigDict`` (or a plain dict) to nested frozen dataclasses, and back.

A configuration class is a frozen dataclass. Its fields may be ``int``, ``float``, ``bool``, ``str``,
``Literal``, ``tuple``, ``dict``, another configuration class, and any ``|`` of these. A ``validate()``
method, if there is one, is called after construction and raises ``ConfigError`` for values that cannot work
together.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import inspect
import json
import numbers
import os
import pathlib
import re
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from jaxrl.errors import ConfigError

T = TypeVar("T")


def field(default: Any = dataclasses.MISSING, doc: str = "") -> Any:
    """Declare a configuration field together with its documentation.

    Args:
      default: the default value; leave out for a required field. Lists and dicts are copied for each
        instance.
      doc: one sentence (with units) shown in the generated documentation and by ``describe``.
    """
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=lambda: copy.deepcopy(default), metadata={"doc": doc})
    if default is dataclasses.MISSING:
        return dataclasses.field(metadata={"doc": doc})
    return dataclasses.field(default=default, metadata={"doc": doc})


def from_config_dict(cls: type[T], config: Any, prefix: str = "config") -> T:
    """Build a configuration dataclass from a ``ConfigDict`` or a dict.

    Args:
      cls: the dataclass to build.
      config: ``ConfigDict``, ``FrozenConfigDict`` or dict. Missing keys take the defaults of ``cls``.
      prefix: dotted name of ``config`` used in messages.

    Raises:
      ConfigError: an unknown key, a missing required key, a value of a wrong type, or a failed
        ``validate()``. The message gives the full dotted name and, for an unknown key, the nearest known
        names.
    """
    return _build(cls, to_plain(config), prefix)


def to_plain(config: Any) -> Any:
    """``ConfigDict`` to dict, recursively; field references are resolved. Other values are returned as they
    are.
    """
    if hasattr(config, "to_dict") and not dataclasses.is_dataclass(config):
        config = config.to_dict()
    if isinstance(config, Mapping):
        return {key: to_plain(value) for key, value in config.items()}
    return config


def to_dict(config: Any) -> Any:
    """A configuration dataclass as nested dicts and lists that JSON can hold."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {f.name: to_dict(getattr(config, f.name)) for f in dataclasses.fields(config)}
    if isinstance(config, Mapping):
        return {key: to_dict(value) for key, value in config.items()}
    if isinstance(config, (tuple, list)):
        return [to_dict(value) for value in config]
    return config


def save_json(config: Any, path: str | os.PathLike[str]) -> None:
    """Write a configuration (dataclass or dict) to ``path`` as JSON, atomically."""
    path = pathlib.Path(path)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(to_dict(config), indent=2) + "\n")
    os.replace(temporary, path)


def load_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a configuration written by ``save_json``.

    Raises:
      ConfigError: the file is missing or is not a JSON object.
    """
    try:
        config = json.loads(pathlib.Path(path).read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigError(
            f"cannot read the configuration {path}: {error}; give a file written by a run"
        ) from error
    if not isinstance(config, dict):
        raise ConfigError(
            f"{path} holds a {type(config).__name__}, not a JSON object; give a file written by a run"
        )
    return config


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """Nested configuration as ``{dotted name: value}``; empty dicts are kept as values."""
    rows: dict[str, Any] = {}
    for key, value in to_dict(config).items():
        name = f"{prefix}.{key}" if prefix else key
        if isinstance(value, dict) and value:
            rows.update(flatten(value, name))
        else:
            rows[name] = value
    return rows


@dataclasses.dataclass(frozen=True)
class ConfigRow:
    """One line of the generated documentation of a configuration class."""

    name: str
    type: str
    default: str
    doc: str


def describe(cls: type, prefix: str = "", defaults: Any = None) -> list[ConfigRow]:
    """All fields of a configuration class and of the classes nested in it, as rows for documentation.

    Args:
      cls: the dataclass.
      prefix: dotted name put before every row.
      defaults: an instance of ``cls`` whose values are shown as defaults; None shows those of ``cls``.
    """
    rows: list[ConfigRow] = []
    hints, documented = typing.get_type_hints(cls), _attribute_docs(cls)
    for f in dataclasses.fields(cls):
        name = f"{prefix}.{f.name}" if prefix else f.name
        hint = hints[f.name]
        nested = [m for m in _members(hint) if isinstance(m, type) and dataclasses.is_dataclass(m)]
        default = default_of(f) if defaults is None else getattr(defaults, f.name)
        if nested != [hint]:
            shown = "required" if default is dataclasses.MISSING else repr(default)
            rows.append(
                ConfigRow(name, type_name(hint), shown, f.metadata.get("doc") or documented.get(f.name, ""))
            )
        for member in nested:
            rows.extend(describe(member, name, default if isinstance(default, member) else None))
    return rows


def _attribute_docs(cls: type) -> dict[str, str]:
    """Field documentation from the ``Attributes:`` section of a class docstring."""
    section = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")[2]
    docs: dict[str, str] = {}
    names: list[str] = []
    for line in section.split("\n"):
        entry = re.match(r"  (\w+(?:, \w+)*): (.*)", line)
        if entry:
            names = entry.group(1).split(", ")
            docs.update(dict.fromkeys(names, entry.group(2)))
        elif line.startswith("    ") and names:
            docs.update({name: docs[name] + " " + line.strip() for name in names})
        elif line.strip():
            break
    return docs


def default_of(f: dataclasses.Field[Any]) -> Any:
    """The default of a dataclass field, or ``dataclasses.MISSING``."""
    if f.default is not dataclasses.MISSING:
        return f.default
    if f.default_factory is not dataclasses.MISSING:
        return f.default_factory()
    return dataclasses.MISSING


def suggest(name: str, known: Iterable[str]) -> str:
    """A clause with the nearest known names, or with all of them when none is near."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    if near:
        return "did you mean " + " or ".join(repr(n) for n in near) + "?"
    return "known names: " + (", ".join(known) or "none")


def type_name(hint: Any) -> str:
    """A type hint as a reader would write it."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is type(None):
        return "None"
    if origin is Literal:
        return " | ".join(repr(a) for a in args)
    if origin in (Union, types.UnionType):
        return " | ".join(type_name(a) for a in args)
    if origin is not None:
        return f"{origin.__name__}[{', '.join('...' if a is Ellipsis else type_name(a) for a in args)}]"
    return getattr(hint, "__name__", str(hint))


def _members(hint: Any) -> list[Any]:
    return list(get_args(hint)) if get_origin(hint) in (Union, types.UnionType) else [hint]


def _build(cls: type[T], data: Any, prefix: str) -> T:
    if isinstance(data, cls):
        return data
    if not isinstance(data, Mapping):
        raise ConfigError(f"{prefix} is {_shown(data)}; give a group of settings ({cls.__name__})")
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    unknown = [key for key in data if key not in fields]
    if unknown:
        lines = [
            f"{prefix}.{key} is not a setting of {cls.__name__}; {suggest(str(key), fields)}"
            for key in unknown
        ]
        raise ConfigError("\n".join(lines))
    hints = typing.get_type_hints(cls)
    unset = {n for n, f in fields.items() if default_of(f) is dataclasses.MISSING and data.get(n) is None}
    missing = [n for n in fields if n in unset and not (n in data and type(None) in _members(hints[n]))]
    if missing:
        names = ", ".join(f"{prefix}.{name}" for name in missing)
        raise ConfigError(f"{names} must be set; {cls.__name__} has no default for it")
    values = {}
    for key, value in data.items():
        default = default_of(fields[key])
        if (
            isinstance(value, Mapping)
            and dataclasses.is_dataclass(hints[key])
            and type(default) is hints[key]
        ):
            # A group given in part keeps the other defaults of this field.
            value = {f.name: getattr(default, f.name) for f in dataclasses.fields(default)} | dict(value)
        values[key] = _convert(hints[key], value, f"{prefix}.{key}")
    try:
        config = cls(**values)
        validate = getattr(config, "validate", None)
        if validate is not None:
            validate()
    except ConfigError as error:
        raise ConfigError(f"{prefix}: {error}") from error
    return config


def _convert(hint: Any, value: Any, name: str) -> Any:
    """``value`` as the type ``hint``, or ConfigError. Only widening conversions are made: int to float, list
    to tuple.
    """
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        return _convert_union(args, hint, value, name)
    if origin is Literal:
        if any(value == a and type(value) is type(a) for a in args):
            return value
        hint_text = (
            suggest(value, args) if isinstance(value, str) and all(isinstance(a, str) for a in args) else ""
        )
        raise ConfigError(
            f"{name} is {_shown(value)}; use one of {type_name(hint)}" + (hint_text and f" ({hint_text})")
        )
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _build(hint, value, name)
    if hint is type(None):
        if value is None:
            return None
    elif hint is bool:
        if isinstance(value, bool):
            return value
    elif hint is int:
        if isinstance(value, numbers.Integral) and not isinstance(value, bool):
            return int(value)
    elif hint is float:
        if isinstance(value, numbers.Real) and not isinstance(value, bool):
            return float(value)
    elif hint is str:
        if isinstance(value, str):
            return value
    elif origin is tuple or hint is tuple:
        return _convert_tuple(hint, args, value, name)
    elif origin in (dict, Mapping) or hint is dict:
        if isinstance(value, Mapping):
            key_type, value_type = args or (Any, Any)
            return {
                _convert(key_type, k, f"{name} (key)"): _convert(value_type, v, f"{name}.{k}")
                for k, v in value.items()
            }
    elif isinstance(hint, type):
        if isinstance(value, hint):
            return value
    else:
        raise ConfigError(
            f"{name} is declared as {hint}, which configuration cannot hold; declare a plainer type"
        )
    raise ConfigError(f"{name} is {_shown(value)}; give {_article(type_name(hint))}")


def _convert_union(args: tuple[Any, ...], hint: Any, value: Any, name: str) -> Any:
    if value is None and type(None) in args:
        return None
    # An exact type wins over a widening one, so that 3 stays an int under `float | int`.
    ordered = sorted(args, key=lambda a: not (isinstance(a, type) and type(value) is a))
    problems = []
    for member in ordered:
        if member is type(None):
            continue
        try:
            return _convert(member, value, name)
        except ConfigError as error:
            problems.append(str(error))
    if len(problems) == 1:
        raise ConfigError(problems[0])
    raise ConfigError(f"{name} is {_shown(value)}; give {_article(type_name(hint))} ({' / '.join(problems)})")


def _convert_tuple(hint: Any, args: tuple[Any, ...], value: Any, name: str) -> tuple[Any, ...]:
    if isinstance(value, Mapping) and len(args) == 2 and get_origin(args[0]) is tuple and args[1] is Ellipsis:
        value = tuple(value.items())  # {"regex": 1e-4} for a tuple of pairs
    if not isinstance(value, (tuple, list)):
        raise ConfigError(f"{name} is {_shown(value)}; give {_article(type_name(hint))}")
    if not args:
        return tuple(value)
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(_convert(args[0], v, f"{name}[{i}]") for i, v in enumerate(value))
    if len(args) != len(value):
        raise ConfigError(f"{name} has {len(value)} entries; {type_name(hint)} needs {len(args)}")
    return tuple(_convert(a, v, f"{name}[{i}]") for i, (a, v) in enumerate(zip(args, value, strict=True)))


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def _article(name: str) -> str:
    return ("an " if name[:1] in "aeiou" else "a ") + name
