"""Trains a Keras model on handwritten digits with TFTrainer.

    python examples/tensorflow_classification.py --learning_rate 2e-3

Every option of TFTrainingArguments is a flag. Needs TensorFlow: pip install "paceline[tf,demo]".
"""

from __future__ import annotations

import keras
import numpy as np
from sklearn.datasets import load_digits

import paceline


def make_model() -> keras.Model:
    """A small convolutional network. Its outputs are logits: with integer labels the loss is the cross-entropy."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )


def compute_metrics(prediction: paceline.EvalPrediction) -> dict[str, float]:
    return {"accuracy": float(np.mean(prediction.predictions.argmax(-1) == prediction.label_ids))}


def main() -> None:
    parser = paceline.HfArgumentParser(paceline.TFTrainingArguments)
    parser.set_defaults(
        output_dir="runs/tensorflow-digits",
        learning_rate=2e-3,
        num_train_epochs=5,
        per_device_train_batch_size=32,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        report_to="none",
    )
    (args,) = parser.parse_args_into_dataclasses()
    keras.utils.set_random_seed(args.seed)
    images, labels = load_digits(return_X_y=True)
    features = (images / 16).reshape(-1, 8, 8, 1).astype("float32")
    trainer = paceline.TFTrainer(
        make_model(),
        args,
        train_dataset=(features[:1500], labels[:1500]),
        eval_dataset=(features[1500:], labels[1500:]),
        compute_metrics=compute_metrics,
    )
    trainer.train()
    metrics = trainer.evaluate()
    trainer.save_metrics("eval", metrics)
    trainer.save_model()
    print(f"accuracy {metrics['eval_accuracy']:.3f}")


if __name__ == "__main__":
    main()
