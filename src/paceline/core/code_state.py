"""The state of the user's code: commit and branch, uncommitted changes and untracked Python files of its repository.

Standard library only. A repository that is slow, broken or missing yields empty results, and no error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.args.secrets import MASK, mask_text, masked
from paceline.core.lineage import DIFF_FILE
from paceline.core.record import GIT_SECONDS, git, git_output

MOST_BYTES = 1_000_000  # largest size of the diff
MOST_FILES = 100  # untracked files that are hashed
_CHUNK = 50  # lines masked at once: a regular expression holds the GIL while it runs


def read_changes(folder: Path) -> tuple[dict[str, Any], str]:
    """Returns the entries of `run.json` below `git` for uncommitted code, and the diff, secrets masked.

    The diff is that of tracked files against the commit, cut at the end of a line to `MOST_BYTES`; the last line of a
    cut diff states that. The diff is empty if nothing differs. Without a repository, diff and entries are empty.

    Args:
        folder: a folder of the repository.
    """
    names = git(folder, "ls-files", "-z", "--others", "--exclude-standard", "--", "*.py")
    if names is None and git(folder, "rev-parse", "--git-dir") is None:
        return {}, ""
    text, is_cut = _bounded_diff(folder)
    if text is None:
        return {"diff": None, "note": f"git diff failed, or took longer than {GIT_SECONDS:.0f} s"}, ""
    diff = mask_lines(text)
    if is_cut:
        diff += f"\n# cut: the diff is larger than {MOST_BYTES:,} bytes\n"
    entries: dict[str, Any] = {"diff": None, "untracked": _hashes(folder, (names or "").split("\0"))}
    if diff:
        content = diff.encode()
        digest = hashlib.sha256(content).hexdigest()
        entries["diff"] = {"file": DIFF_FILE, "sha256": digest, "bytes": len(content), "is_cut": is_cut}
    return entries, diff


def mask_lines(text: str) -> str:
    """Returns a text with secrets masked, private keys in lines that begin with "+" or "-" of a diff included."""
    lines = list(_without_keys(text.splitlines(keepends=True)))
    chunks = ["".join(lines[start : start + _CHUNK]) for start in range(0, len(lines), _CHUNK)]
    return "".join(masked([chunk])[0] for chunk in chunks)


def _without_keys(lines: list[str]) -> Iterator[str]:
    is_inside = False
    for line in lines:
        is_inside = is_inside and not line.startswith("diff --git ")
        begins = "-----BEGIN " in line and "PRIVATE KEY" in line
        if begins and not is_inside:
            yield f"{line[:1]}{MASK}\n"
        if not begins and not is_inside:
            yield line
        is_inside = (is_inside or begins) and "-----END " not in line


def _bounded_diff(folder: Path) -> tuple[str | None, bool]:
    """Returns the diff, None if git fails or takes too long, and whether it was cut."""
    options = ("--no-color", "--no-ext-diff", "--no-textconv", "--no-relative")
    content, is_cut = git_output(folder, "diff", "HEAD", *options, most=MOST_BYTES)
    if content is None:
        return None, False
    if is_cut:
        content = content[: content.rfind(b"\n") + 1]
    return content.decode("utf-8", "replace"), is_cut


def _hashes(folder: Path, names: list[str]) -> dict[str, str]:
    """Returns the hashes of files below a folder, by their paths; of at most `MOST_FILES`."""
    found = {}
    for name in sorted(filter(None, names))[:MOST_FILES]:
        path = folder / name
        try:
            if path.is_file() and path.stat().st_size <= MOST_BYTES:
                found[mask_text(name)] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        except OSError:
            continue
    return found
