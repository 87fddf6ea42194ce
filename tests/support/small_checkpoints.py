"""Folders that look like checkpoints, made without a model."""

from __future__ import annotations

from pathlib import Path

from paceline.checkpoint import folders


def make_checkpoint(folder: Path, step: int, text: str = "weights") -> Path:
    with folders.staged(folder / f"checkpoint-{step}") as staged:
        (staged / "model.bin").write_text(text + str(step))
        (staged / "inner").mkdir()
        (staged / "inner" / "shard").write_bytes(b"\0" * 100)
        (staged / "trainer_state.json").write_text("{}")
    return folder / f"checkpoint-{step}"
