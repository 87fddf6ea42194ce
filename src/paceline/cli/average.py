"""`paceline average`: writes the mean of the weights of several checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline.cli.errors import UsageError, load_part
from paceline.cli.export import DEFAULT_SHARD_SIZE, find, make_room, parse_size


def run(words: Sequence[str]) -> int:
    """Averages checkpoints.

    Raises:
        UsageError: a folder is missing, or the output already exists.
    """
    places, output, overwrite, size = read_words(words)
    if len(places) < 2 or output is None:
        raise UsageError("average needs two checkpoints or more, and an output folder: paceline average A B -o OUTPUT")
    checkpoints = [find(Path(place)) for place in places]
    soup = load_part("paceline.pytorch.checkpoint.soup")
    make_room(Path(output), 0)
    try:
        soup.average_checkpoints(checkpoints, output, overwrite=overwrite, max_shard_bytes=parse_size(size))
    except FileExistsError:
        raise UsageError(f"{output} already exists: name a folder that is new or empty, or add --overwrite") from None
    print(f"{output}: the mean of {', '.join(map(str, checkpoints))}", flush=True)
    return 0


def read_words(words: Sequence[str]) -> tuple[list[str], str | None, bool, str]:
    """Returns the checkpoints, the output, `--overwrite` and `--max-shard-size`.

    Raises:
        UsageError: an option is unknown, or has no value.
    """
    places: list[str] = []
    output, overwrite, size = None, False, DEFAULT_SHARD_SIZE
    left = list(words)
    while left:
        word = left.pop(0)
        name, sign, value = word.partition("=")
        if name in ("-o", "--output", "--max-shard-size"):
            if not sign:
                if not left:
                    raise UsageError(f"{name} needs a value")
                value = left.pop(0)
            output, size = (output, value) if name == "--max-shard-size" else (value, size)
        elif word == "--overwrite":
            overwrite = True
        elif word.startswith("-"):
            raise UsageError(f"average takes -o, --overwrite and --max-shard-size, not {name}")
        else:
            places.append(word)
    return places, output, overwrite, size
