"""Optimizers by their name in `optim`.

To add one, put an `OptimizerEntry` into `OPTIMIZERS`: how its class is found, and its keyword arguments beside the
learning rate. `optim_args` then reaches every other argument of the class by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.args.errors import UnsupportedOption
from paceline.core.optimizer_options import typed_options
from paceline.core.spelling import nearest
from paceline.optim.adafactor import Adafactor
from paceline.optim.choose import Choice, choose_optimizer, why_not_fused
from paceline.optim.groups import decay_parameter_names, parameter_groups
from paceline.optim.muon import MuonWithAdamW

__all__ = [
    "LIBRARY_OF",
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


@dataclass(frozen=True)
class OptimizerEntry:
    """How one name in `optim` becomes an optimizer.

    Fields:
        load: returns the class; imports its package, if that is an optional one.
        settings: training arguments -> keyword arguments of the class, without params, lr and weight_decay.
    """

    load: Callable[[], type[Optimizer]]
    settings: Callable[[Any], dict[str, Any]]


def _adam_settings(args: Any) -> dict[str, Any]:
    return {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}


def _no_settings(args: Any) -> dict[str, Any]:
    return {}


OPTIMIZERS: dict[str, OptimizerEntry] = {
    "adamw_torch": OptimizerEntry(lambda: torch.optim.AdamW, _adam_settings),
    "adamw_torch_fused": OptimizerEntry(
        lambda: torch.optim.AdamW, lambda args: {**_adam_settings(args), "fused": True}
    ),
    "adam": OptimizerEntry(lambda: torch.optim.Adam, _adam_settings),
    "nadam": OptimizerEntry(lambda: torch.optim.NAdam, _adam_settings),
    "radam": OptimizerEntry(lambda: torch.optim.RAdam, _adam_settings),
    "sgd": OptimizerEntry(lambda: torch.optim.SGD, _no_settings),
    "adagrad": OptimizerEntry(lambda: torch.optim.Adagrad, _no_settings),
    "rmsprop": OptimizerEntry(lambda: torch.optim.RMSprop, _no_settings),
    "adafactor": OptimizerEntry(lambda: Adafactor, lambda args: {"scale_parameter": False, "relative_step": False}),
    "muon": OptimizerEntry(lambda: MuonWithAdamW, _adam_settings),
}
"""Name in `optim` -> how to make it."""

_FROM_LIBRARIES = {
    "torch_xla": ("adamw_torch_xla",),
    "torch_npu": ("adamw_torch_npu_fused",),
    "apex": ("adamw_apex_fused",),
    "torchdistx": ("adamw_anyprecision",),
    "torchao": ("adamw_torch_4bit", "adamw_torch_8bit"),
    "bitsandbytes": (
        "ademamix",
        "ademamix_8bit",
        "adamw_bnb_8bit",
        "adamw_8bit",
        "lion_8bit",
        "lion_32bit",
        "paged_adamw_32bit",
        "paged_adamw_8bit",
        "paged_ademamix_32bit",
        "paged_ademamix_8bit",
        "paged_lion_32bit",
        "paged_lion_8bit",
        "rmsprop_bnb",
        "rmsprop_bnb_8bit",
        "rmsprop_bnb_32bit",
    ),
    "galore_torch": (
        "galore_adamw",
        "galore_adamw_8bit",
        "galore_adafactor",
        "galore_adamw_layerwise",
        "galore_adamw_8bit_layerwise",
        "galore_adafactor_layerwise",
    ),
    "lomo_optim": ("lomo", "adalomo"),
    "grokadamw": ("grokadamw",),
    "schedulefree": ("schedule_free_radam", "schedule_free_adamw", "schedule_free_sgd"),
    "apollo_torch": ("apollo_adamw", "apollo_adamw_layerwise"),
    "optimi": ("stable_adamw",),
}
LIBRARY_OF = {name: library for library, names in _FROM_LIBRARIES.items() for name in names}
"""Names in `optim` that other packages implement and paceline does not reach yet -> that package."""


def _find(name: str) -> OptimizerEntry:
    if name in OPTIMIZERS:
        return OPTIMIZERS[name]
    if name in LIBRARY_OF:
        raise UnsupportedOption(
            f"optim={name!r} is made by the package {LIBRARY_OF[name]}, which this version does not reach yet: "
            f"pass its class as optimizer_cls_and_kwargs=(class, kwargs) to the Trainer, or choose one of "
            f"{', '.join(OPTIMIZERS)}"
        )
    raise ValueError(f"optim={name!r} is no known optimizer; {nearest(name, [*OPTIMIZERS, 'auto'])}")


def _asked(args: Any) -> str:
    return str(getattr(args.optim, "value", args.optim))


def describe_choice(args: Any, model: nn.Module) -> str:
    """One sentence on the optimizer that `args.optim` gives for `model`, with the reason if it is "auto"."""
    asked = _asked(args)
    if asked != "auto":
        _find(asked)
        return f"optim={asked!r}, as asked"
    return _told(choose_optimizer(model))


def _told(choice: Choice) -> str:
    return f"optim='auto' took {choice.name!r}: {choice.reason}"


def resolve_optimizer(args: Any, model: nn.Module | None = None) -> tuple[type[Optimizer], dict[str, Any]]:
    """The optimizer's class and its keyword arguments, parameters not included.

    Args:
        args: training arguments: optim, optim_args, optim_target_modules (for Muon), learning_rate, adam_beta1,
            adam_beta2, adam_epsilon.
        model: needed for "auto"; where given, a fused optimizer that it rules out is replaced by the plain one.

    Raises:
        UnsupportedOption: an optimizer of a package that is not reached yet.
        ValueError, TypeError: an unknown optimizer, or `optim_args` that do not fit; the nearest names are given.
    """
    name = _asked(args)
    if name == "auto":
        if model is None:
            raise ValueError('optim="auto" looks at the model to choose: pass the model')
        choice = choose_optimizer(model)
        name = choice.name
        logger.info("%s", _told(choice))
    entry = _find(name)
    targets = getattr(args, "optim_target_modules", None)
    if targets and name != "muon":
        raise ValueError(f'optim_target_modules={targets!r} is for optim="muon"; {name!r} has no use for it')
    optimizer_class = entry.load()
    kwargs = {"lr": args.learning_rate, **entry.settings(args)}
    kwargs.update(typed_options(args.optim_args, optimizer_class, name))
    if kwargs.get("fused") and model is not None:
        obstacle = why_not_fused(model)
        if obstacle is not None:
            logger.warning("optim=%r runs without the fused kernel because %s.", name, obstacle)
            del kwargs["fused"]
    return optimizer_class, kwargs


def create_optimizer(
    args: Any,
    model: nn.Module,
    *,
    cls_and_kwargs: tuple[Any, dict[str, Any]] | None = None,
    decay_names: Collection[str] | None = None,
) -> Optimizer:
    """The optimizer that `args` asks for, over the trainable parameters of `model`.

    Args:
        args: as for `resolve_optimizer`, and weight_decay and optim_target_modules (for Muon).
        cls_and_kwargs: used instead of what `args.optim` and `args.optim_args` say; see `build_optimizer`.
        decay_names: parameters that get weight decay; None: `decay_parameter_names(model)`.

    Raises:
        ValueError: no parameter is trainable, two weight decays, or as `resolve_optimizer`.
    """
    optimizer_class, kwargs = resolve_optimizer(args, model) if cls_and_kwargs is None else cls_and_kwargs
    weight_decay = kwargs.get("weight_decay", args.weight_decay)
    if args.weight_decay and weight_decay != args.weight_decay:
        raise ValueError(
            f"weight_decay is {args.weight_decay} in the arguments and {weight_decay} among the optimizer's own: "
            "leave one out"
        )
    targets = getattr(args, "optim_target_modules", None)
    return build_optimizer(
        optimizer_class, kwargs, model, weight_decay=weight_decay, targets=targets, decay_names=decay_names
    )


def build_optimizer(
    optimizer_class: Any,
    kwargs: dict[str, Any],
    model: nn.Module,
    *,
    weight_decay: float = 0.0,
    targets: str | Sequence[str] | None = None,
    decay_names: Collection[str] | None = None,
) -> Optimizer:
    """An optimizer from a class and its keyword arguments, as in `Trainer(optimizer_cls_and_kwargs=...)`.

    Args:
        optimizer_class: a torch optimizer class, called with parameter groups; or the class of a factory, which is
            made without arguments and called with the model.
        kwargs: passed on, but for "params" (or "model" or "optimizer_dict", as subclasses of transformers' Trainer
            name them), which replaces the groups; "weight_decay" replaces `weight_decay`.
        targets, decay_names: see `parameter_groups`.
    """
    kwargs = dict(kwargs)
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        return cast(Optimizer, optimizer_class()(model, **kwargs))
    name = "muon" if issubclass(optimizer_class, MuonWithAdamW) else ""
    given = [kwargs.pop(key) for key in ("params", "model", "optimizer_dict") if key in kwargs]
    groups = given[-1] if given else None
    if groups is None:
        weight_decay = kwargs.pop("weight_decay", weight_decay)
        groups = parameter_groups(model, weight_decay, name, targets=targets or None, decay_names=decay_names)
        if not any(group["params"] for group in groups):
            raise ValueError(
                f"{type(model).__name__} has no trainable parameter: set requires_grad=True on what should be trained"
            )
    return optimizer_class(groups, **kwargs)
