"""A model whose gradients have a known mean and covariance, trained without a learning rate."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from small_models import make_trainer
from torch import Tensor, nn

from paceline import Trainer

SIZE, SPREAD = 200, 0.5
NOISE_SCALE = SPREAD**2 * SIZE / (0.2**2 * SIZE)  # tr(S) / |G|^2 of normal numbers: 6.25 samples


class Linear(nn.Module):
    """The gradient of a sample is the sample."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SIZE))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": (x @ self.weight).mean()}


def samples(number: int) -> list[dict[str, Tensor]]:
    noise = torch.randn(number, SIZE, generator=torch.Generator().manual_seed(0))
    return [{"x": row} for row in 0.2 + SPREAD * noise]


class Ragged(Linear):
    """A mean over targets; the gradient of a target is its row."""

    def forward(self, x: Tensor, labels: Tensor, position_ids: Any = None) -> dict[str, Tensor]:  # type: ignore[override]
        return {"loss": (x @ self.weight)[labels != -100].mean()}


class RaggedScaled(Linear):
    """The sum over targets, divided by the number of all targets of the optimizer step."""

    def forward(self, x: Tensor, labels: Tensor, num_items_in_batch: Any = None, **kwargs: Any) -> dict[str, Tensor]:  # type: ignore[override]
        kept = labels != -100
        total = (x @ self.weight)[kept].sum()
        return {"loss": total / (kept.sum() if num_items_in_batch is None else num_items_in_batch)}


def ragged_samples(number: int) -> list[dict[str, Tensor]]:
    """Rows of 1 to 10 targets."""
    generator = torch.Generator().manual_seed(0)
    noise = 0.2 + SPREAD * torch.randn(number, 10, SIZE, generator=generator)
    lengths = torch.randint(1, 11, (number, 1), generator=generator)
    labels = torch.where(torch.arange(10) < lengths, 1, -100)
    return [{"x": x, "labels": row} for x, row in zip(noise, labels, strict=True)]


def train(folder: Path, num_steps: int, split: tuple[int, int], resume: bool = False, **options: Any) -> Trainer:
    """Trains `num_steps` steps of split[1] micro-batches of split[0] samples on each process."""
    size = split[0] * split[1] * int(os.environ.get("WORLD_SIZE", 1))
    trainer = make_trainer(
        folder,
        Linear(),
        samples(num_steps * size),
        per_device_train_batch_size=split[0],
        gradient_accumulation_steps=split[1],
        gradient_noise_scale=True,
        learning_rate=0.0,
        loss_weight="samples",
        **options,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def main() -> None:
    folder = Path(sys.argv[1])
    measured = train(folder / "out", 600, (2, 2), parallel="ddp", logging_steps=100).noise_scale
    assert measured is not None
    found = {"scale": measured.value, "sentence": measured.describe()}
    torch.save(found, folder / f"{os.environ['RANK']}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
