"""The documentation of options in other forms: the docstring of an arguments class, and a JSON schema.

All of it is read from the declarations in `paceline.args.sections`.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Mapping
from enum import Enum
from typing import Any, Literal, get_args, get_origin

from paceline.args.coercion import SPECIAL, hints_of, own_hints, union_members

JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
OPTIONS_HEADING = "Options:"


def plain_default(item: dataclasses.Field[Any]) -> Any:
    """Returns the default of an option; enumerations by their value."""
    value = item.default
    if item.default_factory is not dataclasses.MISSING:
        value = item.default_factory()
    return value.value if isinstance(value, Enum) else value


def choices_of(item: dataclasses.Field[Any], hint: object) -> list[str]:
    """Returns the strings that an option accepts; empty if it accepts others too."""
    if "choices" in item.metadata:
        return list(item.metadata["choices"])
    found: list[str] = []
    for member in union_members(hint):
        if isinstance(member, type) and issubclass(member, Enum):
            found += [str(choice.value) for choice in member]
        elif get_origin(member) is Literal:
            found += [str(choice) for choice in get_args(member)]
    return found


def class_doc(cls: Any, own: str) -> str:
    """Returns the docstring of an arguments class, completed by its options.

    Args:
        cls: the class, a dataclass.
        own: the docstring as written.
    """
    lines = [own.rstrip(), "", f"    {OPTIONS_HEADING}"] if own else [OPTIONS_HEADING]
    indent = "    " if own else ""
    for item in dataclasses.fields(cls):
        kind = item.type if isinstance(item.type, str) else getattr(item.type, "__name__", str(item.type))
        default = "" if plain_default(item) is dataclasses.MISSING else f", default {plain_default(item)!r}"
        lines.append(f"{indent}    {item.name} ({kind}{default}):")
        text = str(item.metadata.get("help", ""))
        margin = f"{indent}        "
        lines += textwrap.wrap(
            text, 110, initial_indent=margin, subsequent_indent=margin, break_on_hyphens=False, break_long_words=False
        )
    return "\n".join(lines) + "\n"


def schema_of(cls: Any) -> dict[str, dict[str, Any]]:
    """Returns the JSON schema of each option of an arguments class, by name."""
    hints = {**own_hints(), **hints_of(cls)}
    return {item.name: option_schema(item, hints.get(item.name, Any)) for item in dataclasses.fields(cls)}


def option_schema(item: dataclasses.Field[Any], hint: object) -> dict[str, Any]:
    """Returns the JSON schema of an option: its text, default, and the values that it accepts.

    The values of an option that is converted by a function of its own are not restricted, only suggested.
    """
    schema: dict[str, Any] = {"description": str(item.metadata.get("help", ""))}
    default = plain_default(item)
    if isinstance(default, str | int | float | list | None):
        schema["default"] = default
    choices = choices_of(item, hint)
    if item.name in SPECIAL:
        return {**schema, "examples": choices} if choices else schema
    values: list[Mapping[str, Any]] = []
    if choices:
        # YAML 1.1 reads a bare `no` as false
        values.append({"enum": [*choices, False] if "no" in choices else choices})
    members = [member for member in union_members(hint) if not (choices and member in (str, Any))]
    for member in members:
        if isinstance(member, type) and issubclass(member, Enum):
            continue
        kind = _json_type(member)
        if kind is None:
            return schema
        values.append(kind)
    return {**schema, **values[0]} if len(values) == 1 else {**schema, "anyOf": values}


def _json_type(member: object) -> dict[str, Any] | None:
    """Returns the schema of one type; None if JSON has none for it."""
    if isinstance(member, type) and member in JSON_TYPES:
        return {"type": ["string", "number"] if member is str else JSON_TYPES[member]}
    if (get_origin(member) or member) in (list, tuple):
        return {"type": ["array", "string"]}
    return {"type": ["object", "string"]} if (get_origin(member) or member) is dict else None
