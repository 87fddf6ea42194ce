"""Mixed precision: Keras' policies, set on the layers of a model that was built without one, and loss scaling."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from paceline.tensorflow.framework import keras, tf

POLICIES = {"bf16": "mixed_bfloat16", "fp16": "mixed_float16"}


@contextmanager
def in_precision(model: object, precision: str, option: str | None = None) -> Iterator[None]:
    """Returns a context in which a Keras 3 model computes in `precision`; its layers' policies are restored afterwards.

    Args:
        model: a Keras 3 model; any model if nothing must be changed.
        precision: "bf16" or "fp16"; any other value keeps the model's own precision.
        option: the option to name in errors; None: `precision`.

    Raises:
        ValueError: the model was built under another policy, or is no Keras 3 model and was not built under this one.
    """
    policy = POLICIES.get(precision)
    if policy is None or computes_in(model, policy):
        yield
        return
    others = [other for other in POLICIES.values() if computes_in(model, other)]
    if others:
        raise ValueError(
            f"{option or precision}=True: the model was built under the policy {others[0]!r}, and layers that compute "
            f"in one 16-bit type are not switched to the other. Leave {option or precision} out."
        )
    if not isinstance(model, keras.Model):
        raise ValueError(
            f"{option or precision}=True: a {type(model).__name__} computes in the types of its own variables. Build "
            f"it with {policy.removeprefix('mixed_')} inside (tf_keras: set its global policy to '{policy}' before), "
            f"or leave {option or precision} out."
        )
    layers = [layer for layer in model._flatten_layers() if layer.dtype_policy.name == "float32"]
    before = [layer.dtype_policy for layer in layers]
    for layer in layers:
        layer.dtype_policy = policy
    try:
        yield
    finally:
        for layer, own in zip(layers, before, strict=True):
            layer.dtype_policy = own


def evaluation_precision(training: str, *, bf16: bool, fp16: bool) -> tuple[str, str | None]:
    """Returns the precision of evaluations, and the option that set it if it differs from that of the training.

    Args:
        training: "bf16" or "fp16"; any other value keeps the model's own precision.
        bf16, fp16: the options `bf16_full_eval` and `fp16_full_eval`.
    """
    if bf16:
        return "bf16", "bf16_full_eval"
    return ("fp16", "fp16_full_eval") if fp16 else (training, None)


def computes_in(model: object, policy: str) -> bool:
    """True if a model was built under this policy."""
    found: Any = getattr(model, "layers", None) or getattr(model, "submodules", ())
    return any(getattr(getattr(layer, "dtype_policy", None), "name", None) == policy for layer in found)


def has_loss_scale(optimizer: object) -> bool:
    """True if an optimizer scales the loss and skips steps that overflow, as for float16."""
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer) or hasattr(optimizer, "get_scaled_loss")


def needs_loss_scale(model: object, optimizer: object, precision: str) -> bool:
    """True if small gradients would be 0 in float16: of "fp16", and of a Keras model built under `mixed_float16`.

    False if the optimizer scales already, and for that of `compile()`, which Keras has wrapped unless told not to.
    """
    if has_loss_scale(optimizer):
        return False
    if precision == "fp16":
        return True
    is_compiled = getattr(model, "optimizer", None) is optimizer
    is_scaled = getattr(optimizer, "loss_scale_factor", None) is not None
    is_known = isinstance(model, keras.Model) and isinstance(optimizer, keras.optimizers.Optimizer)
    return is_known and not is_compiled and not is_scaled and computes_in(model, POLICIES["fp16"])


def scale_loss(optimizer: object, loss: object) -> Any:
    """Returns the loss multiplied by the factor by which the optimizer divides the gradients."""
    if hasattr(optimizer, "get_scaled_loss"):  # of tf_keras
        return optimizer.get_scaled_loss(loss)
    return optimizer.scale_loss(loss) if hasattr(optimizer, "scale_loss") else loss


def loss_scale(optimizer: object) -> Any:
    """Returns the factor by which the gradients are scaled."""
    if has_loss_scale(optimizer):
        scale = getattr(optimizer, "dynamic_scale", getattr(optimizer, "loss_scale", None))
        return tf.cast(tf.convert_to_tensor(scale), tf.float32)
    return getattr(optimizer, "loss_scale_factor", None) or 1.0
