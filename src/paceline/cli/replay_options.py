"""What `paceline replay` may be told, and the job that it is to make again. Loads no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.cli.errors import UsageError
from paceline.cli.jobs import JOB_NAME, Job, is_of_tensorflow
from paceline.cli.options import Known, parse_options
from paceline.core import folders

MODULES = {"train": "train", "demo": "demo_text", "demo digits": "demo_digits"}
DEFAULT_SHOWN = 3


@dataclass(frozen=True)
class ReplayOptions:
    """The options of a replay.

    Attributes:
        job: the run.
        module: of `paceline.cli`, which can put its Trainer together again.
        step: which update.
        shown: how many of its samples to show.
    """

    job: Job
    module: str
    step: int
    shown: int


def read_replay_options(words: Sequence[str]) -> ReplayOptions:
    """Read the command line of `paceline replay`.

    Raises:
        UsageError: a value is missing or makes no sense, or the folder holds no run that can be made again.
    """
    given = parse_options(words, Known(("RUN",), {"step": False, "show": False}))
    if given.arguments:
        raise UsageError(f"replay takes --step and --show, not --{next(iter(given.arguments))}")
    if not given.positional or "step" not in given.own:
        raise UsageError("replay needs a run and a step: paceline replay RUN --step N")
    step, shown = _number(given.own, "step", 1), _number({"show": DEFAULT_SHOWN, **given.own}, "show", 0)
    job = find_job(Path(given.positional[0]))
    return ReplayOptions(job, MODULES[job.command], step, shown)


def find_job(folder: Path) -> Job:
    """The job whose folder this is.

    Raises:
        UsageError: it is none that can be made again; the message says why.
    """
    path = folder / JOB_NAME
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}")
    of_tensorflow = f"{folder} holds a run of TensorFlow: replay makes updates of runs of torch again"
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
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is damaged ({type(error).__name__}: {error})") from error
    if str(command).endswith("--framework tf"):
        raise UsageError(of_tensorflow)
    if command not in MODULES or not isinstance(identity, Mapping) or not isinstance(settings, Mapping):
        raise UsageError(f"{path} is damaged: it names no job that can be made again")
    if not isinstance(settings.get("given"), Mapping):
        raise UsageError(f"{path} does not say how the run was started, so it cannot be made again")
    return Job(folder, command, dict(identity), dict(settings))


def _number(own: Mapping[str, Any], name: str, least: int) -> int:
    try:
        number = int(own[name])
    except ValueError:
        number = least - 1
    if number < least:
        raise UsageError(f"--{name} {own[name]}: give a whole number, {least} or more")
    return number
