"""A learning rate range test on two processes, whose effects are undone: `python lr_job.py FOLDER`."""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path
from typing import Any

import torch
from memory_job import Blocks, trainer_in, weights_of
from small_models import losses
from torch import Tensor, nn

RANGE: dict[str, Any] = {"lowest": 1e-4, "highest": 30.0, "num_steps": 30}


class Uneasy(Blocks):
    """With a buffer and random numbers that differ between the processes."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.1)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        self.calls += 1
        return super().forward(self.drop(x), labels)


def search(folder: Path, mesh: str, size: int, between_runs: bool = False) -> dict[str, Any]:
    """Returns the range test of a model without dropout, and True if a run after one is the same as without it."""
    found = trainer_in(folder / "found", size, mesh, Blocks()).find_lr(**RANGE)
    trainers, drawn = [], []
    for number in range(2):
        torch.manual_seed(0)
        trainer = trainer_in(folder / str(number), size, mesh, Uneasy(), optim="adamw_torch", max_steps=4)
        if between_runs:
            trainer.train()
        if number:
            before = copy.deepcopy(vars(trainer.state))
            trainer.find_lr(num_steps=12, highest=1e9)  # it ends where the loss diverges, on both at the same step
            assert vars(trainer.state) == before
        drawn.append(torch.rand(1))
        trainer.train()
        trainers.append(trainer)
    one, other = trainers
    return {
        "losses": found.losses,
        "suggestion": found.suggestion,
        "is_alike": torch.equal(weights_of(one), weights_of(other)) and losses(one) == losses(other),
        "draws_alike": torch.equal(*drawn),
    }


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    cases = {"ddp": False, "fsdp": True, "tp": False}  # a training before it leaves an optimizer with shards of states
    found = {mesh: search(folder / mesh, mesh, 2, between_runs) for mesh, between_runs in cases.items()}
    torch.save(found, folder / f"{rank}.pt")


if __name__ == "__main__":
    main()
