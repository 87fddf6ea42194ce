"""Reads the configuration file of `paceline train`, and overrides from the command line.

model: a folder or name for transformers | {model_type: ..., ...} | package.module:factory
tokenizer: a folder or name, or package.module:factory (default: the model's)
data: files, a folder, or package.module:factory
preprocess: package.module:function
metrics: [accuracy, f1]
data_collator, compute_metrics, compute_loss_func, preprocess_logits_for_metrics, trainer: package.module:name
callbacks: [package.module:Class, ...]
augmentation: [shift_left, ...]              # of the final evaluation and the predictions
calibration: temperature                     # fitted on the evaluation data, stored beside the model
ensemble: [runs/a, runs/b]                   # folders whose predictions are combined
members: [{learning_rate: 1e-3}, {learning_rate: 1e-2, seed: 1}, ...]  # several models, trained at once
framework: tf                                # default: torch
arguments: {learning_rate: 3e-4, ...}        # or the same names at the top level
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.args import yaml_text
from paceline.args.errors import did_you_mean
from paceline.args.members import read_members
from paceline.args.option_files import read_mapping
from paceline.cli.errors import UsageError, suggest
from paceline.cli.options import Given, Known, argument_names, check_framework, parse_options, read_framework
from paceline.cli.references import REFERENCE

# section -> the key that a plain string sets
SECTIONS: dict[str, str] = {
    "model": "path",
    "tokenizer": "path",
    "data": "train",
    "preprocess": "factory",
    "metrics": "names",
    "data_collator": "factory",
    "compute_metrics": "factory",
    "compute_loss_func": "factory",
    "preprocess_logits_for_metrics": "factory",
    "trainer": "factory",
    "augmentation": "transforms",
    "calibration": "method",
    "ensemble": "members",
}
LISTS = ("data", "metrics", "augmentation", "ensemble")  # sections that may hold a list
LISTS_ALONE = ("callbacks", "members")  # keys that hold nothing but a list
OTHER_NAMES = {"processing_class": "tokenizer"}
DATA_KEYS = ("train", "eval", "test", "format", "eval_fraction", "text_column", "block_size", "num_proc")
FLOAT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


@dataclass
class JobConfig:
    """The configuration of a training job.

    Attributes:
        path: the file; modules and data are also searched for in its folder.
        sections: the values of the keys of `SECTIONS` and `LISTS_ALONE`.
        arguments: options of `TrainingArguments`, unchecked.
        framework: `torch` or `tf`.
    """

    path: Path
    sections: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    framework: str = "torch"

    @property
    def folder(self) -> Path:
        """The folder of the file."""
        return self.path.parent

    def get(self, name: str) -> Any:
        return self.sections.get(name)

    def find_file(self, name: str) -> Path | None:
        """Returns a named file or folder in the configuration's folder, else in the current folder; None if missing."""
        for base in (self.folder, Path.cwd()):
            found = base / Path(name).expanduser()
            if found.exists():
                return found
        return None


def read_job(words: Sequence[str]) -> tuple[JobConfig, bool]:
    """Reads `paceline train CONFIG.yaml --option value ...`. Returns the job, and True if `--fresh` is given.

    Raises:
        UsageError: an unknown file, key or option.
    """
    own = {"fresh": True, "framework": False}
    given = parse_options(words, Known(("CONFIG.yaml",), own, (*SECTIONS, *OTHER_NAMES)))
    if not given.positional:
        raise UsageError("train needs a file: paceline train CONFIG.yaml (`paceline train --help` shows one)")
    config = read_config(Path(given.positional[0]))
    apply_overrides(config, given)
    check_framework(config.framework, config.arguments)
    return config, bool(given.own.get("fresh"))


def read_config(path: Path) -> JobConfig:
    """Reads a job from a YAML or JSON file.

    Raises:
        UsageError: the file is missing or invalid, or has an unknown key; the message names the closest known one.
    """
    try:
        content = plain_numbers(read_mapping(path))
    except IsADirectoryError:
        raise UsageError(f"{path} is a folder; expected a file, YAML or JSON{_files_in(path)}") from None
    except OSError as error:
        hint = did_you_mean(path.name, _configurations(path.parent)) if isinstance(error, FileNotFoundError) else ""
        raise UsageError(f"{path} cannot be read: {error.strerror or error}{hint}") from error
    except ValueError as error:
        text = str(error).removesuffix(".")
        raise UsageError(text if str(path) in text else f"{str(path)!r}: {text}") from error
    if not content:
        raise UsageError(f"{path} is empty; expected 'name: value' lines (`paceline train --help` shows a file)")
    try:
        return make_config(content, path.resolve())
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def _configurations(folder: Path) -> list[str]:
    """Returns the names of the files in a folder that may be configurations."""
    if not folder.is_dir() or not os.access(folder, os.R_OK | os.X_OK):
        return []
    return sorted(path.name for path in folder.iterdir() if path.suffix.lower() in (".yaml", ".yml", ".json"))


def _files_in(folder: Path) -> str:
    names = _configurations(folder)[:4]
    return f" ({', '.join(names)})" if names else ""


def parse_value(where: str, text: str) -> Any:
    """Parses a value of the command line as YAML: numbers, true and false, [lists], {mappings}, else text."""
    try:
        return plain_numbers(yaml_text.read(text))
    except ValueError as error:
        raise UsageError(f"{where}: {text!r} is not valid YAML ({error}); put it in quotes") from error


def plain_numbers(value: object) -> Any:
    """Converts strings like `3e-4` in nested values to numbers."""
    if isinstance(value, dict):
        return {key: plain_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain_numbers(item) for item in value]
    if isinstance(value, str) and "e" in value.lower() and FLOAT.fullmatch(value):
        number = float(value)
        return number if math.isfinite(number) else value
    return value


def make_config(content: Mapping[str, Any], path: Path) -> JobConfig:
    """Sorts the keys of a configuration into sections and arguments. Raises: UsageError, for an unknown key."""
    config = JobConfig(path)
    names = argument_names()
    for key, value in content.items():
        name = OTHER_NAMES.get(str(key), str(key))
        if name == "framework":
            config.framework = read_framework("framework:", value)
        elif name == "arguments":
            _add_arguments(config, value, names)
        elif name in SECTIONS or name in LISTS_ALONE:
            if name in config.sections:
                raise UsageError(f"{key!r} and {name!r} are the same: give one of them")
            config.sections[name] = value
        elif name in names:
            _add_argument(config, name, value)
        else:
            known = {*SECTIONS, *OTHER_NAMES, *LISTS_ALONE, "framework", "arguments", *names}
            raise UsageError(f"unknown key {name!r}{suggest(name, known)}")
    check_sections(config)
    return config


def apply_overrides(config: JobConfig, given: Given) -> None:
    """Overrides a configuration by the options of a command line.

    Raises:
        UsageError: `--section.key` names an unknown section or key.
    """
    config.arguments.update(given.arguments)
    config.framework = read_framework("--framework", given.own.get("framework", config.framework))
    for section, key, text in given.sections:
        section = OTHER_NAMES.get(section, section)
        value = parse_value(f"--{section}{'.' if key else ''}{key}", text)
        current = config.sections.get(section)
        if not key:
            config.sections[section] = value
            continue
        if isinstance(current, str):
            current = {"factory" if REFERENCE.fullmatch(current) else SECTIONS[section]: current}
        if isinstance(current, list) and section in LISTS:
            current = {SECTIONS[section]: current}
        if current is not None and not isinstance(current, Mapping):
            raise UsageError(f"--{section}.{key}: {section!r} holds {_kind(current)} and has no keys")
        config.sections[section] = _put({**(current or {})}, key.split("."), value, f"--{section}.{key}")
    check_sections(config)


def check_sections(config: JobConfig) -> None:
    """Checks the sections as far as possible without imports.

    Raises:
        UsageError: an invalid section; the message names the key.
    """
    for name, value in config.sections.items():
        if name in LISTS_ALONE:
            if not isinstance(value, list):
                raise UsageError(f"{name}: expected a list, not {_kind(value)}")
        elif not isinstance(value, str | Mapping | None) and not (name in LISTS and isinstance(value, list)):
            raise UsageError(f"{name}: expected text or a mapping, not {_kind(value)}")
    if config.get("metrics") is not None and config.get("compute_metrics") is not None:
        raise UsageError("metrics and compute_metrics exclude each other: let compute_metrics return all of them")
    if config.get("members") is not None:
        _check_members(config)
    data, preprocess = config.get("data"), config.get("preprocess")
    if isinstance(data, Mapping) and "factory" not in data:
        _check_keys("data", data, (*DATA_KEYS, "factory"))
        _check_fraction(data)
    if isinstance(preprocess, Mapping) and "factory" not in preprocess:
        raise UsageError("preprocess: 'factory' is missing: the function, as package.module:name")


def _check_members(config: JobConfig) -> None:
    if config.framework == "tf":
        raise UsageError("members: TensorFlow trains one model at a time: leave them out, or give --framework torch")
    try:
        read_members(config.get("members"))
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error


def _check_fraction(data: Mapping[str, Any]) -> None:
    fraction = data.get("eval_fraction")
    if fraction is None:
        return
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction < 1:
        raise UsageError(f"data.eval_fraction: {fraction!r} is not between 0 and 1")
    if "eval" in data:
        raise UsageError("data: 'eval' and 'eval_fraction' exclude each other")


def _add_arguments(config: JobConfig, value: object, names: set[str]) -> None:
    if value is None:
        return
    if not isinstance(value, Mapping):
        raise UsageError(f"arguments: expected a mapping, not {_kind(value)}")
    _check_keys("arguments", value, names)
    for key, item in value.items():
        _add_argument(config, key, item)


def _add_argument(config: JobConfig, name: str, value: object) -> None:
    if name in config.arguments:
        raise UsageError(f"{name!r} is given twice: at the top level and under 'arguments'")
    config.arguments[name] = value


def _check_keys(where: str, value: Mapping[Any, Any], names: Any) -> None:
    for key in value:
        if key not in names:
            raise UsageError(f"{where}: unknown key {key!r}{suggest(str(key), names)}")


def _put(target: dict[str, Any], path: list[str], value: object, where: str) -> dict[str, Any]:
    """Returns `target` with a value set at a path of keys; nested mappings are copied, not modified."""
    head, *tail = path
    if tail:
        inner = target.get(head, {})
        if not isinstance(inner, Mapping):
            raise UsageError(f"{where}: {head!r} holds {_kind(inner)} and has no keys")
        value = _put({**inner}, tail, value, where)
    return {**target, head: value}


def _kind(value: object) -> str:
    if value is None:
        return "nothing"
    name = type(value).__name__
    return "text" if isinstance(value, str) else f"{'an' if name == 'int' else 'a'} {name}"
