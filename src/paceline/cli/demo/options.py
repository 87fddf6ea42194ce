"""Options of `paceline demo`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.args.training import TrainingArguments
from paceline.cli.errors import UsageError, suggest
from paceline.cli.options import Known, check_framework, parse_options, read_framework
from paceline.tensorflow.arguments import TFTrainingArguments

JOBS = ("text", "digits")
DEFAULT_PROMPT = "The for statement"
DEFAULT_SECONDS = 90.0


@dataclass(frozen=True)
class DemoOptions:
    """The options of a demonstration.

    Attributes:
        job: `text` or `digits`.
        fresh: True starts over.
        prompt: the prompt of the generated sample.
        seconds: training time if the number of steps is not given.
        framework: `torch` or `tf`.
        arguments: options of `TrainingArguments`.
    """

    job: str = "text"
    fresh: bool = False
    prompt: str = DEFAULT_PROMPT
    seconds: float = DEFAULT_SECONDS
    framework: str = "torch"
    arguments: Mapping[str, Any] = field(default_factory=dict)


def read_demo_options(words: Sequence[str]) -> DemoOptions:
    """Reads the command line of `paceline demo`.

    Raises:
        UsageError: an unknown job or option, or an invalid value.
    """
    known = Known(positional=("job",), own={"fresh": True, "prompt": False, "seconds": False, "framework": False})
    given = parse_options(words, known)
    job = given.positional[0] if given.positional else "text"
    if job not in JOBS:
        raise UsageError(f"there is no demonstration {job!r}{suggest(job, JOBS)}")
    for name in ("prompt", "seconds"):
        if job != "text" and name in given.own:
            raise UsageError(f"--{name} has a meaning only for `paceline demo text`")
    own = given.own
    framework = read_framework("--framework", own.get("framework", "torch"))
    check_framework(framework, given.arguments)
    if framework == "tf" and job != "digits":
        raise UsageError("--framework tf: with TensorFlow there is `paceline demo digits`")
    return DemoOptions(
        job, own.get("fresh", False), own.get("prompt", DEFAULT_PROMPT), _seconds(own), framework, given.arguments
    )


def make_arguments(defaults: Mapping[str, Any], options: DemoOptions) -> TrainingArguments:
    """Builds the arguments from the job's defaults and the user's options.

    Raises:
        UsageError: an option has an invalid value, or contradicts another.
    """
    try:
        kind = TrainingArguments if options.framework == "torch" else TFTrainingArguments
        return kind(**{**defaults, **options.arguments})
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error


def _seconds(own: Mapping[str, Any]) -> float:
    text = own.get("seconds", DEFAULT_SECONDS)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UsageError(f"--seconds {text}: give a number above 0")
    return seconds
