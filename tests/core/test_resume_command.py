"""The command that resumes a run, from its command line."""

from __future__ import annotations

import pytest

from paceline.core.resume_command import resume_command


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["/env/bin/paceline", "train", "job.yaml"], "paceline train job.yaml"),
        (["/src/paceline/__main__.py", "demo", "digits"], "paceline demo digits"),
        (["paceline", "train", "my job.yaml", "--seed", "7"], "paceline train 'my job.yaml' --seed 7"),
        (["paceline", "train", "job.yaml", "--fresh", "--bf16"], "paceline train job.yaml --bf16"),
        (["paceline", "train", "--resume-from-checkpoint", "a/b", "job.yaml"], "paceline train job.yaml"),
        (["paceline", "train", "--resume_from_checkpoint=a/b", "job.yaml"], "paceline train job.yaml"),
        (["paceline", "train", "--resume_from_checkpoint", "--bf16", "job.yaml"], "paceline train --bf16 job.yaml"),
        (["paceline", "train", "a.yaml", "--hub_token", "hf_secret"], "paceline train a.yaml --hub_token '<MASKED>'"),
        (["train.py", "train", "job.yaml"], None),
        (["other/__main__.py", "train", "job.yaml"], None),
        (["paceline", "plan", "job.yaml"], None),
        (["paceline"], None),
        ([], None),
    ],
)  # fmt: skip
def test_the_command_that_resumes(words: list[str], command: str | None) -> None:
    assert resume_command(words) == command
