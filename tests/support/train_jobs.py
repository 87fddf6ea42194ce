"""Jobs of `paceline train`: a person's module and a configuration in one folder, and what a run of it has written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.cli.main import main

MODULE = """
import torch
from torch import nn
from paceline import EarlyStoppingCallback, Trainer, TrainerCallback


class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.first, self.last = nn.Linear(4, width), nn.Linear(width, 1)

    def forward(self, x, y=None):
        guess = self.last(torch.tanh(self.first(x)))
        return {"guess": guess} if y is None else {"loss": nn.functional.mse_loss(guess, y), "guess": guess}


def rows(size):
    x = torch.randn(size, 4, generator=torch.Generator().manual_seed(0))
    return [{"x": value, "y": value.sum()[None]} for value in x]


def data(size=64):
    return {"train": rows(size)[:-16], "validation": rows(size)[-16:], "test": rows(size)[-16:]}


def misnamed():
    return {"trian": rows(8)}


def pair():
    return rows(48), rows(16)


def alone():
    return rows(48)


def metrics(prediction):
    return {"mae": float(abs(prediction.predictions - prediction.label_ids).mean())}


def logger(tag):
    return Note(tag)


class Note(TrainerCallback):
    def __init__(self, tag="note"):
        self.tag = tag

    def on_train_end(self, args, state, control, **kwargs):
        print(f"{self.tag} was here")


class Mine(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        return (2 * loss, outputs) if return_outputs else 2 * loss
"""


def write_job(folder: Path, module: str, config: str) -> Path:
    """Writes a module and the configuration that names it as {module}; returns the path of the configuration."""
    name = f"train_{folder.name.replace('-', '_')}"
    (folder / f"{name}.py").write_text(module, encoding="utf-8")
    path = folder / "job.yaml"
    path.write_text(config.format(module=name, folder=folder), encoding="utf-8")
    return path


def module_of(config: Path) -> str:
    """Returns the name of the module beside a configuration."""
    return next(config.parent.glob("train_*.py")).stem


def losses(run: Path) -> list[tuple[int, float]]:
    """Returns the logged losses with their steps."""
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    return [(row["step"], row["loss"]) for row in rows if "loss" in row]


def results(run: Path) -> dict[str, float]:
    """Returns the metrics of all stages."""
    found: dict[str, float] = json.loads((run / "all_results.json").read_text(encoding="utf-8"))
    return found


def check_finished(config: Path, steps: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Checks that a finished run is found so, and that an option that it was not trained with is named."""
    assert main(["train", str(config), "--learning_rate", "0.1"]) == 0
    output = capsys.readouterr().out
    assert f"This run is finished: {steps} steps" in output
    assert "Not trained with learning_rate = 0.1: it was 0.03." in output


def check_refused(config: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Checks that a usage error is reported in a sentence; {module} stands for the name of the module."""
    module = module_of(config)
    assert main(["train", str(config), *(word.format(module=module) for word in words)]) == 2
    assert message.format(module=module) in capsys.readouterr().err
