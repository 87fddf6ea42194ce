"""The time ledger: parts that add up to the whole, on fake clocks; its rows and its summary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from paceline.core import ledger as ledgers
from paceline.core.ledger import (
    BACKWARD,
    DATA,
    DEVICE,
    EVALUATE,
    FORWARD,
    LOG,
    OTHER,
    SETUP,
    HostClock,
    Ledger,
    describe,
    remedies,
    slow_processes,
)


class FakeClock:
    """A clock that is set by hand, and counts how often it is read, and how often its stamps are compared."""

    def __init__(self) -> None:
        self.time = 100.0
        self.num_reads = 0
        self.num_waits = 0

    def now(self) -> float:
        self.num_reads += 1
        return self.time

    def spans(self, first: float, stamps: Sequence[float]) -> Sequence[float]:
        self.num_waits += 1
        return HostClock().spans(first, stamps)


def test_each_second_belongs_to_the_activity_that_ends_and_the_parts_are_the_whole() -> None:
    clock = FakeClock()
    ledger = Ledger(clock)
    ledger.begin(setup=3.0)
    for activity, seconds in [(DATA, 0.5), (FORWARD, 1.0), (BACKWARD, 2.0), (OTHER, 0.25), (DATA, 0.25)]:
        clock.time += seconds
        ledger.note((activity, ledger.now()))
    assert ledger.seconds == {"setup": 3.0}, "nothing is read before `settle`"
    assert clock.num_waits == 0
    ledger.settle()
    assert ledger.seconds == {"setup": 3.0, "data": 0.75, "forward": 1.0, "backward": 2.0, "other": 0.25}
    assert sum(ledger.seconds.values()) == clock.time - 100.0 + 3.0
    assert (clock.num_reads, clock.num_waits) == (6, 1)
    ledger.settle()
    assert clock.num_waits == 1, "nothing was noted since"


def test_a_row_holds_the_seconds_since_the_one_before_and_is_taken_once() -> None:
    clock = FakeClock()
    ledger = Ledger(clock)
    ledger.begin()
    clock.time += 2.0
    ledger.note((DATA, ledger.now()))
    ledger.settle()
    ledger.close_row()
    assert ledger.take_row() == {"time/data": 2.0}
    assert ledger.take_row() == {}
    clock.time += 1.5
    ledger.note((LOG, ledger.now()))
    ledger.settle()
    ledger.close_row()
    assert ledger.take_row() == {"time/log": 1.5}


def test_a_row_that_was_not_taken_is_part_of_the_next_one() -> None:
    clock = FakeClock()
    ledger = Ledger(clock)
    ledger.begin()
    for seconds, is_taken in ((2.0, False), (1.0, False), (0.5, True), (0.25, True)):
        clock.time += seconds
        ledger.note((FORWARD, ledger.now()))
        ledger.settle()
        ledger.close_row()
        row = ledger.take_row() if is_taken else {}
        ledger.keep_row()
        assert ledger.take_row() == {}
        assert row == ({"time/forward": 3.5 if seconds == 0.5 else 0.25} if is_taken else {})


def test_notes_before_the_clock_was_started_count_from_the_first() -> None:
    clock = FakeClock()
    ledger = Ledger(clock)
    ledger.note((DATA, ledger.now()))
    clock.time += 1.0
    ledger.note((FORWARD, ledger.now()))
    ledger.settle()
    assert ledger.seconds == {"forward": 1.0}


def test_reading_results_is_logging_or_the_wait_for_a_device_that_the_clock_cannot_see() -> None:
    assert Ledger().reading == LOG
    assert Ledger(waits_unseen=True).reading == DEVICE


def test_each_activity_has_a_name_and_a_place_in_the_summary() -> None:
    assert len(ledgers.ACTIVITIES) == OTHER + 1
    assert ledgers.ACTIVITIES[SETUP] == "setup"
    assert ledgers.ACTIVITIES[EVALUATE] == "evaluate"
    named = sorted(index for members, _ in ledgers.GROUPS for index in members)
    assert named == list(range(len(ledgers.ACTIVITIES)))


def test_the_summary_names_the_parts_in_words_the_largest_first() -> None:
    seconds = {"forward": 3.0, "backward": 3.1, "data": 2.2, "optimizer": 1.68, "log": 0.02}
    assert describe(seconds, 50) == (
        "10.0 s, 50 optimizer steps: 61 % forward+backward, 22 % waiting for data, 17 % clipping and optimizer"
    )
    assert describe({}) == "no time was measured"


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        ({"data": 22.0, "forward": 78.0}, ["22 % of the time is waiting for data: raise it."]),
        ({"data": 10.0, "forward": 90.0}, []),
        ({"data": 10.0, "forward": 40.0, "setup": 500.0}, ["20 % of the time is waiting for data: raise it."]),
        ({"evaluate": 50.0, "forward": 50.0}, ["50 % of the time is evaluation: evaluate less often (eval_steps)"]),
        ({"setup": 1.0}, []),
    ],
)
def test_what_takes_too_much_is_told_with_its_remedy(seconds: dict[str, float], told: list[str]) -> None:
    found: list[Any] = remedies(seconds, "raise it")
    assert len(found) == len(told)
    assert all(text.startswith(start) for text, start in zip(found, told, strict=True))


def test_a_process_that_the_others_wait_for_is_named() -> None:
    quick = {"data": 1.0, "forward": 3.0, "backward": 4.0, "communication": 2.0}
    slow = {"data": 3.0, "forward": 3.0, "backward": 4.0, "communication": 0.0}
    assert slow_processes([quick, slow]) == [
        "Process 1 is slow (data 3.0 s, transfer 0.0 s, forward 3.0 s): 6.0 s of its own work; the median "
        "process has 4.0 s; the others wait for it."
    ]
    assert slow_processes([quick, quick]) == []
    assert slow_processes([slow]) == [], "one process waits for nobody"
    little = {"data": 0.1, "forward": 0.1, "backward": 90.0}
    assert slow_processes([little, {**little, "data": 0.5}]) == [], "nobody loses much"
