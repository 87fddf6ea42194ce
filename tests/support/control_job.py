"""A run whose callbacks change settings on one process only, or that waits for commands."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from small_models import Classifier, classification, make_trainer, weights

from paceline import Trainer, TrainerCallback

OPTIONS = {"max_steps": 12, "save_strategy": "steps", "save_steps": 6, "logging_steps": 1, "weight_decay": 0.1}


class ChangeOnOne(TrainerCallback):
    """Requests changes on the last process only, in three events."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        is_last = int(os.environ.get("RANK", 0)) == int(os.environ.get("WORLD_SIZE", 1)) - 1
        if is_last and state.global_step == 3:
            control.scale_learning_rate(0.5)
            control.max_grad_norm = 0.05
        elif is_last and state.global_step == 8:
            control.learning_rate = 2e-3

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 5:  # on all processes: once, not once for each
            control.scale_weight_decay(3.0)


class Slow(TrainerCallback):
    """Makes steps of 50 ms, and says when training has begun."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            print("training", flush=True)
        time.sleep(0.05)


def make(folder: Path, *callbacks: TrainerCallback, size: int = 4, **options: Any) -> Trainer:
    return make_trainer(
        folder,
        Classifier(dropout=0.2),
        classification(400),
        callbacks=list(callbacks),
        per_device_train_batch_size=size,
        **{**OPTIONS, **options},
    )


def share(folder: Path) -> None:
    """Trains on several processes, once whole and once resumed in the middle."""
    options: dict[str, Any] = {"fsdp": True} if sys.argv[3] == "fsdp" else {"parallel": sys.argv[3]}
    trainer = make(folder / "out", ChangeOnOne(), **options)
    trainer.train()
    groups = [group["weight_decay"] for group in trainer.optimizer.param_groups]
    again = make(folder / "out", ChangeOnOne(), **options)
    again.train(resume_from_checkpoint=str(folder / "out" / "checkpoint-6"))
    found = {"weights": weights(trainer.model), "resumed": weights(again.model), "decay": groups}
    if sys.argv[3] == "fsdp":
        found.update({name: value.full_tensor() for name, value in found.items() if hasattr(value, "full_tensor")})
    torch.save(found, folder / f"{os.environ['RANK']}.pt")


def wait(folder: Path) -> None:
    make(folder / "out", Slow(), eval_dataset=classification(8), max_steps=4000, save_steps=4000).train()


def main() -> None:
    folder = Path(sys.argv[2])
    {"share": share, "wait": wait}[sys.argv[1]](folder)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
