"""Mixed precision: Keras' policies, put on the layers of a model that was built without one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from paceline.tf.framework import keras

POLICIES = {"bf16": "mixed_bfloat16", "fp16": "mixed_float16"}


@contextmanager
def in_precision(model: Any, precision: str, option: str | None = None) -> Iterator[None]:
    """While entered, a Keras 3 model computes in the precision of the plan; its layers have their own back afterwards.

    Args:
        model: of any kind, where there is nothing to change.
        precision: "bf16", "fp16", or another for that of the model.
        option: that asked for it, for the error; None: the one of the precision's name.

    Raises:
        ValueError: the model is not of Keras 3 and was not built under the policy, or was built under another.
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


def evaluation_precision(args: Any) -> tuple[str, str | None]:
    """The precision of evaluations, and the option that asked for it if it is not that of the training."""
    for precision in POLICIES:
        if getattr(args, f"{precision}_full_eval"):
            return precision, f"{precision}_full_eval"
    return args.mixed_precision, None


def computes_in(model: Any, policy: str) -> bool:
    """Whether a model was built under this policy."""
    found: Any = getattr(model, "layers", None) or getattr(model, "submodules", ())
    return any(getattr(getattr(layer, "dtype_policy", None), "name", None) == policy for layer in found)
