"""`paceline export`: a checkpoint in shards becomes a folder that `from_pretrained` loads, tensor by tensor."""

from __future__ import annotations

import fnmatch
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.callbacks.progress import make_bar
from paceline.cli.errors import UsageError, load_part
from paceline.cli.jobs import is_of_tensorflow
from paceline.cli.options import Known, parse_options
from paceline.core import folders
from paceline.core.manifest import MANIFEST_NAME
from paceline.core.space import Place, in_words

logger = logging.getLogger(__name__)

DEFAULT_SHARD_SIZE = "50GB"
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
# of a checkpoint, what is no part of a model that is used; folders are those of shards
_LEFT = (
    "*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.distcp", ".*",
    MANIFEST_NAME, "trainer_state.json", "progress.json", "sharded.json", "run.json", "journal.bin", "log.jsonl",
    "log.csv", "events.out.*", "README.md", "latest", "latest_universal", "zero_to_*.py",
)  # fmt: skip


def run(words: Sequence[str]) -> int:
    """Export one checkpoint.

    Raises:
        UsageError: a folder is missing, or the output is there already.
    """
    given = parse_options(words, Known(("CHECKPOINT", "OUTPUT"), {"max_shard_size": False, "files_from": False}))
    if given.arguments:
        raise UsageError(f"export takes --max-shard-size and --files-from, not --{next(iter(given.arguments))}")
    if len(given.positional) != 2:
        raise UsageError("export needs a checkpoint and a folder to make: paceline export CHECKPOINT OUTPUT")
    size = parse_size(given.own.get("max_shard_size", DEFAULT_SHARD_SIZE))
    extra = Path(given.own["files_from"]) if "files_from" in given.own else None
    if extra is not None and not extra.is_dir():
        raise UsageError(f"--files-from {extra} is not a folder")
    export(find(Path(given.positional[0])), Path(given.positional[1]), max_shard_bytes=size, files_from=extra)
    return 0


def find(place: Path) -> Path:
    """The checkpoint, or the newest good one of a run.

    Raises:
        UsageError: there is none, or it is damaged.
    """
    if not place.is_dir():
        raise UsageError(f"{place} is not a folder")
    if folders.list_checkpoints(place):
        found = folders.newest_valid(place, logger.warning)
        if found is None:
            raise UsageError(f"{place} has no checkpoint that is whole")
        return found
    if (place / MANIFEST_NAME).is_file():
        problems = folders.verify(place)
        if problems:
            raise UsageError(f"{place} is damaged: {'; '.join(problems[:3])}")
    return place


def export(checkpoint: Path, output: Path, *, max_shard_bytes: int, files_from: Path | None = None) -> None:
    """Write the weights of a checkpoint and the files beside them into a new folder, which appears when it is whole.

    Takes the memory of the largest tensor. What stops it (a full disk, Ctrl-C) leaves nothing of it.

    Args:
        files_from: a folder whose configuration and tokenizer are taken too, where the checkpoint has none.

    Raises:
        UsageError: the output is there already.
        CheckpointError: there are no weights, or they are damaged.
        OSError: the disk refuses.
    """
    if os.path.lexists(output) and (not output.is_dir() or any(output.iterdir())):
        raise UsageError(f"{output} is there already: name a folder that is new or empty")
    if is_of_tensorflow(checkpoint):
        raise UsageError(
            f"{checkpoint} is of TensorFlow: export makes safetensors of models of torch. TFTrainer.save_model writes "
            "the model (a run of `paceline train` has it as model.keras), and tf.train.Checkpoint reads the variables"
        )
    streaming = load_part("paceline.checkpoint.streaming")
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
    print(f"{output}: {len(source.forms)} tensors, {in_words(total)} in {seconds:.1f} s", flush=True)
    if not (output / "config.json").is_file():
        print(
            f"{checkpoint} has no config.json, so from_pretrained cannot find the model's class: name the folder of "
            "the model that was trained with --files-from",
            file=sys.stderr,
        )


def make_room(output: Path, num_bytes: int) -> None:
    """Clear what an export to the same folder left that was killed. Raises: OSError, where there is no room."""
    output.parent.mkdir(parents=True, exist_ok=True)
    folders.recover(output.parent, logger.warning, only=output.name)
    Place(output.parent).check(num_bytes)


def chosen_files(checkpoint: Path, files_from: Path | None) -> Iterator[Path]:
    """Configuration, tokenizer, own code: what is neither weights nor the state of the training."""
    seen: set[str] = set()
    for place in (checkpoint, files_from):
        for path in sorted(place.iterdir()) if place is not None else ():
            is_left = any(fnmatch.fnmatchcase(path.name, pattern) for pattern in _LEFT)
            if path.is_file() and not is_left and path.name not in seen:
                seen.add(path.name)
                yield path


def parse_size(text: str) -> int:
    """`5GB` in bytes.

    Raises:
        UsageError: it is no size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?b?)\s*", str(text).lower())
    unit = (match[2].upper() if match else "?").replace("B", "")
    factor = _UNITS.get(f"{unit}B" if unit else "")
    if match is None or factor is None or float(match[1]) * factor < 1:
        raise UsageError(f"--max-shard-size {text} is no size: write 500MB, 5GB or 2GiB")
    return int(float(match[1]) * factor)
