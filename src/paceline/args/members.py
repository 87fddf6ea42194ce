"""Members that are trained at once: their settings, and the checks of these."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from numbers import Real
from typing import Any

from paceline.args.errors import did_you_mean, wrong_value

_FOLDER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+=-]*")


@dataclass(frozen=True)
class Member:
    """The settings of one of several models that are trained at once; None: that of the training arguments.

    Attributes:
        learning_rate: the initial learning rate.
        weight_decay: the weight decay of the parameters that have weight decay.
        seed: the seed of the initialization, with `model_init`.
        data_seed: the seed of the order of the training data; None: all such members share their batches.
        bootstrap: seed of a sample of the training data with replacement, as many as there are; None: all of them once.
        lr_scheduler_type: the schedule of the learning rate.
        lr_scheduler_kwargs: the options of this schedule.
        name: in logs and folders; None: `member-0`, `member-1` ...
    """

    learning_rate: float | None = None
    weight_decay: float | None = None
    seed: int | None = None
    data_seed: int | None = None
    bootstrap: int | None = None
    lr_scheduler_type: str | None = None
    lr_scheduler_kwargs: Mapping[str, Any] | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        """Raises ValueError if a setting is invalid."""
        for name in ("learning_rate", "weight_decay"):
            value = getattr(self, name)
            is_number = isinstance(value, Real) and not isinstance(value, bool)
            if value is not None and not (is_number and math.isfinite(value) and value >= 0):
                raise wrong_value(f"Member({name})", value, "expected a number of 0 or more")
        for name in ("seed", "data_seed", "bootstrap"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                raise wrong_value(f"Member({name})", value, "expected a whole number of 0 or more")
        if self.name is not None and not (isinstance(self.name, str) and _FOLDER_NAME.fullmatch(self.name)):
            raise wrong_value(
                "Member(name)", self.name, "expected letters, digits and ._+=- only, since it names a folder"
            )

    def to_dict(self) -> dict[str, Any]:
        """Returns the settings that are set, as plain values."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def read_members(value: object) -> list[Member]:
    """Returns members with names, from `Member` objects or dicts of their settings.

    Raises:
        ValueError: there are fewer than two, one is invalid, or two have the same name.
    """
    if isinstance(value, str | Mapping) or not isinstance(value, Sequence) or len(value) < 2:
        raise wrong_value("members", value, "expected a list of two or more members, each a dict of its settings")
    found = [_named(_read(each), number) for number, each in enumerate(value)]
    names = [member.name for member in found]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise wrong_value("members", names, f"two have the name {repeated!r}")
    return found


def _read(value: object) -> Member:
    if isinstance(value, Member):
        return value
    known = [field.name for field in fields(Member)]
    if not isinstance(value, Mapping):
        raise wrong_value("members", value, f"each is a Member, or a dict with some of {', '.join(known)}")
    for name in value:
        if name not in known:
            hint = did_you_mean(str(name), known)
            raise ValueError(
                f"members: {name!r} is no setting of a member, which are {', '.join(known)}{hint}. What all members "
                "share, such as the architecture and the batch size, is set in the training arguments."
            )
    return Member(**value)


def _named(member: Member, number: int) -> Member:
    return member if member.name is not None else replace(member, name=f"member-{number}")
