"""Conversion of values from a command line, YAML, JSON or a script to an option's type.

Every function takes the option's name and the raw value, returns the converted value, and raises a ValueError that
names the option, the value and the expected form.
"""

from __future__ import annotations

import functools
import importlib
import math
import operator
import os
import re
import types
import typing
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from paceline.args import option_files
from paceline.args.accelerator_config import AcceleratorConfig
from paceline.args.choices import TOKEN_COUNTS, DebugOption, OptimizerNames
from paceline.args.errors import did_you_mean, parse_json, wrong_value
from paceline.args.mesh import read_parallel, read_parallelism
from paceline.args.pipelining import keep_pipelining
from paceline.args.places import check_url, is_url
from paceline.args.profiling import keep_profile
from paceline.args.redeclared import is_redeclared
from paceline.args.sections import Options
from paceline.args.warmups import keep_warmup

TRUE_WORDS = frozenset({"true", "yes", "y", "t", "on", "1"})
FALSE_WORDS = frozenset({"false", "no", "n", "f", "off", "0"})
UNITS = {"k": 1000, "%": 0.01, "s": 1, "min": 60, "h": 3600}  # that people write; options are plain numbers and seconds

_PLAIN = frozenset((bool, int, float, str, type(None)))  # exact types: an enum member may be text too


def plain_scalar(value: object) -> Any:
    """Converts a numpy scalar, a 0-d array or a 0-d tensor to a Python number; returns anything else unchanged."""
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item()
    return value


def to_bool(name: str, value: object) -> bool:
    """Converts True and False, 1 and 0, and their usual words."""
    value = plain_scalar(value)
    if isinstance(value, bool):
        return value
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    if isinstance(value, str) and value.strip().lower() in TRUE_WORDS | FALSE_WORDS:
        return value.strip().lower() in TRUE_WORDS
    raise wrong_value(name, value, "expected true or false")


def to_float(name: str, value: object) -> float:
    """Converts to a number; an integer stays an integer (500 does not become 500.0). NaN is refused."""
    value = plain_scalar(value)
    if isinstance(value, str):
        text = value.strip().replace("_", "")
        try:
            value = int(text)
        except ValueError:
            try:
                value = float(text)
            except ValueError:
                raise wrong_value(name, value, "expected a number", without_unit(text)) from None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        raise wrong_value(name, value, "expected a number")
    return value


def without_unit(text: str) -> str:
    """Returns a hint with the plain number for text such as `5k`, `10%` or `2h` (in seconds); empty for other text."""
    found = re.fullmatch(r"([+-]?\d+\.?\d*) ?(k|%|s|min|h)", text, re.IGNORECASE)
    return f"; did you mean {float(found[1]) * UNITS[found[2].lower()]:.10g}?" if found else ""


def to_int(name: str, value: object) -> int:
    """Converts to an integer; 1e4 and "10_000" are accepted."""
    number = to_float(name, value)
    if isinstance(number, float):
        if not number.is_integer():
            raise wrong_value(name, value, "expected a whole number")
        return int(number)
    return operator.index(number)


def to_str(name: str, value: object, choices: typing.Sequence[str] | None = None) -> str:
    """Converts to text, also from a path or a number. `choices` are matched case-insensitively."""
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if choices is not None:
        return to_choice(name, value, choices)
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise wrong_value(name, value, "expected text")
    return str(value)


def to_choice(name: str, value: object, choices: typing.Iterable[str]) -> str:
    """Converts to one of `choices`. YAML reads a bare `no` as false, so False means 'no' if 'no' is a choice."""
    allowed = [str(choice) for choice in choices]
    if isinstance(value, Enum):
        value = value.value
    if value is False and "no" in allowed:
        return "no"
    text = str(value).strip().lower()
    for choice in allowed:
        if text == choice.lower():
            return choice
    raise wrong_value(name, value, f"expected one of {', '.join(allowed)}", did_you_mean(text, allowed))


def to_list(name: str, value: object, choices: typing.Sequence[str] | None = None) -> list[Any]:
    """Converts a list, JSON, or words separated by commas to a list of text."""
    if isinstance(value, str):
        text = value.strip()
        if text.startswith("["):
            value = parse_json(name, text)
        else:
            value = [word.strip() for word in text.split(",") if word.strip()]
    if not isinstance(value, (list, tuple, set, frozenset)):
        raise wrong_value(name, value, "expected a list")
    return [to_str(name, item, choices) for item in value]


def to_mapping(name: str, value: object) -> Any:
    """Converts a dict, JSON, or the path of a JSON file to a dict. Other objects (a config class) are kept."""
    if not isinstance(value, (str, Path)):
        return value
    text = str(value).strip()
    if text.startswith("{"):
        return revive_scalars(parse_json(name, text))
    if not Path(text).expanduser().is_file():
        raise wrong_value(name, value, "expected a dict, a JSON object, or the path of a JSON file")
    try:
        return option_files.read_mapping(Path(text).expanduser(), is_json=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from None


def revive_scalars(value: object) -> Any:
    """Converts numbers and booleans that shell quoting left as text inside JSON: {"a": "2"} becomes {"a": 2}."""
    if isinstance(value, dict):
        return {key: revive_scalars(item) for key, item in value.items()}
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    for number in (int, float):
        try:
            return number(value)
        except ValueError:
            continue
    return value


def union_members(hint: object) -> tuple[Any, ...]:
    """Returns the members of a union, or the hint alone."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return typing.get_args(hint)
    return (hint,)


def coerce(name: str, value: object, hint: object, choices: typing.Sequence[str] | None = None) -> Any:
    """Converts the value of an option to the type `hint`.

    Raises:
        ValueError: the value cannot be converted.
    """
    members = union_members(hint)
    if value is None:
        if type(None) in members:
            return None
        raise wrong_value(name, value, "expected a value; leave it out for the default")
    enums = [member for member in members if isinstance(member, type) and issubclass(member, Enum)]
    if enums:
        return enums[0](to_choice(name, value, [member.value for member in enums[0]]))
    origins = {typing.get_origin(member) or member for member in members}
    if dict in origins:
        return to_mapping(name, value)
    if list in origins and not (str in origins and isinstance(value, str)):
        return to_list(name, value, choices)
    converters: list[tuple[Any, Callable[..., Any]]] = [(bool, to_bool), (int, to_int), (float, to_float)]
    for kind, convert in converters:
        if kind in origins:
            return convert(name, value)
    return to_str(name, value, choices) if str in origins else value


# Options whose conversion depends on more than their type.


def to_report_list(name: str, value: object) -> list[str]:
    """Returns the names of reporters; "none" is the empty list, "all" is resolved by the registry."""
    names = [] if value is None else to_list(name, value)
    if len(names) > 1 and ("none" in names or "all" in names):
        raise wrong_value(name, value, "'none' and 'all' cannot be combined with other names")
    return [] if names == ["none"] else names


def to_debug_list(name: str, value: object) -> list[DebugOption]:
    """Converts a list, or words separated by spaces or commas, to diagnostics."""
    if isinstance(value, str) and not value.strip().startswith("["):
        value = value.replace(",", " ").split()
    words = to_list(name, value or [])
    return [DebugOption(to_choice(name, word, [member.value for member in DebugOption])) for word in words]


def to_token_count(name: str, value: object) -> str:
    """Converts the kind of input tokens to count; True means 'all' and False 'no'."""
    if isinstance(value, str) and value.strip().lower() in TRUE_WORDS | FALSE_WORDS:
        value = to_bool(name, value)
    if value is True:
        return "all"
    return to_choice(name, value, TOKEN_COUNTS)


def to_accelerator_config(name: str, value: object) -> AcceleratorConfig:
    """Converts another library's object, a dict, JSON, a file, or None to AcceleratorConfig."""
    if isinstance(value, AcceleratorConfig):
        return value
    if isinstance(value, type):
        raise wrong_value(name, value, f"expected an instance: {value.__name__}()")
    if hasattr(value, "to_dict"):
        value = value.to_dict()
    settings = to_mapping(name, {} if value is None else value)
    if not isinstance(settings, dict):
        raise wrong_value(name, value, "expected a dict, a JSON object, or the path of a JSON file")
    known = {field.name for field in fields(AcceleratorConfig)}
    return AcceleratorConfig.from_dict({key: item for key, item in settings.items() if key in known or item})


def to_optimizer(name: str, value: object) -> OptimizerNames:
    """Converts an optimizer's name; a retired implementation is replaced by its successor."""
    if value == "adamw_hf":
        value = OptimizerNames.ADAMW_TORCH
    return OptimizerNames(to_choice(name, value, [member.value for member in OptimizerNames]))


def to_folder(name: str, value: Any) -> str:
    """Converts a folder or a URL; ~ is expanded."""
    if is_url(value):
        return check_url(name, value)
    return os.path.expanduser("trainer_output" if value is None else to_str(name, value))


def to_store(name: str, value: object) -> str | None:
    """Checks the URL of an object store; None stays None."""
    return None if value is None else check_url(name, to_str(name, value))


def to_token(name: str, value: object) -> str | None:
    """Converts a secret. The placeholder that files contain becomes None."""
    return None if value in (None, f"<{name.upper()}>") else to_str(name, value)


def keep_bool(name: str, value: object) -> Any:
    """Converts the words for True and False in an option whose type is text; keeps other values."""
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    return value if isinstance(value, list) else to_str(name, value)


def keep_config(name: str, value: object) -> Any:
    """Keeps a dict or the path of a file that another library reads; JSON becomes a dict."""
    return to_mapping(name, value) if isinstance(value, str) and value.strip().startswith("{") else value


def number_or_zero(name: str, value: object) -> float:
    """Converts to a number; None means 0."""
    return 0 if value is None else to_float(name, value)


def to_cache_steps(name: str, value: object) -> int | None:
    """Converts the optimizer steps between two releases of cached memory."""
    try:
        return None if value is None else to_int(name, value)
    except ValueError as error:
        raise ValueError(f"`{name}` must be an integer bigger than 0, got {value!r}: {error}") from None


def list_or_empty(name: str, value: object) -> list[Any]:
    """Converts to a list; None means an empty one."""
    return [] if value is None else to_list(name, value, CHOICES.get(name))


def to_precision_backend(name: str, value: object) -> str:
    """Converts the backend of half precision; all names of torch's autocast become "auto"."""
    backend = "auto" if value is None else to_choice(name, value, CHOICES[name])
    return backend if backend == "apex" else "auto"


def to_loss_weight(name: str, value: object) -> Any:
    """Keeps one of the choices, or a function, whose value cannot be restored from a file."""
    if value is None or (callable(value) and not isinstance(value, type)):
        return value
    if isinstance(value, str) and ":" in value:
        raise wrong_value(name, value, "it was a function when it was saved: pass that function again")
    return to_choice(name, value, CHOICES[name])


def to_head(name: str, value: object) -> str | bool:
    """Converts to True, False, "auto", "liger", or the name of a module."""
    kept = keep_bool(name, value)
    if isinstance(kept, bool):
        return kept
    if not isinstance(kept, str) or not all(part.isidentifier() or part.isdecimal() for part in kept.split(".")):
        expected = "expected 'auto', True, False, 'liger', or the name of a module such as 'lm_head'"
        raise wrong_value(name, value, expected)
    return kept


def to_regularizers(name: str, value: object) -> Any:
    """Converts a list of regularizers; their settings are imported only if there are any."""
    if value in (None, "", []):
        return None
    return importlib.import_module("paceline.args.regularizers").keep_regularizers(name, value)


def keep_eval_samples(name: str, value: object) -> Any:
    """Keeps a number of rows, or the settings of samples."""
    if value is None or (isinstance(value, int) and value == 0):
        return 0
    # imported if it is set: it would be loaded with every Trainer
    return importlib.import_module("paceline.args.eval_samples").keep_samples(name, value)


def to_harness(name: str, value: object) -> Any:
    """Converts tasks of the lm-evaluation-harness; their module is imported only if there are any."""
    if value is None or value is False or value in ("", "none", []):
        return None
    return importlib.import_module("paceline.args.eval_harness").keep_harness(name, value)


def to_snapshots(name: str, value: object) -> bool | int:
    """Converts to True, False, or the number of snapshots that are kept.

    Raises:
        ValueError: it is none of these.
    """
    word = value.strip().lower() if isinstance(value, str) else value
    if word in (None, "", "none", "false", False):
        return False
    number = int(word) if isinstance(word, str) and word.isdecimal() else word
    if number == "true" or number is True:
        return True
    if not isinstance(number, int) or number < 0:
        raise wrong_value(name, value, "expected True, False, or the number of snapshots that are kept")
    return number


def to_pruning(name: str, value: object) -> Any:
    """Converts the settings of pruning; their module is imported only if there are any."""
    if value is None or value is False or value in ("", "none"):
        return None
    return importlib.import_module("paceline.args.pruning").keep_pruning(name, value)


def to_phases(name: str, value: object) -> Any:
    """Converts training phases; their module is imported only if there are any."""
    return None if value is None else importlib.import_module("paceline.args.phases").keep_phases(name, value)


def to_layers(name: str, value: object) -> Any:
    """Converts a map of modules, or its JSON."""
    return None if value is None else importlib.import_module("paceline.args.distillation").keep_layers(name, value)


SPECIAL: dict[str, Callable[[str, Any], Any]] = {
    "accelerator_config": to_accelerator_config,
    "batch_size_warmup": keep_warmup,
    "debug": to_debug_list,
    "deepspeed": keep_config,
    "distillation_layers": to_layers,
    "eval_delay": number_or_zero,
    "eval_harness": to_harness,
    "eval_samples": keep_eval_samples,
    "fsdp": keep_bool,
    "fsdp_config": keep_config,
    "generation_config": keep_config,
    "half_precision_backend": to_precision_backend,
    "hub_token": to_token,
    "include_for_metrics": list_or_empty,
    "include_num_input_tokens_seen": to_token_count,
    "linear_cross_entropy": to_head,
    "loss_weight": to_loss_weight,
    "max_grad_norm": number_or_zero,
    "optim": to_optimizer,
    "output_dir": to_folder,
    "output_store": to_store,
    "parallel": read_parallel,
    "parallelism_config": read_parallelism,
    "phases": to_phases,
    "pipeline_config": keep_pipelining,
    "profile": keep_profile,
    "pruning": to_pruning,
    "regularizers": to_regularizers,
    "report_to": to_report_list,
    "resume_from_checkpoint": keep_bool,
    "sequence_length_warmup": keep_warmup,
    "snapshot_ensemble": to_snapshots,
    "torch_empty_cache_steps": to_cache_steps,
    "trackio_static_space_id": keep_bool,
}
CHOICES: dict[str, list[str]] = {
    field.name: field.metadata["choices"] for field in fields(Options) if "choices" in field.metadata
}


@functools.cache
def own_hints() -> dict[str, Any]:
    """Returns the types of paceline's options."""
    return typing.get_type_hints(Options)


@functools.cache
def hints_of(cls: type) -> dict[str, Any]:
    """Returns the types of the fields that a subclass adds; empty if its annotations cannot be resolved."""
    try:
        hints = typing.get_type_hints(cls)
    except Exception:  # A local class under postponed annotations: its fields are not converted.
        return {}
    return {name: hint for name, hint in hints.items() if name not in own_hints()}


def coerce_option(cls: type, name: str, value: object) -> Any:
    """Converts `value` for the option `name` of the arguments class `cls`.

    In fields that a subclass adds, only text is converted, to the number, boolean or enum member of the type; other
    values are kept. A field by which a subclass replaces one of paceline's own options keeps its value.
    """
    if is_redeclared(cls, name):
        return value
    if name in SPECIAL:
        return SPECIAL[name](name, value)
    if name in own_hints():
        return coerce(name, value, own_hints()[name], CHOICES.get(name))
    hint = hints_of(cls).get(name)
    if hint is None or not isinstance(value, str):
        return value
    wanted = union_members(hint)
    is_scalar = any(kind in wanted for kind in (bool, int, float))
    is_enum = any(isinstance(kind, type) and issubclass(kind, Enum) for kind in wanted)
    return coerce(name, value, hint) if (is_scalar and str not in wanted) or is_enum else value


def as_plain(value: object) -> Any:
    """Converts `value` to JSON and YAML types as far as possible; containers are copied."""
    # most options are plain, and each save converts all of them
    if type(value) in _PLAIN or isinstance(value, type):
        return value
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {(key.value if isinstance(key, Enum) else key): as_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [as_plain(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    value = plain_scalar(value)
    if type(value).__module__ == "torch" and type(value).__name__ in ("dtype", "device"):
        return str(value).removeprefix("torch.")
    for method in ("to_dict", "to_json"):
        if hasattr(value, method):
            return as_plain(getattr(value, method)())
    if is_dataclass(value):
        return {field.name: as_plain(getattr(value, field.name)) for field in fields(value)}
    if callable(value):
        named = value if hasattr(value, "__qualname__") else type(value)
        return f"{named.__module__}:{named.__qualname__}"
    return value
