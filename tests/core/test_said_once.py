"""Warnings that each process of a launch logs are shown once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from paceline.core.said_once import folder_of

SCRIPT = """
import logging, os
from paceline import TrainingArguments
TrainingArguments("out", overwrite_output_dir=True)
log = logging.getLogger("paceline.anything")
for _ in range(2):
    log.warning("twice in each process")
log.warning("of process %s", os.environ["RANK"])
if os.environ["RANK"] == "1":
    log.error("of the second only")
"""


def run(folder: Path, identity: str, size: int = 2) -> Counter[str]:
    """Lines on the standard error of processes with torchrun's variables."""
    shared = {**os.environ, "TORCHELASTIC_RUN_ID": identity, "LOCAL_WORLD_SIZE": str(size), "TMPDIR": str(folder)}
    lines: Counter[str] = Counter()
    ranks = ["1", "0"]  # the claims end with the first process, which ends last here
    for rank in ranks:
        variables = {**shared, "RANK": rank, "LOCAL_RANK": rank}
        command = [sys.executable, "-c", SCRIPT]
        result = subprocess.run(command, env=variables, check=True, capture_output=True, text=True)
        lines.update(result.stderr.splitlines())
    assert not list(folder.iterdir())
    return lines


def test_each_warning_is_shown_once(tmp_path: Path) -> None:
    lines = run(tmp_path, "one")
    assert sum(count for line, count in lines.items() if line.startswith("overwrite_output_dir=True")) == 1
    del lines[next(line for line in lines if line.startswith("overwrite_output_dir"))]
    assert lines == {"twice in each process": 2, "of process 0": 1, "of process 1": 1, "of the second only": 1}


def test_one_process_of_a_launch_is_left_alone(tmp_path: Path) -> None:
    assert run(tmp_path, "one", size=1)["twice in each process"] == 4


def test_launches_share_nothing() -> None:
    first = {"TORCHELASTIC_RUN_ID": "none", "MASTER_PORT": "29500"}
    assert folder_of(first, os.getpid()) == folder_of(first, os.getpid())
    assert folder_of(first, os.getpid()) != folder_of(first, os.getppid())
    for change in ({"MASTER_PORT": "1"}, {"TORCHELASTIC_RESTART_COUNT": "1"}, {"TORCHELASTIC_RUN_ID": "x"}):
        assert folder_of({**first, **change}, os.getpid()) != folder_of(first, os.getpid())


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="needs owners of files")
def test_without_a_place_for_claims_nothing_is_hidden(tmp_path: Path) -> None:
    """A file in place of the folder: each process shows all."""
    variables = {**os.environ, "TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "2", "TMPDIR": str(tmp_path)}
    code = (
        "import os, logging; from pathlib import Path; from paceline.core.said_once import folder_of;"
        "Path(folder_of(os.environ, os.getppid())).touch(); import paceline;"
        "logging.getLogger('paceline').warning('shown')"
    )
    for rank in "01":
        ranked = {**variables, "RANK": rank, "LOCAL_RANK": rank}
        result = subprocess.run([sys.executable, "-c", code], env=ranked, check=True, capture_output=True, text=True)
        assert result.stderr.splitlines() == ["shown"]
