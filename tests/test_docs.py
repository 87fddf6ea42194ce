"""The documentation is checked: its code runs, its links lead somewhere, its table of modules is the code's."""

from __future__ import annotations

import importlib.util
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
CODE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)#]+)[^)]*\)")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.fixture
def _registries() -> Iterator[None]:
    """Recipes add to the registries: put back what was there."""
    from paceline.callbacks.reporters import REPORTERS
    from paceline.core.schedules import SCHEDULES
    from paceline.optim.optimizers import OPTIMIZERS

    registries: list[dict[str, Any]] = [REPORTERS, SCHEDULES, OPTIMIZERS]
    before = [dict(registry) for registry in registries]
    yield
    for registry, content in zip(registries, before, strict=True):
        registry.clear()
        registry.update(content)


@pytest.mark.parametrize("page", [page for page in PAGES if CODE.search(page.read_text("utf-8"))], ids=name_of)
@pytest.mark.usefixtures("_registries")
def test_code_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page are one program."""
    monkeypatch.chdir(tmp_path)
    text = page.read_text("utf-8")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in CODE.finditer(text):
        first_line = text[: block.start(1)].count("\n")
        exec(compile("\n" * first_line + block[1], str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    links = [link for link in LINK.findall(page.read_text("utf-8")) if not link.startswith(("http", "mailto:"))]
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing


def test_modules_are_listed() -> None:
    spec = importlib.util.spec_from_file_location("docs_tool", ROOT / "tools" / "docs.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    assert tool.with_modules(text) == text, "docs/architecture.md is behind the code: run `make docs`"


def test_layers_are_those_of_the_test() -> None:
    spec = importlib.util.spec_from_file_location("architecture", ROOT / "tests" / "test_architecture.py")
    assert spec is not None
    assert spec.loader is not None
    architecture = importlib.util.module_from_spec(spec)
    sys.modules.setdefault("architecture", architecture)
    spec.loader.exec_module(architecture)
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    listed = re.findall(r"^\d+\. (.*)$", text, re.MULTILINE)
    told = [set(re.findall(r"`(\w+)`", re.split(r"[(:]", line)[0])) for line in listed]
    assert told == architecture.LAYERS


def test_the_version_is_one() -> None:
    import paceline

    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert paceline.__version__ == project["version"]


def test_commands_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for page in PAGES:
        for target in re.findall(r"(?:^\$ |`)make ([a-z-]+)", page.read_text("utf-8"), re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{name_of(page)}: make {target}"


def test_guarantees_name_tests_that_exist() -> None:
    text = (ROOT / "docs" / "guarantees.md").read_text("utf-8")
    places = set(re.findall(r"tests/[\w/.]+", text))
    assert len(places) > 15
    missing = sorted(place for place in places if not (ROOT / place).exists())
    assert not missing
    for command in re.findall(r"`pytest ([^`]*-k[^`]*)`", text):
        place, words = command.split(" -k ")
        names = re.findall(r"\w+", words.replace(" or ", " "))
        code = "".join((ROOT / path).read_text("utf-8") for path in place.split())
        assert all(re.search(rf"def test_\w*{name}", code) for name in names), command
