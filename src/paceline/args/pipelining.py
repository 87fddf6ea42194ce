"""Pipeline parallelism: validation of `pipeline_config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.args.errors import UnsupportedOption, did_you_mean, parse_object, wrong_value

# supported schedules of torch.distributed.pipelining -> default number of stages per process
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved_1f1b": 2}
# unsupported schedules, which split the backward pass or visit the stages in another order
NOT_USED = ("looped_bfs", "interleaved_zero_bubble", "zb_v", "zbv_zero_bubble", "dual_pipe_v")
SETTINGS = ("schedule", "stages_per_process", "micro_batches")


@dataclass(frozen=True)
class Pipelining:
    """The resolved `pipeline_config`.

    Attributes:
        schedule: the order of forward and backward passes, a key of `SCHEDULES`.
        stages_per_process: stages of the model per process.
        micro_batches: minimum number of micro-batches per optimizer step; batches are split to reach it. 0 means the
            number of stages.
    """

    schedule: str = "1f1b"
    stages_per_process: int = 1
    micro_batches: int = 0


def keep_pipelining(name: str, value: object) -> dict[str, Any] | None:
    """Converts `pipeline_config`, a mapping or JSON, to a plain dict.

    Raises:
        ValueError: it is neither of these, or a setting is invalid.
        UnsupportedOption: a schedule that is not supported.
    """
    value = parse_object(name, value)
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise wrong_value(name, value, f"expected a dict with some of {', '.join(SETTINGS)}")
    read_pipelining(value)
    return {str(key): setting for key, setting in value.items()}


def read_pipelining(config: Mapping[str, Any] | None) -> Pipelining:
    """Resolves the settings.

    Args:
        config: `pipeline_config`; None for the defaults.

    Raises:
        ValueError: an unknown setting or an invalid value.
        UnsupportedOption: a schedule that is not supported.
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
        remedy = f"expected one of {', '.join(SCHEDULES)}"
        raise wrong_value("pipeline_config", config, remedy, did_you_mean(schedule, list(SCHEDULES)))
    stages = whole_number(config, "stages_per_process", SCHEDULES[schedule])
    if (stages > 1) != (schedule == "interleaved_1f1b"):
        raise ValueError(
            f"pipeline_config={config!r}: interleaved_1f1b has several stages on each process, and the other schedules "
            "have one: change schedule or stages_per_process."
        )
    return Pipelining(schedule, stages, whole_number(config, "micro_batches", 0))


def whole_number(config: Mapping[str, Any], key: str, default: int) -> int:
    """Returns a setting that must be a whole number of at least 1. Raises: ValueError, for anything else."""
    value = config.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise wrong_value("pipeline_config", dict(config), f"{key} is a whole number of at least 1")
    return value
