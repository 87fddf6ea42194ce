"""Arguments to and from dicts and files. Secrets never leave: a placeholder stands in their place."""

from __future__ import annotations

import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped, unused-ignore]

from paceline.args.coercion import as_plain
from paceline.args.sections import Options


def placeholder(name: str) -> str:
    """What is written in place of a secret."""
    return f"<{name.upper()}>"


def options_to_dict(options: Options) -> dict[str, Any]:
    """All fields in plain types; every option whose name ends in `_token` as a placeholder, set or not."""
    return {
        item.name: placeholder(item.name) if item.name.endswith("_token") else as_plain(getattr(options, item.name))
        for item in fields(options)
        if item.init
    }


def without_placeholders(values: dict[str, Any]) -> dict[str, Any]:
    """`values` less the secrets that were replaced when they were written."""
    return {
        name: value for name, value in values.items() if not (name.endswith("_token") and value == placeholder(name))
    }


class _StrictLoader(yaml.SafeLoader):  # type: ignore[misc, unused-ignore]
    """YAML's safe types; a key given twice is an error instead of a silent choice."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = str(key_node.value)
            if key in seen and key != "<<":
                raise ValueError(f"{key!r} is given twice{key_node.start_mark}.")
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def read_mapping(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The dict in a JSON or YAML file, told apart by the name's ending (.json, else YAML).

    Raises:
        ValueError: the file is not valid, gives a key twice (YAML), or holds something other than a dict.
    """
    text = Path(path).read_text(encoding="utf-8")
    try:
        content = json.loads(text) if Path(path).suffix == ".json" else yaml.load(text, Loader=_StrictLoader)
    except (json.JSONDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}; names and values of options are needed.")
    return content


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a file, making its folder where it is missing."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text, encoding="utf-8")


def to_json_text(values: dict[str, Any]) -> str:
    """Values as JSON; what JSON does not know becomes its text."""
    return json.dumps(values, indent=2, default=str)


def to_yaml_text(values: dict[str, Any]) -> str:
    """Values as YAML in the order of the fields; what YAML does not know becomes its text."""
    return str(yaml.safe_dump(json.loads(to_json_text(values)), sort_keys=False, allow_unicode=True))
