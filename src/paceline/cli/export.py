"""`paceline export`: converts a sharded checkpoint to a folder for `from_pretrained`, tensor by tensor."""

from __future__ import annotations

import fnmatch
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from paceline.callbacks.progress import make_bar
from paceline.checkpoint import folders
from paceline.checkpoint.beside import chosen_files
from paceline.checkpoint.inside import leads_outside
from paceline.checkpoint.manifest import MANIFEST_NAME
from paceline.checkpoint.space import Place
from paceline.cli.errors import UsageError, load_part
from paceline.cli.jobs import is_of_tensorflow
from paceline.cli.options import Known, parse_options
from paceline.core.byte_sizes import format_bytes
from paceline.core.terminal import show

logger = logging.getLogger(__name__)

DEFAULT_SHARD_SIZE = "50GB"
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_WEIGHTS = ("*.safetensors", "*.index.json", "*.bin", "*.pt", "*.pth", "*.distcp", ".metadata")


def run(words: Sequence[str]) -> int:
    """Exports one checkpoint.

    Raises:
        UsageError: a folder is missing, or the output already exists.
    """
    given = parse_options(words, Known(("CHECKPOINT", "OUTPUT"), {"max_shard_size": False, "files_from": False}))
    if given.arguments:
        raise UsageError(f"export takes --max-shard-size and --files-from, not --{next(iter(given.arguments))}")
    if len(given.positional) != 2:
        raise UsageError("export needs a checkpoint and an output folder: paceline export CHECKPOINT OUTPUT")
    size = parse_size(given.own.get("max_shard_size", DEFAULT_SHARD_SIZE))
    extra = Path(given.own["files_from"]) if "files_from" in given.own else None
    if extra is not None and not extra.is_dir():
        raise UsageError(f"--files-from {extra} is not a folder")
    export(find(Path(given.positional[0])), Path(given.positional[1]), max_shard_bytes=size, files_from=extra)
    return 0


def find(place: Path) -> Path:
    """Returns `place` if it is a checkpoint, or the newest valid checkpoint of a run's folder.

    Raises:
        UsageError: there is no checkpoint, or it is damaged.
    """
    if not place.is_dir():
        raise UsageError(f"{place} is not a folder")
    if folders.list_checkpoints(place):
        found = folders.newest_valid(place, logger.warning)
        if found is None:
            raise UsageError(f"{place} has no valid checkpoint")
        return found
    if (place / MANIFEST_NAME).is_file():
        problems = folders.verify(place)
        if problems:
            raise UsageError(f"{place} is damaged: {'; '.join(problems[:3])}")
    linked = [path for path in sorted(place.rglob("*")) if path.is_symlink() and leads_outside(path, place)]
    weights = [path for path in linked if any(fnmatch.fnmatchcase(path.name, pattern) for pattern in _WEIGHTS)]
    if weights:
        raise UsageError(f"{weights[0]} is a link to a file outside of {place}: put the file itself in its place")
    return place


def export(checkpoint: Path, output: Path, *, max_shard_bytes: int, files_from: Path | None = None) -> None:
    """Writes the weights of a checkpoint and the files next to them to a new folder, atomically.

    Peak memory is the size of the largest tensor, of sharded weights twice that. A failure (a full disk, Ctrl-C) leaves
    no files.

    Args:
        checkpoint: the checkpoint folder.
        output: the new folder.
        max_shard_bytes: maximum bytes of one file.
        files_from: a folder whose configuration and tokenizer are used if the checkpoint has none.

    Raises:
        UsageError: the output already exists.
        CheckpointError: there are no weights, or they are damaged.
        OSError: writing fails.
    """
    if os.path.lexists(output) and (not output.is_dir() or any(output.iterdir())):
        raise UsageError(f"{output} already exists: name a folder that is new or empty")
    if is_of_tensorflow(checkpoint):
        raise UsageError(
            f"{checkpoint} is a TensorFlow checkpoint: export writes safetensors of torch models. TFTrainer.save_model "
            "writes the model (a run of `paceline train` has model.keras), and tf.train.Checkpoint reads the variables"
        )
    streaming = load_part("paceline.pytorch.checkpoint.streaming")
    source = streaming.open_weights(checkpoint)
    start, total = time.perf_counter(), source.num_bytes()
    make_room(output, total)
    bar = make_bar(total // 10**6, "exporting", "MB")
    done = 0

    def advance(num_bytes: int) -> None:
        nonlocal done
        before, done = done, done + num_bytes
        bar.update(done // 10**6 - before // 10**6)

    try:
        with folders.staged(output) as temporary:
            for path in chosen_files(checkpoint, files_from):
                shutil.copyfile(path, temporary / path.name)
            streaming.write_stream(source, temporary, max_shard_bytes=max_shard_bytes, progress=advance)
    finally:
        bar.close()
    seconds = max(time.perf_counter() - start, 1e-9)
    show(f"{output}: {len(source.forms)} tensors, {format_bytes(total)} in {seconds:.1f} s")
    if not (output / "config.json").is_file():
        print(
            f"{checkpoint} has no config.json, so from_pretrained cannot find the model's class: name the folder of "
            "the model that was trained with --files-from",
            file=sys.stderr,
        )


def make_room(output: Path, num_bytes: int) -> None:
    """Removes the remains of a killed export to the same folder. Raises: OSError, if there is not enough space."""
    output.parent.mkdir(parents=True, exist_ok=True)
    folders.recover(output.parent, logger.warning, only=output.name)
    Place(output.parent).check(num_bytes)


def parse_size(text: str) -> int:
    """Parses a size such as `5GB` to bytes.

    Raises:
        UsageError: the text is not a size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?b?)\s*", str(text).lower())
    unit = (match[2].upper() if match else "?").replace("B", "")
    factor = _UNITS.get(f"{unit}B" if unit else "")
    if match is None or factor is None or float(match[1]) * factor < 1:
        raise UsageError(f"--max-shard-size {text} is not a size: write 500MB, 5GB or 2GiB")
    return int(float(match[1]) * factor)
