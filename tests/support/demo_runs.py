"""Runs of a demonstration with its output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.cli.demo.options import DemoOptions, read_demo_options


def options(folder: Path, *words: str) -> DemoOptions:
    return read_demo_options([*words, "--output_dir", str(folder), "--disable_tqdm", "--use_cpu"])


def run(demo: Any, chosen: DemoOptions) -> str:
    """Returns what a demonstration (a module with `run`) says in a run that succeeds."""
    said: list[str] = []
    assert demo.run(chosen, said.append) == 0
    return "\n".join(said)
