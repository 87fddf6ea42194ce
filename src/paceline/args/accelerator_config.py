"""The settings that accelerate's users keep under `accelerator_config`."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields
from typing import Any


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

    def changed(self) -> dict[str, Any]:
        """The settings that differ from their defaults."""
        defaults = asdict(AcceleratorConfig())
        return {name: value for name, value in asdict(self).items() if value != defaults[name]}
