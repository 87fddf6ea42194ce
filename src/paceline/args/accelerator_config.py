"""The settings of `accelerator_config`, under accelerate's names."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, fields
from typing import Any

from paceline.args.errors import UnsupportedOption
from paceline.args.option_files import read_mapping
from paceline.args.registry import SAMPLERS


@dataclass
class AcceleratorConfig:
    """The distribution of batches across ranks.

    Attributes:
        split_batches: the batch size is global; each rank takes a shard of every batch.
        dispatch_batches: rank 0 reads all data and sends the other ranks their batches. None does so only if the
            user's loader reads a stream.
        even_batches: every rank gets the same number of samples.
        use_seedable_sampler: the order of the samples is a function of the seed.
        non_blocking: copies to the device are asynchronous.
        gradient_accumulation_kwargs: settings of accelerate's accumulation plugin.
        use_configured_state: reuse an existing accelerate state.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = True
    non_blocking: bool = False
    gradient_accumulation_kwargs: dict[str, Any] | None = None
    use_configured_state: bool = False

    def pop(self, key: str, default: object = None) -> Any:
        """Returns a setting and resets it to its default."""
        return vars(self).pop(key, default)

    @classmethod
    def from_json_file(cls, json_file: str | os.PathLike[str]) -> AcceleratorConfig:
        """Reads the settings from a JSON file.

        Raises:
            ValueError: the file names a setting that does not exist.
        """
        return cls.from_dict(read_mapping(json_file, is_json=True))

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> AcceleratorConfig:
        """Builds the settings from a dict.

        Raises:
            ValueError: `settings` names a setting that does not exist.
        """
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(settings) - set(known))
        if unknown:
            raise ValueError(f"accelerator_config has no setting {unknown}; it has {known}.")
        return cls(**settings)

    def to_dict(self) -> dict[str, Any]:
        """Returns the settings as a dict."""
        return asdict(self)

    @property
    def num_steps(self) -> int | None:
        """Returns the micro-batches per optimizer step of accelerate's accumulation plugin; None if unset."""
        steps = (self.gradient_accumulation_kwargs or {}).get("num_steps")
        return steps if type(steps) is int else None

    def changed(self) -> dict[str, Any]:
        """Returns the settings that differ from their defaults."""
        defaults = asdict(AcceleratorConfig())
        return {name: value for name, value in asdict(self).items() if value != defaults[name]}


ACCUMULATION = ("num_steps", "adjust_scheduler", "sync_with_dataloader", "sync_each_batch")
# (setting, value) -> the reason why it has no effect on any number of processes
IDLE: dict[tuple[str, Any], str] = {
    ("even_batches", False): "no sample ever comes twice",
    ("use_seedable_sampler", False): "the order of the samples stays a function of the seed, so that a run can be "
    "resumed; only loaders that user code gives to `accelerator.prepare` then keep their own sampler",
    ("non_blocking", True): "copies to the device never wait",
}
FOR_SEVERAL = ("split_batches", "dispatch_batches")
ONE_PROCESS_ONLY = ("sync_each_batch",)
# (setting, value) -> the reason why it is not supported
REFUSED: dict[tuple[str, Any], str] = {
    ("adjust_scheduler", True): "the schedule advances once per optimizer step",
    ("adjust_scheduler", False): "the schedule advances once per optimizer step",
    ("sync_with_dataloader", False): "the last optimizer step of an epoch takes the remaining micro-batches",
}


def asked_settings(config: object) -> dict[str, Any]:
    """Returns the settings that differ from their defaults, including those of the accumulation plugin."""
    settings: dict[str, Any] = config.changed() if isinstance(config, AcceleratorConfig) else {}
    settings.pop("use_configured_state", None)  # an existing state is always reused
    accumulation = settings.pop("gradient_accumulation_kwargs", None) or {}
    return {**settings, **accumulation}


def reason_in(table: dict[tuple[str, Any], str], name: str, value: object) -> str | None:
    """Returns the reason in a table for a setting's value, which need not be hashable; None without an entry."""
    return next((reason for (key, item), reason in table.items() if key == name and item == value), None)


def check_accelerator(config: Any, accumulation: int) -> None:
    """Checks that the settings are supported and that the accumulation steps agree.

    Raises:
        ValueError: an unknown setting, or a `num_steps` that is not `gradient_accumulation_steps`.
        UnsupportedOption: a setting that is not supported on any number of processes.
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
            raise ValueError(f"accelerator_config={shown!r} is invalid: expected {wanted}.")
        reason = reason_in(REFUSED, name, value)
        if reason is not None:
            raise UnsupportedOption(f"accelerator_config={shown!r} is not supported: {reason}; leave it out.")
    steps = asked.get("num_steps", accumulation)
    if steps != accumulation:
        raise ValueError(
            f"The `AcceleratorConfig`'s `num_steps` is set but `gradient_accumulation_steps` is another: "
            f"gradient_accumulation_steps={accumulation} and num_steps={steps!r} in gradient_accumulation_kwargs of "
            "accelerator_config contradict each other: leave one of them out."
        )


def accelerator_notes(config: object, world_size: int) -> list[str]:
    """Returns one sentence for each setting that has no effect in this run.

    Raises:
        UnsupportedOption: a setting that is supported with one process only, and there are several.
    """
    notes = []
    for name, value in asked_settings(config).items():
        reason = reason_in(IDLE, name, value)
        if name in ONE_PROCESS_ONLY and value:
            if world_size > 1:
                shown = {name: True}
                raise UnsupportedOption(
                    f"accelerator_config={shown!r} is not supported with {world_size} processes: gradients are "
                    "reduced once per optimizer step; leave it out."
                )
            reason = "this run has one process"
        if name in FOR_SEVERAL and value and world_size == 1:
            reason = "this run has one process"
        if reason is not None:
            notes.append(f"accelerator_config: {name}={value!r} changes nothing here, {reason}.")
    return notes


def is_on(config: object, name: str) -> bool:
    """True if a setting that is off by default is on."""
    return getattr(config, name, None) is True


def global_micro_batch_size(config: object, batch_size: int, num_parts: int) -> int:
    """Returns the samples of one batch over all `num_parts` data-parallel ranks."""
    return batch_size if is_on(config, "split_batches") else batch_size * num_parts


def check_sharing(args: Any, num_parts: int) -> None:
    """Checks the settings for the distribution of batches over `num_parts` data-parallel ranks.

    Raises:
        ValueError: a batch to be split has fewer samples than ranks.
        UnsupportedOption: dispatch_batches together with an order that makes its own micro-batches.
    """
    config, size = args.accelerator_config, args.per_device_train_batch_size
    if num_parts > 1:
        check_batch(config, "per_device_train_batch_size", size, num_parts)
        if str(args.eval_strategy) != "no" or args.eval_on_start:
            check_batch(config, "per_device_eval_batch_size", args.per_device_eval_batch_size, num_parts)
    order = str(args.train_sampling_strategy)
    if num_parts > 1 and is_on(config, "dispatch_batches") and SAMPLERS[order].makes_batches:
        raise UnsupportedOption(
            f"train_sampling_strategy={order!r} with accelerator_config={{'dispatch_batches': True}} is not "
            f"supported on {num_parts} processes, each of which makes its own micro-batches: leave one of them out."
        )


def check_batch(config: object, name: str, batch_size: int, num_parts: int) -> None:
    """Checks that each data-parallel rank gets at least one sample of a batch.

    Raises:
        ValueError: there are fewer samples than ranks.
    """
    if is_on(config, "split_batches") and batch_size < num_parts:
        raise ValueError(
            f"{name}={batch_size} with accelerator_config={{'split_batches': True}}: a batch of {batch_size} cannot be "
            f"split over {num_parts} processes. Set {name} to {num_parts} or more, or leave split_batches out."
        )
