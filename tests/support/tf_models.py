"""Small models of TensorFlow, data that they can learn, and a TFTrainer that says nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from paceline import TFTrainer, TFTrainingArguments
from paceline.tensorflow.framework import keras, tf

FEATURES, CLASSES = 8, 3
TIMES = ("runtime", "per_second")


def make_data(size: int, seed: int = 0) -> tuple[Any, Any]:
    """Features (size, 8) and classes (size,) that depend on them."""
    x = np.random.default_rng(seed).normal(size=(size, FEATURES)).astype(np.float32)
    return x, (x[:, 0] > 0).astype(np.int64) + (x[:, 1] > 0)


def make_model(dropout: float = 0.0, seed: int = 0) -> Any:
    """A Keras model of two layers that gives logits."""
    keras.utils.set_random_seed(seed)
    layers = [keras.Input((FEATURES,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(CLASSES)]
    if dropout:
        layers.insert(2, keras.layers.Dropout(dropout))
    return keras.Sequential(layers)


def make_rows(size: int, seed: int = 0, longest: int = 12) -> list[tuple[Any, Any]]:
    """Samples of token ids of different length, and a class of each."""
    draw = np.random.default_rng(seed)
    rows = [draw.integers(1, 20, size=draw.integers(3, longest)).astype(np.int32) for _ in range(size)]
    return [(row, np.int64(row[0] % CLASSES)) for row in rows]


def pad_rows(rows: list[tuple[Any, Any]]) -> tuple[Any, Any]:
    """A batch as wide as its longest sample."""
    batch = np.zeros((len(rows), max(len(row) for row, _ in rows)), np.int32)
    for line, (row, _) in zip(batch, rows, strict=True):
        line[: len(row)] = row
    return batch, np.array([label for _, label in rows])


def make_reader(dropout: float = 0.2, seed: int = 0) -> Any:
    """A Keras model of token ids, of any number per sample."""
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.Input((None,), dtype="int32"),
            keras.layers.Embedding(20, 16),
            keras.layers.Dropout(dropout),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(CLASSES),
        ]
    )


class Linear(tf.Module):  # type: ignore[misc]
    """A plain module: one matrix."""

    def __init__(self, inputs: int = FEATURES, outputs: int = CLASSES) -> None:
        super().__init__()
        self.weight = tf.Variable(tf.zeros([inputs, outputs]), name="weight")
        self.bias = tf.Variable(tf.zeros([outputs]), name="bias")

    def __call__(self, x: Any) -> Any:
        return tf.matmul(x, self.weight) + self.bias


def make_trainer(folder: Path, model: Any, data: Any, **options: Any) -> TFTrainer:
    """A TFTrainer whose options, by their names, may be those of the arguments or of the Trainer."""
    own = ("eval_dataset", "compute_metrics", "strategy", "callbacks", "optimizers", "data_collator", "model_init")
    own += ("compute_loss_func", "preprocess_logits_for_metrics", "processing_class", "tb_writer")
    given = {name: options.pop(name) for name in own if name in options}
    kind = options.pop("kind", TFTrainer)
    defaults = {
        "num_train_epochs": 1,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.05,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    args = TFTrainingArguments(output_dir=str(folder), **{**defaults, **options})
    trainer: TFTrainer = kind(model, args, data, **given)
    return trainer


def weights(model: Any) -> Any:
    """All variables of a model in one vector."""
    return np.concatenate([np.ravel(np.asarray(variable)) for variable in model.variables])


def values(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of a log without their times."""
    return [{name: value for name, value in row.items() if not name.endswith(TIMES)} for row in rows]


def losses(trainer: Any) -> list[float]:
    """The losses that were logged."""
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]
