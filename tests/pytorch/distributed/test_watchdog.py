"""Reports name the late rank from the last known states; no process waits for a store that does not answer."""

from __future__ import annotations

import itertools
import json
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from paceline.pytorch.distributed import watchdog
from paceline.pytorch.distributed.watchdog import Watchdog
from paceline.pytorch.distributed.world import World


class Store:
    """Holds records; `held` keeps every request from returning, as the store of a stopped process does."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.held = threading.Event()
        self.is_gone = False

    def clone(self) -> Store:
        return self

    def set(self, key: str, value: str) -> None:
        while self.held.is_set():
            time.sleep(0.01)
        if self.is_gone:
            raise RuntimeError("Connection reset by peer")
        self.values[key] = value

    def check(self, keys: list[str]) -> bool:
        return keys[0] in self.values

    def get(self, key: str) -> str:
        return str(self.values[key])

    def say(self, rank: int, *record: Any) -> None:
        self.values[f"paceline/watchdog/{rank}"] = json.dumps(record)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    made = Store()
    monkeypatch.setattr(watchdog.distributed_c10d, "_get_default_store", lambda: made)
    monkeypatch.setattr(watchdog, "LEAST_INTERVAL", 0.02)
    monkeypatch.setattr(watchdog, "SECONDS_TO_LEAVE", 0.05)
    monkeypatch.setattr(watchdog.Records, "patience", property(lambda self: 0.3))
    yield made
    made.held.clear()


def watch(timeout: float = 0.6) -> Watchdog:
    return Watchdog(World(torch.device("cpu"), 3, 1, 1), timeout)


def until(condition: Any) -> None:
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < 10
        time.sleep(0.01)


def test_a_store_that_does_not_answer_holds_up_nobody(store: Store, caplog: pytest.LogCaptureFixture) -> None:

    def wait() -> None:
        with dog.waiting("here"):
            until(lambda: "Process 1 is waiting: " in caplog.text)
            until(lambda: dog.records.is_held_up)
            raise RuntimeError("timed out")

    with caplog.at_level(logging.WARNING), watch() as dog:
        until(lambda: store.values)
        store.held.set()
        with pytest.raises(RuntimeError, match=r"Process 1, here: process 0, .* has not answered for"):
            wait()
        begun = time.monotonic()
    assert time.monotonic() - begun < 5  # it leaves, though the request has not returned


def test_the_launcher_is_named_where_it_keeps_the_records(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with watch() as dog:
        store.held.set()
        until(lambda: dog.records.is_held_up)
        assert dog.report().startswith("the launcher, which keeps the records, has not answered")


def test_a_store_that_is_gone_is_told(store: Store) -> None:
    with watch() as dog:
        store.is_gone = True
        until(lambda: dog.records.is_gone)
        assert "process 0 cannot be reached any more" in dog.report()


def test_a_silent_process_is_told_from_a_late_one(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """By this process's own clock: what the clocks of machines say is not asked."""
    jumps = itertools.cycle([1e9, 1e8, 2e9])
    monkeypatch.setattr(time, "time", lambda: next(jumps))
    store.say(2, "evaluating", 1.0, False, 1)
    with watch() as dog:
        count = 0

        def both() -> bool:
            nonlocal count
            count += 1
            store.say(0, "reading data", 100.0, False, count)
            return dog.records.silence(dog.records.heard[2][1]) is not None if 2 in dog.records.heard else False

        until(both)
        report = dog.report()
    assert "process 0 was reading data for 100 s" in report
    assert "process 2, last heard of evaluating, has not responded for" in report
    assert "process 2 was" not in report


def test_who_waits_keeps_nobody_waiting(store: Store) -> None:
    store.say(0, "waiting", 5.0, True, 1)
    with watch() as dog:
        until(lambda: 0 in dog.records.heard)
        assert dog.report().startswith("a process has ended or cannot be reached")
