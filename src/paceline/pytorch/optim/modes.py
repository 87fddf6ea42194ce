"""Optimizers with two sets of weights (schedule-free ones, arXiv:2405.15682), and the switch between them.

They compute one set from the other, which rounds: the training weights are stored while the evaluation weights are in
use,
 and saved with the optimizer, so that neither an evaluation nor a resume changes the training.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

ASIDE = "paceline_weights_to_train"
"""Key in the optimizer's state of a parameter, while the weights to evaluate are in use."""


def switch_optimizer(optimizer: object, mode: str) -> None:
    """Switches the model to the weights to `train`, or those to `eval`; does nothing with only one set.

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
def evaluation_weights(optimizer: object, is_training: bool) -> Iterator[None]:
    """Switches to the evaluation weights while entered; afterwards to those for training, if `is_training`."""
    if is_training and callable(getattr(optimizer, "eval", None)):
        put_aside(optimizer)
    switch_optimizer(optimizer, "eval")
    try:
        yield
    finally:
        if is_training:
            switch_optimizer(optimizer, "train")


def put_aside(optimizer: object) -> None:
    """Stores a copy of the training weights in the optimizer's state; as much memory again as the weights take."""
    for parameter, entry in getattr(optimizer, "state", {}).items():
        if isinstance(entry, dict) and entry and ASIDE not in entry:
            entry[ASIDE] = parameter.detach().clone()
