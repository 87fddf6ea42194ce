"""Training phases with a Keras model: digits first, then "odd or even" from a few samples, at once and head first.

    python examples/phases_tensorflow.py [--seeds 5]

Needs TensorFlow, and scikit-learn, whose digits it trains on. Prints the error on held-out samples, as the mean over
the seeds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile

import keras
from sklearn.datasets import load_digits

import paceline

NUM_FEW = 20  # samples of the second task


def make_model(seed: int) -> keras.Model:
    """Pixels -> logits. Patterns of phases name its layers."""
    keras.utils.set_random_seed(seed)
    hidden = [keras.layers.Dense(64, "gelu", name=f"hidden_{number}") for number in range(3)]
    return keras.Sequential([keras.Input((64,)), *hidden, keras.layers.Dense(10, name="head")])


def error_of(phases: list[paceline.Phase], test: tuple, seed: int, folder: str) -> float:
    """Trains in phases; returns the error in percent on the held-out samples."""
    args = paceline.TFTrainingArguments(
        folder,
        phases=phases,
        per_device_train_batch_size=16,
        learning_rate=3e-3,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=seed,
    )
    trainer = paceline.TFTrainer(
        make_model(seed),
        args,
        train_dataset=phases[-1].train_dataset,
        eval_dataset=test,
        compute_metrics=lambda result: {"error": 100.0 * (result.predictions.argmax(-1) != result.label_ids).mean()},
    )
    trainer.remove_callback(paceline.PrinterCallback)
    trainer.train()
    return trainer.evaluate()["eval_error"]


def main() -> None:
    """Prints one line for each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    images, digits = load_digits(return_X_y=True)
    pixels = (images / 16).astype("float32")
    known, test = (pixels[:800], digits[:800]), (pixels[1200:], digits[1200:] % 2)
    errors: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(parser.parse_args().seeds):
            rows = slice(800 + seed * NUM_FEW, 800 + (seed + 1) * NUM_FEW)
            few = pixels[rows], digits[rows] % 2
            digits_first = paceline.Phase("digits", until="500 steps", train_dataset=known)
            all_at_once = paceline.Phase("odd or even", until="120 steps", train_dataset=few)
            ways = {
                "odd or even alone": [all_at_once],
                "digits, then all layers": [digits_first, all_at_once],
                "digits, then the head, then all": [
                    digits_first,
                    paceline.Phase(
                        "head", until="60 steps", freeze=["hidden_*"], learning_rate=1e-2, train_dataset=few
                    ),
                    paceline.Phase("all", until="60 steps", learning_rate=3e-4, train_dataset=few),
                ],
            }
            for name, phases in ways.items():
                errors.setdefault(name, []).append(error_of(phases, test, seed, folder))
    for name, found in errors.items():
        print(f"{name:32}  error {statistics.mean(found):5.1f} %")


if __name__ == "__main__":
    main()
