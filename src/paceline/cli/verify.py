"""`paceline verify`: reads every checkpoint of a run and says which are good. Loads no torch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from paceline.cli.errors import UsageError
from paceline.core import folders
from paceline.core.space import in_words

_MOST_SHOWN = 5


def run(words: Sequence[str]) -> int:
    """Check run folders, or single checkpoints.

    Returns:
        0 when everything is as it was written, 1 when something is damaged.

    Raises:
        UsageError: no folder is named, or one has no checkpoints.
    """
    unknown = [word for word in words if word.startswith("-")]
    if unknown or not words:
        raise UsageError(f"verify takes folders of runs or checkpoints{f', not {unknown[0]!r}' if unknown else ''}")
    return max([verify_place(Path(word)) for word in words])


def verify_place(place: Path) -> int:
    """Check one run or checkpoint, and print a line for each checkpoint. Returns 0 or 1."""
    if not place.is_dir():
        raise UsageError(f"{place} is not a folder")
    checkpoints = folders.list_checkpoints(place)
    if not checkpoints and any((place / name).exists() for name in (folders.MANIFEST_NAME, "trainer_state.json")):
        checkpoints = [place]
    if not checkpoints:
        raise UsageError(f"{place} has no checkpoints: name the folder that holds checkpoint-1, checkpoint-2, ...")
    width = max(len(path.name) for path in checkpoints)
    start, read, good = time.perf_counter(), 0, []
    for path in checkpoints:
        problems = folders.verify(path)
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        read += size
        if not problems:
            good.append(path)
        print(f"{path.name:<{width}}  {describe(path, problems, size)}", flush=True)
        for problem in problems[1:_MOST_SHOWN]:
            print(f"{'':<{width}}           {problem}")
        if len(problems) > _MOST_SHOWN:
            print(f"{'':<{width}}           and {len(problems) - _MOST_SHOWN} more")
    for leftover in sorted(path.name for path in place.glob(f".{folders.PREFIX_CHECKPOINT_DIR}-*")):
        print(f"{leftover}: being written, or left by a crash; a run that is resumed here clears it")
    seconds = max(time.perf_counter() - start, 1e-9)
    num_bad = len(checkpoints) - len(good)
    print(f"{len(checkpoints)} checked, {num_bad} damaged; {in_words(read)} at {in_words(read / seconds)}/s")
    if num_bad and checkpoints != [place]:
        print(f"a resume takes {good[-1].name}" if good else "there is none to resume from")
    return 1 if num_bad else 0


def describe(path: Path, problems: Sequence[str], size: int) -> str:
    """What was found in one checkpoint, in one line."""
    if problems:
        return f"DAMAGED  {problems[0]}"
    if not (path / folders.MANIFEST_NAME).exists():
        return f"good     {in_words(size)}; without a manifest, so only its structure could be checked"
    extra = folders.extra_files(path)
    return f"good     {in_words(size)}" + (f"; not in its manifest: {', '.join(extra)}" if extra else "")
