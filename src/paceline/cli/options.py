"""Parses `--name value` on a command line, without types."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_origin

from paceline.args.coercion import FALSE_WORDS, TRUE_WORDS, hints_of, own_hints, union_members
from paceline.args.errors import did_you_mean
from paceline.args.older_names import OLDER_NAMES
from paceline.cli.errors import UsageError, suggest
from paceline.tensorflow.arguments import TFTrainingArguments

FRAMEWORKS = ("torch", "tf")


@dataclass(frozen=True)
class Known:
    """The command line that a command accepts.

    Attributes:
        positional: names of the positional values, in order.
        own: the command's own options: name -> True for a switch, False for an option with a value.
        sections: names that accept `--section.key value`.
    """

    positional: tuple[str, ...] = ()
    own: Mapping[str, bool] = field(default_factory=dict)
    sections: tuple[str, ...] = ()


@dataclass
class Given:
    """A parsed command line.

    Attributes:
        positional: positional values.
        own: the command's own options.
        sections: `(section, key, value)` of each `--section.key value`.
        arguments: options of `TrainingArguments`, as strings, lists of strings, or booleans.
    """

    positional: list[str] = field(default_factory=list)
    own: dict[str, Any] = field(default_factory=dict)
    sections: list[tuple[str, str, str]] = field(default_factory=list)
    arguments: dict[str, Any] = field(default_factory=dict)


def argument_fields() -> dict[str, dataclasses.Field[Any]]:
    """Returns the options of `TFTrainingArguments` by name, which include those of `TrainingArguments`."""
    return {item.name: item for item in dataclasses.fields(TFTrainingArguments)}


def option_hints() -> dict[str, Any]:
    """Returns the type hints of the options, rather than the fields' `type`, which transformers' parser overwrites."""
    return {**hints_of(TFTrainingArguments), **own_hints()}


def argument_names() -> set[str]:
    """Returns the names of all options of both frameworks' arguments, older names included."""
    return set(argument_fields()) | set(OLDER_NAMES)


def is_option_of_tensorflow(name: str) -> bool:
    """True if only `TFTrainingArguments` has the option."""
    return name not in own_hints() and name in argument_fields()


def read_framework(where: str, value: object) -> str:
    """Reads the framework: `torch` or `tf`.

    Raises:
        UsageError: the value is neither.
    """
    if value not in FRAMEWORKS:
        raise UsageError(f"{where} {value}: expected one of {', '.join(FRAMEWORKS)}")
    return str(value)


def check_framework(framework: str, names: Iterable[str]) -> None:
    """Refuses TensorFlow's options for torch; TFTrainingArguments refuses torch's options.

    Raises:
        UsageError: an option of TensorFlow is given with the framework torch.
    """
    for name in names:
        if framework != "tf" and is_option_of_tensorflow(name):
            raise UsageError(f"{name} is an option of TensorFlow: give --framework tf too, or leave it out")


def parse_options(words: Sequence[str], known: Known) -> Given:
    """Parses a command line.

    Accepts `--name value`, `--name=value`, `--name` for a switch, and `--no_name` to turn a switch off; `-` and `_` in
    a name are equivalent. Options that hold lists take several values.

    Raises:
        UsageError: an unknown option (the message names the closest known one), a missing value, or a surplus value.
    """
    given = Given()
    hints = option_hints()
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            _take_positional(word, known, given)
            continue
        name, equals, attached = word[2:].partition("=")
        name = name.replace("-", "_")
        values = [attached] if equals else []
        section, dot, key = name.partition(".")
        if dot:
            _check(section, known.sections, word)
            if not all(key.split(".")):
                raise UsageError(f"{word}: a name is missing before or after a dot")
            given.sections.append((section, key, values[0] if values else _next_value(word, rest)))
        elif name in known.own:
            given.own[name] = _own_value(word, known.own[name], values, rest)
        elif name.startswith("no_") and name not in hints and _is_switch(hints.get(name[3:])):
            if values:
                raise UsageError(f"{word}: write --{name} alone, or --{name[3:]} false")
            given.arguments[name[3:]] = False
        else:
            _check(name, {*known.own, *known.sections, *argument_names()}, word)
            if name in known.sections:
                given.sections.append((name, "", values[0] if values else _next_value(word, rest)))
            else:
                given.arguments[name] = values[0] if values else _argument_value(word, hints.get(name), rest)
    return given


def _take_positional(word: str, known: Known, given: Given) -> None:
    if len(given.positional) >= len(known.positional):
        name = word.lstrip("-+").partition("=")[0].replace("-", "_")  # of `lr=1`, `-lr`
        names = {*known.own, *known.sections, *argument_names()}
        hint = f"; did you mean '--{name}'?" if name in names else did_you_mean(name, names, "--")
        raise UsageError(f"{word!r} is one value too many; options begin with --{hint}")
    given.positional.append(word)


def _check(name: str, names: Collection[str], word: str) -> None:
    if name not in names:
        raise UsageError(f"there is no option {word.partition('=')[0]}{suggest(name, names, '--')}")


def _next_value(word: str, rest: list[str]) -> str:
    if not rest or rest[0].startswith("--"):
        raise UsageError(f"{word} needs a value")
    return rest.pop(0)


def _own_value(word: str, is_switch: bool, values: list[str], rest: list[str]) -> Any:
    if not is_switch:
        return values[0] if values else _next_value(word, rest)
    if values:
        raise UsageError(f"{word}: {word.partition('=')[0]} takes no value")
    return True


def _argument_value(word: str, hint: object, rest: list[str]) -> Any:
    if _is_switch(hint) and (not rest or rest[0].lower() not in TRUE_WORDS | FALSE_WORDS):
        return True
    if hint is None and (not rest or rest[0].startswith("--")):
        return True  # an older name: many of them were switches
    value = _next_value(word, rest)
    if not any(get_origin(member) is list for member in union_members(hint)):
        return value
    values = [value]
    while rest and not rest[0].startswith("--"):
        values.append(rest.pop(0))
    return values if len(values) > 1 else value


def _is_switch(hint: object) -> bool:
    """True if the option is a boolean (or None)."""
    return hint is not None and set(union_members(hint)) <= {bool, type(None)}
