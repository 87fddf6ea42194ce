"""Makes the project's virtual environment and installs the package into it. Standard library only; `make` runs it.

    python tools/environment.py --extras dev [--rebuild-for-other-python]

Does nothing when the environment is already what is asked: a stamp in it holds a hash of everything that decides.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STAMP = "installed.json"
# what decides the content of the environment; the code itself is installed in place
INPUTS = ("pyproject.toml", "constraints.txt", "constraints-tests.txt", "tools/environment.py")


def main() -> int:
    """Make or complete the environment. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--extras", required=True, help="extras of the package, separated by commas")
    parser.add_argument("--folder", type=Path, default=ROOT / ".venv")
    parser.add_argument(
        "--rebuild-for-other-python", action="store_true", help="replace an environment another Python has made"
    )
    options = parser.parse_args()
    folder: Path = options.folder.absolute()
    stamp = read_stamp(folder)
    if stamp and stamp["python"] != sys.executable and options.rebuild_for_other_python:
        print(f"{folder} was made by {stamp['python']}: making it anew with {sys.executable}", flush=True)
        shutil.rmtree(folder)
        stamp = {}
    extras = options.extras.split(",")
    inputs = hash_of_inputs()
    if stamp.get("inputs") == inputs and set(extras) <= set(stamp["extras"]):
        return 0
    wanted = sorted({*extras, *stamp.get("extras", [])})
    try:
        if not stamp:
            make_environment(folder)
        install(folder, wanted)
    except subprocess.CalledProcessError as error:
        print(f"\nThe installation failed: {' '.join(map(str, error.cmd))}", file=sys.stderr)
        print("With another Python: make PYTHON=/path/to/python ...", file=sys.stderr)
        return 1
    content = {"python": stamp.get("python", sys.executable), "extras": wanted, "inputs": inputs}
    (folder / STAMP).write_text(json.dumps(content) + "\n", encoding="utf-8")
    return 0


def read_stamp(folder: Path) -> dict[str, Any]:
    """Returns the record of the environment's contents; empty if it is absent or incomplete, or its Python is gone."""
    try:
        stamp: dict[str, Any] = json.loads((folder / STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamp if Path(interpreter(folder)).exists() else {}


def hash_of_inputs() -> str:
    """A hash of the files that decide what is installed, of the place, and of whether there is a GPU."""
    digest = hashlib.sha256(f"{ROOT}\n{has_gpu()}\n".encode())
    for name in INPUTS:
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def interpreter(folder: Path) -> str:
    """The environment's Python."""
    return str(folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python"))


def has_gpu() -> bool:
    """True if this machine has an NVIDIA or AMD GPU that torch's default wheel could use."""
    return shutil.which("nvidia-smi") is not None or Path("/dev/kfd").exists()


def make_environment(folder: Path) -> None:
    """Make an empty environment; one that sees this Python's packages when torch is among them."""
    keeps_torch = importlib.util.find_spec("torch") is not None
    inside_venv = sys.prefix != sys.base_prefix
    # Debian splits ensurepip off: pip is then installed from outside, below
    has_ensurepip = importlib.util.find_spec("ensurepip") is not None
    print(f"making {folder} with Python {platform.python_version()}", flush=True)
    builder = venv.EnvBuilder(
        clear=True, symlinks=os.name != "nt", with_pip=has_ensurepip, system_site_packages=keeps_torch
    )
    builder.create(folder)
    if not has_ensurepip:
        subprocess.run(
            [sys.executable, "-m", "pip", "--python", interpreter(folder), "install", "--quiet", "pip"], check=True
        )
    if keeps_torch:
        print("torch is importable here already: it is kept", flush=True)
    if keeps_torch and inside_venv:
        # system_site_packages shows the base Python's packages, not those of the environment we run in
        others = [path for path in sys.path if Path(path).name in {"site-packages", "dist-packages"}]
        command = [interpreter(folder), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
        purelib = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
        (Path(purelib) / "zz_outer_environment.pth").write_text("\n".join(others) + "\n", encoding="utf-8")


def install(folder: Path, extras: list[str]) -> None:
    """Install torch, then the package with its extras."""
    pip = [interpreter(folder), "-m", "pip", "install", "--disable-pip-version-check", "-qq"]
    pip += ["--no-compile"]  # a third of the CPU time: most of 20,000 modules are never imported
    keeps_torch = sees_torch(folder)
    constraints = [] if keeps_torch or has_gpu() else ["--constraint", str(ROOT / "constraints.txt")]
    if not keeps_torch:
        print("installing torch" + (" (the release of constraints.txt)" if constraints else ""), flush=True)
        subprocess.run([*pip, *constraints, "--upgrade", "torch"], check=True)
    if "dev" in extras:  # a release of another library must not break the tests of an unchanged commit
        constraints += ["--constraint", str(ROOT / "constraints-tests.txt")]
    print(f"installing paceline[{','.join(extras)}]", flush=True)
    subprocess.run([*pip, "--editable", f"{ROOT}[{','.join(extras)}]", *constraints], check=True)


def sees_torch(folder: Path) -> bool:
    """True if the environment has a torch that the package supports."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    oldest = [int(part) for part in re.findall(r'"torch>=(\d+)\.(\d+)', text)[0]]
    code = (
        "import re, sys; from importlib.metadata import version; "
        "numbers = [int(part) for part in re.findall(r'[0-9]+', version('torch'))]; "
        f"sys.exit(numbers < {oldest})"
    )
    return subprocess.run([interpreter(folder), "-c", code], stderr=subprocess.DEVNULL).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
