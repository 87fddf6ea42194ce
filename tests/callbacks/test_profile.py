"""`profile`: traces of the steps that were asked for, and a table."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import Classifier, classification, make_trainer

from paceline import UnsupportedOption
from paceline.args.profiling import Profiling
from paceline.callbacks.profile import SNAPSHOT_EVENTS, ProfileCallback


def trace_of(path: Path) -> Any:
    return json.loads(gzip.decompress(path.read_bytes()))


def test_the_steps_that_were_asked_for_are_traced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make_trainer(tmp_path, Classifier(), classification(64), max_steps=8, profile="steps=3-4+6,memory")
    trainer.train()
    names = sorted(path.name for path in (tmp_path / "profile").iterdir())
    assert names == ["rank0-steps3-4.trace.json.gz", "rank0-steps6-6.trace.json.gz"]
    events = trace_of(tmp_path / "profile" / names[0])["traceEvents"]
    steps = {event["name"] for event in events if str(event.get("name")).startswith("ProfilerStep")}
    assert steps == {"ProfilerStep#2", "ProfilerStep#3"}, "from 0: the steps 3 and 4"
    told = {event.get("name") for event in events}
    assert {"aten::addmm", "autograd::engine::evaluate_function: AddmmBackward0"} & told
    assert "[memory]" in told
    printed = capsys.readouterr().out
    assert printed.count("Self CPU time total") == 2
    assert "Profile of the steps 3 to 4: " in printed


def test_a_run_that_ends_early_leaves_what_it_has(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, Any] = {"max_steps": 4, "profile": {"schedule": {"wait": 1, "active": 9}}}
    make_trainer(tmp_path, Classifier(), classification(64), **options).train()
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["rank0-steps3-4.trace.json.gz"]
    make_trainer(tmp_path / "other", Classifier(), classification(64), max_steps=4, profile="steps=9").train()
    assert not (tmp_path / "other" / "profile").exists()
    assert "the steps 9-9 are not recorded: this run begins after step 0 and ends with step 4" in caplog.text


def test_a_trace_that_cannot_be_written_ends_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "profile").write_text("in the way of the folder")
    trainer = make_trainer(tmp_path, Classifier(), classification(64), max_steps=4, profile="steps=2")
    assert trainer.train().global_step == 4
    assert "rank0-steps2-2.trace.json.gz could not be written, and the run goes on" in caplog.text
    assert "Profile of" not in capsys.readouterr().out


@pytest.mark.slow
def test_training_is_the_same(tmp_path: Path) -> None:
    losses = []
    for profile in (None, "steps=2-3,memory,stacks,shapes"):
        trainer = make_trainer(tmp_path, Classifier(), classification(64), max_steps=4, profile=profile, seed=3)
        losses.append(trainer.train().training_loss)
    assert losses[0] == losses[1]


def test_memory_snapshots_need_a_cuda_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(tmp_path, Classifier(), classification(64), max_steps=3, profile="steps=2,snapshot")
    if not torch.cuda.is_available():
        with pytest.raises(UnsupportedOption, match=r"profile: snapshot=True needs a CUDA device.*measure_memory"):
            trainer.train()
    # a stand-in for the allocator of a device: the calls, in order
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    # optimizers of torch 2.14, whose CUDA build would ask the driver
    monkeypatch.setattr(
        torch.optim.Optimizer, "_accelerator_graph_capture_health_check", lambda self: None, raising=False
    )
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **options: calls.append(options))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", calls.append)
    callback = ProfileCallback(Profiling(steps=((2, 2),), snapshot=True))
    make_trainer(tmp_path, Classifier(), classification(64), max_steps=3, callbacks=[callback]).train()
    dumped = str(tmp_path / "profile" / "rank0-steps2-2.memory.pickle")
    assert calls == [{"max_entries": SNAPSHOT_EVENTS}, dumped, {"enabled": None}]
