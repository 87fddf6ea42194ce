"""How a pipeline runs: `pipeline_config` read into one set of decisions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.args.errors import UnsupportedOption, did_you_mean, wrong_value

# the schedules of torch.distributed.pipelining that are used -> stages of each process, where nothing is said
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved_1f1b": 2}
# those that split the backward pass in two, or go through the stages in another order
NOT_USED = ("looped_bfs", "interleaved_zero_bubble", "zb_v", "zbv_zero_bubble", "dual_pipe_v")
SETTINGS = ("schedule", "stages_per_process", "micro_batches")


@dataclass(frozen=True)
class Pipelining:
    """What `pipeline_config` asks for.

    Attributes:
        schedule: the order of forward and backward passes, a key of `SCHEDULES`.
        stages_per_process: parts of the model that each process holds.
        micro_batches: of an update, at least; batches are cut until there are so many. 0: as many as stages.
    """

    schedule: str = "1f1b"
    stages_per_process: int = 1
    micro_batches: int = 0


def keep_pipelining(name: str, value: Any) -> dict[str, Any] | None:
    """The value of `pipeline_config`: a mapping or JSON, as a plain dict.

    Raises:
        ValueError: it is neither, or says something that cannot be.
        UnsupportedOption: a schedule that is not used here.
    """
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise wrong_value(name, value, f"it is not valid JSON ({error})") from None
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise wrong_value(name, value, f"give a dict with some of {', '.join(SETTINGS)}")
    read_pipelining(value)
    return {str(key): setting for key, setting in value.items()}


def read_pipelining(config: Mapping[str, Any] | None) -> Pipelining:
    """The decisions.

    Args:
        config: `pipeline_config`; None: the defaults.

    Raises:
        ValueError: an unknown setting, or a value that cannot be.
        UnsupportedOption: a schedule that is not used here.
    """
    config = dict(config or {})
    for key in config:
        if key not in SETTINGS:
            remedy = f"there is no setting {key!r}; there are {', '.join(SETTINGS)}"
            raise wrong_value("pipeline_config", config, remedy, did_you_mean(str(key), list(SETTINGS)))
    schedule = str(config.get("schedule") or "1f1b").lower().replace("-", "_").removeprefix("schedule_")
    schedule = {"interleaved1f1b": "interleaved_1f1b", "interleaved": "interleaved_1f1b"}.get(schedule, schedule)
    if schedule not in SCHEDULES:
        if schedule in NOT_USED:
            raise UnsupportedOption(
                f"pipeline_config={{'schedule': {config['schedule']!r}}} is not supported: choose one of "
                f"{', '.join(SCHEDULES)}."
            )
        remedy = f"choose one of {', '.join(SCHEDULES)}"
        raise wrong_value("pipeline_config", config, remedy, did_you_mean(schedule, list(SCHEDULES)))
    stages = whole_number(config, "stages_per_process", SCHEDULES[schedule])
    if (stages > 1) != (schedule == "interleaved_1f1b"):
        raise ValueError(
            f"pipeline_config={config!r}: interleaved_1f1b has several stages on each process, and the other schedules "
            "have one: change schedule or stages_per_process."
        )
    return Pipelining(schedule, stages, whole_number(config, "micro_batches", 0))


def whole_number(config: Mapping[str, Any], key: str, default: int) -> int:
    """A setting that is a whole number of at least 1. Raises: ValueError, for anything else."""
    value = config.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise wrong_value("pipeline_config", dict(config), f"{key} is a whole number of at least 1")
    return value
