"""Reads option files in YAML and JSON. An error names the file, the line, and the expected content."""

from __future__ import annotations

import importlib
import json
import os
import re
from pathlib import Path
from typing import Any

MOST_BYTES = 16 << 20  # option files have a few kB; the limit avoids reading a whole weights file given by mistake
EXPECTED = "expected names and values of options"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")

# message of the JSON parser -> the expected content
_EXPECTED_OF_JSON = {
    "Expecting value": "expected a value: a number, true, false, null, a text in double quotes, a list or an object",
    "Expecting property name enclosed in double quotes": "expected a name in double quotes, without a comma before it "
    "if it is the first and without a comma after the last value",
    "Illegal trailing comma before end of object": "expected no comma after the last value",
    "Illegal trailing comma before end of array": "expected no comma after the last value",
    "Expecting ':' delimiter": "expected ':' between a name and its value",
    "Expecting ',' delimiter": "expected ',' before the next value, or the closing bracket",
    "Extra data": "expected nothing after the end of the first value",
    "Unterminated string starting at": "expected a closing double quote for the text that begins here",
    "Invalid control character at": "expected no line break or tab inside of a text: write \\n or \\t",
    "Invalid \\escape": 'expected one of "\\/bfnrtu after a backslash: write \\\\ for a backslash',
    "Invalid \\uXXXX escape": "expected four hexadecimal digits after \\u",
}


class _Repeated(ValueError):
    """A JSON object has a duplicate name."""


def read_text(path: str | os.PathLike[str]) -> str:
    """Reads an option file as UTF-8 text.

    Raises:
        OSError: the file is missing, unreadable or a folder.
        ValueError: the file is too large, or not text; the message names the file and the line.
    """
    with open(path, "rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"{path} cannot be read: it has more than {MOST_BYTES >> 20} MiB; expected a file of options.")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if content.startswith(_UTF16):
            raise ValueError(f"{path} cannot be read: it is saved in UTF-16; expected UTF-8.") from None
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{path} cannot be read: line {line} is not text in UTF-8 (byte 0x{content[error.start]:02x}); expected a "
            "text file of YAML or JSON."
        ) from None


def parse_json(text: str) -> Any:
    """Parses JSON.

    Raises:
        ValueError: invalid JSON, a duplicate name, or deep nesting; the message gives line, column and the expected
            content.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        expected = _EXPECTED_OF_JSON.get(error.msg, "expected JSON")
        raise ValueError(f"line {error.lineno}, column {error.colno}: {expected}") from None
    except _Repeated as error:
        name = str(error)
        found = re.finditer(re.escape(json.dumps(name)) + r"\s*:", text)
        lines = sorted({text.count("\n", 0, match.start()) + 1 for match in found})
        where = f"line {', '.join(map(str, lines))}: " if lines else ""
        raise ValueError(f"{where}{name!r} is given twice in one object; expected it once") from None
    except RecursionError:
        raise ValueError("values are nested too deeply; expected names and values") from None
    except ValueError:  # an integer exceeds Python's limit of digits
        raise ValueError("a number has too many digits") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        raise _Repeated(next(name for name in names if names.count(name) > 1))
    return content


def read_mapping(path: str | os.PathLike[str], is_json: bool | None = None) -> dict[str, Any]:
    """Reads a dict from a YAML or JSON file. An empty YAML file gives an empty dict.

    Args:
        path: the file.
        is_json: None decides by the suffix .json.

    Raises:
        OSError: the file is missing, unreadable or a folder.
        ValueError: the file is invalid, repeats a name, or does not hold a dict; the message names file and line.
    """
    text = read_text(path)
    if is_json is None:
        is_json = Path(path).suffix.lower() == ".json"
    if is_json and not text.strip():
        raise ValueError(f"{path} cannot be read: it is empty; expected a JSON object.")
    try:
        # YAML takes 10 ms to import, and most runs do not need it
        content = parse_json(text) if is_json else importlib.import_module("paceline.args.yaml_text").read(text)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}.") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        hint = "; 'name: value' needs a space after the colon" if _lacks_space(content) else ""
        raise ValueError(f"{path} holds {_kind(content)}; {EXPECTED}{hint}.")
    return content


def _lacks_space(content: object) -> bool:
    return isinstance(content, str) and re.match(r"\w+:\S", content) is not None


def _kind(content: object) -> str:
    name = type(content).__name__
    return "text" if isinstance(content, str) else f"{'an' if name == 'int' else 'a'} {name}"
