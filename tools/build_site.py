"""Builds the documentation as a site: `make site`, or several versions of it beside each other.

    python tools/build_site.py                          # the working tree, to build/site/VERSION
    python tools/build_site.py --versions v0.1.0 main   # tags, branches or commits of this repository

Each version has a folder of its own, and the sidebar of each page leads to the same page of the others, those of
earlier builds in the same place among them. The site needs no server. All versions are built with this tree's
`docs/conf.py` and the installed packages; warnings are errors for the working tree only.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONFIGURATION = ROOT / "docs"
LIST_FILE = "versions.js"
MARK = "objects.inv"  # a file that Sphinx writes to each site


class BuildError(RuntimeError):
    """A version cannot be built; the message names it."""


def main(words: Sequence[str] | None = None) -> int:
    """Builds the versions that are asked for; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--versions", nargs="+", metavar="REF", help="tags, branches or commits; default: this tree")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "site")
    arguments = parser.parse_args(words)
    if importlib.util.find_spec("sphinx") is None:
        print('sphinx is required: pip install -e ".[dev,site]"', file=sys.stderr)
        return 1
    try:
        if arguments.versions:
            first = build_refs(ROOT, arguments.versions, arguments.output)
        else:
            first = build_tree(arguments.output)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    write_entry(arguments.output, first)
    print(f"open {arguments.output / 'index.html'}")
    return 0


def build_tree(output: Path) -> str:
    """Builds the working tree; returns its folder's name, the version of the package. Raises: BuildError."""
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    found = re.search(r'^version = "(.+)"$', text, re.MULTILINE)
    name = found[1] if found else "current"
    run_sphinx(ROOT, output / name, name, ["--fail-on-warning", "--keep-going"])
    return name


def build_refs(repository: Path, refs: Sequence[str], output: Path) -> str:
    """Builds commits of a repository; returns the folder's name of the first.

    Raises: BuildError, if a ref is unknown, two have one folder, or Sphinx fails.
    """
    folders = {ref: folder_of(ref) for ref in refs}
    if len(set(folders.values())) < len(refs):
        raise BuildError(f"--versions: two of {', '.join(refs)} have the same folder; name each once")
    for ref, name in folders.items():
        with tempfile.TemporaryDirectory() as place:
            extract(repository, ref, Path(place))
            run_sphinx(Path(place), output / name, name, ["-d", str(Path(place) / "doctrees"), "-E"])
    return folders[refs[0]]


def folder_of(ref: str) -> str:
    """Returns the name of a version's folder, which is shown in the sidebar too."""
    return re.sub(r"[^\w.-]+", "-", ref, flags=re.ASCII).strip("-.") or "version"


def extract(repository: Path, ref: str, place: Path) -> None:
    """Writes the files of a commit to a folder. Raises: BuildError, if there is no such commit."""
    git = ["git", "-C", str(repository)]
    known = subprocess.run(
        [*git, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}"],
        capture_output=True,
        text=True,
        check=False,
    )
    if known.returncode:
        raise BuildError(f"--versions: {ref!r} is no tag, branch or commit of this repository")
    archive = subprocess.run([*git, "archive", known.stdout.strip()], capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(place, filter="data")


def run_sphinx(tree: Path, output: Path, name: str, options: Sequence[str]) -> None:
    """Builds the pages of a tree. Raises: BuildError, if Sphinx fails."""
    command = [sys.executable, "-m", "sphinx", "-q", "-c", str(CONFIGURATION), "-t", "versions", *options]
    command += ["-D", f"html_title=paceline {name}", str(tree / "docs"), str(output)]
    paths = [str(tree / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    if subprocess.run(command, cwd=tree, env=environment, check=False).returncode:
        raise BuildError(f"version {name}: Sphinx failed, see above")


def write_entry(output: Path, first: str) -> None:
    """Writes the list of the versions in a folder, and a page that leads to one of them."""
    names = sorted((path.parent.name for path in output.glob(f"*/{MARK}")), key=newest_first)
    versions = [
        {
            "folder": name,
            "pages": sorted(path.relative_to(output / name).as_posix() for path in pages_of(output / name)),
        }
        for name in names
    ]
    (output / LIST_FILE).write_text(f"window.siteVersions = {json.dumps(versions)};\n", "utf-8")
    (output / "index.html").write_text(
        f'<!DOCTYPE html>\n<html lang="en"><meta charset="utf-8"><title>paceline</title>\n'
        f'<meta http-equiv="refresh" content="0; url={first}/index.html">\n'
        f'<p><a href="{first}/index.html">paceline {first}</a></p></html>\n',
        "utf-8",
    )


def pages_of(site: Path) -> list[Path]:
    """Returns the pages of a version."""
    return [path for path in site.rglob("*.html") if "_static" not in path.parts]


def newest_first(name: str) -> tuple[bool, list[int], str]:
    """Returns the place of a version in the list: branches by name, then releases, the newest first."""
    numbers = [-int(number) for number in re.findall(r"\d+", name)]
    is_release = re.match(r"v?\d", name) is not None
    return is_release, numbers if is_release else [], name


if __name__ == "__main__":
    sys.exit(main())
