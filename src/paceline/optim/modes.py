"""Optimizers that keep two sets of weights (schedule-free ones, arXiv:2405.15682), and are told which is in use.

They compute one set from the other, which rounds: the weights to train are put aside while those to evaluate are in
use, and saved with the optimizer, so that neither an evaluation nor a resume changes what follows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

ASIDE = "paceline_weights_to_train"
"""Key in the optimizer's state of a parameter, while the weights to evaluate are in use."""


def switch_optimizer(optimizer: Any, mode: str) -> None:
    """Let the model hold the weights to `train`, or those to `eval`; nothing where there is only one set.

    Weights to train that were put aside come back as they were.
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
def evaluation_weights(optimizer: Any, is_training: bool) -> Iterator[None]:
    """The weights to evaluate and to keep, for as long as it lasts; afterwards those to train, if `is_training`."""
    if is_training and callable(getattr(optimizer, "eval", None)):
        put_aside(optimizer)
    switch_optimizer(optimizer, "eval")
    try:
        yield
    finally:
        if is_training:
            switch_optimizer(optimizer, "train")


def put_aside(optimizer: Any) -> None:
    """Keep a copy of the weights to train in the optimizer's state; as much memory again as the weights take."""
    for parameter, entry in getattr(optimizer, "state", {}).items():
        if isinstance(entry, dict) and entry and ASIDE not in entry:
            entry[ASIDE] = parameter.detach().clone()
