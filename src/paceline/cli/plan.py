"""`paceline plan CONFIG.yaml`: what a run will take, before its first step."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from paceline.args import yaml_text
from paceline.args.secrets import mask_text
from paceline.cli.display import output_for, say
from paceline.cli.errors import UsageError, load_part
from paceline.cli.preview import built, read_words
from paceline.core.metrics import jsonable
from paceline.core.terminal import encodable

FLAGS = ("--time", "--print-config", "--json")
PROCESSES = "--processes"


def run(words: Sequence[str]) -> int:
    """Prints the forecast; returns the exit code.

    Raises:
        UsageError: the configuration is invalid.
    """
    number, rest = take_processes(words)
    config, given = read_words("plan", rest, FLAGS)
    if number is not None and "--time" in given:
        raise UsageError(f"{PROCESSES} {number} and --time: the other processes are not started; leave one of them out")
    with output_for("--json" in given), processes_of(number), built(config) as (trainer, args):
        try:
            found = trainer.plan(time="--time" in given)
        except ValueError as error:
            raise UsageError(str(error)) from error
    options, defaults = options_of(args), options_of(type(args)(output_dir=str(args.output_dir)))
    changed = tuple(name for name in options if name == "output_dir" or options[name] != defaults.get(name))
    found = replace(found, options=options, changed=changed)
    if number is None and not trainer.is_world_process_zero():
        return 0
    if "--json" in given:
        print(mask_text(json.dumps(jsonable(found.to_dict()), default=str)))
        return 0
    say(str(found))
    if "--print-config" in given:
        text = mask_text("\n" + print_options(found.options, found.changed))
        print(encodable(text, sys.stdout, "backslashreplace"), flush=True)  # YAML reads these escapes, too
    return 0


def options_of(args: Any) -> dict[str, Any]:
    """Returns all options as JSON values that a file of `paceline train` takes; secrets are masked."""
    written = json.loads(args.to_json_string())
    return {name: None if getattr(args, name, None) is None else value for name, value in written.items()}


def take_processes(words: Sequence[str]) -> tuple[int | None, list[str]]:
    """Returns the number of `--processes N`, or None, and the other words.

    Raises:
        UsageError: it is no number from 1 on.
    """
    rest = list(words)
    for index, word in enumerate(rest):
        name, _, value = word.partition("=")
        if name != PROCESSES:
            continue
        length = 1 if "=" in word else 2
        value = value if length == 1 else "".join(rest[index + 1 : index + 2])
        if not value.isdecimal() or int(value) < 1:
            raise UsageError(f"{PROCESSES} {value}".rstrip() + ": expected a number of processes from 1 on")
        return int(value), rest[:index] + rest[index + length :]
    return None, rest


def processes_of(number: int | None) -> AbstractContextManager[None]:
    """Returns the context in which this process is the first of `number`; one that changes nothing for None."""
    if number is None:
        return nullcontext()
    found: AbstractContextManager[None] = load_part("paceline.pytorch.distributed.simulated").simulated_processes(
        number
    )
    return found


def print_options(options: Mapping[str, Any], changed: Sequence[str]) -> str:
    """Returns all options as YAML; lines of those that differ from their defaults end with a mark."""
    lines = ["arguments:"]
    for name, value in options.items():
        mark = "  # not the default" if name in changed else ""
        lines.append(f"  {name}: {as_yaml(value)}{mark}")
    text = "\n".join(lines)
    yaml_text.read(text)  # JSON values are YAML
    return text


def as_yaml(value: object) -> str:
    """Returns a value as JSON that YAML reads as the same value: without the pairs of escapes of JSON."""
    text = json.dumps(jsonable(value), default=str, ensure_ascii=False)
    return "".join(each if each.isprintable() else f"\\U{ord(each):08x}" for each in text)
