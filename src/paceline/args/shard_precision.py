"""Mixed precision of a sharded model: validation of `fsdp_config["mixed_precision_policy"]`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.args.errors import UnsupportedOption

NAME = "mixed_precision_policy"
FORMATS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}  # accelerate's names -> torch's
SHORT = {long: short for short, long in FORMATS.items()}
FIELDS = ("param_dtype", "reduce_dtype", "output_dtype")


@dataclass(frozen=True)
class ShardPrecision:
    """Dtypes by torch's names ("bfloat16", "float16", "float32"); None for no cast.

    Attributes:
        parameters: dtype of the gathered parameters, and so of the computation.
        gradients: dtype of the gradient reduction.
        outputs: dtype that the model's outputs are cast to.
        casts_inputs: True casts floating-point inputs to the dtype of the parameters.
    """

    parameters: str | None = None
    gradients: str | None = None
    outputs: str | None = None
    casts_inputs: bool = True

    @property
    def is_short(self) -> bool:
        """True if the model may compute in 16 bits."""
        return not {self.parameters, self.outputs} <= {None, "float32"}

    @property
    def exchanges_short(self) -> bool:
        """True if gradients are reduced in 16 bits. They must not be accumulated over micro-batches in 16 bits."""
        return (self.gradients or self.parameters) not in (None, "float32")

    def describe(self) -> str:
        """Describes the dtypes."""
        parts = [
            f"{what} in {SHORT[name]}"
            for what, name in (
                ("weights are gathered", self.parameters),
                ("gradients reduced", self.gradients or self.parameters),
                ("outputs returned", self.outputs),
            )
            if name is not None
        ]
        inputs = [] if self.casts_inputs or self.parameters is None else ["inputs not cast"]
        return ", ".join(parts + inputs)


def read_policy(value: object) -> ShardPrecision | None:
    """Reads the dtypes; returns None if unset.

    Args:
        value: "bf16", "fp16" or "fp32" for all three; a mapping with any of `param_dtype`, `reduce_dtype`,
            `output_dtype` and `cast_forward_inputs`; or torch's MixedPrecisionPolicy.

    Raises:
        ValueError: an unknown dtype or key.
        UnsupportedOption: fp8, or a setting that fully_shard does not have.
    """
    shown = f"fsdp_config[{NAME!r}]={value!r}"
    if value in (None, "", {}, False) or str(value).lower() in ("none", "no"):
        return None
    if isinstance(value, str) or is_format(value):
        name = read_format(shown, value)
        return ShardPrecision(name, name, name)
    settings = value if isinstance(value, Mapping) else fields_of(shown, value)
    check_settings(shown, settings)
    casts_inputs = settings.get("cast_forward_inputs", True)
    if not isinstance(casts_inputs, bool):
        raise ValueError(f"{shown} is invalid: expected True or False for cast_forward_inputs.")
    parameters, gradients, outputs = (
        None if settings.get(key) is None else read_format(shown, settings[key]) for key in FIELDS
    )
    policy = ShardPrecision(parameters, gradients, outputs, casts_inputs)
    return policy if parameters or gradients or outputs else None


def check_settings(shown: str, settings: Mapping[str, Any]) -> None:
    """Checks the keys of a mapping of dtypes.

    Args:
        shown: the option and its value, for messages.

    Raises:
        ValueError: an unknown key.
        UnsupportedOption: `buffer_dtype` is not float32.
    """
    known = (*FIELDS, "cast_forward_inputs")
    for key, item in settings.items():
        if key == "buffer_dtype":
            if item is not None and read_format(shown, item) != "float32":
                raise UnsupportedOption(
                    f"{shown} is not supported: fully_shard does not cast buffers; leave {key!r} out."
                )
        elif key not in known:
            raise ValueError(f"{shown} has no {key!r}; it takes {', '.join(known)}.")


def is_format(value: object) -> bool:
    """True if a value is a torch dtype; this package does not import torch."""
    return type(value).__module__ == "torch" and type(value).__name__ == "dtype"


def fields_of(shown: str, policy: object) -> dict[str, Any]:
    """Returns the settings of a MixedPrecisionPolicy.

    Raises:
        ValueError: `policy` is another object.
    """
    names = (*FIELDS, "cast_forward_inputs")
    if not all(hasattr(policy, name) for name in names):
        raise ValueError(
            f"{shown} is invalid: expected 'bf16', 'fp16', 'fp32', a dict of {', '.join(FIELDS)}, or a "
            "torch.distributed.fsdp.MixedPrecisionPolicy."
        )
    return {name: getattr(policy, name) for name in names}


def read_format(shown: str, value: object) -> str:
    """Returns torch's name of a dtype.

    Raises:
        ValueError: the name is unknown.
        UnsupportedOption: fp8.
    """
    text = str(value).removeprefix("torch.").lower()
    if text.startswith(("fp8", "float8")):
        raise UnsupportedOption(f"{shown} is not supported: {value} is not a dtype for full weights; use 'bf16'.")
    name = FORMATS.get(text, text)
    if name not in SHORT:
        raise ValueError(f"{shown}: {value!r} is invalid; expected one of {', '.join(FORMATS)}.")
    return name


def check_policy_fits(policy: ShardPrecision | None, value: object, options: Any) -> None:
    """Checks that a policy and the precision options are consistent.

    Args:
        policy: the policy as read.
        value: its original value, for the message.
        options: the arguments: `bf16`, `fp16` and the two `*_full_eval`.

    Raises:
        ValueError: they contradict each other, or fp16 comes without loss scaling.
    """
    if policy is None:
        return
    shown = f"fsdp_config[{NAME!r}]={value!r}"
    other = {"bfloat16": "fp16", "float16": "bf16"}.get(policy.parameters or "")
    if other is not None and getattr(options, other):
        raise ValueError(f"{shown} and {other}=True contradict each other: use one dtype, or leave {other} out.")
    if "float16" in (policy.parameters, policy.gradients, policy.outputs) and not options.fp16:
        raise ValueError(
            f"{shown} and fp16={options.fp16} contradict each other: gradients underflow in fp16 without loss scaling. "
            "Set fp16=True too, or use 'bf16'."
        )
    for name in ("bf16_full_eval", "fp16_full_eval"):
        if getattr(options, name):
            raise ValueError(
                f"{shown} and {name}=True contradict each other: under a policy the model is evaluated as it is "
                f"trained; leave {name} out."
            )
