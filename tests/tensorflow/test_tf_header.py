"""The header of a run with TensorFlow."""

from __future__ import annotations

from paceline.tensorflow.framework import keras
from paceline.tensorflow.header import describe_parts


def test_the_lines_about_optimizer_and_memory() -> None:
    model = keras.Sequential([keras.Input((1024,)), keras.layers.Dense(1024, use_bias=False), keras.layers.Dense(1)])
    model.layers[-1].trainable = False
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.AdamW(0.25))
    optimizer.build(model.trainable_variables)
    first, second = describe_parts(model, optimizer, 0.25, "linear")
    assert first == "optimizer  AdamW, learning rate 0.25, schedule linear"
    assert (
        second
        == "memory     4.0 MiB of parameters, 4.0 MiB of gradients, optimizer state 8.0 MiB; activations not included"
    )
