"""Reports of the late rank and its stage: the watchdogs of two processes in one process, over a store in memory."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from torch import distributed
from torch.distributed import HashStore, distributed_c10d

from paceline.pytorch.distributed import watchdog
from paceline.pytorch.distributed.watchdog import SHARE_OF_TIMEOUT, Watchdog, watching

PATIENCE = 0.3  # seconds


@pytest.fixture
def dumps(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The dumps of the threads' stacks, which are not made."""
    found: list[Any] = []
    monkeypatch.setattr(watchdog.faulthandler, "dump_traceback", lambda *args, **options: found.append(args))
    return found


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch, dumps: list[Any]) -> Iterator[list[Watchdog]]:
    store = HashStore()
    monkeypatch.setattr(distributed_c10d, "_get_default_store", lambda: store)
    with ExitStack() as stack:
        worlds: list[Any] = [SimpleNamespace(process_index=rank, world_size=2, is_distributed=True) for rank in (0, 1)]
        yield [stack.enter_context(Watchdog(world, PATIENCE * SHARE_OF_TIMEOUT)) for world in worlds]


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.02)


def test_who_waits_says_once_whom_for_and_the_late_one_shows_its_threads(
    pair: list[Watchdog], dumps: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    assert [each.patience for each in pair] == pytest.approx([PATIENCE, PATIENCE])  # a part of `ddp_timeout`
    pair[0].enter("reading data")
    wait_for(lambda: "reading data" in pair[1].report())  # else it may still be said to be starting
    with pair[1].waiting("waiting for the others before an update"):
        wait_for(lambda: "Process 1 is waiting" in caplog.text and "Process 0 has been reading data" in caplog.text)
        time.sleep(2 * PATIENCE)
    said = [record.getMessage() for record in caplog.records]
    assert len([text for text in said if text.startswith("Process 1 is waiting: process 0 was reading data for")]) == 1
    assert len([text for text in said if text.startswith("Process 0 has been reading data for")]) == 1
    # of the late one, which on a slow machine may be the other one too, before it waits; one that waits shows nothing
    assert len(dumps) == len([text for text in said if text.endswith("what its threads do:")])


def test_one_that_is_quick_is_never_named(pair: list[Watchdog], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    for number in range(12):
        for each in pair:
            each.enter(f"making update {number}")
        time.sleep(PATIENCE / 4)
    assert not caplog.records


def test_the_report_leaves_out_who_waits(pair: list[Watchdog]) -> None:
    pair[0].enter("reading data")
    wait_for(lambda: "reading data" in pair[1].report())
    with pair[0].waiting("waiting for the others"):
        wait_for(lambda: "process 0 was" not in pair[1].report())
    assert pair[0].stage == "reading data"  # as before it waited


def test_a_wait_that_fails_says_what_the_others_did(pair: list[Watchdog]) -> None:
    pair[0].enter("evaluating")
    wait_for(lambda: "evaluating" in pair[1].report())
    with (
        pytest.raises(RuntimeError, match=r"Process 1, waiting for gradients: process 0 was evaluating for \d+ s"),
        pair[1].waiting("waiting for gradients"),
    ):
        raise RuntimeError("timed out")


@pytest.mark.parametrize(
    ("error", "is_told"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:18327."), True),
        (distributed.DistBackendError("NCCL error: remote process exited"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    ],
)
def test_an_error_of_a_connection_says_what_the_others_did(
    monkeypatch: pytest.MonkeyPatch, error: Exception, is_told: bool
) -> None:
    """Collectives of passes and evaluations are not in a wait that is named; the error has the address of a socket."""
    store = HashStore()
    monkeypatch.setattr(distributed_c10d, "_get_default_store", lambda: store)
    worlds: list[Any] = [SimpleNamespace(process_index=rank, world_size=2, is_distributed=True) for rank in (0, 1)]

    def fail() -> None:
        with Watchdog(worlds[1], PATIENCE * SHARE_OF_TIMEOUT) as own:
            own.enter("making an update")
            wait_for(lambda: "evaluating" in own.report())
            raise error

    with Watchdog(worlds[0], PATIENCE * SHARE_OF_TIMEOUT) as other:
        other.enter("evaluating")
        with pytest.raises(type(error)) as raised:
            fail()
    notes = getattr(raised.value, "__notes__", [])
    assert [text.startswith("Process 1, making an update: process 0 was evaluating for") for text in notes] == (
        [True] if is_told else []
    )


def test_one_process_has_none() -> None:
    alone: Any = SimpleNamespace(is_distributed=False)
    with watching(alone, None) as nobody:
        assert nobody is None
