"""Reads the options of `paceline replay` and the job that it reruns. Does not import torch."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.args.secrets import mask_text
from paceline.checkpoint import folders
from paceline.cli.errors import UsageError
from paceline.cli.jobs import JOB_NAME, Job, is_of_tensorflow
from paceline.cli.options import Known, parse_options
from paceline.cli.references import REFERENCE

MODULES = {"train": "train", "demo": "demo.text", "demo digits": "demo.digits"}
DEFAULT_SHOWN = 3


@dataclass(frozen=True)
class ReplayOptions:
    """The options of a replay.

    Attributes:
        job: the run.
        module: the module of `paceline.cli` that rebuilds its Trainer.
        step: the optimizer step.
        shown: the number of samples to show.
        is_blaming: rank the samples by their own loss and gradient norm.
        is_json: print one JSON object instead of text.
    """

    job: Job
    module: str
    step: int
    shown: int
    is_blaming: bool = False
    is_json: bool = False


def read_replay_options(words: Sequence[str]) -> ReplayOptions:
    """Reads the command line of `paceline replay`.

    Raises:
        UsageError: a value is missing or invalid, or the folder holds no reproducible run.
    """
    given = parse_options(
        words, Known(("RUN",), {"step": False, "show": False, "trust": True, "blame": True, "json": True})
    )
    if given.arguments:
        raise UsageError(
            f"replay takes --step, --show, --blame, --json and --trust, not --{next(iter(given.arguments))}"
        )
    if not given.positional or "step" not in given.own:
        raise UsageError("replay needs a run and a step: paceline replay RUN --step N")
    step, shown = _number(given.own, "step", 1), _number({"show": DEFAULT_SHOWN, **given.own}, "show", 0)
    job = find_job(Path(given.positional[0]))
    check_trust(job, is_trusted=bool(given.own.get("trust")))
    flags = (bool(given.own.get(name)) for name in ("blame", "json"))
    return ReplayOptions(job, MODULES[job.command], step, shown, *flags)


def find_job(folder: Path) -> Job:
    """Returns the job of a folder.

    Raises:
        UsageError: the job cannot be rerun; the message gives the reason.
    """
    path = folder / JOB_NAME
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}")
    of_tensorflow = f"{folder} holds a run of TensorFlow: replay supports runs of torch only"
    if any(is_of_tensorflow(place) for place in (folder, *folders.list_checkpoints(folder))):
        raise UsageError(of_tensorflow)
    if not path.is_file():
        raise UsageError(
            f"{folder} was not made by `paceline train` or `paceline demo` (it has no {JOB_NAME}); for a run of your "
            "own script, call paceline.replay(trainer, step) with the Trainer of that script"
        )
    try:
        content: Any = json.loads(path.read_bytes())
        command, identity, settings = content["command"], content["identity"], content["settings"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"{path} is damaged ({type(error).__name__}: {error})") from error
    if str(command).endswith("--framework tf"):
        raise UsageError(of_tensorflow)
    if command not in MODULES or not isinstance(identity, Mapping) or not isinstance(settings, Mapping):
        raise UsageError(f"{path} is damaged: it names no job that can be rerun")
    if not isinstance(settings.get("given"), Mapping):
        raise UsageError(f"{path} does not record how the run was started, so it cannot be rerun")
    return Job(folder, command, dict(identity), dict(settings))


def check_trust(job: Job, *, is_trusted: bool) -> None:
    """Asks for confirmation before running the code that `job.json` names, because its writer could name any code.

    The demonstrations run only this package's code. A job of `paceline train` can run other code even if it names none,
    because the folder of its configuration is first on Python's path.

    Args:
        job: the job.
        is_trusted: True if `--trust` was given, which skips the confirmation.

    Raises:
        UsageError: the answer is no, or there is no terminal; the message names the code and the remedy.
    """
    if is_trusted or job.command != "train":
        return
    given = job.settings["given"]
    named = sorted({*references_in(given.get("sections")), *references_in(given.get("arguments"))})
    folder = os.path.dirname(str(given.get("path", ""))) or "."
    what = (
        f"{job.folder / JOB_NAME} makes Python import {', '.join(named) or 'what its model and data need'}, with "
        f"{folder} and the current folder on its path"
    )
    if sys.stdin is None or not sys.stdin.isatty():
        raise UsageError(f"{what}: give --trust if you trust its author")
    print(mask_text(f"{what}. Go on? [y/N] "), end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UsageError("nothing was run")


def references_in(value: object) -> Iterator[str]:
    """Yields every `package.module:name` in nested values."""
    if isinstance(value, Mapping):
        for item in value.values():
            yield from references_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from references_in(item)
    elif isinstance(value, str) and REFERENCE.fullmatch(value):
        yield value


def _number(own: Mapping[str, Any], name: str, least: int) -> int:
    try:
        number = int(own[name])
    except ValueError:
        number = least - 1
    if number < least:
        raise UsageError(f"--{name} {own[name]}: give a whole number, {least} or more")
    return number
