"""Errors about refused options and invalid JSON in options."""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Iterable
from typing import Any

from paceline.args import option_files
from paceline.args.secrets import MASK, is_secret, mask_text


class UnsupportedOption(ValueError):
    """An option that exists but is not supported here. The message names it, its value and the remedy."""


def did_you_mean(word: str, candidates: Iterable[str], prefix: str = "") -> str:
    """Returns `; did you mean 'x'?` for the candidate that `word` means, or an empty string if none is close.

    For a name of other libraries for what is no option here, it returns what to do instead.

    Args:
        word: the unknown word.
        candidates: the known words. A common name for one of them (`lr`) and almost the same spelling go before
            words that begin with it, and these before similar spelling.
        prefix: text put before the candidate, such as the dashes of a command line.
    """
    known = [name for name in candidates if word.startswith("_") or not name.startswith("_")]  # none that is private
    # imported for an error only: it would be loaded with every Trainer
    synonyms = importlib.import_module("paceline.args.synonyms")
    if remedy := synonyms.remedy_for(word, known):
        return f"; {remedy}"
    near = synonyms.meant_by(word, known) or difflib.get_close_matches(word, known, n=1, cutoff=0.9)
    near = near or cut_short(word, known) or difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"; did you mean {' or '.join(repr(prefix + name) for name in near)}?" if near else ""


def cut_short(word: str, known: Iterable[str]) -> list[str]:
    """Returns the words that begin with `word`, if these are few enough to be a guess."""
    found = [name for name in known if name.startswith(word)] if len(word) > 2 else []
    return found if len(found) <= 2 else []


def wrong_value(name: str, value: object, expected: str, hint: str = "") -> ValueError:
    """Builds the error for an option with an invalid value. A note of it says where the option is described."""
    shown = MASK if is_secret(name, str(value)) else mask_text(repr(value))
    error = ValueError(f"{name}={shown} is invalid: {expected}{hint}" + ("" if hint.endswith("?") else "."))
    add_help(error)
    return error


def add_help(error: ValueError, note: str = "") -> None:
    """Adds a note that says where the first option that the message names with its value is described, and `note`."""
    # imported for an error only: the declarations import this module
    options = importlib.import_module("paceline.args.sections").Options.__dataclass_fields__
    name = next((word for word in re.findall(r"\b(\w+)=", str(error)) if word in options), None)
    place = f"`paceline train --help {name}` describes this option; docs/options.md has all of them."
    for text in (place if name else "", note):
        if text and text not in getattr(error, "__notes__", ()):
            error.add_note(text)


def parse_json(name: str, text: str) -> Any:
    """Parses the JSON of an option. Raises: ValueError, which names the option."""
    try:
        return option_files.parse_json(text)
    except ValueError as error:
        raise wrong_value(name, text, f"it is not valid JSON ({error})") from None


def parse_object(name: str, value: object) -> Any:
    """Parses the text of a JSON object; other values are kept. Raises: as `parse_json`."""
    return parse_json(name, value) if isinstance(value, str) and value.lstrip().startswith("{") else value
