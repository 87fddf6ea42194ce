"""Profiling: validation of `profile`."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.args.errors import did_you_mean, wrong_value

SWITCHES = ("memory", "stacks", "shapes", "snapshot")
COUNTS = {"wait": 0, "warmup": 1, "active": 3, "repeat": 1}  # settings of a schedule -> defaults
SETTINGS = ("steps", "schedule", *COUNTS, *SWITCHES)
DEFAULT = {"steps": "10-12"}
RANGE = re.compile(r"(\d+)(?:-(\d+))?")
TRUE, FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0", "none", "")


@dataclass(frozen=True)
class Profiling:
    """The resolved `profile`.

    Attributes:
        steps: first and last optimizer step of each trace, ascending, without overlap; empty to use the schedule.
        wait: steps that each cycle of the schedule skips.
        warmup: steps that each cycle profiles and discards.
        active: steps that each cycle records.
        repeat: number of cycles.
        memory: record allocations.
        stacks: record the Python stack of each operation.
        shapes: record the shapes of its inputs.
        snapshot: write torch's memory snapshot of a CUDA device.
    """

    steps: tuple[tuple[int, int], ...] = ()
    wait: int = 0
    warmup: int = 1
    active: int = 3
    repeat: int = 1
    memory: bool = False
    stacks: bool = False
    shapes: bool = False
    snapshot: bool = False

    def ranges(self, first_step: int) -> tuple[tuple[int, int], ...]:
        """Returns the first and last optimizer step of each trace, for a run that begins after step `first_step`."""
        if self.steps:
            return self.steps
        period = self.wait + self.warmup + self.active
        ends = [first_step + period * (number + 1) for number in range(self.repeat)]
        return tuple((end - self.active + 1, end) for end in ends)


def keep_profile(name: str, value: object) -> dict[str, Any] | None:
    """Converts `profile` (True, a text such as `"steps=10-15,memory"`, JSON or a mapping) to a plain dict.

    Raises:
        ValueError: an unknown setting or an invalid value.
    """
    settings: Any = value
    if isinstance(value, str):
        settings = settings_in(name, value)
    if settings is None or settings is False:
        return None
    if settings is True:
        settings = DEFAULT
    if not isinstance(settings, Mapping):
        raise wrong_value(name, value, f"expected True, 'steps=10-15', or a dict with some of {', '.join(SETTINGS)}")
    plain = {str(key): setting for key, setting in settings.items()}
    read_profiling(plain)
    return plain


def settings_in(name: str, text: str) -> Any:
    """Parses the text of the option: JSON, settings separated by commas, or a word for True or False."""
    if text.strip().lower() in (*TRUE, *FALSE):
        return text.strip().lower() in TRUE
    if text.lstrip().startswith("{"):
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise wrong_value(name, text, f"it is not valid JSON ({error})") from None
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    return {key.strip(): setting.strip() if is_given else True for key, is_given, setting in pairs}


def read_profiling(config: Mapping[str, Any]) -> Profiling:
    """Resolves the settings.

    Raises:
        ValueError: an unknown setting, an invalid value, or both `steps` and a schedule.
    """
    settings = {**config}
    settings.update(settings.pop("schedule", None) or {})
    for key in settings:
        if key not in SETTINGS:
            remedy = f"there is no setting {key!r}; there are {', '.join(SETTINGS)}"
            raise wrong_value("profile", dict(config), remedy, did_you_mean(key, list(SETTINGS)))
    counts: dict[str, Any] = {key: count_in(config, key, settings[key]) for key in COUNTS if key in settings}
    if "steps" in settings and set(counts) - {"warmup"}:
        raise wrong_value("profile", dict(config), "steps and a schedule both choose steps: leave one of them out")
    steps = ranges_in(config, settings["steps"]) if "steps" in settings else ()
    if not steps and not counts:
        steps = ranges_in(config, DEFAULT["steps"])
    switches: dict[str, Any] = {key: switch_in(config, key, settings[key]) for key in SWITCHES if key in settings}
    return Profiling(steps=steps, **counts, **switches)


def count_in(config: Mapping[str, Any], key: str, value: object) -> int:
    """Returns a count, which must be at least 1 for `active` and `repeat`. Raises: ValueError, for anything else."""
    least = 1 if key in ("active", "repeat") else 0
    text = str(value)
    if isinstance(value, bool) or not text.isdigit() or int(text) < least:
        raise wrong_value("profile", dict(config), f"{key} is a whole number of at least {least}")
    return int(text)


def switch_in(config: Mapping[str, Any], key: str, value: object) -> bool:
    """Returns a boolean setting. Raises: ValueError, for anything else."""
    if str(value).lower() not in (*TRUE, *FALSE):
        raise wrong_value("profile", dict(config), f"{key} is True or False")
    return str(value).lower() in TRUE


def ranges_in(config: Mapping[str, Any], value: object) -> tuple[tuple[int, int], ...]:
    """Returns the ranges of `steps`: 10, "10-15", "10-15+100-102", or [10, 15]."""
    if isinstance(value, list | tuple) and len(value) == 2:
        value = f"{value[0]}-{value[1]}"
    found = [RANGE.fullmatch(part.strip()) for part in str(value).split("+")]
    ranges = [(int(match[1]), int(match[2] or match[1])) for match in found if match is not None]
    bounds = [bound for pair in ranges for bound in pair]
    is_ascending = all(first < last for (_, first), (last, _) in itertools.pairwise(ranges))
    if None in found or min(bounds) < 1 or any(first > last for first, last in ranges) or not is_ascending:
        raise wrong_value(
            "profile", dict(config), "steps is the first and the last optimizer step, from 1: 10-15, or 10-15+100-102"
        )
    return tuple(ranges)
