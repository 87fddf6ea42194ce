"""checkpoint_format='sharded' in one process: what is written, resumed, refused, rotated; the same run as without."""

from __future__ import annotations

import errno
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import Classifier, classification, make_trainer, weights

from paceline import Trainer, TrainingArguments
from paceline.args.errors import UnsupportedOption
from paceline.checkpoint import folders, layout
from paceline.pytorch.checkpoint import shards
from paceline.pytorch.checkpoint.fqn_state import read_whole_model
from paceline.pytorch.checkpoint.tensors import CheckpointError

DATA = classification(32)


def make(folder: Path, model: Any = None, **options: Any) -> Trainer:
    defaults = {"save_strategy": "steps", "save_steps": 2, "checkpoint_format": "sharded", "weight_decay": 0.1}
    return make_trainer(folder, model or Classifier(dropout=0.2), DATA, **{**defaults, **options})


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


class Tied(Classifier):
    """Two names for one weight, a buffer, and extra state that is no tensor."""

    def __init__(self) -> None:
        super().__init__(features=8, classes=8)
        self.again = self.second
        self.register_buffer("seen", torch.zeros(3))

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 7}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.loaded = state


@pytest.mark.slow
@pytest.mark.parametrize("in_background", [True, False])
def test_a_run_is_the_same_and_is_resumed_bit_for_bit(tmp_path: Path, in_background: bool) -> None:
    options: dict[str, Any] = {"optim": "adamw_torch", "max_grad_norm": 0.5, "save_in_background": in_background}
    plain = make(tmp_path / "plain", checkpoint_format="full", **options)
    plain.train()
    trainer = make(tmp_path / "run", **options)
    trainer.train()
    assert torch.equal(weights(trainer.model), weights(plain.model))
    checkpoint = tmp_path / "run" / "checkpoint-4"
    assert folders.verify(checkpoint) == []
    assert hidden(tmp_path / "run") == []
    assert {"optimizer_0/.metadata", "pytorch_model_fsdp_0/__0_0.distcp", "sharded.json"} <= names(checkpoint)
    assert not {"model.safetensors", "optimizer.pt"} & names(checkpoint)
    for target in ("sharded", "full"):  # whichever form the run goes on to write
        resumed = make(tmp_path / target, checkpoint_format=target, **options)
        resumed.train(resume_from_checkpoint=str(checkpoint))
        assert torch.equal(weights(resumed.model), weights(plain.model))
        for entry, other in zip(resumed.optimizer.state.values(), plain.optimizer.state.values(), strict=True):
            assert all(torch.equal(entry[key], other[key]) for key in other)
    back = make(tmp_path / "back", **options)
    back.train(resume_from_checkpoint=str(tmp_path / "plain" / "checkpoint-4"))
    assert torch.equal(weights(back.model), weights(plain.model))


@pytest.mark.parametrize("optim", ["sgd", "adafactor", "adagrad", "muon"])
def test_every_kind_of_optimizer_state_comes_back(tmp_path: Path, optim: str) -> None:
    whole = make(tmp_path / "whole", optim=optim)
    whole.train()
    resumed = make(tmp_path / "resumed", optim=optim)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    assert torch.equal(weights(resumed.model), weights(whole.model))


def test_ties_buffers_and_extra_state(tmp_path: Path) -> None:
    trainer = make(tmp_path, Tied())
    trainer.train()
    checkpoint = tmp_path / "checkpoint-4"
    stored = shards.Shards(checkpoint / layout.MODEL_FOLDER)
    assert "model.second.weight" in stored.tensors
    assert "model.again.weight" not in stored.tensors
    assert json.loads((checkpoint / "sharded.json").read_text())["tied"]["again.weight"] == "second.weight"
    model = Tied()
    other = make(tmp_path / "other", model)
    other._load_from_checkpoint(str(checkpoint))
    assert model.loaded == {"version": 7}
    whole = read_whole_model(checkpoint)
    assert whole is not None
    assert torch.equal(whole["again.weight"], model.second.weight)


def test_the_best_is_loaded_and_old_ones_are_deleted(tmp_path: Path) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 2, "eval_dataset": classification(16, seed=5)}
    trainer = make(tmp_path, load_best_model_at_end=True, save_total_limit=1, **options)
    trainer.train()
    best = Path(str(trainer.state.best_model_checkpoint))
    assert {path.name for path in folders.list_checkpoints(tmp_path)} <= {best.name, "checkpoint-6", "checkpoint-8"}
    whole = read_whole_model(best)
    assert whole is not None
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value, whole[name])


def test_a_damaged_one_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(tmp_path).train()
    newest = folders.list_checkpoints(tmp_path)[-1]
    path = next((newest / layout.OPTIMIZER_FOLDER).glob("*.distcp"))
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(bytes(raw))
    assert folders.newest_valid(tmp_path, logging.getLogger("test").warning) != newest
    assert "is damaged" in caplog.text


def test_a_disk_that_refuses_leaves_the_checkpoints_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write = shards.Part.write

    def refuse(part: Any, folder: Path) -> Any:
        if "checkpoint-4" in str(folder):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(part, folder)

    monkeypatch.setattr(shards.Part, "write", refuse)
    make(tmp_path).train()
    assert "checkpoint-4 could not be written: [Errno 28] process 0: No space left" in caplog.text
    assert "checkpoint-4" not in {path.name for path in folders.list_checkpoints(tmp_path)}
    assert hidden(tmp_path) == []
    assert folders.verify(tmp_path / "checkpoint-2") == []


def test_other_parameters_and_shapes_are_named(tmp_path: Path) -> None:
    make(tmp_path).train()
    checkpoint = tmp_path / "checkpoint-2"
    with pytest.raises(CheckpointError, match=r"first.weight is \(16, 8\) instead of \(16, 9\)"):
        make(tmp_path / "b", Classifier(features=9))._load_from_checkpoint(str(checkpoint))
    other = make(tmp_path / "c", weight_decay=0.0)
    other.create_optimizer_and_scheduler(4)
    other.optimizer = torch.optim.AdamW(list(other.model.parameters())[:2])
    with pytest.raises(CheckpointError, match=r"are on one side only|grouped otherwise"):
        other._load_optimizer_and_scheduler(str(checkpoint))


def test_only_the_model(tmp_path: Path) -> None:
    make(tmp_path, save_only_model=True).train()
    assert not (tmp_path / "checkpoint-2" / layout.OPTIMIZER_FOLDER).exists()
    assert read_whole_model(tmp_path / "checkpoint-2") is not None


def test_what_cannot_be_had_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedOption, match="save_on_each_node"):
        make(tmp_path, save_on_each_node=True).train()
    with pytest.raises(ValueError, match="checkpoint_format"):
        TrainingArguments(output_dir=str(tmp_path), checkpoint_format="halved")
    with pytest.raises(ValueError, match="contradicts"):
        TrainingArguments(
            output_dir=str(tmp_path),
            fsdp=True,
            fsdp_config={"state_dict_type": "FULL_STATE_DICT"},
            checkpoint_format="sharded",
        )
    with pytest.raises(UnsupportedOption, match="LOCAL_STATE_DICT"):
        TrainingArguments(output_dir=str(tmp_path), fsdp=True, fsdp_config={"state_dict_type": "LOCAL_STATE_DICT"})
