"""`replay(..., blame=True)` and `paceline replay --blame`: the samples of a step, ranked."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_models import Classifier, Tagger, classification, make_trainer, tagging, weights

from paceline.args.errors import UnsupportedOption
from paceline.cli.main import main
from paceline.core.journal import JOURNAL_FILE, read_rows
from paceline.pytorch.replay.blame import rank
from paceline.pytorch.replay.step import Replayed, StopAfter, replay

OPTIONS = {"num_train_epochs": 3, "gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 5}

MODULE = """
import torch
from torch import nn

POISONED = 61_803


class Rows(torch.utils.data.Dataset):
    def __init__(self):
        self.x = torch.randn(100_000, 4, generator=torch.Generator().manual_seed(0))
        self.y = self.x.sum(1, keepdim=True)
        self.y[POISONED] = 1e4

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "y": self.y[index]}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1))

    def forward(self, x, y=None):
        guess = self.layers(x)
        return {"guess": guess} if y is None else {"loss": nn.functional.mse_loss(guess, y), "guess": guess}
"""

CONFIG = """
model: poisoned_rows:Net
data: poisoned_rows:Rows
arguments:
  output_dir: {folder}/run
  num_train_epochs: 1
  per_device_train_batch_size: 500
  learning_rate: 1e-3
  save_steps: 50
  logging_steps: 50
  label_names: [y]
  report_to: none
  disable_tqdm: true
  use_cpu: true
"""


@pytest.mark.slow
def test_one_poisoned_row_of_100_000_is_named_by_one_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "poisoned_rows.py").write_text(MODULE, encoding="utf-8")
    (tmp_path / "job.yaml").write_text(CONFIG.format(folder=tmp_path), encoding="utf-8")
    assert main(["train", str(tmp_path / "job.yaml")]) == 0
    rows = read_rows(tmp_path / "run" / JOURNAL_FILE)
    step = max(rows, key=lambda row: row.loss).step
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*") if path.is_file()}
    capsys.readouterr()
    assert main(["replay", "--blame", str(tmp_path / "run"), "--step", str(step), "--show", "1", "--trust"]) == 0
    out = capsys.readouterr().out
    assert "bit-exact      yes" in out
    lines = out.splitlines()
    start = next(place for place, line in enumerate(lines) if "gradient norm  deviations" in line)
    first, second = lines[start + 1].split(), lines[start + 2].split()
    assert first[:2] == ["1", "61803"]
    assert float(first[2]) > 1e6 * float(second[2])
    assert "  sample 61803\n" in out  # shown first
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def blamed(folder: Path, model: torch.nn.Module, data: Any, step: int, **options: Any) -> Replayed:
    return replay(make_trainer(folder, model, data, **{**OPTIONS, **options}), step, blame=True)


@pytest.mark.parametrize("step", [1, 6, 7])
def test_loss_and_norm_are_those_of_the_sample_alone_before_the_step(tmp_path: Path, step: int) -> None:
    """From the beginning, directly after a checkpoint, and one step later; with dropout, and accumulation."""
    data = classification(26)
    make_trainer(tmp_path / "whole", Classifier(dropout=0.3), data, **OPTIONS).train()
    found = blamed(tmp_path / "whole", Classifier(dropout=0.3), data, step)
    assert found.is_exact
    assert sorted(sample.id for sample in found.samples) == sorted(found.sample_ids)
    model = Classifier(dropout=0.3)
    if step > 1:
        trained = make_trainer(tmp_path / "again", model, data, **OPTIONS)
        trained.add_callback(StopAfter(step - 1, []))
        trained.train()
    check_samples(found, model, data)
    scores = [sample.score for sample in found.samples]
    assert scores == sorted(scores, reverse=True)


def check_samples(found: Replayed, model: torch.nn.Module, data: Any) -> None:
    """Checks losses and norms against those of the model, in evaluation mode."""
    model.eval()
    for sample in found.samples:
        model.zero_grad()
        loss = model(data[sample.id]["x"][None], data[sample.id]["labels"][None])[0]
        loss.backward()
        norm = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
        assert sample.loss == pytest.approx(loss.item(), rel=1e-5)
        assert sample.grad_norm == pytest.approx(norm.norm().item(), rel=1e-5)


def test_samples_of_a_stream_have_positions(tmp_path: Path) -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            data = classification(40)
            data[18] = {**data[18], "x": data[18]["x"] * 1000}
            yield from data

    options = {"max_steps": 4, "num_train_epochs": 1}
    make_trainer(tmp_path, Classifier(), Stream(), **{**OPTIONS, **options}).train()
    found = blamed(tmp_path, Classifier(), Stream(), 3, **options)
    assert found.is_exact
    assert not found.is_indexed
    assert sorted(sample.id for sample in found.samples) == list(range(16, 24))
    assert found.samples[0].id == 18


def test_a_collator_that_sorts_a_batch_does_not_confuse_the_ids(tmp_path: Path) -> None:
    data = classification(24)

    def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        ordered = sorted(samples, key=lambda sample: -float(sample["x"].abs().sum()))
        return {name: torch.stack([sample[name] for sample in ordered]) for name in ("x", "labels")}

    make_trainer(tmp_path, Classifier(), data, **OPTIONS, data_collator=collate).train()
    trainer = make_trainer(tmp_path, Classifier(), data, **OPTIONS, data_collator=collate)
    found = replay(trainer, 2, blame=True)
    assert len(found.samples) == 8
    check_samples(found, trainer.model, data)


def test_samples_without_targets_come_last(tmp_path: Path) -> None:
    data = tagging(24)
    data[3]["labels"][:] = -100
    make_trainer(tmp_path, Tagger(), data, **OPTIONS).train()
    for step in (1, 2, 3):
        found = blamed(tmp_path, Tagger(), data, step)
        empty = [sample for sample in found.samples if not (data[sample.id]["labels"] != -100).any()]
        assert all(math.isnan(sample.loss) and sample.grad_norm == 0 for sample in empty)
        assert found.samples[len(found.samples) - len(empty) :] == empty


def test_running_statistics_and_the_replay_are_left_alone(tmp_path: Path) -> None:
    class Normed(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(8)

        def begin(self, x: torch.Tensor) -> torch.Tensor:
            return super().begin(self.norm(x))

    data = classification(26)
    options = {"dataloader_drop_last": True}
    make_trainer(tmp_path, Normed(), data, **OPTIONS, **options).train()
    plain = make_trainer(tmp_path, Normed(), data, **OPTIONS, **options)
    assert replay(plain, 4).is_exact
    blaming = make_trainer(tmp_path, Normed(), data, **OPTIONS, **options)
    found = replay(blaming, 4, blame=True)
    assert found.is_exact
    assert len(found.samples) == 8
    assert not torch.equal(weights(plain.model), weights(blaming.model))  # those from before the step


def test_a_loss_that_needs_a_whole_batch_is_an_error_that_says_so(tmp_path: Path) -> None:
    class Pairs(Classifier):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            if len(x) < 2:
                raise RuntimeError("at least two samples")
            return super().forward(x, labels)

    data = classification(24)
    make_trainer(tmp_path, Pairs(), data, **OPTIONS).train()
    with pytest.raises(ValueError, match=r"the loss of sample \d+ alone.*at least two samples"):
        blamed(tmp_path, Pairs(), data, 2)


def test_a_sharded_model_is_refused_on_one_process_too(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, Classifier(), classification(8), **OPTIONS)
    trainer.strategy.is_sharded = True
    with pytest.raises(UnsupportedOption, match="shards the model"):
        replay(trainer, 1, blame=True)


def test_ranking() -> None:
    found = rank([(1, 1.0, 1.0), (2, 1.1, 0.9), (3, 9.0, 1.1), (4, math.inf, 1.0), (5, math.nan, 0.0)])
    assert [sample.id for sample in found][:2] == [4, 3]
    assert found[-1].id == 5
    assert found[0].score == math.inf
    assert found[-1].score == 0
    assert np.isfinite([sample.score for sample in found[1:]]).all()
    assert [sample.id for sample in rank([(7, -3.0, 2.0)])] == [7]
