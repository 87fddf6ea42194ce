"""Trains, saves, resumes and evaluates on the device `standin`, and writes what was found to a file.

python stand_in_device_job.py FOLDER REPORT.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import stand_in_device
import torch
from torch import nn

from paceline import Trainer, TrainingArguments, set_seed
from paceline.pytorch.checkpoint.weights import alias_groups


class Net(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Dropout(dropout), nn.GELU(), nn.Linear(16, 3))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def make_samples(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    return [{"x": row, "labels": row[:3].argmax()} for row in x]


def make_trainer(folder: Path, dropout: float = 0.2, **options: Any) -> Trainer:
    args = TrainingArguments(
        str(folder),
        max_steps=8,
        save_steps=4,
        logging_steps=1,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        report_to="none",
        disable_tqdm=True,
        **options,
    )
    set_seed(3)
    return Trainer(
        Net(dropout),
        args,
        train_dataset=make_samples(64, 0),
        eval_dataset=make_samples(20, 1),
        compute_metrics=lambda found: {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())},
    )


def measure(trainer: Trainer, checkpoint: str | None = None) -> dict[str, Any]:
    trainer.train(resume_from_checkpoint=checkpoint)
    metrics = trainer.evaluate()
    return {
        "device": str(next(trainer.model.parameters()).device),
        "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
        "eval_loss": metrics["eval_loss"],
        "eval_accuracy": metrics["eval_accuracy"],
        "weights": {name: value.cpu().tolist() for name, value in trainer.model.state_dict().items()},
    }


def main(folder: Path, report: Path) -> None:
    stand_in_device.register()
    calls = stand_in_device.record_calls(torch.cuda, "paceline")
    tied, other = torch.ones(3, device=stand_in_device.NAME), torch.zeros(3, device=stand_in_device.NAME)
    found = {
        "aliases": alias_groups({"embedding": tied, "head": tied.detach(), "bias": other}),
        "accelerator": str(torch.accelerator.current_accelerator()),
        "whole": measure(make_trainer(folder / "whole")),
        "resumed": measure(make_trainer(folder / "resumed"), str(folder / "whole" / "checkpoint-4")),
        "plain": measure(make_trainer(folder / "plain", dropout=0.0)),
        "cpu": measure(make_trainer(folder / "cpu", dropout=0.0, use_cpu=True)),
        "run": json.loads((folder / "whole" / "run.json").read_text("utf-8")),
    }
    report.write_text(json.dumps({**found, "cuda_calls": calls}), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
