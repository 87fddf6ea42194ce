"""Parses a command line, a dict or a file into dataclasses.

The parser implements the interface of transformers' HfArgumentParser, for one dataclass or several.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import types
import typing
from argparse import SUPPRESS, ArgumentDefaultsHelpFormatter, ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Iterable
from enum import Enum
from pathlib import Path
from typing import Any, Literal, NoReturn

from paceline.args.coercion import to_bool, union_members
from paceline.args.errors import did_you_mean
from paceline.args.older_names import OLDER_NAMES
from paceline.args.option_files import parse_json, read_mapping
from paceline.args.sections import Options


def HfArg(
    *,
    aliases: str | list[str] | None = None,
    help: str | None = None,
    default: Any = dataclasses.MISSING,
    default_factory: Any = dataclasses.MISSING,
    metadata: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Returns a dataclass field with a help text and additional command-line flags (`aliases`, such as "-l")."""
    entries = dict(metadata or {})
    entries.update({key: item for key, item in (("aliases", aliases), ("help", help)) if item is not None})
    return dataclasses.field(default=default, default_factory=default_factory, metadata=entries, **kwargs)


def string_to_bool(value: object) -> bool:
    """Converts the usual words for a boolean, for argparse.

    Raises:
        ArgumentTypeError: the value is none of them.
    """
    try:
        return to_bool("value", value)
    except ValueError:
        raise ArgumentTypeError(f"{value!r} is neither true (yes, t, y, 1) nor false (no, f, n, 0)") from None


def choice_reader(choices: Iterable[Any]) -> Callable[[str], Any]:
    """Returns a function from a choice's text to the choice; it passes other text on for argparse to refuse."""
    by_text = {str(choice): choice for choice in choices}
    return lambda text: by_text.get(text, text)


def read_json_object(text: str) -> Any:
    """Parses a JSON object, for argparse; other text is kept (it may be a path)."""
    if not text.strip().startswith("{"):
        return text
    try:
        return parse_json(text)
    except ValueError as error:
        raise ArgumentTypeError(f"{text!r} is not valid JSON ({error})") from None


@dataclasses.dataclass
class Shape:
    """The keywords of `add_argument` for a type, with a flag for booleans."""

    keywords: dict[str, Any]
    is_bool: bool = False


def readable_members(hint: object, name: str) -> list[Any]:
    """Returns the types that one flag may hold: the members of a union except None.

    Raises:
        ValueError: the type is a union whose members one flag cannot distinguish.
    """
    members = [member for member in union_members(hint) if member is not type(None)]
    if len(members) > 1 and bool in members:
        members.remove(bool)  # Text and numbers include the words for booleans; the dataclass distinguishes them.
    if len(members) > 1 and not any(kind in members for kind in (str, Path)):
        raise ValueError(
            f"The field {name!r} has the type {hint}: one flag takes one type, or text, or either with None."
        )
    return members


def shape_of(hint: object, name: str, default: object) -> Shape:
    """Returns the keywords of `add_argument` for the type `hint`.

    Raises:
        ValueError: the type is a union whose members one flag cannot distinguish.
    """
    members = readable_members(hint, name)
    if members == [bool]:
        is_plain = hint is bool or default not in (None, dataclasses.MISSING)
        return Shape({"type": string_to_bool, **({"nargs": "?", "const": True} if is_plain else {})}, is_bool=True)
    for member in members:
        origin = typing.get_origin(member) or member
        if origin is Literal or (isinstance(origin, type) and issubclass(origin, Enum)):
            choices = typing.get_args(member) if origin is Literal else [item.value for item in member]
            return Shape({"type": choice_reader(choices), "choices": list(choices)})
        if origin is dict:
            return Shape({"type": read_json_object})
        if origin in (list, tuple):
            inner = (typing.get_args(member) or (str,))[0]
            return Shape({**shape_of(inner, name, None).keywords, "nargs": "+"})
    reader = next((member for member in members if member is not str), str)
    return Shape({"type": reader if callable(reader) and reader is not Any else str})


class ArgumentsParser(ArgumentParser):
    """Parses a command line, dict, JSON or YAML into instances of dataclasses.

    Each field becomes a flag `--name` (and `--na-me`). Its help text is `metadata["help"]`, additional flags are
    `metadata["aliases"]`, and other entries of the metadata are passed to `add_argument`. A boolean with the default
    True gets `--no_name` too. A dataclass with `_argument_group_name` gets its own group. The older names of paceline's
    options are accepted.

    Args:
        dataclass_types: one dataclass or several.
        kwargs: passed to `argparse.ArgumentParser`.
    """

    def __init__(self, dataclass_types: object = None, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", ArgumentDefaultsHelpFormatter)
        super().__init__(**kwargs)
        if dataclass_types is None:
            dataclass_types = []
        elif dataclasses.is_dataclass(dataclass_types) or not isinstance(dataclass_types, Iterable):
            dataclass_types = [dataclass_types]
        self.dataclass_types: list[Any] = list(dataclass_types)
        for dataclass_type in self.dataclass_types:
            self._add_dataclass(dataclass_type)

    def _add_dataclass(self, dataclass_type: Any) -> None:
        group = getattr(dataclass_type, "_argument_group_name", None)
        target = self if group is None else self.add_argument_group(group)
        try:
            hints = typing.get_type_hints(dataclass_type)
        except NameError as error:
            raise RuntimeError(
                f"The types of {dataclass_type.__name__} cannot be resolved ({error}): define it at module level, or "
                "leave out `from __future__ import annotations`."
            ) from error
        for item in dataclasses.fields(dataclass_type):
            if item.init:
                add_field(target, item, hints[item.name])
        if isinstance(dataclass_type, type) and issubclass(dataclass_type, Options):
            taken = {item.name for item in dataclasses.fields(dataclass_type)}
            for name in OLDER_NAMES.keys() - taken:
                # An older flag without a value was a switch.
                self.add_argument(f"--{name}", nargs="?", const="true", default=SUPPRESS, help=SUPPRESS)

    def error(self, message: str) -> NoReturn:
        """Ends the program with `message`; an abbreviation that fits several options is given a hint."""
        found = re.match(r"ambiguous option: --([^\s=]+)", message)
        super().error(message + self._hint(found[1]) if found else message)

    def _hint(self, name: str) -> str:
        """Returns the question for an unknown flag, without its dashes."""
        flags = [flag.lstrip("-") for flag in self._option_string_actions]
        return did_you_mean(name, flags, "--")

    def parse_args_into_dataclasses(
        self,
        args: list[str] | None = None,
        return_remaining_strings: bool = False,
        look_for_args_file: bool = True,
        args_filename: str | None = None,
        args_file_flag: str | None = None,
    ) -> tuple[Any, ...]:
        """Parses a command line.

        Args:
            args: the words; None for the command line of the process.
            return_remaining_strings: return unused words rather than refuse them.
            look_for_args_file: read the script's `.args` file first, if it exists.
            args_filename: the file to read first instead of the script's.
            args_file_flag: a flag that names more such files; words of the command line override them.

        Returns:
            One instance per dataclass, then a namespace with arguments added by hand (if any), then the list of
            remaining words (if requested).

        Raises:
            ValueError: an unused word.
        """
        words = self._with_files(args, look_for_args_file, args_filename, args_file_flag)
        namespace, remaining = self.parse_known_args(args=words)
        given = vars(namespace)
        outputs: list[Any] = []
        for dataclass_type in self.dataclass_types:
            names = [item.name for item in dataclasses.fields(dataclass_type) if item.init]
            if issubclass(dataclass_type, Options):
                names += [name for name in OLDER_NAMES if name in given and name not in names]
            outputs.append(dataclass_type(**{name: unwrap(given.pop(name), dataclass_type, name) for name in names}))
        if given:
            outputs.append(namespace)
        if return_remaining_strings:
            return (*outputs, remaining)
        if remaining:
            hint = self._hint(remaining[0].split("=")[0].lstrip("-"))
            raise ValueError(f"Some specified arguments are not used by the HfArgumentParser: {remaining}{hint}")
        return tuple(outputs)

    def _with_files(
        self, args: list[str] | None, look_for_file: bool, filename: str | None, flag: str | None
    ) -> list[str] | None:
        """Returns the words of argument files and the command line; later words override earlier ones."""
        files: list[Path] = []
        if filename:
            files.append(Path(filename))
        elif look_for_file and sys.argv and sys.argv[0]:
            files.append(Path(sys.argv[0]).with_suffix(".args"))
        if flag:
            finder = ArgumentParser(add_help=False, allow_abbrev=False)
            finder.add_argument(flag, dest="files", action="append", default=[])
            found, args = finder.parse_known_args(args)
            files += [Path(name) for name in found.files]
        words = [word for path in files if path.is_file() for word in path.read_text(encoding="utf-8").split()]
        return [*words, *(sys.argv[1:] if args is None else args)] if files else args

    def parse_dict(self, args: dict[str, Any], allow_extra_keys: bool = False) -> tuple[Any, ...]:
        """Builds instances from a dict whose keys are the fields of all dataclasses together.

        Raises:
            ValueError: a key that no dataclass has, unless `allow_extra_keys`.
        """
        unused = dict(args)
        outputs: list[Any] = []
        for dataclass_type in self.dataclass_types:
            names = {item.name for item in dataclasses.fields(dataclass_type) if item.init}
            if issubclass(dataclass_type, Options):
                names |= OLDER_NAMES.keys()
            outputs.append(dataclass_type(**{name: item for name, item in args.items() if name in names}))
            unused = {name: item for name, item in unused.items() if name not in names}
        if unused and not allow_extra_keys:
            known = [item.name for kind in self.dataclass_types for item in dataclasses.fields(kind)]
            hint = did_you_mean(sorted(unused)[0], known)
            raise ValueError(f"Some keys are not used by the HfArgumentParser: {sorted(unused)}{hint}")
        return tuple(outputs)

    def parse_json_file(self, json_file: str | os.PathLike[str], allow_extra_keys: bool = False) -> tuple[Any, ...]:
        """Builds instances from a JSON file; see `parse_dict`."""
        return self.parse_dict(read_mapping(json_file, is_json=True), allow_extra_keys=allow_extra_keys)

    def parse_yaml_file(self, yaml_file: str | os.PathLike[str], allow_extra_keys: bool = False) -> tuple[Any, ...]:
        """Builds instances from a YAML file; see `parse_dict`."""
        return self.parse_dict(read_mapping(yaml_file), allow_extra_keys=allow_extra_keys)


HfArgumentParser = ArgumentsParser


def add_field(target: Any, item: dataclasses.Field[Any], hint: object) -> None:
    """Adds one field of a dataclass to a parser or a group."""
    extra = dict(item.metadata)
    aliases = extra.pop("aliases", [])
    flags = [f"--{item.name}", *([aliases] if isinstance(aliases, str) else aliases)]
    if "_" in item.name:
        flags.insert(1, f"--{item.name.replace('_', '-')}")
    shape = shape_of(hint, item.name, item.default)
    keywords = {**extra, **shape.keywords}
    if item.default is not dataclasses.MISSING:
        keywords["default"] = item.default
    elif item.default_factory is not dataclasses.MISSING:
        keywords["default"] = item.default_factory()
    elif shape.is_bool:
        keywords["default"] = False
    else:
        keywords["required"] = True
    target.add_argument(*flags, **keywords)
    if shape.is_bool and item.default is True:
        negations = [f"--no_{item.name}", f"--no-{item.name.replace('_', '-')}"]
        target.add_argument(*negations, action="store_false", dest=item.name, default=SUPPRESS, help=extra.get("help"))


def unwrap(value: object, dataclass_type: object, name: str) -> Any:
    """Returns the word of a one-element list if the field accepts text as well as a list."""
    if isinstance(value, list) and len(value) == 1:
        members = union_members(typing.get_type_hints(dataclass_type).get(name, Any))
        if str in members and types.NoneType in members:
            return value[0]
    return value
