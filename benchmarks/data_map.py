"""The cost of a data map: CPU time per optimizer step with it and without it.

    python benchmarks/data_map.py [--width 512] [--steps 300] [--rounds 7]

A classifier of linear layers is trained with AdamW; both contenders take turns, and the ratio is one of neighbours. The
clock stops after the map is evaluated.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any

import torch
from torch import nn

from paceline import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

WARM = 5  # optimizer steps before the clock starts


class Classifier(nn.Module):
    """Linear layers of one width, and a head of ten classes."""

    def __init__(self, width: int, depth: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = torch.relu(layer(x))
        logits = self.head(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Clock(TrainerCallback):
    """Takes the CPU time of the process from the first measured step to the end."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == WARM:
            self.start = time.process_time()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seconds = time.process_time() - self.start


def step_seconds(width: int, steps: int, batch_size: int, options: dict[str, Any]) -> float:
    """Returns the CPU seconds of an optimizer step, the evaluation of the map included."""
    rows = [{"x": torch.randn(width), "labels": index % 10} for index in range(batch_size * 20)]
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
        trainer = Trainer(Classifier(width), args, train_dataset=rows, callbacks=[clock])
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return clock.seconds / steps


def main() -> None:
    """Prints the time per step of both contenders, and the median ratio of neighbours."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    times: dict[bool, list[float]] = {False: [], True: []}
    for number in range(options.rounds):
        for has_map in (False, True) if number % 2 else (True, False):
            given = {"data_map": has_map}
            times[has_map].append(step_seconds(options.width, options.steps, options.batch_size, given))
    for has_map, found in times.items():
        print(f"data_map={has_map!s:5} {statistics.median(found) * 1e3:.3f} ms of CPU time a step")
    ratios = [mapped / plain for mapped, plain in zip(times[True], times[False], strict=True)]
    spread = f"{min(ratios):.3f} .. {max(ratios):.3f}"
    print(f"ratio: {statistics.median(ratios):.3f} ({spread}, {options.rounds} rounds)")


if __name__ == "__main__":
    main()
