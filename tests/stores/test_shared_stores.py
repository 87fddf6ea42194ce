"""Two processes and one store: the first writes to it, both resume from it."""

from __future__ import annotations

import shutil
from pathlib import Path

import processes
import pytest
import torch

from paceline.checkpoint.folders import step_of
from paceline.checkpoint.stores import ObjectStore

pytestmark = pytest.mark.slow


def test_processes_go_on_from_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    url = f"file://{tmp_path}/remote/run"
    processes.finish(processes.start("store_job.py", 2, url, str(tmp_path / "first.pt"), "0"))
    store = ObjectStore(url)
    assert sorted(map(step_of, store.checkpoints())) == [10, 12]
    shutil.rmtree(tmp_path / "cache")  # as if it had ended earlier, on machines that are gone
    store.delete(["checkpoint-12/manifest.json"])
    texts = processes.finish(processes.start("store_job.py", 2, url, str(tmp_path / "second.pt"), "0"))
    assert f"checkpoint-10 is resumed from {url}" in texts[0]
    first, second = (torch.load(tmp_path / f"{which}.pt", weights_only=True) for which in ("first", "second"))
    assert torch.equal(first["weights"], second["weights"])
    assert second["step"] == 12
