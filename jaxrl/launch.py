"""Command line: ``python -m jaxrl.launch --config=configs/x.py[:variant] --run_dir=DIR [--config.a.b=VALUE
...]``.

A configuration is a Python file with ``get_config(variant)`` (or ``get_config()``) that returns a
``ConfigDict`` with the keys ``system`` (name of a module in ``jaxrl.systems``), ``run`` (``RunConfig``),
``mesh`` (``MeshConfig``) and the settings of the system. A ``config.json`` of an earlier run works as well.
Any setting, listed in the file or not, can be set by ``--config.NAME=VALUE``.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import json
import logging
import pathlib
import pkgutil
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Union, get_args, get_origin

import jax
from absl import flags
from ml_collections import config_dict, config_flags

import jaxrl
from jaxrl.errors import ConfigError, JaxrlError
from jaxrl.parallel.mesh import MeshConfig, make_mesh
from jaxrl.runtime import config as configs
from jaxrl.runtime import loop, summary
from jaxrl.runtime.host_memory import keep_freed_memory
from jaxrl.runtime.run_config import RunConfig
from jaxrl.runtime.rundir import RunDir
from jaxrl.runtime.signals import Interrupted
from jaxrl.runtime.state import count_parameters

logger = logging.getLogger("jaxrl")
USAGE = __doc__
RESERVED = ("system", "run", "mesh")
RESUME_MAY_CHANGE = ("run.", "mesh.")


@dataclasses.dataclass(frozen=True)
class Launch:
    """Everything that a command line resolves to."""

    system: str
    run: RunConfig
    mesh: Any
    config: Any

    def settings(self) -> dict[str, Any]:
        """The resolved configuration as written to ``config.json``."""
        head = {"system": self.system, "run": configs.to_dict(self.run), "mesh": configs.to_dict(self.mesh)}
        return head | configs.to_dict(self.config)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line.

    Returns:
      Exit code: 0 done, 2 an error of the user's making (one message), 128 + n stopped by signal n after
      saving.
    """
    argv = list(sys.argv if argv is None else argv)
    debug = any(a in ("--debug", "--debug=true", "-debug") for a in argv)
    # force: imported libraries have put handlers of their own on the root logger.
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s" if debug else "%(message)s", force=True)
    for name in ("absl", "orbax", "jax", "asyncio"):  # their tracebacks repeat what our message says
        logging.getLogger(name).setLevel(logging.WARNING if debug else logging.CRITICAL)
    try:
        return _main(argv)
    except Interrupted as stop:
        return int(stop.code or 0)
    except (JaxrlError, flags.Error) as error:
        if debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2


def _main(argv: list[str]) -> int:
    _check_package()
    options, settings = parse(argv)
    if options is None:
        print(USAGE)
        return 0
    if options.distributed:
        jax.distributed.initialize()
    if jax.default_backend() == "cpu":
        keep_freed_memory()
    launch = resolve(settings)
    run_dir = options.run_dir or launch.run.run_dir
    if options.dry_run:
        print(dry_run(launch))
        return 0
    if not run_dir:
        raise ConfigError("no run folder is given; add --run_dir=FOLDER")
    folder = RunDir(run_dir).create()
    system = build(launch)
    if jax.process_index() == 0:
        _save_config(folder, launch)
    loop.run(system, launch.run, folder.path, launch.settings())
    if jax.process_index() == 0:
        summary.show(folder)
    return 0


def parse(argv: Sequence[str]) -> tuple[flags.FlagValues | None, dict[str, Any]]:
    """Command line to (flags, configuration as a dict with overrides applied); (None, {}) if help is asked
    for.

    Raises:
      ConfigError: the file cannot be loaded, or an override names no setting.
    """
    if not argv[1:] or any(a in ("--help", "-h", "-help") for a in argv):
        return None, {}
    values = flags.FlagValues()
    flags.DEFINE_string("run_dir", "", "run folder", flag_values=values)
    flags.DEFINE_integer("seed", None, "short for --config.run.seed", flag_values=values)
    flags.DEFINE_string("profile_steps", None, "short for --config.run.profile_steps", flag_values=values)
    flags.DEFINE_boolean("dry_run", False, "print what would run, then stop", flag_values=values)
    flags.DEFINE_boolean("debug", False, "show tracebacks", flag_values=values)
    flags.DEFINE_boolean("distributed", False, "call jax.distributed.initialize first", flag_values=values)
    file, rest = _take_config_file(list(argv))
    given = load_config(file)
    for argument in rest[1:]:  # first of all, as the other settings depend on it
        if argument.lstrip("-").startswith("config.system="):
            given["system"] = argument.split("=", 1)[1]
    config = with_defaults(given)
    for argument in rest[1:]:
        _check_override(argument, config)
    config_flags.DEFINE_config_dict("config", config, flag_values=values, sys_argv=rest)
    unparsed = values(rest)[1:]
    if unparsed:
        raise ConfigError(f"{unparsed[0]!r} is not understood; settings are given as --config.NAME=VALUE")
    for name in ("seed", "profile_steps"):
        if getattr(values, name) is not None:
            config.run[name] = getattr(values, name)
    return values, configs.to_plain(config)


def load_config(file: str) -> dict[str, Any]:
    """Load ``path.py[:variant]`` or a ``config.json``.

    Raises:
      ConfigError: no such file, no ``get_config``, a variant that it refuses, or no ``system`` in the result.
    """
    path, _, variant = file.partition(":")
    if not pathlib.Path(path).is_file():
        raise ConfigError(
            f"--config={path}: no such file; give a Python file with get_config, or a config.json"
        )
    if path.endswith(".json"):
        return configs.load_json(path)
    spec = importlib.util.spec_from_file_location("jaxrl_config_file", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "get_config"):
        raise ConfigError(f"--config={path} has no get_config function; define get_config(variant)")
    takes_variant = bool(inspect.signature(module.get_config).parameters)
    if variant and not takes_variant:
        raise ConfigError(
            f"--config={file}: get_config of this file takes no variant; leave out ':{variant}'"
        )
    config = configs.to_plain(module.get_config(*([variant] if variant else [])))
    if not isinstance(config, Mapping) or "system" not in config:
        raise ConfigError(
            f"--config={path} names no system; set config.system to one of {', '.join(system_names())}"
        )
    return dict(config)


def system_names() -> list[str]:
    """Modules of ``jaxrl.systems`` that can be launched."""
    package = importlib.import_module("jaxrl.systems")
    return sorted(m.name for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_"))


def load_system(name: str) -> types.ModuleType:
    """The module of a system. Raises ConfigError with near misses if there is none, or it lacks Config or
    build.
    """
    names = system_names()
    if name not in names:
        raise ConfigError(f"config.system is {name!r}; {configs.suggest(str(name), names)}")
    module = importlib.import_module(f"jaxrl.systems.{name}")
    for part in ("Config", "build"):
        if not hasattr(module, part):
            raise ConfigError(f"jaxrl.systems.{name} has no {part}; config.system must name a system")
    return module


def with_defaults(config: Mapping[str, Any]) -> config_dict.ConfigDict:
    """The configuration with every default filled in, so that each setting has a typed flag."""
    module = load_system(config["system"])
    full: dict[str, Any] = {"system": config["system"]}
    full["run"] = _fill(RunConfig, config.get("run", {}))
    full["mesh"] = _fill(MeshConfig, config.get("mesh", {}))
    full |= _fill(module.Config, {k: v for k, v in config.items() if k not in RESERVED})
    return config_dict.ConfigDict(full)


def resolve(config: Mapping[str, Any]) -> Launch:
    """Configuration dict to checked dataclasses. Raises ConfigError naming the setting."""
    module = load_system(config["system"])
    run = configs.from_config_dict(RunConfig, config.get("run", {}), "config.run")
    mesh = configs.from_config_dict(MeshConfig, config.get("mesh", {}), "config.mesh")
    rest = {k: v for k, v in config.items() if k not in RESERVED}
    return Launch(config["system"], run, mesh, configs.from_config_dict(module.Config, rest, "config"))


def build(launch: Launch) -> loop.System:
    """The system of a resolved configuration, on its mesh."""
    return load_system(launch.system).build(launch.config, make_mesh(launch.mesh))


def dry_run(launch: Launch) -> str:
    """What would run: resolved configuration, parameter count, memory. Nothing is written and no step is
    taken.
    """
    system = build(launch)
    lines = [json.dumps(launch.settings(), indent=2)]
    if hasattr(system, "describe"):
        facts = dict(system.describe())
    else:
        state = jax.eval_shape(lambda key: system.init(key).device, jax.random.key(launch.run.seed))
        facts = {"state_elements": count_parameters(state)}
    lines += [
        f"{name}: {value:,}" if isinstance(value, int) else f"{name}: {value}"
        for name, value in facts.items()
    ]
    return "\n".join(lines)


def _fill(cls: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """``given`` on top of the defaults of ``cls``; None of an optional number becomes a typed placeholder."""
    hints = typing.get_type_hints(cls)
    full: dict[str, Any] = dict(given)
    for f in dataclasses.fields(cls):
        hint = hints[f.name]
        default = configs.default_of(f)
        value = full.get(f.name, default)
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            # A group given in part keeps the other defaults of this field.
            base = _shallow(default) if dataclasses.is_dataclass(default) else {}
            given_part = _shallow(value) if dataclasses.is_dataclass(value) else value
            full[f.name] = _fill(hint, base | dict(given_part if isinstance(given_part, Mapping) else {}))
        elif dataclasses.is_dataclass(value):
            full[f.name] = _fill(type(value), _shallow(value))
        elif value is None or value is dataclasses.MISSING:
            plain = [t for t in _union(hint) if t in (int, float, str, bool)]
            if plain:
                full[f.name] = config_dict.placeholder(plain[0])
            elif value is None:
                full[f.name] = None
        else:
            full[f.name] = value
    return full


def _shallow(value: Any) -> dict[str, Any]:
    return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}


def _union(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _take_config_file(argv: list[str]) -> tuple[str, list[str]]:
    for i, argument in enumerate(argv):
        if argument.startswith(("--config=", "-config=")):
            return argument.split("=", 1)[1], argv[:i] + argv[i + 1 :]
        if argument in ("--config", "-config") and i + 1 < len(argv):
            return argv[i + 1], argv[:i] + argv[i + 2 :]
    raise ConfigError("no configuration is given; add --config=configs/NAME.py")


def _check_override(argument: str, config: config_dict.ConfigDict) -> None:
    """Refuse ``--config.a.b=...`` that names no setting, with near misses."""
    name = argument.lstrip("-").split("=", 1)[0].removeprefix("no")
    if not argument.startswith("-") or not name.startswith("config."):
        return
    node: Any = config
    taken = "config"
    for part in name.split(".")[1:]:
        if not isinstance(node, config_dict.ConfigDict):
            raise ConfigError(
                f"--{name}: {taken} is a single value without settings of its own; set --{taken}=VALUE"
            )
        if part not in node:
            raise ConfigError(
                f"--{name}: {taken} has no setting {part!r}; {configs.suggest(part, node.keys())}"
            )
        node, taken = node[part], f"{taken}.{part}"


def _save_config(folder: RunDir, launch: Launch) -> None:
    """Write config.json; when a run is resumed with other settings, say which."""
    new = launch.settings()
    if folder.config.exists() and folder.checkpoints.is_dir():
        old = configs.flatten(configs.load_json(folder.config))
        now = configs.flatten(json.loads(json.dumps(new)))
        for name in sorted(old.keys() | now.keys()):
            if old.get(name) != now.get(name) and not name.startswith(RESUME_MAY_CHANGE):
                logger.warning("resuming with another %s: %r, was %r", name, now.get(name), old.get(name))
    configs.save_json(new, folder.config)


def _check_package() -> None:
    """Two packages are called jaxrl; make sure that this is the one."""
    if getattr(jaxrl, "MARKER", None) != "jaxrl-train":
        where = getattr(jaxrl, "__file__", None) or list(jaxrl.__path__)
        raise ConfigError(
            f"another package named jaxrl is imported from {where}; uninstall it, or use a fresh environment"
        )


if __name__ == "__main__":
    sys.exit(main())
