"""The time ledger of a run: every second of its wall time, attributed to one activity.

The code that ends an activity notes its name and end time. The time between two notes belongs to the activity of the
later one, so the activities add up to the wall time. A note is two calls of C functions, about 0.1 us, and no Python
call::

    note, now = ledger.note, ledger.now
    batches = feed.draw()
    note((DATA, now()))
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

# index in ACTIVITIES; plain numbers, because a note is on the path of every step
(SETUP, DATA, TRANSFER, FORWARD, BACKWARD, COMPUTE, COMMUNICATION, OPTIMIZER, DEVICE, LOG, EVALUATE, SAVE, OTHER) = (
    range(13)
)
ACTIVITIES = (
    "setup",  # before the loop: reading the checkpoint, placing the model
    "data",  # waiting for batches
    "transfer",  # moving batches to the device
    "forward",
    "backward",  # including its collectives
    "compute",  # forward and backward together: an overridden training_step, a pipeline, a TensorFlow function
    "communication",  # waiting for the other ranks before and after the passes
    "optimizer",  # clipping, optimizer and schedule
    "device",  # waiting for a device whose time cannot be measured on the device
    "log",
    "evaluate",
    "save",  # only the time for which training waits
    "other",  # callbacks, the loop itself
)
PREFIX = "time/"  # prefix of the ledger's keys in a log row
NOT_TRAINING = {f"{PREFIX}{ACTIVITIES[activity]}" for activity in (SETUP, EVALUATE, SAVE)}
COMPILE_PREFIX = "compile/"  # prefix of the counts of compilations
RESOURCE_PREFIX = "resource/"  # prefix of the keys of `paceline.core.resources`, a module that few runs load

# (activities, their wording in a summary)
GROUPS = (
    ((FORWARD, BACKWARD, COMPUTE), "forward+backward"),
    ((DATA,), "waiting for data"),
    ((TRANSFER,), "transfer to the device"),
    ((COMMUNICATION,), "waiting for other processes"),
    ((OPTIMIZER,), "clipping and optimizer"),
    ((DEVICE,), "waiting for the device"),
    ((LOG,), "logging"),
    ((EVALUATE,), "evaluation"),
    ((SAVE,), "saving"),
    ((SETUP,), "setup"),
    ((OTHER,), "callbacks and the rest"),
)
LEAST_SHARE = 0.005  # a summary leaves out parts below this share of the wall time

# (activity, share of the wall time above which advice is logged, remedy)
REMEDIES = (
    (COMMUNICATION, 0.2, "the processes wait for each other: give them equal work and equal machines"),
    (EVALUATE, 0.3, "evaluate less often (eval_steps) or in larger batches (per_device_eval_batch_size)"),
    (SAVE, 0.1, "save less often (save_steps), or in the background (save_in_background=True)"),
    (LOG, 0.1, "log less often (logging_steps)"),
)
DATA_SHARE = 0.15

OWN_WORK = (DATA, TRANSFER, FORWARD)  # activities without waits for other ranks, unless parameters are sharded
SLOW_FACTOR = 1.2  # a slow process takes at least this multiple of the median process's time
SLOW_SHARE = 0.05  # and costs the others at least this share of the time without setup


class Clock(Protocol):
    """A source of time stamps."""

    def now(self) -> Any:
        """Returns a stamp."""
        ...

    def spans(self, first: Any, stamps: Sequence[Any]) -> Sequence[float]:
        """Returns the seconds between consecutive stamps, starting at `first`; waits until the last one was reached."""
        ...


class HostClock:
    """The monotonic clock of this process."""

    now = staticmethod(time.perf_counter)

    def spans(self, first: float, stamps: Sequence[float]) -> Sequence[float]:
        """Returns the seconds between consecutive stamps, starting at `first`."""
        seconds: list[float] = np.diff(np.asarray(stamps), prepend=first).tolist()
        return seconds


class Ledger:
    """Adds up the seconds of each activity.

    Args:
        clock: the source of stamps; None for the host's clock.
        waits_unseen: True if the device runs asynchronously and the clock measures the host only. The wait for the
            device when its results are read then counts as the activity "device".

    Attributes:
        note: `((activity, stamp))`: ends an activity. A C function.
        now: returns a stamp. A C function for the host's clock.
    """

    def __init__(self, clock: Clock | None = None, waits_unseen: bool = False) -> None:
        self.clock: Clock = HostClock() if clock is None else clock
        self.reading = DEVICE if waits_unseen else LOG  # the activity of reading results back
        # activity, stamp, activity, stamp ...: a flat list, because numbers cost the garbage collector nothing
        self._notes: list[Any] = []
        self.note: Callable[[tuple[int, Any]], None] = self._notes.extend
        self.now: Callable[[], Any] = self.clock.now
        self._last: Any = None
        self._totals = np.zeros(len(ACTIVITIES))
        self._in_rows = np.zeros(len(ACTIVITIES))  # the part of these seconds that is in log rows already
        self._row: dict[str, float] = {}
        self._before_row = self._in_rows  # the part of the seconds in log rows before the prepared one

    def begin(self, setup: float = 0.0) -> None:
        """Starts the clock.

        Args:
            setup: seconds that the setup of the run took.
        """
        self._totals[SETUP] += setup
        self._notes.clear()
        self._last = self.now()

    def settle(self) -> None:
        """Adds up the notes since the last call. With a device's clock, waits until the device reached the last one."""
        if not self._notes:
            return
        activities, stamps = self._notes[0::2], self._notes[1::2]
        self._notes.clear()
        if self._last is None:  # never started: outside of a run
            self._last = stamps[0]
        spans = self.clock.spans(self._last, stamps)
        self._totals += np.bincount(activities, weights=spans, minlength=len(ACTIVITIES))
        self._last = stamps[-1]

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds of each activity up to the last `settle`, without activities that took no time."""
        return {name: float(value) for name, value in zip(ACTIVITIES, self._totals, strict=True) if value}

    # ---- log rows

    def close_row(self) -> None:
        """Prepares the entries of the next log row: the seconds of each activity since the previous row, if not 0."""
        since = self._totals - self._in_rows
        self._before_row, self._in_rows = self._in_rows, self._totals.copy()
        self._row = {
            f"{PREFIX}{name}": round(float(value), 6) for name, value in zip(ACTIVITIES, since, strict=True) if value
        }

    def take_row(self) -> dict[str, float]:
        """Returns the prepared entries; a second call returns an empty dict."""
        row, self._row = self._row, {}
        return row

    def keep_row(self) -> None:
        """Adds the prepared entries to the next row, if they were not taken; the counts of meters go on as well."""
        if self._row:
            self._in_rows, self._row = self._before_row, {}


def training_seconds(row: Mapping[str, float]) -> float:
    """Returns the seconds in a log row, without those of setup, evaluations and saves."""
    return sum(value for name, value in row.items() if name.startswith(PREFIX) and name not in NOT_TRAINING)


def describe(seconds: Mapping[str, float], num_steps: int | None = None) -> str:
    """Returns a summary in words, the largest part first: `"61 % forward+backward, 22 % waiting for data"`.

    Args:
        seconds: by activity, as `Ledger.seconds`.
        num_steps: optimizer steps of the run; None leaves them out of the text.
    """
    total = sum(seconds.values())
    if total <= 0:
        return "no time was measured"
    parts = [
        (sum(seconds.get(ACTIVITIES[index], 0.0) for index in members) / total, words) for members, words in GROUPS
    ]
    shown = [f"{share:.0%} {words}".replace("%", " %") for share, words in sorted(parts, reverse=True)]
    kept = [text for text, (share, _) in zip(shown, sorted(parts, reverse=True), strict=True) if share >= LEAST_SHARE]
    steps = "" if num_steps is None else f", {num_steps} optimizer steps"
    return f"{total:.1f} s{steps}: {', '.join(kept)}"


def remedies(seconds: Mapping[str, float], data_remedy: str) -> list[str]:
    """Returns advice for activities that take too large a share of the wall time without setup.

    Args:
        seconds: by activity, as `Ledger.seconds`.
        data_remedy: advice on how to load the data faster.
    """
    total = sum(value for name, value in seconds.items() if name != ACTIVITIES[SETUP])
    if total <= 0:
        return []
    advice = []
    for activity, least, remedy in ((DATA, DATA_SHARE, data_remedy), *REMEDIES):
        share = seconds.get(ACTIVITIES[activity], 0.0) / total
        if share >= least:
            words = next(words for members, words in GROUPS if members == (activity,))
            advice.append(f"{share * 100:.0f} % of the time is {words}: {remedy}.")
    return advice


def slow_processes(times: Sequence[Mapping[str, float]]) -> list[str]:
    """Returns a sentence for each slow process: its own work takes longer than the median, and the others wait for it.

    Args:
        times: the seconds by activity of each rank.
    """
    work = [sum(seconds.get(ACTIVITIES[index], 0.0) for index in OWN_WORK) for seconds in times]
    typical = sorted(work)[(len(work) - 1) // 2]  # the median; the lower middle value of an even number
    told = []
    for rank, (own, seconds) in enumerate(zip(work, times, strict=True)):
        wall = sum(value for name, value in seconds.items() if name != ACTIVITIES[SETUP])
        if own >= SLOW_FACTOR * typical and own - typical >= SLOW_SHARE * wall:
            parts = ", ".join(f"{ACTIVITIES[index]} {seconds.get(ACTIVITIES[index], 0.0):.1f} s" for index in OWN_WORK)
            told.append(
                f"Process {rank} is slow ({parts}): {own:.1f} s of its own work; the median process has "
                f"{typical:.1f} s; the others wait for it."
            )
    return told
