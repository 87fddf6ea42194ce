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
        split_batches: a batch size is that of all processes together, each of which takes a part of every batch.
        dispatch_batches: the first process reads all data and sends each other one its batches. None: only where a
            loader of the user's own reads a stream.
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
# setting and value -> why it changes nothing, on any number of processes
IDLE: dict[tuple[str, Any], str] = {
    ("even_batches", False): "no sample ever comes twice",
    ("non_blocking", True): "copies to the device never wait",
}
FOR_SEVERAL = ("split_batches", "dispatch_batches")
ONE_PROCESS_ONLY = ("sync_each_batch",)
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
                    f"accelerator_config={shown!r} is not supported with {world_size} processes: gradients are "
                    "exchanged once for each update; leave it out."
                )
            reason = "this run has one process"
        if name in FOR_SEVERAL and value and world_size == 1:
            reason = "this run has one process"
        if reason is not None:
            notes.append(f"accelerator_config: {name}={value!r} changes nothing here, {reason}.")
    return notes


def is_on(config: Any, name: str) -> bool:
    """Whether a setting that is off by default is on."""
    return getattr(config, name, None) is True


def batch_of_all(config: Any, batch_size: int, num_parts: int) -> int:
    """Samples of a batch over all processes that read different data, `num_parts` of them."""
    return batch_size if is_on(config, "split_batches") else batch_size * num_parts


def check_sharing(args: Any, num_parts: int) -> None:
    """That what is asked for about the sharing of batches can be had, with so many parts of the data.

    Raises:
        ValueError: a batch that is to be split has fewer samples than parts.
        UnsupportedOption: micro-batches that each process makes for itself, and a first one that reads for all.
    """
    config, size = args.accelerator_config, args.per_device_train_batch_size
    if num_parts > 1:
        check_batch(config, "per_device_train_batch_size", size, num_parts)
        if str(args.eval_strategy) != "no" or args.eval_on_start:
            check_batch(config, "per_device_eval_batch_size", args.per_device_eval_batch_size, num_parts)
    if num_parts > 1 and is_on(config, "dispatch_batches") and str(args.train_sampling_strategy) == "batch_rebalance":
        raise UnsupportedOption(
            "train_sampling_strategy='batch_rebalance' with accelerator_config={'dispatch_batches': True} is not "
            f"supported on {num_parts} processes, each of which makes its own micro-batches: leave one of them out."
        )


def check_batch(config: Any, name: str, batch_size: int, num_parts: int) -> None:
    """That each part gets a sample of a batch.

    Raises:
        ValueError: there are fewer samples than parts.
    """
    if is_on(config, "split_batches") and batch_size < num_parts:
        raise ValueError(
            f"{name}={batch_size} with accelerator_config={{'split_batches': True}}: a batch of {batch_size} cannot be "
            f"split over {num_parts} processes. Set {name} to {num_parts} or more, or leave split_batches out."
        )
