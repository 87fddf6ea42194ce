"""Peak memory of optimizer steps on several processes, by torch's allocator: `planned_job.py FOLDER`.

The first process writes the bytes of each case into `FOLDER/peaks.json`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from small_models import make_trainer
from torch import nn
from torch.nn import functional

from paceline import TrainerCallback


class Perceptron(nn.Module):
    """Wide enough for its tensors to outweigh what the framework allocates."""

    tp_plan = {"first": "colwise", "second": "rowwise"}

    def __init__(self, width: int = 1024) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(256, width), nn.Linear(width, 256)
        self.third, self.fourth = nn.Linear(256, width), nn.Linear(width, 10)

    def forward(self, x: Any, labels: Any) -> Any:
        hidden = self.second(torch.relu(self.first(x)))
        logits = self.fourth(torch.relu(self.third(hidden)))
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


UNITS = {"fsdp_config": {"transformer_layer_cls_to_wrap": ["Linear"]}}
CASES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp, accumulation": {"gradient_accumulation_steps": 2},
    "fsdp": {"fsdp": True, **UNITS},
    "fsdp, SGD, large batch": {"fsdp": True, "optim": "sgd", "per_device_train_batch_size": 256, **UNITS},
    "fsdp, accumulation": {"fsdp": True, "gradient_accumulation_steps": 2, **UNITS},
    "tp": {"parallel": {"tp": 2}},
}


def build(folder: Path, name: str) -> Any:
    torch.manual_seed(0)
    data = [{"x": torch.randn(256), "labels": index % 10} for index in range(2048)]
    options = {"per_device_train_batch_size": 64, "max_steps": 8, "logging_strategy": "no", **CASES[name]}
    return make_trainer(folder, Perceptron(), data, loss_weight="samples", **options)


class Allocated(TrainerCallback):
    """Records what the allocator gives and takes back during each step from the third on.

    gloo frees a buffer after the other process has read it, so a step that waits holds more than it needs; the step
    with the lowest peak waited least.
    """

    def __init__(self) -> None:
        self.profilers: list[Any] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step >= 2:
            kinds = [torch.profiler.ProfilerActivity.CPU]
            self.profilers.append(torch.profiler.profile(activities=kinds, profile_memory=True))
            self.profilers[-1].__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= 3:
            self.profilers[-1].__exit__(None, None, None)


def held_before(trainer: Any, optimizer: Any) -> int:
    """Returns the bytes of parameters and optimizer state of this process; and of DDP's buckets."""
    from paceline.pytorch.distributed.memory import count_memory

    memory = count_memory(trainer.model, optimizer)
    return memory.parameters + (memory.optimizer or 0) + (memory.gradients if not trainer.strategy.is_sharded else 0)


def rise(profiler: Any) -> int:
    """Returns how far the allocated bytes rise above those at the start."""
    level = highest = 0
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda each: each.start_ns()):
        if event.name() == "[memory]":
            level += event.nbytes()
            highest = max(highest, level)
    return highest


def main(folder: Path) -> None:
    peaks = {}
    for name in CASES:
        with tempfile.TemporaryDirectory() as scratch:
            trainer = build(Path(scratch), name)
            watch = Allocated()
            trainer.add_callback(watch)
            trainer.train()
            peaks[name] = held_before(trainer, trainer.optimizer) + min(map(rise, watch.profilers))
    if os.environ.get("RANK", "0") == "0":
        (folder / "peaks.json").write_text(json.dumps(peaks))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
