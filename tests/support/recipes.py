"""Recipes of docs/recipes that are diffs: applied to a copy of the package, whose program then runs there.

python recipes.py SOURCES PROGRAM    runs a program with the package of another folder
"""

from __future__ import annotations

import re
import runpy
import shutil
import sys
from pathlib import Path

import processes
import warm

DIFF = re.compile(r"^```diff\n(--- .*?)^```$", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"^--- (\S+)\n\+\+\+ b/(\S+)\n", re.MULTILINE)
HUNK = re.compile(r"^@@ .*\n", re.MULTILINE)
PROCESSES = re.compile(r"--nproc-per-node (\d+)")


def changed_files(text: str) -> list[str]:
    """Returns the files that the diffs of a page change or add."""
    return [path for block in DIFF.findall(text) for _, path in FILE.findall(block)]


def apply(text: str, root: Path) -> None:
    """Applies the diffs of a page to the files below `root`. Hunks are placed by their context, not their numbers."""
    for block in DIFF.findall(text):
        _, *parts = FILE.split(block)
        for before, name, body in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
            path = root / name
            content = "" if before == "/dev/null" else path.read_text("utf-8")
            assert bool(content) == path.exists(), name
            for hunk in HUNK.split(body)[1:]:
                content = changed(content, hunk.splitlines(), name)
            path.write_text(content, "utf-8")


def changed(content: str, hunk: list[str], name: str) -> str:
    """Returns a file's text after one hunk."""
    old = "".join(f"{line[1:]}\n" for line in hunk if not line.startswith("+"))
    new = "".join(f"{line[1:]}\n" for line in hunk if not line.startswith("-"))
    if not content and not old:
        return new
    assert content.count(old) == 1, f"{name} has {content.count(old)} places for:\n{old}"
    return content.replace(old, new)


def run(text: str, program: str, folder: Path) -> None:
    """Applies the diffs of a page to a copy of the package, and runs its program with it, on as many processes."""
    shutil.copytree(processes.SOURCES, folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    apply(text, folder)
    (folder / "program.py").write_text(program, "utf-8")
    size = max([int(number) for number in PROCESSES.findall(text)], default=1)
    words = (__file__, str(folder / "src"), str(folder / "program.py"))
    port = processes.free_port()
    environments = [processes.environment_of(rank, size, port) for rank in range(size)] if size > 1 else [None]
    processes.finish([warm.start(words, cwd=folder, env=environment) for environment in environments])


if __name__ == "__main__":
    _, sources, script = sys.argv
    sys.path.insert(0, sources)
    for module in [module for module in sys.modules if module.split(".")[0] == "paceline"]:
        del sys.modules[module]
    import paceline

    assert Path(str(paceline.__file__)).is_relative_to(sources)
    runpy.run_path(script, run_name="__main__")
