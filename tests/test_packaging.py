"""House rules that a reader of one file cannot see: dependencies are declared, imports go down, no retired APIs."""

from __future__ import annotations

import ast
import configparser
import pathlib
import re
import sys
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGES = ("jaxrl", "pallas_kernels")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
#: docs/architecture.md: a package imports only from packages below it, and `errors` is below all.
FLOORS = (
    {"errors"},
    {"ops", "parallel"},
    {"models"},
    {"rewards", "data", "envs"},
    {"rollout"},
    {"objectives"},
    {"runtime"},
    {"systems"},
    {"launch", "__main__"},
)
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names}
#: Import names whose distribution is called otherwise.
DISTRIBUTIONS = {"orbax": "orbax-checkpoint", "absl": "absl-py"}
RETIRED = ("jax._src", "jax.experimental.shard_map", "jax.pmap", "flax.nnx.jit", "flax.nnx.Optimizer")
NICKNAMES = {"nnx": "flax.nnx"}


def settings() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def names(requirements: str) -> set[str]:
    """Normalised distribution names of a requirement list; `jaxrl-train[a,b]` stands for the extras a and b."""
    found = set()
    for line in filter(None, map(str.strip, requirements.splitlines())):
        name, extras = re.match(r"([\w.-]+)(?:\[([^\]]*)\])?", line).groups()
        if name == "jaxrl-train":
            for extra in extras.split(","):
                found |= names(settings()["options.extras_require"][extra])
        else:
            found.add(normal(name))
    return found


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def distribution(module: str) -> str:
    top = module.partition(".")[0]
    return normal(DISTRIBUTIONS.get(top, top))


def imports(tree: ast.AST) -> Iterator[str]:
    """Dotted names of what a file imports; `from a import b` gives `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the floor"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def dotted(tree: ast.AST) -> Iterator[str]:
    """Names like `jax.lax.scan` that a file imports or uses."""
    yield from imports(tree)
    for node in ast.walk(tree):
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if parts and isinstance(node, ast.Name):
            yield ".".join([NICKNAMES.get(node.id, node.id), *reversed(parts)])


def extras_asked_for(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "require":
            module, extra = node.args
            assert isinstance(module, ast.Constant) and isinstance(extra, ast.Constant), ast.unparse(node)
            yield module.value, extra.value


def room(module: str) -> str:
    """`jaxrl.ops.kl` -> `ops`; the package itself and its version belong to the lowest floor."""
    part = module.split(".")[1] if "." in module else ""
    return part if part in FLOOR else "errors"


def upward(tree: ast.AST, here: str) -> list[str]:
    """Imports of a file of `here` that its floor does not allow. Neighbours on one floor may import each other."""
    if here == "pallas_kernels":
        return [name for name in imports(tree) if name.startswith("jaxrl")]
    mine = [name for name in imports(tree) if name == "jaxrl" or name.startswith("jaxrl.")]
    return [name for name in mine if FLOOR[room(name)] > FLOOR[here]]


def retired(tree: ast.AST) -> list[str]:
    return [name for name in dotted(tree) if any(name == r or name.startswith(r + ".") for r in RETIRED)]


def undeclared(tree: ast.AST) -> set[str]:
    """Third-party modules imported without `require` that are not among the core dependencies."""
    ours = {"jaxrl", "pallas_kernels", "__future__"} | sys.stdlib_module_names
    modules = {name.partition(".")[0] for name in imports(tree)} - ours
    return {m for m in modules if distribution(m) not in names(settings()["options"]["install_requires"])}


def parse(path: pathlib.Path) -> ast.AST:
    return ast.parse(path.read_text())


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_file_keeps_the_house_rules(path):
    tree, parts = parse(path), path.relative_to(ROOT).with_suffix("").parts
    here = parts[1] if parts[0] == "jaxrl" and parts[1] in FLOOR else "errors"
    if parts[0] == "pallas_kernels":
        here = "pallas_kernels"
    assert upward(tree, here) == []
    assert retired(tree) == []
    assert undeclared(tree) == set()
    extras = settings()["options.extras_require"]
    for module, extra in extras_asked_for(tree):
        assert extra in extras, f"require({module!r}, {extra!r}): setup.cfg has no such extra"
        assert distribution(module) in names(extras[extra]), f"the extra {extra!r} does not install {module!r}"


def test_every_floor_is_known():
    rooms = {p.stem for p in (ROOT / "jaxrl").iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    assert rooms - {"__init__"} <= FLOOR.keys()


def test_every_folder_with_code_is_a_package():
    assert [str(f.parent) for f in FILES if not (f.parent / "__init__.py").exists()] == []


@pytest.mark.parametrize(
    ("check", "source", "culprit"),
    [
        (lambda t: upward(t, "ops"), "from jaxrl.models.decoder import LanguageModel", "jaxrl.models.decoder.LanguageModel"),
        (lambda t: upward(t, "models"), "def f():\n  from jaxrl import launch", "jaxrl.launch"),
        (lambda t: upward(t, "pallas_kernels"), "import jaxrl.ops", "jaxrl.ops"),
        (retired, "import jax\njax.pmap(f)", "jax.pmap"),
        (retired, "from jax._src import core", "jax._src.core"),
        (retired, "from jax.experimental.shard_map import shard_map", "jax.experimental.shard_map.shard_map"),
        (retired, "from flax import nnx\n@nnx.jit\ndef f(): ...", "flax.nnx.jit"),
        (retired, "from flax import nnx\nnnx.Optimizer(model)", "flax.nnx.Optimizer"),
        (undeclared, "import torch", "torch"),
        (undeclared, "def f():\n  from transformers import AutoTokenizer", "transformers"),
    ],
)
def test_checks_see_violations(check, source, culprit):
    assert culprit in check(ast.parse(source))


def test_checks_accept_what_is_right():
    source = "import json\nimport jax.numpy as jnp\nimport orbax.checkpoint as ocp\nfrom jaxrl.errors import require\n"
    tree = ast.parse(source + "from jaxrl.parallel import mesh\n")
    assert (upward(tree, "ops"), retired(tree), undeclared(tree)) == ([], [], set())
