"""Validation of knowledge distillation: the options `teacher` and `distillation_*`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.args.errors import UnsupportedOption, parse_json, wrong_value
from paceline.args.packing import JOINING, packing_of
from paceline.args.sections import DistillationSection, Options


@dataclass(frozen=True)
class DistillationSettings:
    """The settings of a distillation.

    Attributes:
        temperature: divides the logits of both models in the soft loss.
        alpha: the weight of the soft loss; the hard loss has 1 - alpha.
        top_k: classes of the teacher that the soft loss distinguishes; None: all.
        layers: names of the teacher's modules by names of the student's.
        layer_loss: "mse" or "cosine".
        layer_weight: the weight of the loss of the hidden states.
    """

    temperature: float
    alpha: float
    top_k: int | None
    layers: Mapping[str, str]
    layer_loss: str
    layer_weight: float


def keep_layers(name: str, value: object) -> object:
    """Converts `distillation_layers`, a mapping or JSON, to a plain dict."""
    given = parse_json(name, value) if isinstance(value, str) else value
    if given is None:
        return None
    if (
        not isinstance(given, Mapping)
        or not given
        or not all(isinstance(part, str) and part for pair in given.items() for part in pair)
    ):
        raise wrong_value(name, value, "expected names of the student's modules with those of the teacher's")
    return dict(given)


def settings_of(options: Options) -> DistillationSettings:
    """Returns the settings that the options ask for."""
    layers: Any = options.distillation_layers or {}
    return DistillationSettings(
        temperature=options.distillation_temperature,
        alpha=options.distillation_alpha,
        top_k=options.distillation_top_k,
        layers=layers,
        layer_loss=options.distillation_layer_loss,
        layer_weight=options.distillation_layer_weight,
    )


def check_distillation(options: Options) -> None:
    """Checks the ranges of the options of distillation, and that those of layers come with layers.

    Raises:
        ValueError: a value is out of range, or belongs to an option that is not set.
    """
    if not (options.distillation_temperature > 0 and math.isfinite(options.distillation_temperature)):
        raise wrong_value("distillation_temperature", options.distillation_temperature, "expected a number above 0")
    if not 0 <= options.distillation_alpha <= 1:
        raise wrong_value("distillation_alpha", options.distillation_alpha, "expected a weight from 0 to 1")
    if options.distillation_top_k is not None and options.distillation_top_k < 1:
        raise wrong_value(
            "distillation_top_k", options.distillation_top_k, "expected a number of classes of at least 1"
        )
    if not (options.distillation_layer_weight > 0 and math.isfinite(options.distillation_layer_weight)):
        raise wrong_value("distillation_layer_weight", options.distillation_layer_weight, "expected a number above 0")
    if options.distillation_layers is None:
        for name in ("distillation_layer_loss", "distillation_layer_weight"):
            if getattr(options, name) != default_of(name):
                raise ValueError(
                    f"{name}={getattr(options, name)!r} requires distillation_layers: set that too, or leave it out."
                )
    elif options.torch_compile:
        raise UnsupportedOption(
            "distillation_layers with torch_compile=True is not supported, whose code keeps no outputs of modules: "
            "leave one of them out."
        )
    check_cache(options)
    if options.teacher is not None:
        check_with_teacher(options)


def check_cache(options: Options) -> None:
    """Refuses the options with which a sample has no logits of its own that could be kept.

    Raises:
        ValueError: `distillation_cache` names no folder.
        UnsupportedOption: such an option is set.
    """
    folder = options.distillation_cache
    if folder is None:
        return
    if not str(folder).strip():
        raise wrong_value("distillation_cache", folder, "expected a folder")
    asked = f"distillation_cache={str(folder)!r}"
    if options.distillation_layers is not None:
        raise UnsupportedOption(
            f"{asked} with distillation_layers is not supported: it keeps no hidden states. Leave one of them out."
        )
    if options.sequence_length_warmup:
        raise UnsupportedOption(
            f"{asked} with sequence_length_warmup is not supported, which cuts the samples: leave one of them out."
        )


def check_without_teacher(options: Options) -> None:
    """Raises ValueError if an option of distillation is set, for a Trainer without a teacher."""
    for name in DistillationSection.__dataclass_fields__:
        if name != "teacher" and getattr(options, name) != default_of(name):
            raise ValueError(
                f"{name}={getattr(options, name)!r} requires a teacher: pass Trainer(teacher=...), set the option "
                "teacher to the folder of a model, or leave it out."
            )


def check_with_teacher(options: Options) -> None:
    """Refuses the options whose numbers would not be right with a teacher.

    Raises:
        UnsupportedOption: such an option is set.
    """
    if packing_of(options) in JOINING:
        raise UnsupportedOption(
            f"packing={options.packing!r} with a teacher is not supported, which would see across the documents of a "
            "row: set packing='group', or leave it out."
        )
    if options.linear_cross_entropy not in (False, "auto"):
        raise UnsupportedOption(
            f"linear_cross_entropy={options.linear_cross_entropy!r} trains without logits, and the soft loss of a "
            "teacher needs them: set it to False, or leave the teacher out."
        )
    if callable(options.loss_weight):
        raise UnsupportedOption(
            "loss_weight=<function> with a teacher is not supported, whose soft loss is a mean over the same items as "
            "the hard one: name them, as in loss_weight='samples'."
        )
    # cross-entropies and losses of samples that are observed in a pass would be those of the teacher too
    observers = ("log_token_metrics", "loss_by_source", "z_loss_weight")
    for name in ("deepspeed", "regularizers", "use_liger_kernel", *observers):
        if getattr(options, name):
            raise UnsupportedOption(f"{name} with a teacher is not supported: leave one of them out.")


def default_of(name: str) -> Any:
    """Returns the default of an option."""
    return DistillationSection.__dataclass_fields__[name].default
