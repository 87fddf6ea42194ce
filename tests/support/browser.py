"""Chromium without a window, for tests of pages."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def opened(url: str, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Opens a page. The output is the document that its scripts left, the error what they reported.

    Args:
        url: the address.
        folder: an empty folder, or one that has `browser` in it, for the browser's own files.
        options: further words of the command line.
    """
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("needs Chromium")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    command += [*options, f"--user-data-dir={folder / 'browser'}", url]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)
