"""The mark of tests that compile C++."""

from __future__ import annotations

import shutil

import pytest

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None, reason="needs a C++ compiler (g++)"
)
