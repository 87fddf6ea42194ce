"""Streams that processes share, left in the middle of an epoch and read on by another number of them."""

from __future__ import annotations

import json
from pathlib import Path

import processes
import pytest
from cases import slow_but
from stream_jobs import NUM_SAMPLES

CASES = [(kind, "") for kind in ("plain", "stateful", "shared", "shared_stateful")]
CASES += [("plain", "begin"), ("stateful", "end")]
OFTEN = [("plain", ""), ("shared_stateful", ""), ("stateful", "end")]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "dispatched"), slow_but(OFTEN, CASES, pytest.mark.nightly))
def test_every_sample_comes_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, dispatched: str) -> None:
    """2 -> 1 -> 2 processes within one epoch: each sample is trained on once, 6 in each update.

    `dispatched`: in this part of it one process reads for all.
    """
    monkeypatch.setenv("DISPATCH", dispatched)
    read: list[int] = []
    for size, mode in ((2, "begin"), (1, "on"), (2, "end")):
        checkpoint = {"begin": "", "on": f"={tmp_path}/{kind}/checkpoint-3", "end": f"={tmp_path}/{kind}/checkpoint-5"}
        said = processes.run("stream_jobs.py", size, str(tmp_path), kind, mode + checkpoint[mode])
        found = [json.loads((tmp_path / f"{kind}-{mode}-{rank}.json").read_text()) for rank in range(size)]
        if mode == "on":
            assert "Begun on 2 processes, resuming on 1: each optimizer step takes the same 6 samples" in said[0]
            assert [len(batch) for batch in found[0]] == [3] * 4
        read += [sample for batches in found for batch in batches for sample in batch]
    assert sorted(read) == list(range(NUM_SAMPLES))
