"""Images, defaults and results of the digits demonstrations, independent of the framework."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.cli.demo.plot import can_draw_unicode, draw_curve, draw_table
from paceline.cli.errors import need
from paceline.cli.jobs import Job, Say
from paceline.core.outputs import EvalPrediction

HELD_OUT = 0.25
BRIGHTEST = 16.0  # a pixel is the number of ink dots out of 16
Images = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]
NAMES = [str(digit) for digit in range(10)]
COLUMNS = {"eval_loss": "held out", "eval_accuracy": "accuracy"}
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


def read_images() -> tuple[Images, Images, str]:
    """Returns training and held-out images (n, 1, 8, 8), 0 to 1, with their digits (stratified), and a digest.

    Raises:
        UsageError: scikit-learn is missing.
    """
    datasets = need("sklearn.datasets", "demo", "the digits come with scikit-learn")
    selection = need("sklearn.model_selection", "demo", "the digits come with scikit-learn")
    images, digits = datasets.load_digits(return_X_y=True)
    digest = hashlib.sha256(np.ascontiguousarray(images, dtype=np.float64).tobytes()).hexdigest()[:16]
    chosen = selection.train_test_split(np.arange(len(digits)), test_size=HELD_OUT, stratify=digits, random_state=0)
    pixels = (images / BRIGHTEST).astype(np.float32).reshape(-1, 1, 8, 8)
    train, held_out = ((pixels[indices], digits[indices]) for indices in chosen)
    return train, held_out, digest


def identify(digest: str) -> dict[str, Any]:
    """Returns the properties that must be equal for a checkpoint to fit."""
    return {"images_sha256": digest}


def compute_accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Returns the share of correctly classified digits."""
    return {"accuracy": float((np.argmax(prediction.predictions, axis=-1) == prediction.label_ids).mean())}


def count_confusions(truth: Sequence[int], predicted: Sequence[int]) -> list[list[int]]:
    """Returns the confusion matrix: rows are true digits, columns predicted ones."""
    table = [[0] * len(NAMES) for _ in NAMES]
    for true, guess in zip(truth, predicted, strict=True):
        table[true][guess] += 1
    return table


def show_results(trainer: Any, held_out: Any, truth: Sequence[int], job: Job, say: Say) -> None:
    """Shows the loss curve, accuracy, confusion matrix, and the output files.

    Args:
        trainer: a Trainer or TFTrainer.
        held_out: the held-out samples in its input format.
        truth: their digits.
    """
    history = trainer.state.log_history
    losses = [(row["step"], row["loss"]) for row in history if "loss" in row]
    evaluations = [(row["step"], row["eval_loss"]) for row in history if "eval_loss" in row]
    say("\nLoss in nats per digit")
    say(draw_curve(losses, evaluations, height=8, unicode=can_draw_unicode()))
    output = trainer.predict(held_out)
    predicted = np.argmax(output.predictions, axis=-1).tolist()
    right = sum(a == b for a, b in zip(truth, predicted, strict=True))
    say(f"\nAccuracy on {len(truth)} held-out digits: {100 * right / len(truth):.1f} % ({right} right)\n")
    say("Confusion matrix (rows: true digit, columns: predicted digit):\n")
    matrix = count_confusions(truth, predicted)
    say(draw_table(matrix, NAMES))
    rows = [[name, *counts] for name, counts in zip(NAMES, matrix, strict=True)]
    trainer.log_table("confusion matrix", ["true digit", *NAMES], rows)
    say(
        f"\nWeights, checkpoints, log.jsonl, run.json and report.html are saved to {job.folder}/. Run the command "
        "again to see this again; --fresh starts over."
    )
