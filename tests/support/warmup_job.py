"""Training with warm-ups on two processes, whole and resumed at each step: `python warmup_job.py FOLDER`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from small_models import Tagger, losses, make_trainer, tagging, weights

from paceline import Trainer, TrainerCallback
from paceline.core.journal import read_rows

SIZES = [[0, 4], [2, 8], [3, 16]]  # samples per optimizer step
OPTIONS: dict[str, Any] = {
    "batch_size_warmup": SIZES,
    "sequence_length_warmup": [[0, 2], [1, 3], [4, 5], [6, None]],
    "gradient_accumulation_steps": 4,
    "optim": "sgd",
    "learning_rate": 0.5,
    "lr_scheduler_type": "linear",
    "num_train_epochs": 2,
}
NUM_SAMPLES = 46


class Rows(TrainerCallback):
    """Keeps the size and the sequence length of each log row with a loss."""

    def __init__(self) -> None:
        self.values: list[tuple[Any, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            self.values.append((logs.get("global_batch_size"), logs.get("sequence_length")))


def trainer_in(folder: Path, num_processes: int = 1, dropout: float = 0.1, **options: Any) -> Trainer:
    """A Trainer with micro-batches of 4 samples over all processes."""
    size = {"per_device_train_batch_size": 4 // num_processes}
    data = tagging(NUM_SAMPLES)
    return make_trainer(folder, Tagger(dropout=dropout), data, **{**OPTIONS, **size, **options})


def found(trainer: Trainer, folder: Path) -> dict[str, Any]:
    rows = [tuple(row[1:4]) for row in read_rows(folder / "journal.bin")]  # epoch, first sample, number of samples
    steps = (trainer.state.global_step, trainer.state.max_steps, trainer.state.epoch)
    return {"weights": weights(trainer.model), "losses": losses(trainer), "rows": rows, "steps": steps}


def whole_and_resumed(folder: Path, num_processes: int, steps: Any, **options: Any) -> list[dict[str, Any]]:
    """The results of a whole run, and of runs resumed after some of its steps."""
    options |= {"save_strategy": "steps", "save_steps": 1}
    whole = trainer_in(folder, num_processes, **options)
    whole.train()
    results = [found(whole, folder)]
    for step in steps:
        resumed = trainer_in(folder, num_processes, **options)
        resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))
        results.append(found(resumed, folder))
    return results


def main(folder: Path) -> dict[str, Any]:
    runs = whole_and_resumed(folder / "whole", 2, (1, 3))
    alone = trainer_in(folder / "plain", 2, dropout=0.0, parallel="ddp")
    alone.train()
    return {"runs": runs, "plain": found(alone, folder / "plain")}


if __name__ == "__main__":
    torch.set_num_threads(1)
    place = Path(sys.argv[1])
    torch.save(main(place), place / f"{os.environ['RANK']}.pt")
