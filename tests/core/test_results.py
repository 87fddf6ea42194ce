"""The files of metrics: atomic, and begun anew if they are damaged."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from paceline.core.results import read_results, save_metrics


@pytest.mark.parametrize("content", ["", '{"train_loss": 1.', "[1, 2]", "[" * 100_000, "\udcff"])
def test_a_damaged_file_ends_no_run(tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "all_results.json"
    path.write_text(content, encoding="utf-8", errors="surrogateescape")
    with caplog.at_level(logging.WARNING):
        save_metrics(tmp_path, "eval", {"eval_loss": 0.5}, combined=True)
    assert "all_results.json could not be read" in caplog.text
    assert read_results(tmp_path) == json.loads((tmp_path / "eval_results.json").read_text()) == {"eval_loss": 0.5}
    assert (tmp_path / "all_results.1.json").is_file() == bool(content)


def test_a_full_disk_keeps_the_earlier_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_metrics(tmp_path, "train", {"train_loss": 1.0}, combined=True)
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}

    def fail(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="No space left on device"):
        save_metrics(tmp_path, "train", {"train_loss": 0.5}, combined=True)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before
