"""Measures time on an accelerator without synchronizing: events on its stream are read when a log is due."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.core.ledger import Ledger

MEASURED = ("cuda", "xpu")  # devices whose events measure elapsed time


class DeviceClock:
    """A clock whose timestamps are events on the current stream of an accelerator.

    The host runs ahead of the device, so the host clock only shows when operations were queued. An event completes
    when the device reaches it: the time between two events is the time the device spent on the operations queued
    between them, or idle. Recording an event takes the host about 2 us and does not block.

    Args:
        make_event: returns an event with timing enabled.
    """

    def __init__(self, make_event: Callable[[], Any]) -> None:
        self._make_event = make_event

    def now(self) -> Any:
        """Records an event on the current stream and returns it."""
        event = self._make_event()
        event.record()
        return event

    def spans(self, first: Any, stamps: Sequence[Any]) -> Sequence[float]:
        """Returns the seconds from each event to the next, from `first` on; waits for the last one."""
        stamps[-1].synchronize()
        spans = []
        for stamp in stamps:
            spans.append(first.elapsed_time(stamp) / 1000)
            first = stamp
        return spans


def make_ledger(device: torch.device) -> Ledger:
    """Returns the ledger of a run on a device.

    Devices without timing events use the host clock, which only sees the time spent waiting for results.
    """
    if device.type == "cpu":
        return Ledger()
    if device.type not in MEASURED:
        return Ledger(waits_unseen=True)
    module = getattr(torch, device.type)
    return Ledger(DeviceClock(lambda: module.Event(enable_timing=True)))
