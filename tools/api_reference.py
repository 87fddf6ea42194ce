"""docs/api: every public name of the package with its signature and docstring, and every option with its default."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from paceline.args import sections

paceline: Any = importlib.import_module("paceline")
ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "api"
TRAINING = ("paceline.pytorch.trainer", "paceline.pytorch.seq2seq", "paceline.pytorch.replay")
# title, file, what its modules begin with; a name goes to the first that fits
GROUPS = (
    ("Training", "training", (*TRAINING, "paceline.core.outputs")),
    ("Arguments", "arguments", ("paceline.args",)),
    ("Callbacks and state", "callbacks", ("paceline.callbacks", "paceline.core.events", "paceline.core.state")),
    ("Data", "data", ("paceline.pytorch.data",)),
    ("Optimizers and schedules", "optimizers", ("paceline.pytorch.optim",)),
    ("Everything else", "others", ("paceline",)),
)
SECTION = re.compile(r"^(Args|Attributes|Fields|Returns|Raises|Yields):$")
ITEM = re.compile(r"^    (\S[^:]*): (.*)$")


def pages() -> dict[Path, str]:
    """Every page and its content."""
    names: dict[str, list[str]] = {file: [] for _, file, _ in GROUPS}
    for name in paceline.__all__:
        home = paceline._HOMES[name]
        names[next(file for _, file, starts in GROUPS if home.startswith(starts))].append(name)
    made = {FOLDER / f"{file}.md": page(title, names[file]) for title, file, _ in GROUPS}
    return {FOLDER / "README.md": index(names), **made}


def index(names: dict[str, list[str]]) -> str:
    """The page that leads to the others."""
    lines = ["# API reference", "", "Written by `make docs` from the docstrings. Import all names from `paceline`."]
    for title, file, _ in GROUPS:
        links = ", ".join(f"[{name}]({file}.md#{name.lower()})" for name in names[file])
        lines += ["", f"**[{title}]({file}.md)**: {links}"]
    return "\n".join(lines) + "\n"


def page(title: str, names: list[str]) -> str:
    """One page: each name with its signature, docstring and members."""
    lines = [f"# {title}", ""]
    for name in names:
        lines += [f"## {name}", "", *described(name, getattr(paceline, name))]
    return "\n".join(lines).rstrip() + "\n"


def described(name: str, item: Any) -> Iterator[str]:
    """The lines on one public name."""
    is_options = isinstance(item, type) and issubclass(item, sections.Options)
    if not isinstance(item, type):
        yield from (*signature(name, item), *docstring(item))
        return
    if is_options:
        yield from (*docstring(item), *options(item))
    else:
        yield from (*signature(name, item), *docstring(item))
    if is_enumeration(item):
        item = cast(Any, item)
        yield from ("Values: " + ", ".join(f"`{member.value}`" for member in list(item)), "")
        return
    for key, member in members(item):
        text = inspect.getdoc(member) or ""
        if isinstance(member, property):
            yield from (f"### {name}.{key}", "", *markdown(text))
        else:
            yield from (f"### {name}.{key}()", "", *signature(key, member), *markdown(text))


def is_enumeration(item: type) -> bool:
    """True if a class is an enumeration."""
    return any(base.__module__ == "enum" for base in item.__mro__)


def members(item: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties that paceline defines, those of its own bases included; not of exported bases."""
    exported = {getattr(paceline, name) for name in paceline.__all__ if isinstance(getattr(paceline, name), type)}
    owners = [base for base in item.__mro__ if base.__module__.startswith("paceline")]
    owners = [base for base in owners if base is item or base not in exported]
    seen: set[str] = set()
    for owner in owners:
        for key, raw in vars(owner).items():
            member = raw.__func__ if isinstance(raw, staticmethod | classmethod) else raw
            if key.startswith("_") or key in seen or not (inspect.isfunction(member) or isinstance(member, property)):
                continue
            seen.add(key)
            if inspect.getdoc(getattr(item, key)):
                yield key, member


def signature(name: str, item: Any) -> list[str]:
    """The signature as a block of code, one parameter a line where it is long."""
    try:
        found = inspect.signature(item)
    except (TypeError, ValueError):
        return []
    parameters = [p for p in found.parameters.values() if p.name not in ("self", "cls")]
    texts = [parameter_text(parameter) for parameter in parameters]
    kinds = [parameter.kind for parameter in parameters]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        texts.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    is_silent = isinstance(item, type) or found.return_annotation is found.empty
    returned = "" if is_silent else f" -> {type_text(found.return_annotation)}"
    line = f"{name}({', '.join(texts)}){returned}"
    if len(line) > 100:
        line = f"{name}(\n" + "".join(f"    {text},\n" for text in texts) + f"){returned}"
    return ["```text", line, "```", ""]


def parameter_text(parameter: inspect.Parameter) -> str:
    """One parameter: name, type, default."""
    is_starred = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    prefix = "" if not is_starred else "*" if parameter.kind == parameter.VAR_POSITIONAL else "**"
    hint = "" if parameter.annotation is parameter.empty else f": {type_text(parameter.annotation)}"
    if parameter.default is parameter.empty:
        return f"{prefix}{parameter.name}{hint}"
    equals = " = " if hint else "="
    return f"{parameter.name}{hint}{equals}{default_text(parameter.default)}"


def type_text(annotation: Any) -> str:
    """A type as it stands in the source, where annotations are texts; else its name."""
    if isinstance(annotation, str):
        return annotation
    return str(getattr(annotation, "__forward_arg__", None) or getattr(annotation, "__name__", annotation))


def default_text(value: Any) -> str:
    """A default as it would be written; enumerations by their value, functions and classes by their name."""
    value = getattr(value, "value", value) if is_enumeration(type(value)) else value
    text = repr(value)
    return getattr(value, "__name__", "...") if text.startswith("<") else text


def options(item: type) -> Iterator[str]:
    """A table of the options that a class of arguments adds: default, type, what it does."""
    owners = [base for base in item.__mro__ if base.__module__.startswith("paceline.args")]
    fields = {field.name: field for field in dataclasses.fields(item)}
    inherited: set[str] = set()
    if item is not paceline.TrainingArguments and issubclass(item, paceline.TrainingArguments):
        inherited = {field.name for field in dataclasses.fields(paceline.TrainingArguments)}
        yield from ("Beside the options of [TrainingArguments](#trainingarguments):", "")
    for owner in owners:
        own = [name for name in vars(owner).get("__annotations__", {}) if name in fields and name not in inherited]
        if not own or owner is sections.Options:
            continue
        yield from (
            (f"**{(vars(owner).get('__doc__') or '').strip().splitlines()[0]}**", "") if owner is not item else ()
        )
        yield from ("| option | default | type | |", "|---|---|---|---|")
        for name in own:
            inherited.add(name)
            field = fields[name]
            made = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
            choices = field.metadata.get("choices")
            text = field.metadata["help"] + (f" One of {', '.join(f'`{c}`' for c in choices)}." if choices else "")
            cells = (f"`{name}`", f"`{default_text(made)}`", f"`{type_text(field.type)}`", text)
            yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
        yield ""


def docstring(item: Any) -> list[str]:
    """The docstring of a class or function; none where it is only Python's own of a dataclass or a base's."""
    written = vars(item).get("__doc__") if isinstance(item, type) else item.__doc__  # without the list of options
    text = inspect.cleandoc(written) if written else ""
    return [] if text.startswith(f"{getattr(item, '__name__', '')}(") else markdown(text)


def markdown(text: str) -> list[str]:
    """A docstring as Markdown: the lists below Args and the like become lists, indented blocks code."""
    lines: list[str] = []
    is_list = False
    for line in text.splitlines():
        heading, item = SECTION.match(line), ITEM.match(line)
        if heading:
            lines += [f"{heading[1]}:", ""]
            is_list = True
        elif is_list and item:
            lines.append(f"- `{item[1]}`: {item[2]}")
        elif is_list and line.startswith("    "):
            lines.append(("  " if lines[-1] else "- ") + line.strip())
        else:
            is_list = is_list and not line
            lines.append(line.removesuffix(":") if line.endswith("::") else line)  # a block of code follows
    return [*lines, ""] if lines else []
