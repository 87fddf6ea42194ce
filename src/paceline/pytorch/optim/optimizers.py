"""Creates optimizers by their name in `optim`.

To add an optimizer, put an `OptimizerEntry` into `OPTIMIZERS` (or into `FROM_LIBRARIES` of `optim.libraries`, if its
class comes from another package). The entry loads the class and returns its keyword arguments besides the learning
rate. `optim_args` then sets every other argument of the class without further code.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.args.sections import Options
from paceline.core.optimizer_options import typed_options
from paceline.core.spelling import nearest
from paceline.pytorch.optim.adafactor import Adafactor
from paceline.pytorch.optim.adapted import EmbeddingsIn32Bits, adapted
from paceline.pytorch.optim.choose import Choice, choose_optimizer, why_not_fused
from paceline.pytorch.optim.entries import ADAM_DEFAULTS, Made, OptimizerEntry, adam_settings
from paceline.pytorch.optim.groups import decay_parameter_names, parameter_groups
from paceline.pytorch.optim.layerwise import PerParameterOptimizer, by_parameter
from paceline.pytorch.optim.libraries import FROM_LIBRARIES
from paceline.pytorch.optim.muon import MuonWithAdamW

__all__ = [
    "OPTIMIZERS",
    "OptimizerEntry",
    "build_optimizer",
    "create_optimizer",
    "decay_parameter_names",
    "describe_choice",
    "parameter_groups",
    "resolve_optimizer",
]

logger = logging.getLogger(__name__)


def given_rate(made: Made, args: Options, model: object, given: dict[str, Any]) -> Made:
    """Returns Adafactor with the learning rate from the arguments.

    Raises:
        ValueError: `relative_step` is set, which also needs another schedule.
    """
    if made[1].get("relative_step"):
        raise ValueError(
            "optim_args: relative_step=True is not supported with optim='adafactor', which takes learning_rate and a "
            "schedule; make the optimizer yourself, optimizer = Adafactor(model.parameters()), and pass "
            "Trainer(optimizers=(optimizer, AdafactorSchedule(optimizer))), both from transformers.optimization or "
            "paceline"
        )
    return made


OPTIMIZERS: dict[str, OptimizerEntry] = {
    "adamw_torch": OptimizerEntry(lambda: torch.optim.AdamW, adam_settings),
    "adamw_torch_fused": OptimizerEntry(lambda: torch.optim.AdamW, lambda args: {**adam_settings(args), "fused": True}),
    "adam": OptimizerEntry(lambda: torch.optim.Adam, adam_settings),
    "nadam": OptimizerEntry(lambda: torch.optim.NAdam, adam_settings),
    "radam": OptimizerEntry(lambda: torch.optim.RAdam, adam_settings),
    "sgd": OptimizerEntry(lambda: torch.optim.SGD),
    "adagrad": OptimizerEntry(lambda: torch.optim.Adagrad),
    "rmsprop": OptimizerEntry(lambda: torch.optim.RMSprop),
    "adafactor": OptimizerEntry(
        lambda: Adafactor, lambda args: {"scale_parameter": False, "relative_step": False}, finish=given_rate
    ),
    "muon": OptimizerEntry(
        lambda: MuonWithAdamW,
        adam_settings,
        targets=True,
        note="needs torch 2.9; `optim_target_modules` may be left out",
    ),
    **FROM_LIBRARIES,
}
"""Name in `optim` -> entry of the optimizer."""


def _find(name: str) -> OptimizerEntry:
    if name in OPTIMIZERS:
        return OPTIMIZERS[name]
    raise ValueError(f"optim={name!r} is no known optimizer; {nearest(name, [*OPTIMIZERS, 'auto'])}")


def _asked(args: Options) -> str:
    return str(getattr(args.optim, "value", args.optim))


def describe_choice(args: Options, model: nn.Module) -> str:
    """Returns a sentence on the optimizer that `args.optim` selects for `model`, with the reason if it is "auto"."""
    asked = _asked(args)
    if asked != "auto":
        _find(asked)
        return f"optim={asked!r}, as asked"
    return _told(choose_optimizer(model))


def _told(choice: Choice) -> str:
    return f"optim='auto' took {choice.name!r}: {choice.reason}"


def resolve_optimizer(args: Options, model: nn.Module | None = None) -> tuple[type[Optimizer], dict[str, Any]]:
    """Returns the optimizer's original class and its keyword arguments, without the parameters.

    Args:
        args: training arguments: optim, optim_args, optim_target_modules, learning_rate, weight_decay, warmup_steps,
            adam_beta1, adam_beta2, adam_epsilon.
        model: required for "auto", for low-rank optimizers and for LOMO. If given, a fused optimizer that the model
            does not support is replaced by the plain one, and an optimizer that its device does not support is an
            error.

    Raises:
        ImportError: the optimizer's package is missing; the message says what to install.
        ValueError, TypeError: the optimizer is unknown, or `optim_args` or `optim_target_modules` are invalid; the
            message suggests the nearest names.
    """
    name = _asked(args)
    if name == "auto":
        if model is None:
            raise ValueError('optim="auto" looks at the model to choose: pass the model')
        choice = choose_optimizer(model)
        name = choice.name
        logger.info("%s", _told(choice))
    entry = _find(name)
    _check_targets(name, entry, args)
    try:
        optimizer_class = entry.load()
    except ImportError as error:
        raise ImportError(f"optim={name!r}: {error}") from error
    _check_device(name, entry, model)
    kwargs = {"lr": args.learning_rate, **entry.settings(args)}
    _tell_unread(name, entry, args)
    given = typed_options(args.optim_args, optimizer_class, name, entry.options)
    further = {option: given.pop(option) for option in entry.options if option in given}
    optimizer_class, kwargs = entry.finish((optimizer_class, {**kwargs, **given}), args, model, further)
    if kwargs.get("fused") and model is not None:
        obstacle = why_not_fused(model)
        if obstacle is not None:
            logger.warning("optim=%r runs without the fused kernel because %s.", name, obstacle)
            del kwargs["fused"]
    return optimizer_class, kwargs


def _check_targets(name: str, entry: OptimizerEntry, args: Options) -> None:
    targets = getattr(args, "optim_target_modules", None)
    if targets and not entry.targets:
        users = ", ".join(other for other, each in OPTIMIZERS.items() if each.targets)
        raise ValueError(f"optim_target_modules={targets!r} is read by {users}; {name!r} has no use for it")


def _tell_unread(name: str, entry: OptimizerEntry, args: Options) -> None:
    """Warns about settings of the Adam family that this optimizer does not take."""
    for option, default in ADAM_DEFAULTS.items():
        value = getattr(args, option, default)
        if value != default and not entry.reads(option, args):
            logger.warning("%s=%s has no effect: optim=%r does not take it; leave it out.", option, value, name)


def _check_device(name: str, entry: OptimizerEntry, model: nn.Module | None) -> None:
    parameters = model.parameters() if model is not None else ()
    device = next((parameter.device.type for parameter in parameters if not parameter.is_meta), None)
    if entry.devices and device is not None and device not in entry.devices:
        raise ValueError(
            f"optim={name!r} runs on {' or '.join(sorted(entry.devices))} only, and the model is on {device!r}: "
            "train there, or choose another optimizer, such as 'adamw_torch_fused'"
        )


def create_optimizer(
    args: Options,
    model: nn.Module,
    *,
    cls_and_kwargs: tuple[Any, dict[str, Any]] | None = None,
    decay_names: Collection[str] | None = None,
) -> Optimizer:
    """Returns the optimizer that `args` selects, over the trainable parameters of `model`.

    Args:
        args: as for `resolve_optimizer`.
        model: the model to train.
        cls_and_kwargs: replaces `args.optim` and `args.optim_args`; see `build_optimizer`.
        decay_names: names of the parameters with weight decay; None: `decay_parameter_names(model)`.

    Raises:
        ValueError: no parameter is trainable, two different weight decays are given, or see `resolve_optimizer`.
    """
    optimizer_class, kwargs = resolve_optimizer(args, model) if cls_and_kwargs is None else cls_and_kwargs
    weight_decay = kwargs.get("weight_decay", args.weight_decay)
    if args.weight_decay and weight_decay != args.weight_decay:
        raise ValueError(
            f"weight_decay is {args.weight_decay} in the arguments and {weight_decay} among the optimizer's own: "
            "leave one out"
        )
    targets = getattr(args, "optim_target_modules", None)
    optimizer_class, kwargs = by_parameter(optimizer_class, kwargs, args)
    return build_optimizer(
        optimizer_class, kwargs, model, weight_decay=weight_decay, targets=targets, decay_names=decay_names
    )


def build_optimizer(
    optimizer_class: object,
    kwargs: dict[str, Any],
    model: nn.Module,
    *,
    weight_decay: float = 0.0,
    targets: str | Sequence[str] | None = None,
    decay_names: Collection[str] | None = None,
) -> Optimizer:
    """Returns an optimizer from a class and its keyword arguments, as in `Trainer(optimizer_cls_and_kwargs=...)`.

    Args:
        optimizer_class: a torch optimizer class, called with parameter groups; or a factory class, which is
            instantiated without arguments and called with the model.
        kwargs: passed to the class. "params" (or "model" or "optimizer_dict", as subclasses of transformers' Trainer
            name them) replaces the parameter groups, and "weight_decay" replaces `weight_decay`.
        model: the model to train.
        weight_decay: the weight decay of the parameters with weight decay.
        targets, decay_names: see `parameter_groups`.
    """
    optimizer = _build(optimizer_class, dict(kwargs), model, weight_decay, targets, decay_names)
    if kwargs.get("optim_bits") == 8 and isinstance(optimizer, EmbeddingsIn32Bits):
        optimizer.adapt_to(model)
    return optimizer


def _build(
    optimizer_class: Any,
    kwargs: dict[str, Any],
    model: nn.Module,
    weight_decay: float,
    targets: str | Sequence[str] | None,
    decay_names: Collection[str] | None,
) -> Optimizer:
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        return cast(Optimizer, optimizer_class()(model, **kwargs))
    optimizer_class = inner = adapted(optimizer_class)
    if issubclass(optimizer_class, PerParameterOptimizer):
        inner = kwargs["optimizer_class"] = adapted(kwargs["optimizer_class"])
    name = "muon" if issubclass(inner, MuonWithAdamW) else ""
    given = [kwargs.pop(key) for key in ("params", "model", "optimizer_dict") if key in kwargs]
    groups = given[-1] if given else None
    if groups is None:
        weight_decay = kwargs.pop("weight_decay", weight_decay)
        groups = parameter_groups(model, weight_decay, name, targets=targets or None, decay_names=decay_names)
        if not any(group["params"] for group in groups):
            raise ValueError(
                f"{type(model).__name__} has no trainable parameter: set requires_grad=True on what should be trained"
            )
    return cast(Optimizer, optimizer_class(groups, **kwargs))
