"""Phases on two processes: replicated and sharded, undisturbed and resumed in the middle of a phase and between two."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from optimizer_memory_job import SHARDS, StopAt, data, train, values

from paceline import Phase, TrainerCallback

WAYS: dict[str, dict[str, Any]] = {
    "ddp": {"parallel": "ddp"},
    "fsdp": SHARDS,
    "shards": {**SHARDS, "checkpoint_format": "sharded"},
}


def phases() -> list[Phase]:
    return [
        Phase("top", until=3, freeze=["layers.[0-3].*", "embedding.*"]),
        Phase("all", until=6, learning_rate=0.005),
        Phase("middle", freeze=["layers.0.*"], per_device_train_batch_size=2, train_dataset=data(20)),
    ]


class Watch(TrainerCallback):
    """Records the parameters with a gradient and with a state in the optimizer, before and after each step."""

    def __init__(self) -> None:
        self.gradients: list[list[str]] = []
        self.states: list[int] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.gradients.append([name for name, each in model.named_parameters() if each.grad is not None])

    def on_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        self.states.append(sum(bool(entry) for entry in optimizer.state.values()))


def run(folder: Path, callbacks: list[Any], resume: bool = False, **options: Any) -> Any:
    defaults = {"max_steps": 9, "save_strategy": "steps", "logging_steps": 1, "phases": phases()}
    return train(folder, callbacks=callbacks, resume=resume, **{**defaults, **options})


def main() -> None:
    folder = Path(sys.argv[1])
    found: dict[str, Any] = {}
    for name, way in WAYS.items():
        watch = Watch()
        whole = run(folder / f"one-{name}", [watch], **way)
        found[f"{name} straight"] = values(whole)
        found[f"{name} gradients"], found[f"{name} states"] = watch.gradients, watch.states
        found[f"{name} losses"] = [row["loss"] for row in whole.state.log_history if "loss" in row]
        for step in (3, 7):
            run(folder / f"{name}-{step}", [StopAt(step)], save_steps=step, **way)
            found[f"{name} resumed at {step}"] = values(run(folder / f"{name}-{step}", [], resume=True, **way))
    torch.save(found, folder / f"{os.environ['RANK']}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
