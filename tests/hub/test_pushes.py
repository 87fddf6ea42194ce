"""The queue of pushes: order, which are left out, what is told, and waiting."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import wait
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.hub import pushes as pushing
from paceline.hub.pushes import Push, Pushes


def told(caplog: Any, text: str) -> int:
    return sum(text in record.getMessage() for record in caplog.records)


def wait_for(pushes: Pushes) -> None:
    """Waits for the pushes, but not for ever."""
    waiter = threading.Thread(target=pushes.wait_until_done, daemon=True)
    waiter.start()
    waiter.join(30)
    assert not waiter.is_alive()


@given(st.lists(st.booleans(), max_size=8))
def test_those_that_must_are_done_in_order_and_of_the_others_the_newest(can_be_skipped: list[bool]) -> None:
    gate, done, dropped = threading.Event(), [], []
    pushes = Pushes("a/b")
    pushes.start(Push("first", lambda: gate.wait(30)))
    results = [
        pushes.start(Push(str(i), lambda i=i: done.append(i), lambda i=i: dropped.append(i), skipped))  # type: ignore[misc]
        for i, skipped in enumerate(can_be_skipped)
    ]
    gate.set()
    pushes.wait_until_done()
    newest = max((i for i, skipped in enumerate(can_be_skipped) if skipped), default=None)
    expected = [i for i, skipped in enumerate(can_be_skipped) if not skipped or i == newest]
    assert done == expected
    assert sorted(dropped) == list(range(len(can_be_skipped)))  # nothing is left on the disk
    assert [i for i, result in enumerate(results) if result.cancelled()] == sorted(set(range(len(results))) - {*done})
    assert pushes.is_done()


def test_an_answer_and_an_error_reach_who_asked(caplog: Any) -> None:
    def fail() -> None:
        raise OSError("no route") from ValueError("inside")

    pushes = Pushes("a/b")
    assert pushes.start(Push("one", lambda: 5, can_be_skipped=False)).result(10) == 5
    for _ in range(3):
        with pytest.raises(OSError, match="no route"):
            pushes.start(Push("two", fail, can_be_skipped=False)).result(10)
    pushes.wait_until_done()
    assert told(caplog, "failed (OSError: no route <- ValueError: inside)") == 1
    assert isinstance(pushes.failure, OSError)
    pushes.start(Push("three", lambda: None))
    pushes.wait_until_done()
    assert pushes.failure is None
    assert told(caplog, "three could be pushed to a/b again") == 1


def test_waiting_is_told(caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(pushing, "SECONDS_BETWEEN_WORDS", 0.02)
    gate = threading.Event()
    pushes = Pushes("a/b")
    pushes.wait_until_done()
    assert not caplog.records
    pushes.start(Push("one", lambda: gate.wait(30)))
    pushes.start(Push("two", lambda: None))
    threading.Timer(0.1, gate.set).start()
    pushes.wait_until_done()
    assert told(caplog, "Waiting for the push of one to a/b") == 1
    assert told(caplog, "Still pushing one, two to a/b") >= 1


def test_a_push_that_is_cancelled_while_it_waits_is_left_out() -> None:
    begun, gate, done, dropped = threading.Event(), threading.Event(), [], []

    def send() -> None:
        begun.set()
        gate.wait(30)

    pushes = Pushes("a/b")
    running = pushes.start(Push("one", send, can_be_skipped=False))
    waiting = pushes.start(Push("two", lambda: done.append(2), lambda: dropped.append(2), can_be_skipped=False))
    skipped = pushes.start(Push("three", lambda: done.append(3)))
    last = pushes.start(Push("four", lambda: 4))
    assert begun.wait(30)
    assert not running.cancel()  # it is on its way
    assert waiting.cancel()
    gate.set()
    wait_for(pushes)
    assert last.result(0) == 4
    assert (done, dropped) == ([], [2])
    assert wait([running, waiting, skipped], 0).not_done == set()


def test_an_error_beside_a_push_leaves_no_thread_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError("a file is in use")

    monkeypatch.setattr(threading, "excepthook", lambda error: None)
    pushes = Pushes("a/b")
    pushes.start(Push("one", lambda: 1, fail))
    wait_for(pushes)
    assert pushes.start(Push("two", lambda: 2)).result(30) == 2


def test_a_push_that_hangs_is_warned_of_once(caplog: Any) -> None:
    now, gate = [0.0], threading.Event()
    pushes = Pushes("a/b", clock=lambda: now[0])
    pushes.start(Push("one", lambda: gate.wait(30)))
    for minutes, number in ((9, 0), (11, 1), (30, 1)):
        now[0] = 60.0 * minutes
        pushes.start(Push(f"that after {minutes}", lambda: None))
        assert told(caplog, "has been running for") == number
    assert told(caplog, "The push of one to a/b has been running for 11 minutes, and newer pushes wait for it") == 1
    gate.set()
    pushes.wait_until_done()
