"""`paceline demo digits`: real handwritten digits, a plain module, accuracy and the confusion matrix."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.args.training import TrainingArguments
from paceline.cli.demo_options import DemoOptions, make_arguments
from paceline.cli.display import say, show_evaluations
from paceline.cli.errors import need
from paceline.cli.jobs import (
    Job,
    Say,
    Show,
    check_same,
    is_finished,
    kept,
    open_job,
    restore_finished,
    train_job,
    write_results,
)
from paceline.cli.plot import can_draw_unicode, draw_curve, draw_table
from paceline.core.outputs import EvalPrediction
from paceline.trainer import Trainer

HELD_OUT = 0.25
BRIGHTEST = 16.0  # the pixels count how many of 16 dots were ink
SHADES = " .:+*#@"
Samples = list[dict[str, Tensor]]
NAMES = [str(digit) for digit in range(10)]
DEFAULTS: dict[str, Any] = {
    "output_dir": "runs/digits",
    "num_train_epochs": 15,
    "per_device_train_batch_size": 32,
    "per_device_eval_batch_size": 128,
    "learning_rate": 3e-3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0.1,
    "weight_decay": 0.01,
    "logging_steps": 0.025,
    "eval_strategy": "epoch",
    "save_strategy": "epoch",
    "save_total_limit": 2,
    "report_to": "jsonl",
    "loss_weight": "samples",
    "label_names": ["digit"],
}


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
        """(loss, logits), or (logits,) where the digit is not given.

        Args:
            pixels: `(batch, 1, 8, 8)`, 0 to 1.
            digit: `(batch,)` ints.
        """
        logits = self.classify(self.features(pixels))
        return (logits,) if digit is None else (functional.cross_entropy(logits, digit), logits)


def load_digits() -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]], str]:
    """Samples to train on, samples held out (the same share of each digit), and a digest of the images.

    Raises:
        UsageError: scikit-learn is missing.
    """
    datasets = need("sklearn.datasets", "demo", "the digits come with scikit-learn")
    selection = need("sklearn.model_selection", "demo", "the digits come with scikit-learn")
    images, digits = datasets.load_digits(return_X_y=True)
    digest = hashlib.sha256(np.ascontiguousarray(images, dtype=np.float64).tobytes()).hexdigest()[:16]
    chosen = selection.train_test_split(np.arange(len(digits)), test_size=HELD_OUT, stratify=digits, random_state=0)
    pixels = torch.tensor(images / BRIGHTEST, dtype=torch.float32).view(-1, 1, 8, 8)
    targets = torch.tensor(digits)
    train, held_out = ([{"pixels": pixels[i], "digit": targets[i]} for i in indices.tolist()] for indices in chosen)
    return train, held_out, digest


def run(options: DemoOptions, say: Say = say) -> int:
    """The whole demonstration; returns the exit code."""
    args = make_arguments(DEFAULTS, options)
    train, held_out, digest = load_digits()
    say(
        f"paceline demo digits: {len(train):,} handwritten digits to train on, {len(held_out)} held out. "
        f"Everything goes to {args.output_dir}/"
    )
    folder, resume = Path(str(args.output_dir)), args.resume_from_checkpoint
    job = open_job(folder, "demo digits", identify(digest), fresh=options.fresh, say=say, resume=resume)
    trainer = build_trainer(args, train, held_out)
    show_evaluations(trainer, {"eval_loss": "held out", "eval_accuracy": "accuracy"})
    length = {"max_steps": args.max_steps, "num_train_epochs": args.num_train_epochs}
    if is_finished(job, length):
        restore_finished(trainer, job, say)
    else:
        job.settings["given"] = kept(options.arguments)
        code = train_job(trainer, job, length, say, resume)
        if code:
            return code
        write_results(trainer, job)
    show_results(trainer, held_out, job, say)
    return 0


def build_trainer(args: TrainingArguments, train: Samples, held_out: Samples) -> Trainer:
    """A Trainer as anybody would make it. The seed is set before the model is made."""
    torch.manual_seed(args.seed)
    return Trainer(
        model=DigitClassifier(), args=args, train_dataset=train, eval_dataset=held_out, compute_metrics=compute_accuracy
    )


def identify(digest: str) -> dict[str, Any]:
    """What must be the same for a checkpoint to fit."""
    return {"images_sha256": digest}


def rebuild(job: Job, overrides: Mapping[str, Any]) -> tuple[Trainer, Show]:
    """The Trainer of a run as it was at its start, and how to show a sample.

    Raises:
        UsageError: the images are others.
    """
    train, held_out, digest = load_digits()
    check_same(job, identify(digest))
    options = DemoOptions(job="digits", arguments={**job.settings["given"], **overrides})
    return build_trainer(make_arguments(DEFAULTS, options), train, held_out), draw_digit


def draw_digit(sample: Mapping[str, Tensor]) -> str:
    """A digit in characters, and what it is."""
    rows = (sample["pixels"][0] * (len(SHADES) - 1)).round().int().tolist()
    drawn = "\n".join("".join(SHADES[value] * 2 for value in row) for row in rows)
    return f"digit {int(sample['digit'])}\n{drawn}"


def compute_accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """The share of digits that were recognised."""
    return {"accuracy": float((np.argmax(prediction.predictions, axis=-1) == prediction.label_ids).mean())}


def count_confusions(truth: Sequence[int], predicted: Sequence[int]) -> list[list[int]]:
    """How often each digit (row) was taken for each digit (column)."""
    table = [[0] * len(NAMES) for _ in NAMES]
    for true, guess in zip(truth, predicted, strict=True):
        table[true][guess] += 1
    return table


def show_results(trainer: Trainer, held_out: list[dict[str, Tensor]], job: Job, say: Say) -> None:
    """Curve, accuracy, confusion matrix, and where everything lies."""
    history = trainer.state.log_history
    losses = [(row["step"], row["loss"]) for row in history if "loss" in row]
    evaluations = [(row["step"], row["eval_loss"]) for row in history if "eval_loss" in row]
    say("\nLoss in nats per digit")
    say(draw_curve(losses, evaluations, height=8, unicode=can_draw_unicode()))
    output = trainer.predict(held_out)
    predicted = np.argmax(output.predictions, axis=-1).tolist()
    truth = [int(sample["digit"]) for sample in held_out]
    right = sum(a == b for a, b in zip(truth, predicted, strict=True))
    say(f"\nAccuracy on {len(truth)} digits it has not seen: {100 * right / len(truth):.1f} % ({right} right)\n")
    say("What was written (down), what it was taken for (across):\n")
    say(draw_table(count_confusions(truth, predicted), NAMES))
    say(
        f"\nWeights, checkpoints, log.jsonl and run.json lie in {job.folder}/. Run the command again to see this "
        "again; --fresh starts over."
    )
