"""Makes the environment of `make test-xla`: torch_xla on its own CPU device, with the torch that it was built for.

    python tools/environment_xla.py

Linux on x86-64. The registry's torch of that release is a CUDA build that does not start without most of NVIDIA's
libraries; those it does start without, and Triton, are left out, which saves a gigabyte. Takes 6 GB and some 100
seconds. Nothing is kept in pip's cache. Exit status 75: the packages could not be had, which is no fault of the code.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from importlib.metadata import Distribution
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".venv-xla"
RELEASE = "2.9.0"  # torch_xla's last
UNAVAILABLE = 75  # EX_TEMPFAIL
# torch imports without them
LEFT_OUT = ("triton", "nvidia-cuda-nvrtc", "nvidia-cusolver", "nvidia-nvtx")
TESTS = ("pytest>=9,<10", "pytest-timeout>=2.3", "hypothesis>=6.100,<7")


def main() -> int:
    """Make the environment where it is not there. Returns the exit status."""
    stamp = FOLDER / "installed.txt"
    content = f"{RELEASE} {ROOT} {sys.version} {Path(__file__).read_text('utf-8')}"
    if stamp.exists() and stamp.read_text("utf-8") == content:
        return 0
    print(f"making {FOLDER} with torch and torch_xla {RELEASE} (6 GB)", flush=True)
    if shutil.disk_usage(ROOT).free < 8e9:
        return unavailable("less than 8 GB are free on the disk")
    shutil.rmtree(FOLDER, ignore_errors=True)
    try:
        builder = venv.EnvBuilder(clear=True, symlinks=True, with_pip=False)
        builder.create(FOLDER)
        pip("--no-deps", f"torch=={RELEASE}", f"torch_xla=={RELEASE}")
        pip("--no-deps", *needed("torch", is_heavy=True))
        pip(*needed("torch", is_heavy=False), *needed("torch_xla", is_heavy=False), *base_dependencies(), *TESTS)
    except subprocess.CalledProcessError as error:
        shutil.rmtree(FOLDER, ignore_errors=True)
        return unavailable(f"the installation failed: {' '.join(map(str, error.cmd))}")
    site_packages().joinpath("paceline.pth").write_text(f"{ROOT / 'src'}\n", encoding="utf-8")
    stamp.write_text(content, encoding="utf-8")
    return 0


def unavailable(reason: str) -> int:
    """Say why the tests are not run."""
    print(f"torch_xla cannot be had here: {reason}", file=sys.stderr, flush=True)
    return UNAVAILABLE


def pip(*words: str) -> None:
    """Install into the environment by this Python's pip, which needs none there."""
    options = ["--disable-pip-version-check", "--no-cache-dir", "-qq"]
    subprocess.run([*PIP, "--python", str(FOLDER / "bin" / "python"), "install", *options, *words], check=True)


PIP = [sys.executable, "-m", "pip"]


def site_packages() -> Path:
    """Returns the folder of the environment's packages."""
    return next((FOLDER / "lib").glob("python3*")) / "site-packages"


def requirements(package: str) -> Sequence[str]:
    """Returns the declared requirements of an installed package."""
    name = f"{package}-{RELEASE}.dist-info"
    return Distribution.at(site_packages() / name).requires or ()


def needed(package: str, *, is_heavy: bool) -> list[str]:
    """Returns a package's requirements on this machine, without its extras: NVIDIA's libraries, or all others."""
    found = []
    for line in requirements(package):
        requirement, _, condition = line.partition(";")
        name = re.split(r"[<>=! ]", requirement.strip())[0]
        if "extra ==" in condition or name.removesuffix("-cu12") in LEFT_OUT:
            continue
        if name.startswith("nvidia-") == is_heavy:
            found.append(f"{requirement.strip()}; {condition.strip()}" if condition else requirement.strip())
    return found


def base_dependencies() -> list[str]:
    """The package's own, by pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    line = re.findall(r"^dependencies = \[(.*)\]$", text, re.MULTILINE)[0]
    return re.findall(r'"([^"]+)"', line)


if __name__ == "__main__":
    if os.name == "nt" or sys.platform == "darwin" or os.uname().machine != "x86_64":
        sys.exit(unavailable("it is built for Linux on x86-64"))
    sys.exit(main())
