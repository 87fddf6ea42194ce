"""The cost of an exponential moving average: time per optimizer step with it and without it.

    python benchmarks/averages.py [--width 512] [--steps 60] [--rounds 7]

A stack of linear layers is trained with AdamW; both contenders take turns, and the ratio is one of neighbours.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any

import torch
from torch import nn

from paceline import Trainer, TrainerCallback, TrainingArguments

WARM = 5  # optimizer steps before the clock starts


class Stack(nn.Module):
    """Linear layers of one width."""

    def __init__(self, width: int, depth: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return {"loss": (x - labels).square().mean()}


class Clock(TrainerCallback):
    """Takes the time from the first measured step to the end."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == WARM:
            self.start = self.now()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seconds = self.now() - self.start

    def now(self) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()


def step_seconds(width: int, steps: int, batch_size: int, options: dict[str, Any]) -> float:
    """Returns the seconds of an optimizer step."""
    torch.manual_seed(0)
    rows = [{"x": torch.randn(width), "labels": torch.randn(width)} for _ in range(batch_size)]
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            max_steps=WARM + steps,
            per_device_train_batch_size=batch_size,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **options,
        )
        Trainer(Stack(width), args, train_dataset=rows, callbacks=[clock]).train()
    return clock.seconds / steps


def main() -> None:
    """Prints the median of both, and of their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("width", 512), ("steps", 60), ("rounds", 7), ("batch-size", 512)):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    pairs = [
        [
            step_seconds(given.width, given.steps, given.batch_size, options)
            for options in ({}, {"ema_decay": 0.999}, {"ema_decay": 0.999, "average_steps": 10})
        ]
        for _ in range(given.rounds)
    ]
    for index, name in enumerate(("without", "ema_decay=0.999", "... average_steps=10")):
        times = [pair[index] for pair in pairs]
        ratio = statistics.median([pair[index] / pair[0] for pair in pairs])
        print(f"{name:22} {statistics.median(times) * 1e3:8.3f} ms a step   {ratio:.3f}")


if __name__ == "__main__":
    main()
