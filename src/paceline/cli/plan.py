"""`paceline plan CONFIG.yaml`: what a run will take, before its first step."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from paceline.args import yaml_text
from paceline.cli.display import say
from paceline.cli.errors import UsageError
from paceline.cli.preview import built, read_words
from paceline.core.metrics import jsonable

FLAGS = ("--time", "--print-config", "--json")


def run(words: Sequence[str]) -> int:
    """Prints the forecast; returns the exit code.

    Raises:
        UsageError: the configuration is invalid.
    """
    config, given = read_words("plan", words, FLAGS)
    with built(config) as (trainer, args):
        try:
            found = trainer.plan(time="--time" in given)
        except ValueError as error:
            raise UsageError(str(error)) from error
    options = args.to_sanitized_dict()
    defaults = type(args)(output_dir=str(args.output_dir)).to_sanitized_dict()
    changed = tuple(name for name in options if name == "output_dir" or options[name] != defaults.get(name))
    found = replace(found, options=options, changed=changed)
    if "--json" in given:
        say(json.dumps(jsonable(found.to_dict()), default=str))
        return 0
    say(str(found))
    if "--print-config" in given:
        say("\n" + print_options(found.options, found.changed))
    return 0


def print_options(options: Mapping[str, Any], changed: Sequence[str]) -> str:
    """Returns all options as YAML; lines of those that differ from their defaults end with a mark."""
    lines = ["arguments:"]
    for name, value in options.items():
        mark = "  # not the default" if name in changed else ""
        lines.append(f"  {name}: {json.dumps(jsonable(value), default=str)}{mark}")
    text = "\n".join(lines)
    yaml_text.read(text)  # JSON values are YAML
    return text
