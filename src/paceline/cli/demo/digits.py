"""`paceline demo digits`: handwritten digits, a plain module, accuracy and the confusion matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.args.training import TrainingArguments
from paceline.cli.demo.digits_data import (
    COLUMNS,
    DEFAULTS,
    NAMES,
    compute_accuracy,
    identify,
    read_images,
    show_results,
)
from paceline.cli.demo.options import DemoOptions, make_arguments
from paceline.cli.display import say, show_evaluations
from paceline.cli.jobs import Job, Say, Show, check_same, open_job, train_or_restore
from paceline.predictions.augmentation import TestTimeAugmentation
from paceline.pytorch.trainer import Trainer

TRANSFORMS = ["shift_left", "shift_right", "shift_up", "shift_down"]  # by one pixel of eight
WEIGHTS = [2.0, *[1.0] * len(TRANSFORMS)]
SHADES = " .:+*#@"
Samples = list[dict[str, Tensor]]


class DigitClassifier(nn.Module):
    """Two convolutions and two linear layers, for images of 8 x 8."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 48, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.classify = nn.Sequential(
            nn.Flatten(), nn.Dropout(0.25), nn.Linear(48 * 16, 64), nn.ReLU(), nn.Linear(64, len(NAMES))
        )

    def forward(self, pixels: Tensor, digit: Tensor | None = None) -> tuple[Tensor, ...]:
        """Returns (loss, logits), or (logits,) without the digit.

        Args:
            pixels: `(batch, 1, 8, 8)`, 0 to 1.
            digit: `(batch,)` ints.
        """
        logits = self.classify(self.features(pixels))
        return (logits,) if digit is None else (functional.cross_entropy(logits, digit), logits)


def load_digits() -> tuple[Samples, Samples, str]:
    """Returns training samples, held-out samples (the same share of each digit), and a digest of the images.

    Raises:
        UsageError: scikit-learn is missing.
    """
    *parts, digest = read_images()
    train, held_out = (
        [{"pixels": torch.tensor(x), "digit": torch.tensor(y)} for x, y in zip(*part, strict=True)] for part in parts
    )
    return train, held_out, digest


def run(options: DemoOptions, say: Say = say) -> int:
    """Runs the demonstration; returns the exit code."""
    args = make_arguments(DEFAULTS, options)
    train, held_out, digest = load_digits()
    say(
        f"paceline demo digits: {len(train):,} handwritten digits to train on, {len(held_out)} held out. "
        f"Everything goes to {args.output_dir}/"
    )
    folder, resume = Path(str(args.output_dir)), args.resume_from_checkpoint
    job = open_job(folder, "demo digits", identify(digest), fresh=options.fresh, say=say, resume=resume)
    trainer = build_trainer(args, train, held_out)
    show_evaluations(trainer, COLUMNS)
    code = train_or_restore(trainer, job, options.arguments, say, resume)
    if code:
        return code
    truth = [int(sample["digit"]) for sample in held_out]
    show_results(trainer, held_out, truth, job, say)
    show_augmented(trainer, held_out, truth, say)
    return 0


def show_augmented(trainer: Trainer, held_out: Samples, truth: Sequence[int], say: Say) -> None:
    """Shows the accuracy with the mean of several predictions of each digit, as it is and shifted by a pixel."""
    augmentation = TestTimeAugmentation(TRANSFORMS, weights=WEIGHTS)
    output = trainer.predict(held_out, augmentation=augmentation)
    agreement = (output.metrics or {})["test_agreement"]
    right = int((output.predictions.argmax(-1) == np.asarray(truth)).sum())
    say(
        f"\nWith test-time augmentation ({len(TRANSFORMS)} shifts by a pixel): {100 * right / len(truth):.1f} % "
        f"({right} right); the passes agree on {100 * agreement:.1f} % of the digits."
    )


def build_trainer(args: TrainingArguments, train: Samples, held_out: Samples) -> Trainer:
    """Builds the Trainer. The seed is set before the model is created."""
    torch.manual_seed(args.seed)
    return Trainer(
        model=DigitClassifier(), args=args, train_dataset=train, eval_dataset=held_out, compute_metrics=compute_accuracy
    )


def rebuild(job: Job, overrides: Mapping[str, Any]) -> tuple[Trainer, Show]:
    """Rebuilds the Trainer of a run as at its start, with the formatter of a sample.

    Raises:
        UsageError: the images have changed.
    """
    train, held_out, digest = load_digits()
    check_same(job, identify(digest))
    options = DemoOptions(job="digits", arguments={**job.settings["given"], **overrides})
    return build_trainer(make_arguments(DEFAULTS, options), train, held_out), draw_digit


def draw_digit(sample: Mapping[str, Tensor]) -> str:
    """Draws a digit in characters, with its label."""
    rows = (sample["pixels"][0] * (len(SHADES) - 1)).round().int().tolist()
    drawn = "\n".join("".join(SHADES[value] * 2 for value in row) for row in rows)
    return f"digit {int(sample['digit'])}\n{drawn}"
