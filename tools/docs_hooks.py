"""MkDocs hook: pages that are generated from the code, so that they cannot disagree with it."""

from __future__ import annotations

import html
import importlib
import inspect
import pathlib
import re
from typing import Any

from mkdocs.structure.files import File, Files

from jaxrl import launch
from jaxrl.parallel.mesh import MeshConfig
from jaxrl.rewards import REWARDS, RewardSpec
from jaxrl.runtime.config import ConfigRow, describe
from jaxrl.runtime.run_config import RunConfig

ROOT = pathlib.Path(__file__).resolve().parents[1]
#: Packages with an API page, in the order of the floors.
PACKAGES = ("ops", "parallel", "models", "data", "rewards", "rollout", "objectives", "runtime", "systems")


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages to the site."""
    pages = {"reference/configuration.md": configuration(), "reference/rewards.md": rewards()}
    pages |= {f"api/{package}.md": api(package) for package in PACKAGES}
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def configuration() -> str:
    """Every setting of every system, with type and default."""
    parts = [
        "# Configuration reference",
        "Any setting can be given as `--config.NAME=VALUE`. This page is generated from the configuration classes.",
    ]
    for name in launch.system_names():
        module = launch.load_system(name)
        parts += [f"## System `{name}`", summary(module.Config), table(describe(module.Config))]
    parts += [
        "## `run`: the loop, the same for every system",
        table(describe(RunConfig, "run")),
        "## `mesh`",
        table(describe(MeshConfig, "mesh")),
        "## One entry of `rewards`",
        table(describe(RewardSpec, "rewards[i]")),
    ]
    return "\n\n".join(parts) + "\n"


def rewards() -> str:
    """Every registered reward, with its options."""
    parts = [
        "# Built-in rewards",
        "An entry of `rewards` is `dict(name=..., weight=..., kwargs=dict(...))`. This page is generated from the code.",
    ]
    for name, entry in sorted(REWARDS.items()):
        text, _, options = summary(entry.factory).partition("\nArgs:\n")
        parts += [f"## `{name}`", text.strip()]
        for parameter in inspect.signature(entry.factory).parameters.values():
            options = re.sub(rf"^  {parameter.name}: ", option(parameter), options, flags=re.MULTILINE)
        parts.append(options)
        if entry.isolate:
            parts.append(f"Runs in worker processes, at most {entry.time_limit:g} s a row.")
    return "\n\n".join(parts) + "\n"


def option(parameter: inspect.Parameter) -> str:
    required = parameter.default is inspect.Parameter.empty
    return f"* `{parameter.name}` ({'required' if required else f'default `{parameter.default!r}`'}): "


def api(package: str) -> str:
    """One page of the API reference: every public module of a package."""
    folder = ROOT / "jaxrl" / package
    modules = sorted(path.stem for path in folder.glob("*.py") if not path.stem.startswith("_"))
    parts = [f"# `jaxrl.{package}`", summary(importlib.import_module(f"jaxrl.{package}"))]
    return "\n\n".join(parts + [f"::: jaxrl.{package}.{module}" for module in modules]) + "\n"


def summary(documented: Any) -> str:
    return inspect.cleandoc(documented.__doc__ or "")


def table(rows: list[ConfigRow]) -> str:
    lines = ["| setting | type | default | meaning |", "|---|---|---|---|"]
    for row in rows:
        cells = (code(row.name), code(row.type), code(row.default), row.doc.replace("``", "`").replace("|", "&#124;"))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def code(text: str) -> str:
    # A bar inside backticks would end the cell.
    return f"<code>{html.escape(text).replace('|', '&#124;')}</code>"
