"""Pruning of classifiers of handwritten digits: single weights, channels, attention heads, and a lottery ticket.

    python examples/pruning.py [--seeds 3]

Needs scikit-learn, whose digits it trains on. Prints the error on the held-out half, as the mean over the seeds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile

import torch
from sklearn.datasets import load_digits
from torch import nn

import paceline

SPARSITY = 0.95  # of single weights
CHANNELS = 0.8
HEADS = 0.75


class Classifier(nn.Module):
    """Pixels -> loss and logits."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.body(pixels)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Attention(nn.Module):
    """Pixels, read as eight rows of eight -> loss and logits, through eight attention heads."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.place = nn.Linear(8, 64), nn.Parameter(0.1 * torch.randn(8, 64))
        self.queries, self.output, self.head = nn.Linear(64, 192), nn.Linear(64, 64), nn.Linear(512, 10)

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        rows = self.embed(pixels.unflatten(-1, (8, 8))) + self.place
        queries, keys, values = self.queries(rows).unflatten(-1, (3, 8, 8)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(queries, keys, values).transpose(1, 2).flatten(2)
        logits = self.head((rows + self.output(mixed)).relu().flatten(1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def error_of(
    pruning: paceline.Pruning | None, seed: int, folder: str, model_class: type[nn.Module] = Classifier
) -> float:
    """Trains; returns the error in percent on the held-out half."""
    images, digits = load_digits(return_X_y=True)
    rows = [
        {"pixels": torch.tensor(pixels / 16, dtype=torch.float32), "labels": int(digit)}
        for pixels, digit in zip(images, digits, strict=True)
    ]
    args = paceline.TrainingArguments(
        folder,
        max_steps=600,
        per_device_train_batch_size=16,
        learning_rate=3e-3,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=seed,
    )
    trainer = paceline.Trainer(
        model_class(seed),
        args,
        train_dataset=rows[::2],
        eval_dataset=rows[1::2],
        callbacks=[pruning] if pruning is not None else [],
        compute_metrics=lambda result: {"error": 100.0 * (result.predictions.argmax(-1) != result.label_ids).mean()},
    )
    trainer.remove_callback(paceline.PrinterCallback)
    trainer.train()
    return trainer.evaluate()["eval_error"]


def structures() -> dict[str, paceline.Pruning | None]:
    """Returns the ways of pruning whole channels of the hidden layers, and whole attention heads."""
    channels = {"unit": "channel", "exclude": ["body.4"]}  # not the ten classes
    heads = {"unit": "head", "heads": {"output": 8}}
    return {
        "channels, at once": paceline.Pruning(CHANNELS, schedule="one_shot", start=600, **channels),
        "channels, cubic": paceline.Pruning(CHANNELS, start=0.1, end=0.7, every=10, **channels),
        "heads, dense": None,
        "heads, at once": paceline.Pruning(HEADS, schedule="one_shot", start=600, **heads),
        "heads, cubic": paceline.Pruning(HEADS, start=0.1, end=0.7, every=10, **heads),
    }


def main() -> None:
    """Prints one line for each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    errors: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(parser.parse_args().seeds):
            at_end = paceline.Pruning(SPARSITY, schedule="one_shot", start=600)
            cubic = paceline.Pruning(SPARSITY, start=0.1, end=0.7, every=10)
            ways = {
                "dense": None,
                "at the end, at once": at_end,
                "cubic": cubic,
                "movement, cubic": paceline.Pruning(SPARSITY, method="movement", start=0.1, end=0.7, every=10),
            }
            for name, pruning in ways.items():
                errors.setdefault(name, []).append(error_of(pruning, seed, folder))
            ticket = paceline.Pruning(masks=cubic.masks)  # the first weights, with the masks found above
            errors.setdefault("ticket", []).append(error_of(ticket, seed, folder))
            for name, pruning in structures().items():
                model_class = Attention if "heads" in name else Classifier
                errors.setdefault(name, []).append(error_of(pruning, seed, folder, model_class))
    for name, found in errors.items():
        print(f"{name:20} error {statistics.mean(found):.2f} % ({min(found):.2f} .. {max(found):.2f})")


if __name__ == "__main__":
    main()
