"""The header of a run with TensorFlow."""

from __future__ import annotations

from paceline.core.data_lengths import describe_samples
from paceline.tensorflow.framework import keras, tf
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


def test_the_line_about_samples_of_tf_data_is_that_of_its_specification() -> None:
    def fail() -> None:
        raise AssertionError("nothing is read")

    spec = ({"ids": tf.TensorSpec([None, 4]), "any": tf.TensorSpec(None)}, tf.TensorSpec([]))
    data = tf.data.Dataset.from_generator(fail, output_signature=spec)
    assert describe_samples(data) == ["shapes     ids (?, 4), ()"]
