"""What the documentation says runs: code blocks, command lines, names of settings and options."""

from __future__ import annotations

import inspect
import pathlib
import re
import shlex

import pytest

from jaxrl import launch, ops
from jaxrl.parallel.mesh import MeshConfig
from jaxrl.runtime.config import describe
from jaxrl.runtime.run_config import RunConfig

ROOT = pathlib.Path(__file__).resolve().parents[1]
TOP = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
#: architecture.md shows signatures, not programs.
PAGES = [*TOP, *(p for p in sorted((ROOT / "docs").rglob("*.md")) if p.name != "architecture.md")]
PAGES += sorted(ROOT.glob("*/README.md"))
LIBRARIES = {"TRL": ops.trl, "verl": ops.verl, "tunix": ops.tunix}


def blocks(page: pathlib.Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


def cases(language: str) -> list[pytest.param]:
    return [
        pytest.param(block, id=f"{page.relative_to(ROOT)}-{number}")
        for page in PAGES
        for number, block in enumerate(blocks(page, language))
    ]


def settings() -> set[str]:
    """Dotted names of all settings, and of the groups that hold them."""
    rows = describe(RunConfig, "run") + describe(MeshConfig, "mesh")
    for name in launch.system_names():
        rows += describe(launch.load_system(name).Config)
    names = {row.name for row in rows}
    return names | {name.rpartition(".")[0] for name in names}


@pytest.mark.parametrize("source", cases("python"))
def test_python_block_runs(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(source, "documentation", "exec"), {"__name__": "documentation"})


@pytest.mark.parametrize("source", cases("bash"))
def test_launch_commands_resolve(source, monkeypatch):
    monkeypatch.chdir(ROOT)
    for line in source.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words[:3] == ["python", "-m", "jaxrl.launch"]:
            _, config = launch.parse(["launch", *words[3:]])
            launch.resolve(config)
        elif words[:1] == ["make"]:
            targets = [word for word in words[1:] if "=" not in word]
            assert set(targets) <= set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)), line
        elif words[:2] == ["pip", "install"]:
            extras = [extra for word in words for extra in re.findall(r"\[(.*)\]", word)]
            known = (ROOT / "setup.cfg").read_text()
            assert all(re.search(rf"^{name} =", known, re.MULTILINE) for e in extras for name in e.split(",")), line


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_settings_that_a_page_names_exist(page):
    known = settings()
    groups = {name.partition(".")[0] for name in known if "." in name}
    # The first column of a table may hold another library's options.
    text = re.sub(r"^\|[^|]*\|", "|", page.read_text(), flags=re.MULTILINE)
    named = re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?:=[^`]*)?`", text)
    named = [name for name in named if name.partition(".")[0] in groups]
    assert [name for name in named if name not in known] == []


@pytest.mark.parametrize("library", LIBRARIES)
def test_option_table_covers_the_preset(library):
    text = (ROOT / "docs" / "coming-from.md").read_text()
    section = text.partition(f"\n## {library}")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(?:\w+\.)*(\w+)`", section))
    assert set(inspect.signature(LIBRARIES[library]).parameters) <= named
    rows = [row.split("|")[2] for row in section.splitlines() if row.startswith("| `")]
    asked = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert asked <= set(inspect.signature(LIBRARIES[library]).parameters)


def test_algorithm_table_is_complete():
    text = (ROOT / "docs" / "algorithms.md").read_text()
    assert set(re.findall(r"`algorithm\.name=(\w+)`", text)) == set(ops.ALGORITHMS)
    assert set(re.findall(r"`algorithm\.advantage_rule=(\w+)`", text)) <= set(ops.ADVANTAGE_RULES)


def test_every_setting_is_documented():
    for name in launch.system_names():
        assert [row.name for row in describe(launch.load_system(name).Config) if not row.doc] == []


def test_files_that_pages_name_exist():
    named = {
        match
        for page in PAGES
        for match in re.findall(r"`((?:tests|configs|benchmarks|docs|launch)/[\w./-]+)`", page.read_text())
    }
    assert named
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_site_lists_every_page():
    text = (ROOT / "mkdocs.yml").read_text()
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert {page for page in pages if not page.startswith("results/")} <= set(re.findall(r"[\w/-]+\.md", text))
