"""The documentation is checked: its code runs, its links lead somewhere, its table of modules is the code's."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib.util
import json
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import recipes
from cases import slow_but

import api_checks
import api_table
import docs
import links
import reference
import stubs
from paceline.args import yaml_text
from paceline.args.training import TrainingArguments
from paceline.callbacks.reporters import ENTRY_POINT_GROUP
from paceline.cli.main import COMMANDS
from paceline.cli.options import argument_fields
from paceline.cli.schema import make_schema
from paceline.cli.texts import help_on
from paceline.core.optional import is_installed

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md")])
CODE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
WITH_CODE = [page for page in PAGES if CODE.search(page.read_text("utf-8"))]
SEARCH = ROOT / "docs" / "notebooks" / "search.md"  # 20 trials


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.fixture
def _registries() -> Iterator[None]:
    """Recipes add to the registries: put back what was there."""
    from paceline.callbacks.reporters import REPORTERS
    from paceline.core.schedules import SCHEDULES
    from paceline.pytorch.optim.optimizers import OPTIMIZERS

    registries: list[dict[str, Any]] = [REPORTERS, SCHEDULES, OPTIMIZERS]
    before = [dict(registry) for registry in registries]
    yield
    for registry, content in zip(registries, before, strict=True):
        registry.clear()
        registry.update(content)


@pytest.mark.parametrize("page", slow_but([page for page in WITH_CODE if page != SEARCH], WITH_CODE), ids=name_of)
@pytest.mark.usefixtures("_registries")
def test_code_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page are one program. It runs with the package that the page's diffs make of this one."""
    monkeypatch.chdir(tmp_path)
    text = page.read_text("utf-8")
    if recipes.changed_files(text):
        recipes.run(text, "".join(CODE.findall(text)), tmp_path)
        return
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in CODE.finditer(text):
        if "TFTrainer" in block[1] and not is_installed("tensorflow"):
            continue
        first_line = text[: block.start(1)].count("\n")
        exec(compile("\n" * first_line + block[1], str(page), "exec"), namespace)


def blocks(kind: str) -> list[tuple[str, str]]:
    """Returns (page, content) of the blocks of a kind on all pages."""
    pattern = re.compile(rf"^```{kind}\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    return [(name_of(page), found[1]) for page in PAGES for found in pattern.finditer(page.read_text("utf-8"))]


def test_files_of_the_pages_are_those_of_paceline_train() -> None:
    validator = pytest.importorskip("jsonschema").Draft202012Validator(make_schema())
    found = blocks("yaml")
    assert len(found) > 5
    for page, text in found:
        assert not [f"{page}: {error.message}" for error in validator.iter_errors(yaml_text.read(text))]


def test_the_example_of_each_group_of_options_is_accepted(tmp_path: Path) -> None:
    examples = [text for page, text in blocks("yaml") if page == "docs/options.md"]
    assert len(examples) == 1 + len(reference.EXAMPLES)
    for text in examples:
        TrainingArguments(**{"output_dir": str(tmp_path), "use_cpu": True, **yaml_text.read(text)})


def test_editors_find_the_text_of_each_option() -> None:
    stub = ast.parse(next(iter(stubs.pages())).read_text("utf-8"))
    found = {}
    for section in [node for node in stub.body if isinstance(node, ast.ClassDef)]:
        for option, text in zip(section.body, section.body[1:], strict=False):
            if isinstance(option, ast.AnnAssign) and isinstance(text, ast.Expr):
                found[ast.unparse(option.target)] = " ".join(ast.literal_eval(text.value).split())
    assert found == {field.name: field.metadata["help"] for field in dataclasses.fields(TrainingArguments)}


def test_commands_of_the_pages_exist() -> None:
    lines = [(page, line[2:]) for page, text in blocks("console") for line in text.splitlines() if line[:2] == "$ "]
    lines += [(page, line) for page, text in blocks("bash") for line in text.splitlines()]
    commands = [(page, shlex.split(line, comments=True)[1:]) for page, line in lines if line.startswith("paceline ")]
    assert len(commands) > 15
    options = {f"--{name}" for name in argument_fields()}
    for page, (command, *words) in commands:
        assert command in COMMANDS, page
        given = {word.split("=")[0] for word in words if word.startswith("--")}
        known = set(re.findall(r"--[\w-]+", help_on(command, [])))
        takes_options = command in ("train", "plan", "doctor", "search", "launch")
        assert given <= known | (options if takes_options else set()), page


def test_extras_of_the_pages_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    named = {
        (name_of(page), extra)
        for page in PAGES
        for extras in re.findall(r"paceline\[([a-z0-9_,-]+)\]", page.read_text("utf-8"))
        for extra in extras.split(",")
    }
    assert len(named) > 20
    assert [each for each in sorted(named) if each[1] not in project["optional-dependencies"]] == []


def test_toml_and_json_of_the_pages_are_read(tmp_path: Path) -> None:
    """An entry point is of a group that paceline looks up; a JSON block is a configuration of DeepSpeed."""
    for _, text in blocks("toml"):
        ((group, entries),) = tomllib.loads(text)["project"]["entry-points"].items()
        assert group == ENTRY_POINT_GROUP
        assert entries
    for page, text in blocks("json"):
        assert page == "docs/deepspeed.md"
        args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, bf16=True, deepspeed=json.loads(text))
        assert args.deepspeed == json.loads(text)


@pytest.mark.parametrize("name", ["checkpoint-item", "sampler", "reporter", "strategy"])
def test_a_new_part_is_one_file_and_at_most_one_registration(name: str) -> None:
    text = (ROOT / "docs" / "recipes" / f"add-a-{name}.md").read_text("utf-8")
    new, *registrations = recipes.changed_files(text)
    assert not (ROOT / new).exists()
    assert len(registrations) == (name != "checkpoint-item")  # a callback is passed to the Trainer
    assert all((ROOT / place).exists() for place in registrations)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    """To a file that exists, and to a heading that it has."""
    found = links.links_of(page)
    missing = [link.target for link in found if not link.is_external and not link.is_found()]
    assert not missing
    wrong = ("#no-such-heading", "no_such_page.md", f"{page.name}#no-such-heading")
    assert not any(links.Link(page, target).is_found() for target in wrong)


def test_what_is_made_from_the_code_is_current() -> None:
    """The table of modules, the table of the reference's names, the API reference, the examples' counterparts."""
    behind = [
        path.relative_to(ROOT).as_posix()
        for path, text in docs.pages().items()
        if not path.exists() or path.read_text("utf-8") != text
    ]
    assert not behind, "behind the code: run `make docs`"
    assert set(docs.generated_files()) <= set(docs.pages()), "no longer made: run `make docs`"


@functools.cache
def names_of_the_reference() -> list[api_table.Row]:
    return list(api_table.rows())


def test_every_name_of_the_reference_is_accounted_for() -> None:
    found = names_of_the_reference()
    assert len(found) > 600
    assert not api_table.problems(found, api_table.read_reasons())


def test_reasons_that_nothing_needs_are_named() -> None:
    found = names_of_the_reference()
    reasons = {"same": {}, "different": {}, "refused": {"Trainer: methods/log": "no", "Nowhere/*": "no"}}
    told = [line for line in api_table.problems(found, reasons) if line.startswith("delete")]
    assert told == [
        "delete 'Trainer: methods/log' below 'refused' in tools/api_reasons.yaml: it is now same",
        "delete 'Nowhere/*' below 'refused' in tools/api_reasons.yaml: it is now no name at all",
    ]
    lacking = [line for line in api_table.problems(found, reasons) if "gives no reason" in line]
    assert any("jit_compilation_time" in line for line in lacking)


def test_names_that_only_messages_hold_are_not_the_same() -> None:
    """A variable that nothing reads, and an older name of an option that is refused."""
    rows = api_table.with_reasons(names_of_the_reference(), api_table.read_reasons())
    found = {row.key: row.finding.status for row in rows}
    assert found["Environment variables/TENSORBOARD_LOGGING_DIR"] == "same"
    assert found["Environment variables/RAY_SCOPE"] == "same"
    older, now = "TrainingArguments: older names/split_batches", "Keys: accelerator_config/split_batches"
    assert found[older] == found[now]
    assert found["Log keys/eval: {prefix}_model_preparation_time(first eval)"] == "same"


def test_signatures_are_compared() -> None:
    def ours(self: Any, a: int, b: float = 1.0, *, c: str = "x") -> None: ...

    theirs = api_checks.parse("(a, b=1, c='x')")
    assert api_checks.compare(theirs, api_checks.actual(ours)) == api_checks.SAME
    assert "`b` is 1.0 by default" in api_checks.compare({**theirs, "b": "2.0"}, api_checks.actual(ours)).note
    assert "does not take `d`" in api_checks.compare({**theirs, "d": "None"}, api_checks.actual(ours)).note
    assert api_checks.compare({"a": "<required>"}, api_checks.actual(ours)).note == "also takes `b`, `c`"


def test_layers_are_those_of_the_test() -> None:
    spec = importlib.util.spec_from_file_location("architecture", ROOT / "tests" / "test_architecture.py")
    assert spec is not None
    assert spec.loader is not None
    architecture = importlib.util.module_from_spec(spec)
    sys.modules.setdefault("architecture", architecture)
    spec.loader.exec_module(architecture)
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    listed = re.findall(r"^\d+\. (.*)$", text, re.MULTILINE)
    told = [set(re.findall(r"`([\w.]+)`", re.split(r"[(:]", line)[0])) for line in listed]
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
