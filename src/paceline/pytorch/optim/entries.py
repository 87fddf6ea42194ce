"""Entries of the optimizer registry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.args.sections import Options

Made = tuple[Any, dict[str, Any]]

ADAM_DEFAULTS = {"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8}


def no_settings(args: Options) -> dict[str, Any]:
    """Returns no keyword arguments, so only the learning rate is passed."""
    return {}


def adam_settings(args: Options) -> dict[str, Any]:
    """Returns betas and eps from the arguments."""
    return {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}


def changed_adam_settings(args: Options) -> dict[str, Any]:
    """Returns betas and eps from the arguments if they differ from the defaults; otherwise the class uses its own."""
    settings: dict[str, Any] = {}
    if (args.adam_beta1, args.adam_beta2) != (ADAM_DEFAULTS["adam_beta1"], ADAM_DEFAULTS["adam_beta2"]):
        settings["betas"] = (args.adam_beta1, args.adam_beta2)
    if args.adam_epsilon != ADAM_DEFAULTS["adam_epsilon"]:
        settings["eps"] = args.adam_epsilon
    return settings


def as_it_is(made: Made, args: Options, model: object, given: dict[str, Any]) -> Made:
    """Returns the class and its arguments, with the additional options added to the arguments."""
    return made[0], {**made[1], **given}


@dataclass(frozen=True)
class OptimizerEntry:
    """The recipe of the optimizer for one name in `optim`.

    Fields:
        load: returns the class; imports its package if that is optional.
        settings: `(training arguments) -> keyword arguments` of the class, without params, lr and weight_decay.
        options: names in `optim_args` that are not arguments of the class, with their defaults.
        finish: `((class, keyword arguments), training arguments, model or None, values of options) -> (class, keyword
            arguments)`.
        targets: True if `optim_target_modules` is read.
        devices: device types that the optimizer supports; empty: all.
        package: the package of the class.
        note: text for the table in the documentation.
    """

    load: Callable[[], Any]
    settings: Callable[[Any], dict[str, Any]] = no_settings
    options: Mapping[str, Any] = field(default_factory=dict)
    finish: Callable[[Made, Any, Any, dict[str, Any]], Made] = as_it_is
    targets: bool = False
    devices: frozenset[str] = frozenset()
    package: str = "torch"
    note: str = ""

    def reads(self, option: str, args: Options) -> bool:
        """Returns True if `settings` reads this option of the arguments."""
        read: set[str] = set()
        self.settings(Watched(args, read))
        return option in read


class Watched:
    """A wrapper of arguments that records which names are read.

    Args:
        args: the wrapped arguments.
        read: the set to which the names are added.
    """

    def __init__(self, args: Options, read: set[str]) -> None:
        self._args = args
        self._read = read

    def __getattr__(self, name: str) -> Any:
        self._read.add(name)
        return getattr(self._args, name)
