"""Builds the Trainer of a configuration to look at it: its output folder is not created."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from paceline.args.errors import cut_short
from paceline.cli.config import JobConfig, read_job
from paceline.cli.errors import UsageError, load_part
from paceline.cli.references import put_on_path

# options of a Trainer that writes and reports nothing; its output folder is temporary
UNSEEN: dict[str, Any] = {
    "output_store": None,
    "push_to_hub": False,
    "report_to": "none",
    "disable_tqdm": True,
    "resume_from_checkpoint": None,
}


def read_words(command: str, words: Sequence[str], flags: Sequence[str]) -> tuple[JobConfig, set[str]]:
    """Returns the configuration, and the flags of the command that are given.

    Raises:
        UsageError: the configuration is invalid, or is one of TensorFlow.
    """
    words = [word.replace("_", "-") if word.replace("_", "-") in flags else word for word in words]
    given = {word for word in words if word in flags}
    rest = [word for word in words if word not in flags]
    for word in rest:
        near = cut_short(word.replace("_", "-"), flags) if word.startswith("--") else []
        if near:
            raise UsageError(f"there is no option {word}; did you mean {near[0]!r}?")
    if not rest:
        raise UsageError(f"{command} needs a file: paceline {command} CONFIG.yaml")
    config, fresh = read_job(rest)
    if fresh:
        raise UsageError(f"--fresh: {command} starts no run; leave it out")
    if config.framework != "torch":
        raise UsageError(f"framework: {command} looks at jobs of torch only, not of {config.framework}")
    return config, given


@contextmanager
def built(config: JobConfig) -> Iterator[tuple[Any, Any]]:
    """Builds the Trainer of a configuration; yields it and the arguments as `paceline train` would have them.

    Raises:
        UsageError: the configuration is invalid.
    """
    train = load_part("paceline.cli.train")
    put_on_path(config.folder, Path.cwd())
    framework = train.load_framework(config)  # first: it names the extra if the framework is missing
    args = train.make_arguments(config)
    train.check_references(config)
    with TemporaryDirectory(prefix="paceline-") as folder:
        unseen = replace(config, arguments={**config.arguments, **UNSEEN, "output_dir": folder})
        # a copy: what the arguments warn of is said once
        trainer, splits = framework.build_trainer(unseen, replace(args, **UNSEEN, output_dir=folder))
        train.check_splits(splits, args, ("do_train",), {})
        yield trainer, args
