"""TensorFlow and Keras, imported once for this package; if one is missing, the error names what to install."""

from __future__ import annotations

from typing import Any

from paceline.core.optional import is_installed, require

if not is_installed("tensorflow"):
    raise ImportError('TensorFlow is required for TFTrainer: pip install "paceline[tf]"')

tf: Any = require("tensorflow", "tf")
keras: Any = require("keras", "tf")

if keras.backend.backend() != "tensorflow":
    raise ImportError(
        f"Keras runs on {keras.backend.backend()} here (KERAS_BACKEND, or ~/.keras/keras.json): TFTrainer needs it on "
        "tensorflow. Set KERAS_BACKEND=tensorflow before Python starts, or leave it unset."
    )


def plain(variable: Any) -> Any:
    """Returns the TensorFlow variable inside a Keras 3 variable."""
    return variable if isinstance(variable, tf.Variable) else variable.value
