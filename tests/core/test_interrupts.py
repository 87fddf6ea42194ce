"""The line about a run that Ctrl-C has stopped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.core.interrupts import describe_stop, interrupts_described
from paceline.core.lineage import KEY, PROGRESS_FILE, begin_run


def checkpoint(folder: Path, step: int, run_id: str) -> Path:
    path = folder / f"checkpoint-{step}"
    path.mkdir()
    (path / PROGRESS_FILE).write_text(json.dumps({KEY: {"starts": [[run_id, 0]]}}))
    return path


def test_the_newest_checkpoint_of_the_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-of-mine").mkdir()
    checkpoint(tmp_path, 300, "another")
    run = begin_run(tmp_path, None, 0, tmp_path.glob("checkpoint-*"))
    assert "Stopped at step 7. This run has no checkpoint in" in describe_stop(tmp_path, run, 7)
    for step in (9, 10):
        newest = checkpoint(tmp_path, step, run.run_id)
    line = describe_stop(tmp_path, run, 1010)
    assert (
        line == f"Stopped at step 1,010. {newest} is complete: train(resume_from_checkpoint=True) resumes from there."
    )
    assert "before the first step" in describe_stop(tmp_path, None, 0)


def test_the_line_goes_before_the_interrupt(caplog: pytest.LogCaptureFixture) -> None:
    for line in (None, "Stopped."):
        with pytest.raises(KeyboardInterrupt), interrupts_described(lambda line=line: line):  # type: ignore[misc]
            raise KeyboardInterrupt
    with pytest.raises(ValueError, match="other"), interrupts_described(lambda: "not said"):
        raise ValueError("other")
    assert [record.getMessage() for record in caplog.records] == ["Stopped."]
