"""Switches optimizers with two sets of weights (schedule-free ones, arXiv:2405.15682) between these sets.

Such optimizers compute one set from the other, with rounding errors. The training weights are therefore stored while
the evaluation weights are in use, and saved with the optimizer, so that neither an evaluation nor a resume changes the
training.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

ASIDE = "paceline_weights_to_train"
"""Key of the stored training weights in a parameter's optimizer state, while the evaluation weights are in use."""


class Average(Protocol):
    """An average of the weights, kept beside them."""

    def applied(self) -> AbstractContextManager[None]:
        """Returns a context in which the model holds the average."""
        ...


def switch_optimizer(optimizer: object, mode: str) -> None:
    """Switches the model to the weights for `train` or `eval`; does nothing if the optimizer has only one set.

    Stored training weights are restored exactly.
    """
    switch = getattr(optimizer, mode, None)
    if not callable(switch):
        return
    switch()
    if mode == "train":
        for parameter, entry in getattr(optimizer, "state", {}).items():
            aside = entry.pop(ASIDE, None) if isinstance(entry, dict) else None
            if aside is not None:
                parameter.data.copy_(aside)


@contextmanager
def evaluation_weights(optimizer: object, is_training: bool, average: Average | None = None) -> Iterator[None]:
    """Switches to the evaluation weights while entered, and afterwards to the training weights if `is_training`.

    Args:
        optimizer: the optimizer, which may have two sets of weights.
        is_training: a run is in progress.
        average: the average of the weights in this run, or None.
    """
    if is_training and callable(getattr(optimizer, "eval", None)):
        put_aside(optimizer)
    switch_optimizer(optimizer, "eval")
    try:
        with average.applied() if average is not None and is_training else nullcontext():
            yield
    finally:
        if is_training:
            switch_optimizer(optimizer, "train")


def put_aside(optimizer: object) -> None:
    """Stores a copy of the training weights in the optimizer's state, which takes as much memory as the weights."""
    for parameter, entry in getattr(optimizer, "state", {}).items():
        if isinstance(entry, dict) and entry and ASIDE not in entry:
            entry[ASIDE] = parameter.detach().clone()
