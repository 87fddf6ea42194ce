"""Optimizers that keep two sets of weights (schedule-free ones, arXiv:2405.15682), and are told which is in use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def switch_optimizer(optimizer: Any, mode: str) -> None:
    """Let the model hold the weights to `train`, or those to `eval`; nothing where there is only one set."""
    switch = getattr(optimizer, mode, None)
    if callable(switch):
        switch()


@contextmanager
def evaluation_weights(optimizer: Any, is_training: bool) -> Iterator[None]:
    """The weights to evaluate and to keep, for as long as it lasts; afterwards those to train, if `is_training`."""
    switch_optimizer(optimizer, "eval")
    try:
        yield
    finally:
        if is_training:
            switch_optimizer(optimizer, "train")
