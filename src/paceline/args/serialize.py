"""Conversion of arguments to and from dicts and files. Secrets are replaced by placeholders."""

from __future__ import annotations

import importlib
import json
import logging
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

from paceline.args.coercion import as_plain
from paceline.args.secrets import MASK, masked
from paceline.args.sections import Options

logger = logging.getLogger(__name__)


def placeholder(name: str) -> str:
    """Returns the placeholder that replaces a secret."""
    return f"<{name.upper()}>"


def options_to_dict(options: Options) -> dict[str, Any]:
    """Returns all fields in plain types; options whose name ends in `_token` become placeholders, set or not."""
    return {
        item.name: placeholder(item.name) if item.name.endswith("_token") else as_plain(getattr(options, item.name))
        for item in fields(options)
        if item.init
    }


def as_written(values: dict[str, Any]) -> dict[str, Any]:
    """Converts values to numbers, booleans and text only; secrets are masked."""
    plain = masked(values)
    return {name: item if type(item) in (bool, int, float, str) else str(item) for name, item in plain.items()}


def without_placeholders(values: dict[str, Any]) -> dict[str, Any]:
    """Returns `values` without placeholders of secrets; a warning names values with a masked part."""
    parts = [name for name, value in values.items() if MASK in str(value)]
    if parts:
        logger.warning(
            "A part of %s was secret, and masked when it was written: set it anew where it is needed.", ", ".join(parts)
        )
    return {
        name: value for name, value in values.items() if not (name.endswith("_token") and value == placeholder(name))
    }


def _yaml() -> Any:
    """Imports the YAML module, which most runs do not need."""
    return importlib.import_module("paceline.args.yaml_text")


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes a file and creates its folder if missing."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text, encoding="utf-8")


def to_json_text(values: dict[str, Any]) -> str:
    """Converts values to JSON; types unknown to JSON become text."""
    return json.dumps(values, indent=2, default=str)


def to_yaml_text(values: dict[str, Any]) -> str:
    """Converts values to YAML in the order of the fields; types unknown to YAML become text."""
    return str(_yaml().write(json.loads(to_json_text(values))))
