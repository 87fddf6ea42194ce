"""Time on an accelerator, without waiting for it: events on its stream, read when a log is due."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from paceline.core.ledger import Ledger

MEASURED = ("cuda", "xpu")  # devices whose events tell the time between them


class DeviceClock:
    """A clock whose stamps are events on the current stream of an accelerator.

    The host runs ahead of the device, so its own clock shows when operations were queued. An event happens when the
    device has come that far: the time between two of them is that in which the device worked on what was queued in
    between, or had nothing to do. Recording one takes the host about 2 us, and waits for nothing.

    Args:
        make_event: returns an event that can tell the time.
    """

    def __init__(self, make_event: Callable[[], Any]) -> None:
        self._make_event = make_event

    def now(self) -> Any:
        """Returns an event that was queued now."""
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

    On devices without such events the host's clock is used, and what it sees of the device is the wait for its results.
    """
    if device.type == "cpu":
        return Ledger()
    if device.type not in MEASURED:
        return Ledger(waits_unseen=True)
    module = getattr(torch, device.type)
    return Ledger(DeviceClock(lambda: module.Event(enable_timing=True)))
