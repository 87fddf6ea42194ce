"""Errors about refused options and invalid JSON in options."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from paceline.args import option_files
from paceline.args.secrets import MASK, is_secret, mask_text


class UnsupportedOption(ValueError):
    """An option that exists but is not supported here. The message names it, its value and the remedy."""


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """Returns `; did you mean 'x'?` for the candidate closest to `word`, or an empty string if none is close."""
    near = difflib.get_close_matches(word, list(candidates), n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


def wrong_value(name: str, value: object, expected: str, hint: str = "") -> ValueError:
    """Builds the error for an option with an invalid value."""
    shown = MASK if is_secret(name, str(value)) else mask_text(repr(value))
    return ValueError(f"{name}={shown} is invalid: {expected}{hint}" + ("" if hint.endswith("?") else "."))


def parse_json(name: str, text: str) -> Any:
    """Parses the JSON of an option. Raises: ValueError, which names the option."""
    try:
        return option_files.parse_json(text)
    except ValueError as error:
        raise wrong_value(name, text, f"it is not valid JSON ({error})") from None


def parse_object(name: str, value: object) -> Any:
    """Parses the text of a JSON object; other values are kept. Raises: as `parse_json`."""
    return parse_json(name, value) if isinstance(value, str) and value.lstrip().startswith("{") else value
