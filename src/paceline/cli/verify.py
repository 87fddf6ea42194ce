"""`paceline verify`: verifies every checkpoint of a run. Does not import torch."""

from __future__ import annotations

import json
import os
import stat
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from paceline.checkpoint import folders
from paceline.cli.errors import UsageError
from paceline.core.byte_sizes import format_bytes
from paceline.core.terminal import encodable, show

_MOST_SHOWN = 5


def run(words: Sequence[str]) -> int:
    """Verifies run folders or single checkpoints.

    Returns:
        0 if all are valid, 1 if any is damaged.

    Raises:
        UsageError: no folder is given, or a folder has no checkpoints.
    """
    places = [word for word in words if word != "--json"]
    unknown = [word for word in places if word.startswith("-")]
    if unknown or not places:
        raise UsageError(f"verify takes folders of runs or checkpoints{f', not {unknown[0]!r}' if unknown else ''}")
    verify_one = verify_as_json if "--json" in words else verify_place
    return max([verify_one(Path(word)) for word in places])


def checkpoints_in(place: Path) -> list[Path]:
    """Returns the checkpoints in the folder of a run, or the folder itself if it is one.

    Raises:
        UsageError: there is none.
    """
    if not place.is_dir():
        raise UsageError(f"{place} is not a folder")
    checkpoints = folders.list_checkpoints(place)
    if not checkpoints and any((place / name).exists() for name in (folders.MANIFEST_NAME, "trainer_state.json")):
        checkpoints = [place]
    if not checkpoints:
        raise UsageError(f"{place} has no checkpoints: name the folder that holds checkpoint-1, checkpoint-2, ...")
    return checkpoints


def verify_as_json(place: Path) -> int:
    """Verifies one run or checkpoint and prints a JSON object for each checkpoint. Returns 0 or 1."""
    checkpoints, others = checkpoints_in(place), folders.own_checkpoints(place)[1]
    num_bad = 0
    for path in checkpoints:
        problems = folders.verify(path)
        num_bad += bool(problems)
        row = {
            "checkpoint": str(path),
            "is_good": not problems,
            "problems": problems,
            "bytes": num_bytes(path),
            "has_manifest": (path / folders.MANIFEST_NAME).exists(),
            "is_of_last_run": path not in others,
        }
        print(json.dumps(row), flush=True)
    return 1 if num_bad else 0


def verify_place(place: Path) -> int:
    """Verifies one run or checkpoint and prints a line for each checkpoint. Returns 0 or 1."""
    checkpoints = checkpoints_in(place)
    others = folders.own_checkpoints(place)[1]
    width = max(len(path.name) for path in checkpoints)
    start = time.perf_counter()
    num_read = num_bad = 0
    good: list[Path] = []
    for path in checkpoints:
        problems = folders.verify(path)
        size = num_bytes(path)
        num_read += 0 if problems else size  # most of a damaged checkpoint was not read
        num_bad += bool(problems)
        if not problems and path not in others:
            good.append(path)
        whose = "; of another run than the last" if path in others else ""
        say(f"{path.name:<{width}}  {describe(path, problems, size)}{whose}")
        say_problems(problems, width)
    for leftover in sorted(path.name for path in place.glob(f".{folders.PREFIX_CHECKPOINT_DIR}-*")):
        say(f"{leftover}: being written, or left by a crash; a run that is resumed here clears it")
    seconds = max(time.perf_counter() - start, 1e-9)
    read = f"{format_bytes(num_read)} at {format_bytes(num_read / seconds)}/s"
    print(f"{len(checkpoints)} checked, {num_bad} damaged; {read}")
    if (num_bad or others) and checkpoints != [place]:
        print(f"a resume takes {good[-1].name}" if good else "there is none to resume from")
    return 1 if num_bad else 0


def say_problems(problems: list[str], width: int) -> None:
    """Prints the problems of a checkpoint except the first, which the checkpoint's own line shows.

    Args:
        problems: all problems of the checkpoint.
        width: width of the column before the problems, in characters.
    """
    for problem in problems[1:_MOST_SHOWN]:
        say(f"{'':<{width}}           {problem}")
    if len(problems) > _MOST_SHOWN:
        print(f"{'':<{width}}           and {len(problems) - _MOST_SHOWN} more")


def num_bytes(folder: Path) -> int:
    """Returns the bytes of the readable files of a folder."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                found = os.lstat(os.path.join(place, name))
                total += found.st_size if stat.S_ISREG(found.st_mode) else 0
    return total


def say(line: str) -> None:
    """Prints text; escapes what the output cannot show, and control characters, which would command the terminal."""
    line = "".join(char if char.isprintable() or char in "\n\t" else ascii(char)[1:-1] for char in line)
    show(encodable(line, sys.stdout, "backslashreplace"))


def describe(path: Path, problems: Sequence[str], size: int) -> str:
    """Describes the result for one checkpoint in one line."""
    if problems:
        return f"DAMAGED  {problems[0]}"
    if not (path / folders.MANIFEST_NAME).exists():
        return f"good     {format_bytes(size)}; without a manifest, so only its structure could be checked"
    extra = folders.extra_files(path)
    return f"good     {format_bytes(size)}" + (f"; not in its manifest: {', '.join(extra)}" if extra else "")
