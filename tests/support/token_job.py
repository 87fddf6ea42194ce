"""Training by a token budget on two processes, whole and resumed: `python token_job.py FOLDER`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from ragged import llama, pad, texts
from small_models import losses, make_trainer, weights

from paceline import Trainer
from paceline.core.journal import read_rows

BUDGETS: dict[str, dict[str, Any]] = {
    "padded": {},
    "workers": {"dataloader_num_workers": 1},
    "flatten": {"packing": "flatten"},
}
PARALLEL = ("ddp", "fsdp", "pp=2")
CUT = 3  # the step that runs are resumed from, inside the first epoch


def trainer_in(folder: Path, dropout: float = 0.0, **options: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": 8,
        "per_device_train_tokens": 24,
        "gradient_accumulation_steps": 2,
        "data_collator": pad,
        "learning_rate": 0.01,
        "lr_scheduler_type": "constant",
        "ddp_timeout": 60,
        "save_strategy": "steps",
        "save_steps": CUT,
    }
    return make_trainer(folder, llama(dropout=dropout), texts(), **{**defaults, **options})


def one_window(folder: Path, **options: Any) -> Trainer:
    """An optimizer step of all samples in each of two epochs, whatever their micro-batches are."""
    options |= {"save_strategy": "no", "gradient_accumulation_steps": 40, "num_train_epochs": 2}
    trainer = trainer_in(folder, **options)
    trainer.train()
    return trainer


def norms(trainer: Trainer) -> list[float]:
    return [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]


def found(trainer: Trainer) -> dict[str, Any]:
    steps = {"step": trainer.state.global_step, "max_steps": trainer.state.max_steps, "epoch": trainer.state.epoch}
    return {"weights": weights(trainer.model), "loss": losses(trainer), "norm": norms(trainer), **steps}


def windows(folder: Path) -> list[Any]:
    """The samples of each optimizer step: the epoch, the first, and their number."""
    return [tuple(row[1:4]) for row in read_rows(folder / "journal.bin")]


def main(folder: Path) -> dict[str, Any]:
    results = {}
    for name, options in BUDGETS.items():
        whole = trainer_in(folder / name, 0.1, num_train_epochs=2, **options)
        whole.train()
        again = trainer_in(folder / f"{name} again", 0.1, num_train_epochs=2, **options)
        again.train(resume_from_checkpoint=str(folder / name / f"checkpoint-{CUT}"))
        results[name] = {"whole": found(whole), "again": found(again)}
    trainer_in(folder / "two").train()
    more = trainer_in(folder / "more")
    more.train(resume_from_checkpoint=str(folder / "one" / f"checkpoint-{CUT}"))
    results["more"] = found(more)
    for parallel in PARALLEL:
        shared = one_window(folder / parallel, parallel=parallel)
        results[parallel] = {"loss": losses(shared), "norm": norms(shared)}
    return results


if __name__ == "__main__":
    torch.set_num_threads(1)
    place = Path(sys.argv[1])
    torch.save(main(place), place / f"{os.environ['RANK']}.pt")
