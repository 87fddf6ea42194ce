"""Patterns of names in training phases: which parameters or variables a phase trains."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Mapping, Sequence

from paceline.args.phases import Phase


def matches(names: Sequence[str], patterns: Collection[str]) -> bool:
    """True if a pattern matches one of the names."""
    return any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in patterns)


def check_patterns(phases: Sequence[Phase], every: Sequence[str], model: str, kind: str = "parameter") -> None:
    """Checks that each pattern matches a name.

    Args:
        phases: the phases.
        every: all names.
        model: name of the model, for the message.
        kind: the noun for what the names denote, for the message.

    Raises:
        ValueError: a pattern matches none.
    """
    for phase in phases:
        for setting in ("freeze", "train", "learning_rate"):
            patterns = getattr(phase, setting)
            for pattern in patterns if isinstance(patterns, Sequence | Mapping) else ():
                if not fnmatch.filter(every, pattern):
                    raise ValueError(
                        f"phases[{phase.name!r}].{setting}: the pattern {pattern!r} matches no {kind} of "
                        f"{model}, which has {', '.join(every[:3])} ... {every[-1]}."
                    )


def trained_in(phases: Sequence[Phase], names: Sequence[str]) -> tuple[bool, ...]:
    """Returns, for each phase, True if it trains the parameter or variable with these names."""
    return tuple(not matches(names, phase.freeze) or matches(names, phase.train) for phase in phases)


def check_trained(phases: Sequence[Phase], trained: Sequence[Sequence[bool]], kind: str = "parameter") -> None:
    """Checks that each phase trains something.

    Args:
        phases: the phases.
        trained: a result of `trained_in` for each parameter or variable.
        kind: the noun for what the names denote, for the message.

    Raises:
        ValueError: a phase trains nothing.
    """
    for index, phase in enumerate(phases):
        if not any(each[index] for each in trained):
            raise ValueError(
                f"phases[{phase.name!r}].freeze={list(phase.freeze)!r} freezes every {kind}: leave some to train, "
                "or name exceptions in train=[...]."
            )
