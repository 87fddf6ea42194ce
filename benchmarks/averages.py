"""The cost of an exponential moving average in an optimizer step.

    python benchmarks/averages.py [--model stack] [--width 256] [--batch-size 16] [--steps 200] [--threads 1]

One run with `average_steps=2`: every second optimizer step updates the average, so that the steps with it and those
without it are neighbours, and what else the machine does slows both. Without a GPU, it is the CPU time of the process.
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

WARM = 10  # optimizer steps before the clock starts
VOCABULARY, LENGTH = 1000, 64


class Stack(nn.Module):
    """Linear layers of one width."""

    def __init__(self, width: int, depth: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return {"loss": (x - labels).square().mean()}


class Language(nn.Module):
    """A causal transformer of four blocks."""

    def __init__(self, width: int, depth: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH), persistent=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.blocks(self.embedding(input_ids), mask=self.mask, is_causal=True))
        return {"loss": nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}


class Clock(TrainerCallback):
    """Takes the time of each step after the first `WARM`."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.times.append(self.now())

    def now(self) -> float:
        if not torch.cuda.is_available():
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    def steps(self) -> list[tuple[float, float]]:
        """Returns the seconds of neighbouring steps, those without and with an update of the average."""
        steps = [end - begin for begin, end in zip(self.times, self.times[1:], strict=False)][WARM - 1 :]
        return list(zip(steps[::2], steps[1::2], strict=False))  # the first of them is an odd step


def make_data(kind: str, width: int, batch_size: int) -> tuple[nn.Module, list[dict[str, torch.Tensor]]]:
    """Returns a model and its samples."""
    torch.manual_seed(0)
    if kind == "stack":
        return Stack(width), [{"x": torch.randn(width), "labels": torch.randn(width)} for _ in range(batch_size)]
    rows = [torch.randint(0, VOCABULARY, (LENGTH,)) for _ in range(batch_size)]
    return Language(width), [{"input_ids": row, "labels": row} for row in rows]


def main() -> None:
    """Prints the median times, and the median ratio of neighbours."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("transformer", "stack"), default="transformer")
    for name, value in (("width", 256), ("steps", 200), ("batch-size", 16), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    model, rows = make_data(given.model, given.width, given.batch_size)
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            max_steps=WARM + given.steps,
            per_device_train_batch_size=given.batch_size,
            ema_decay=0.999,
            average_steps=2,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Trainer(model, args, train_dataset=rows, callbacks=[clock])
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    pairs = clock.steps()
    ratio = statistics.median(after / before for before, after in pairs)
    print(f"{sum(each.numel() for each in model.parameters()):,} parameters, {given.threads} threads")
    for index, name in enumerate(("without", "with the average")):
        print(f"{name:18} {statistics.median(pair[index] for pair in pairs) * 1e3:8.2f} ms a step")
    print(f"{(ratio - 1) * 100:+.2f} % (median of {len(pairs)} pairs of neighbours)")


if __name__ == "__main__":
    main()
