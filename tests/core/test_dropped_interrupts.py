"""Ctrl-C where Python cannot raise it."""

from __future__ import annotations

import signal
import sys
import time
import weakref
from typing import Any

import pytest

from paceline.__main__ import main
from paceline.core.dropped_interrupts import raised_again
from paceline.core.interrupts import interrupts_described

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs signals")


class Thing:
    """An object with weak references."""


def press_in_callback() -> None:
    """Sends SIGINT within the callback of a weak reference, as one that arrives while a module is imported."""
    thing = Thing()
    reference = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGINT))
    del thing
    assert reference() is None
    for _ in range(100):  # until it is raised again
        time.sleep(0.1)


def test_it_is_raised_later() -> None:
    with pytest.raises(KeyboardInterrupt), raised_again():
        press_in_callback()


def test_it_stops_a_training_that_begins() -> None:
    with pytest.raises(KeyboardInterrupt), interrupts_described(lambda: None):
        press_in_callback()


def test_it_stops_a_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("paceline.cli.main.dispatch", lambda words: press_in_callback())
    assert main() == 130
    assert capsys.readouterr().err == "\npaceline: interrupted\n"


def test_other_errors_are_reported_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: seen.append(unraisable.exc_type))
    before = sys.unraisablehook
    with raised_again():
        thing = Thing()
        reference = weakref.ref(thing, lambda _: 1 / 0)
        del thing
    assert reference() is None
    assert seen == [ZeroDivisionError]
    assert sys.unraisablehook is before
