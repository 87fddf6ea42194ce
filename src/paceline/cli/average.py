"""`paceline average`: writes the mean of the weights of several checkpoints."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.args.metric_names import is_maximized
from paceline.checkpoint import folders
from paceline.cli.config import read_job
from paceline.cli.errors import UsageError, load_part
from paceline.cli.export import DEFAULT_SHARD_SIZE, find, make_room, parse_size
from paceline.cli.preview import built
from paceline.core.terminal import show

VALUES = {"-o": "output", "--output": "output", "--max-shard-size": "size", "--greedy": "config"}
# weights as other programs write them, too, any of which a loader may prefer
WEIGHTS = (
    "*.safetensors", "*.safetensors.index.json", "pytorch_model*", "adapter_*", "tf_model*", "flax_model*", "*.distcp",
)  # fmt: skip


@dataclass
class Words:
    """The command line. `config`: the configuration whose evaluation chooses, with `--greedy`."""

    places: list[str] = field(default_factory=list)
    output: str | None = None
    overwrite: bool = False
    size: str = DEFAULT_SHARD_SIZE
    config: str | None = None


def run(words: Sequence[str]) -> int:
    """Averages checkpoints.

    Raises:
        UsageError: a folder is missing, or the output already exists, or cannot be overwritten.
    """
    given = read_words(words)
    if len(given.places) < 2 or given.output is None:
        raise UsageError("average needs two checkpoints or more, and an output folder: paceline average A B -o OUTPUT")
    checkpoints = [find(Path(place)) for place in given.places]
    soup = load_part("paceline.pytorch.checkpoint.soup")
    make_room(Path(given.output), 0)
    try:
        if given.config is not None:
            checkpoints = choose(given, checkpoints, soup)
        else:
            size = parse_size(given.size)
            if given.overwrite:
                check_overwritten(Path(given.output), checkpoints[0], size)
            soup.average_checkpoints(checkpoints, given.output, overwrite=given.overwrite, max_shard_bytes=size)
    except FileExistsError:
        raise UsageError(
            f"{given.output} already exists: name a folder that is new or empty, or add --overwrite"
        ) from None
    show(f"{given.output}: the mean of {', '.join(map(str, checkpoints))}")
    return 0


def check_overwritten(output: Path, checkpoint: Path, max_shard_bytes: int) -> None:
    """Refuses to overwrite a folder in which weights may stay beside those of the mean.

    These are files that its manifest does not list, and whose names no file of the mean has.

    Args:
        output: the folder.
        checkpoint: a checkpoint with the tensors of the mean.
        max_shard_bytes: maximum bytes of one file.

    Raises:
        UsageError: there are such weights.
    """
    present = [name for name in folders.extra_files(output) if "/" not in name.removeprefix("model/")]
    weights = [name for name in present if any(fnmatch.fnmatchcase(name, pattern) for pattern in WEIGHTS)]
    if not weights:
        return
    streaming = load_part("paceline.pytorch.checkpoint.streaming")
    written = list(streaming.files_of(streaming.open_weights(checkpoint).forms, max_shard_bytes))
    if len(written) > 1:
        written.append(streaming.WEIGHTS_INDEX_NAME)
    left = [name for name in weights if name not in written]
    if left:
        raise UsageError(
            f"--overwrite: {output} holds {', '.join(left[:3])} beside what the mean replaces, which may be loaded in "
            "its place: delete such files, or name another folder"
        )


def choose(given: Words, checkpoints: list[Path], soup: Any) -> list[Path]:
    """Writes the greedy soup by the evaluation of a configuration; returns the checkpoints in it.

    Raises:
        UsageError: the configuration is invalid, or its evaluation gives no such metric.
    """
    if given.overwrite or given.size != DEFAULT_SHARD_SIZE:
        raise UsageError("--greedy writes a new folder: leave out --overwrite and --max-shard-size")
    files = load_part("paceline.pytorch.checkpoint.files")
    config, _ = read_job([str(given.config)])
    with built(config) as (trainer, args):
        metric = f"eval_{(args.metric_for_best_model or 'loss').removeprefix('eval_')}"
        is_greater = args.greater_is_better
        if is_greater is None:
            is_greater = is_maximized(metric)

        def evaluate(folder: str) -> float:
            files.load_model(trainer.model, folder)
            found = trainer.evaluate()
            if metric not in found:
                names = ", ".join(sorted(found))
                raise UsageError(f"metric_for_best_model: the evaluation has no {metric}, but {names}")
            show(f"{metric} {found[metric]:.6g}  {'' if Path(folder).name == 'mean' else folder}".rstrip())
            return float(found[metric])

        made = soup.greedy_soup(checkpoints, evaluate, given.output, greater_is_better=is_greater)
    show(f"{metric} {made.metric:.6g}  {given.output}")
    return [Path(folder) for folder in made.chosen]


def read_words(words: Sequence[str]) -> Words:
    """Returns the command line, read.

    Raises:
        UsageError: an option is unknown, or has no value.
    """
    found = Words()
    left = list(words)
    while left:
        word = left.pop(0)
        name, sign, value = word.partition("=")
        if name in VALUES:
            if not sign:
                if not left or left[0].startswith("-"):
                    raise UsageError(f"{name} needs a value{f', not the option {left[0]}' if left else ''}")
                value = left.pop(0)
            setattr(found, VALUES[name], value)
        elif word == "--overwrite":
            found.overwrite = True
        elif word.startswith("-"):
            raise UsageError(f"average takes -o, --overwrite, --max-shard-size and --greedy, not {name}")
        else:
            found.places.append(word)
    return found
