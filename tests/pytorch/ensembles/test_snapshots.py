"""`SnapshotEnsemble`: a model at the end of each cycle, the same after a resume, and refusals by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support.small_models import Classifier

from paceline import Phase, SnapshotEnsemble, Trainer, TrainerCallback, TrainingArguments, ensemble_predict

torch.manual_seed(0)
DATA = [{"x": torch.randn(8), "labels": torch.tensor(k % 4)} for k in range(24)]


class Weights(TrainerCallback):
    """Keeps the weights after each step, and stops at one."""

    def __init__(self, stop: int | None = None) -> None:
        self.stop = stop
        self.after: dict[int, torch.Tensor] = {}
        self.rates: dict[int, float] = {}

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.rates[state.global_step + 1] = kwargs["optimizer"].param_groups[0]["lr"]

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.after[state.global_step] = kwargs["model"].second.weight.detach().clone()
        if state.global_step == self.stop:
            control.should_save = control.should_training_stop = True


def train(folder: Path, *callbacks: Any, resume: bool = False, **options: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "max_steps": 12,
        "per_device_train_batch_size": 4,
        "lr_scheduler_type": "cosine_with_restarts",
        "lr_scheduler_kwargs": {"num_cycles": 3},
        "learning_rate": 0.01,
        "report_to": "none",
        "disable_tqdm": True,
    }
    args = TrainingArguments(str(folder), **{**defaults, **options})
    trainer = Trainer(Classifier(dropout=0.2), args, train_dataset=DATA, callbacks=list(callbacks))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def weight(folder: Path) -> torch.Tensor:
    return load_file(folder / "model.safetensors")["second.weight"]


@pytest.mark.parametrize("warmup", [0, 2])
def test_a_snapshot_is_the_model_at_the_lowest_rate_of_each_cycle(tmp_path: Path, warmup: int) -> None:
    snapshots, weights = SnapshotEnsemble(), Weights()
    trainer = train(tmp_path, snapshots, weights, warmup_steps=warmup)
    steps = sorted(weights.rates)
    ends = [s for s in steps if s == 12 or (weights.rates[s + 1] > weights.rates[s] and s > warmup)]
    assert len(ends) == len(snapshots.folders) == 3
    for folder, step in zip(snapshots.folders, ends, strict=True):
        assert torch.equal(weight(folder), weights.after[step])
    assert len(ensemble_predict(snapshots.folders, DATA, trainer).members) == 3


def test_a_resumed_run_has_the_same_snapshots(tmp_path: Path) -> None:
    whole = SnapshotEnsemble()
    train(tmp_path / "whole", whole)
    train(tmp_path / "parts", SnapshotEnsemble(), Weights(stop=6))
    second = SnapshotEnsemble()
    train(tmp_path / "parts", second, resume=True)
    assert [folder.name for folder in second.folders] == ["snapshot-1", "snapshot-2", "snapshot-3"]
    for one, other in zip(whole.folders, second.folders, strict=True):
        assert torch.equal(weight(one), weight(other))
    assert not list((tmp_path / "parts" / "snapshots").glob(".*"))


def test_only_the_last_snapshots_are_kept(tmp_path: Path) -> None:
    trainer = train(tmp_path, snapshot_ensemble="2")
    snapshots = next(each for each in trainer.callback_handler.callbacks if isinstance(each, SnapshotEnsemble))
    assert sorted(path.name for path in (tmp_path / "snapshots").iterdir()) == ["snapshot-2", "snapshot-3"]
    assert [folder.name for folder in snapshots.folders] == ["snapshot-2", "snapshot-3"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {}}, "lr_scheduler_type='cosine', which has no cycles"),
        ({"lr_scheduler_kwargs": {"num_cycles": 1}}, "num_cycles"),
        ({"lr_scheduler_kwargs": {"num_cycles": 2.5}}, "num_cycles"),
        ({"lr_scheduler_kwargs": {"num_cycles": 13}}, "num_cycles"),
        ({"ema_decay": 0.9}, "ema_decay"),
        ({"phases": [Phase("first", until=6), Phase("second")]}, "phases"),
        ({"snapshot_ensemble": True}, "snapshot_ensemble=True and a SnapshotEnsemble in callbacks"),
        ({"snapshot_ensemble": -1}, "snapshot_ensemble=-1"),
    ],
)
def test_runs_without_cycles_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train(tmp_path, SnapshotEnsemble(), **options)
    with pytest.raises(ValueError, match="last"):
        SnapshotEnsemble(last=0)
