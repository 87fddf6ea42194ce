"""The settings that accelerate's users keep under `accelerator_config`."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields
from typing import Any

from paceline.args.errors import UnsupportedOption


@dataclass
class AcceleratorConfig:
    """How batches are shared between processes.

    Attributes:
        split_batches: batches of the loader are cut among the processes, rather than one for each.
        dispatch_batches: the first process reads all data and sends it to the others.
        even_batches: every process gets as many samples as the others.
        use_seedable_sampler: the order of the samples is a function of the seed.
        non_blocking: copies to the device do not wait.
        gradient_accumulation_kwargs: settings of accelerate's accumulation plugin.
        use_configured_state: take over an accelerate state that exists already.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = True
    non_blocking: bool = False
    gradient_accumulation_kwargs: dict[str, Any] | None = None
    use_configured_state: bool = False

    def pop(self, key: str, default: Any = None) -> Any:
        """Take a setting out: it is at its default afterwards."""
        return vars(self).pop(key, default)

    @classmethod
    def from_json_file(cls, json_file: str | os.PathLike[str]) -> AcceleratorConfig:
        """Read the settings from a JSON file.

        Raises:
            ValueError: the file names a setting that does not exist.
        """
        with open(json_file, encoding="utf-8") as file:
            return cls.from_dict(json.load(file))

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> AcceleratorConfig:
        """Make the settings from a dict.

        Raises:
            ValueError: `settings` names one that does not exist.
        """
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(settings) - set(known))
        if unknown:
            raise ValueError(f"accelerator_config has no setting {unknown}; it has {known}.")
        return cls(**settings)

    def to_dict(self) -> dict[str, Any]:
        """The settings as a dict."""
        return asdict(self)

    @property
    def num_steps(self) -> int | None:
        """Micro-batches of an update, where the settings of accelerate's accumulation plugin say so."""
        steps = (self.gradient_accumulation_kwargs or {}).get("num_steps")
        return steps if type(steps) is int else None

    def changed(self) -> dict[str, Any]:
        """The settings that differ from their defaults."""
        defaults = asdict(AcceleratorConfig())
        return {name: value for name, value in asdict(self).items() if value != defaults[name]}


ACCUMULATION = ("num_steps", "adjust_scheduler", "sync_with_dataloader", "sync_each_batch")
SHARED_IN_PARTS = "each process reads its part of one order"
# setting and value -> why it changes nothing, on any number of processes
IDLE: dict[tuple[str, Any], str] = {
    ("dispatch_batches", False): SHARED_IN_PARTS,
    ("even_batches", False): "no sample ever comes twice",
    ("non_blocking", True): "copies to the device never wait",
}
ONE_PROCESS_ONLY = ("split_batches", "dispatch_batches", "sync_each_batch")
# setting and value -> why it cannot be had
REFUSED: dict[tuple[str, Any], str] = {
    ("use_seedable_sampler", False): "the order of the samples is a function of the seed, so that a run can be resumed",
    ("adjust_scheduler", True): "the schedule moves once with each update",
    ("adjust_scheduler", False): "the schedule moves once with each update",
    ("sync_with_dataloader", False): "the last update of an epoch takes the micro-batches that are left",
}


def asked_settings(config: Any) -> dict[str, Any]:
    """What settings ask for beside their defaults, those of the accumulation plugin among them."""
    settings: dict[str, Any] = config.changed() if isinstance(config, AcceleratorConfig) else {}
    settings.pop("use_configured_state", None)  # one that exists is always taken over
    accumulation = settings.pop("gradient_accumulation_kwargs", None) or {}
    return {**settings, **accumulation}


def reason_in(table: dict[tuple[str, Any], str], name: str, value: Any) -> str | None:
    """What a table says of a setting's value, which need not be hashable; None: nothing."""
    return next((reason for (key, item), reason in table.items() if key == name and item == value), None)


def check_accelerator(config: Any, accumulation: int) -> None:
    """Settings that can be had, and one number of micro-batches in an update.

    Raises:
        ValueError: an unknown setting, or a `num_steps` that is not `gradient_accumulation_steps`.
        UnsupportedOption: a setting that cannot be had on any number of processes.
    """
    asked = asked_settings(config)
    inner = (config.gradient_accumulation_kwargs or {}) if asked else {}
    unknown = sorted(set(inner) - set(ACCUMULATION))
    if unknown:
        raise ValueError(
            f"accelerator_config: gradient_accumulation_kwargs has no setting {unknown}; it has {list(ACCUMULATION)}."
        )
    for name, value in asked.items():
        shown = {name: value}
        if not (type(value) is int and value >= 1 if name == "num_steps" else value in (True, False, None)):
            wanted = "a whole number of at least 1" if name == "num_steps" else "True or False"
            raise ValueError(f"accelerator_config={shown!r} is not possible: give {wanted}.")
        reason = reason_in(REFUSED, name, value)
        if reason is not None:
            raise UnsupportedOption(f"accelerator_config={shown!r} is not supported: {reason}; leave it out.")
    steps = asked.get("num_steps", accumulation)
    if steps != accumulation:
        raise ValueError(
            f"gradient_accumulation_steps={accumulation} and num_steps={steps!r} in gradient_accumulation_kwargs of "
            "accelerator_config contradict each other: leave one of them out."
        )


def accelerator_notes(config: Any, world_size: int) -> list[str]:
    """One sentence for each setting that changes nothing in this run.

    Raises:
        UnsupportedOption: a setting that only one process takes, and there are several.
    """
    notes = []
    for name, value in asked_settings(config).items():
        reason = reason_in(IDLE, name, value)
        if name in ONE_PROCESS_ONLY and value:
            if world_size > 1:
                shown = {name: True}
                raise UnsupportedOption(
                    f"accelerator_config={shown!r} is not supported with {world_size} processes: "
                    f"{SHARED_IN_PARTS}, and gradients are exchanged once for each update; leave it out."
                )
            reason = "this run has one process"
        if reason is not None:
            notes.append(f"accelerator_config: {name}={value!r} changes nothing here, {reason}.")
    return notes
