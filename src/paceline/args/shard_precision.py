"""In which number formats a sharded model computes and exchanges: `fsdp_config["mixed_precision_policy"]`, read."""

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
    """Formats by torch's names ("bfloat16", "float16", "float32"); None: as it comes.

    Attributes:
        parameters: of the copies that are gathered, and so of what is computed with them.
        gradients: in which gradients are exchanged.
        outputs: that the outputs of the model are cast to.
        casts_inputs: inputs of floating point are cast to the format of the parameters.
    """

    parameters: str | None = None
    gradients: str | None = None
    outputs: str | None = None
    casts_inputs: bool = True

    @property
    def is_short(self) -> bool:
        """Whether anything that the model computes may be in 16 bits."""
        return not {self.parameters, self.outputs} <= {None, "float32"}

    @property
    def exchanges_short(self) -> bool:
        """Whether gradients are exchanged in 16 bits, in which they must not be added up over micro-batches."""
        return (self.gradients or self.parameters) not in (None, "float32")

    def describe(self) -> str:
        """The formats in words."""
        parts = [
            f"{what} in {SHORT[name]}"
            for what, name in (
                ("weights are gathered", self.parameters),
                ("gradients exchanged", self.gradients or self.parameters),
                ("outputs returned", self.outputs),
            )
            if name is not None
        ]
        inputs = [] if self.casts_inputs or self.parameters is None else ["inputs as they come"]
        return ", ".join(parts + inputs)


def read_policy(value: Any) -> ShardPrecision | None:
    """The formats; None where nothing is asked for.

    Args:
        value: "bf16", "fp16" or "fp32" for all three; a mapping with `param_dtype`, `reduce_dtype`, `output_dtype` and
            `cast_forward_inputs`, each perhaps missing; or torch's MixedPrecisionPolicy.

    Raises:
        ValueError: an unknown format or key.
        UnsupportedOption: fp8, or what fully_shard has no counterpart of.
    """
    shown = f"fsdp_config[{NAME!r}]={value!r}"
    if value in (None, "", {}, False) or str(value).lower() in ("none", "no"):
        return None
    if isinstance(value, str) or is_format(value):
        name = read_format(shown, value)
        return ShardPrecision(name, name, name)
    settings = value if isinstance(value, Mapping) else fields_of(shown, value)
    for key, item in settings.items():
        if key == "buffer_dtype" and (item is None or read_format(shown, item) == "float32"):
            continue
        if key == "buffer_dtype":
            raise UnsupportedOption(f"{shown} is not supported: fully_shard leaves buffers alone; leave {key!r} out.")
        if key not in (*FIELDS, "cast_forward_inputs"):
            known = ", ".join((*FIELDS, "cast_forward_inputs"))
            raise ValueError(f"{shown} has no {key!r}; it takes {known}.")
    casts_inputs = settings.get("cast_forward_inputs", True)
    if not isinstance(casts_inputs, bool):
        raise ValueError(f"{shown} is not possible: cast_forward_inputs is True or False.")
    parameters, gradients, outputs = (
        None if settings.get(key) is None else read_format(shown, settings[key]) for key in FIELDS
    )
    policy = ShardPrecision(parameters, gradients, outputs, casts_inputs)
    return policy if parameters or gradients or outputs else None


def is_format(value: Any) -> bool:
    """Whether a value is a dtype of torch, which this package does not load."""
    return type(value).__module__ == "torch" and type(value).__name__ == "dtype"


def fields_of(shown: str, policy: Any) -> dict[str, Any]:
    """The settings that a MixedPrecisionPolicy holds.

    Raises:
        ValueError: it is something else.
    """
    names = (*FIELDS, "cast_forward_inputs")
    if not all(hasattr(policy, name) for name in names):
        raise ValueError(
            f"{shown} is not possible: give 'bf16', 'fp16', 'fp32', a dict of {', '.join(FIELDS)}, or a "
            "torch.distributed.fsdp.MixedPrecisionPolicy."
        )
    return {name: getattr(policy, name) for name in names}


def read_format(shown: str, value: Any) -> str:
    """torch's name of a format.

    Raises:
        ValueError: there is none of that name.
        UnsupportedOption: fp8.
    """
    text = str(value).removeprefix("torch.").lower()
    if text.startswith(("fp8", "float8")):
        raise UnsupportedOption(f"{shown} is not supported: {value} is no format to hold whole weights in; use 'bf16'.")
    name = FORMATS.get(text, text)
    if name not in SHORT:
        raise ValueError(f"{shown}: {value!r} is not possible; choose from {', '.join(FORMATS)}.")
    return name


def check_policy_fits(policy: ShardPrecision | None, value: Any, options: Any) -> None:
    """Check that a policy and the options on number formats say one thing.

    Args:
        policy: that was read.
        value: what it was read from, for the message.
        options: with `bf16`, `fp16` and the two `*_full_eval`.

    Raises:
        ValueError: they contradict each other, or float16 comes without the scaling of losses.
    """
    if policy is None:
        return
    shown = f"fsdp_config[{NAME!r}]={value!r}"
    other = {"bfloat16": "fp16", "float16": "bf16"}.get(policy.parameters or "")
    if other is not None and getattr(options, other):
        raise ValueError(f"{shown} and {other}=True contradict each other: use one format, or leave {other} out.")
    if "float16" in (policy.parameters, policy.gradients, policy.outputs) and not options.fp16:
        raise ValueError(
            f"{shown} and fp16={options.fp16} contradict each other: gradients vanish in float16 without loss scaling. "
            "Set fp16=True too, or use 'bf16'."
        )
    for name in ("bf16_full_eval", "fp16_full_eval"):
        if getattr(options, name):
            raise ValueError(
                f"{shown} and {name}=True contradict each other: under a policy the model is evaluated as it is "
                f"trained; leave {name} out."
            )
