"""The command line that resumes a run."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from paceline.args.secrets import mask_command

# the commands that resume when they are repeated
RESUMING = ("demo", "train", "search")


def resume_command(words: Sequence[str]) -> str | None:
    """Returns the command that resumes the run of a command line, for instance `paceline train job.yaml`.

    Options that start over, or that name another checkpoint, are left out, and secrets are masked.

    Args:
        words: the command line without the interpreter, as in `sys.argv`.

    Returns:
        The command; None if the run was started by a script and not by the command `paceline`.
    """
    if len(words) < 2 or words[1] not in RESUMING:
        return None
    program = Path(words[0])
    if program.stem != "paceline" and program.parts[-2:] != ("paceline", "__main__.py"):
        return None
    kept: list[str] = []
    option = ""
    for word in words[1:]:
        is_value = option == "resume_from_checkpoint" and not word.startswith("--")
        name, equals, _ = word.partition("=")
        option = name[2:].replace("-", "_") if name.startswith("--") else ""
        if is_value or option in ("fresh", "resume_from_checkpoint"):
            option = "" if equals else option
            continue
        kept.append(word)
    return shlex.join(["paceline", *mask_command(kept)])
