"""Virtual environments for tests: links to packages that are installed here, so that they cost a second."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("tensorflow", "tensorboard", "numpy", "safetensors", "PyYAML", "tqdm")


def closure(*names: str) -> set[str]:
    """The distributions that these need, and they themselves."""
    found: set[str] = set()
    pending = list(names)
    while pending:
        name = pending.pop()
        try:
            needs = distribution(name).requires or []
        except PackageNotFoundError:
            continue  # needed on another system only
        if name.lower() in found:
            continue
        found.add(name.lower())
        wanted = [Requirement(text) for text in needs]
        pending += [need.name for need in wanted if need.marker is None or need.marker.evaluate({"extra": ""})]
    return found


def make_environment(folder: Path, packages: Sequence[str] = ()) -> str:
    """A virtual environment with links to the files of `paceline[tf]`'s requirements. Returns its Python.

    Args:
        folder: of the environment.
        packages: requirements that pip installs into it. What is linked stays: it is pinned to its version, for pip
            would remove files through the links.
    """
    venv.create(folder, symlinks=True, with_pip=bool(packages))
    site = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    pins = []
    for name in sorted(closure(*NEEDED) - {"pip", "setuptools", "wheel"}):
        package = distribution(name)
        pins.append(f"{name}=={package.version}")
        for top in {file.parts[0] for file in package.files or [] if file.parts[0] not in ("..", "__pycache__")}:
            if not (site / top).exists():
                (site / top).symlink_to(package.locate_file(top))
    python = str(folder / "bin" / "python")
    if packages:
        constraints = folder / "constraints.txt"
        constraints.write_text("\n".join(pins), encoding="utf-8")
        command = [python, "-m", "pip", "install", "-q", "-c", str(constraints), *packages]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr[-3000:]
    return python


def run_in(python: str, job: str, *arguments: str, timeout: int = 240) -> str:
    """Run a program in an environment, with this package and the tests' support in its path. Returns what it said."""
    places = [str(ROOT / "src"), str(ROOT / "tests" / "support")]
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(places), TF_CPP_MIN_LOG_LEVEL="3")
    done = subprocess.run(
        [python, "-c", job, *arguments], env=environment, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
