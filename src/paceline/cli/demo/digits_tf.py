"""`paceline demo digits --framework tf`: the same digits with TensorFlow, a Keras model and the TFTrainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.cli.demo.digits_data import (
    COLUMNS,
    DEFAULTS,
    NAMES,
    Images,
    compute_accuracy,
    identify,
    read_images,
    show_results,
)
from paceline.cli.demo.options import DemoOptions, make_arguments
from paceline.cli.display import say, show_evaluations
from paceline.cli.jobs import Say, open_job, train_or_restore
from paceline.tensorflow.arguments import TFTrainingArguments
from paceline.tensorflow.framework import keras
from paceline.tensorflow.trainer import TFTrainer

TF_DEFAULTS = {**DEFAULTS, "output_dir": "runs/digits-tf"}


def make_classifier(seed: int) -> Any:
    """Returns a model of two convolutions and two linear layers, for images of 8 x 8."""
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(24, 3, padding="same", activation="relu"),
            layers.Conv2D(48, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dropout(0.25),
            layers.Dense(64, activation="relu"),
            layers.Dense(len(NAMES)),
        ]
    )


def run(options: DemoOptions, say: Say = say) -> int:
    """Runs the demonstration; returns the exit code."""
    args = make_arguments(TF_DEFAULTS, options)
    assert isinstance(args, TFTrainingArguments)
    train, held_out, digest = read_images()
    say(
        f"paceline demo digits, with TensorFlow: {len(train[1]):,} handwritten digits to train on, "
        f"{len(held_out[1])} held out. Everything goes to {args.output_dir}/"
    )
    folder, resume = Path(str(args.output_dir)), args.resume_from_checkpoint
    job = open_job(folder, "demo digits --framework tf", identify(digest), fresh=options.fresh, say=say, resume=resume)
    trainer = TFTrainer(
        make_classifier(args.seed), args, as_columns(train), as_columns(held_out), compute_metrics=compute_accuracy
    )
    show_evaluations(trainer, COLUMNS)
    code = train_or_restore(trainer, job, options.arguments, say, resume)
    if code:
        return code
    show_results(trainer, as_columns(held_out), held_out[1].tolist(), job, say)
    return 0


def as_columns(images: Images) -> dict[str, Any]:
    """Returns channels-last images, as Keras expects them, and their digits."""
    return {"pixels": images[0].reshape(-1, 8, 8, 1), "digit": images[1]}
