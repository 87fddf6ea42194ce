"""The values that processes exchange about an accumulation window. Each is a thread here; sums wait for all."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.args.mesh import Mesh
from paceline.callbacks.flow import DefaultFlowCallback
from paceline.core.events import CallbackHandler, TrainerCallback
from paceline.core.signals import StopSignals
from paceline.core.state import TrainerControl
from paceline.pytorch import sync as sync_module
from paceline.pytorch.distributed.watchdog import Watchdog
from paceline.pytorch.distributed.world import World
from paceline.pytorch.model.loss import LossNormalizer
from paceline.pytorch.model.operations import Counted
from paceline.pytorch.model.reductions import LossReduction
from paceline.pytorch.sync import LocalSync, ProcessSync, SyncControl, synchronized_control

TOKENS = LossReduction("tokens")
STRATEGY: Any = SimpleNamespace(in_step=False, runs_windows=False)


class Processes:
    """Two of them, with a sync each.

    Attributes:
        num_gathers: how often objects were sent, which costs more than numbers.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, known: LossReduction | None = TOKENS, **options: Any) -> None:
        self._values: list[Any] = [None, None]
        self._barrier = threading.Barrier(2)
        self.num_gathers = 0
        for name in ("sum_floats", "sum_ints"):
            monkeypatch.setattr(sync_module, name, self._sum)
        monkeypatch.setattr(sync_module, "gather_objects", self._gather)
        self.syncs = []
        for rank in (0, 1):
            world, normalizer = World(torch.device("cpu"), 2, rank), LossNormalizer(["labels"], known=known)
            signals, watchdog = StopSignals(is_distributed=True), Watchdog(world, 60)
            self.syncs.append(ProcessSync(world, normalizer, 2, signals, watchdog=watchdog, measure=measure, **options))

    def each(self, call: Callable[..., Any], *arguments: Any) -> list[Any]:
        """`call(sync, *arguments)` on both at once; of an argument each takes its own item."""
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(call, self.syncs, *arguments))

    def meet(self, *windows: list[Any]) -> list[Any]:
        """One window of each."""

        def meet_one(sync: ProcessSync, batches: list[Any]) -> Any:
            num_items = torch.tensor(sum(targets(batch) for batch in batches)) if batches else None
            return sync.synchronize((batches, num_items), len(batches))

        return self.each(meet_one, windows)

    def _exchange(self, world: World, value: Any) -> list[Any]:
        self._values[world.process_index] = value
        self._barrier.wait(20)
        found = list(self._values)
        self._barrier.wait(20)
        return found

    def _sum(self, world: World, values: Any) -> list[Any]:
        return [sum(each) for each in zip(*self._exchange(world, values), strict=True)]

    def _gather(self, world: World, value: Any) -> list[Any]:
        self.num_gathers += world.is_first
        return self._exchange(world, value)


def batch_of(*labels: int) -> dict[str, Any]:
    """One sample."""
    return {"labels": torch.tensor([labels])}


def targets(batch: dict[str, Any]) -> int:
    return int((batch["labels"] != -100).sum())


def measure(batches: list[Any]) -> Counted:
    return Counted(sum(batch["labels"].numel() for batch in batches), 10 * len(batches), len(batches), 7)


def test_a_window_weighs_what_all_have_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    both = Processes(monkeypatch)
    results = both.meet([batch_of(1, 2, 3), batch_of(1, -100, -100)], [batch_of(4, 5, -100)])
    for sync, ((batches, num_items), num_samples, num_batches) in zip(both.syncs, results, strict=True):
        assert (sync.weight, sync.total, sync.counted) == (6, 3, (9, 30, 3, 14))
        assert (int(num_items), num_samples, num_batches, sync.is_idle) == (6, 3, 2, False)
        assert sync.signals.requested is None
        assert len(batches) == 2 - sync.world.process_index
    assert both.num_gathers == 0
    assert both.meet([], []) == [(([], None), 0, 0)] * 2


def test_waiting_for_the_others_is_communication_and_what_comes_before_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    both = Processes(monkeypatch)
    for sync in both.syncs:
        sync.ledger.begin()
    late = both.syncs[1]
    count = late.normalizer.count

    def count_late(batch: Any) -> Any:
        time.sleep(0.2)
        return count(batch)

    monkeypatch.setattr(late.normalizer, "count", count_late)
    both.meet([batch_of(1)], [batch_of(2)])
    control = TrainerControl()
    both.each(ProcessSync.agree, [control, control])
    for sync in both.syncs:
        sync.ledger.settle()
    waiting, working = (sync.ledger.seconds for sync in both.syncs)
    assert waiting["communication"] >= 0.15
    assert working["data"] >= 0.2
    assert set(working) == {"data", "communication", "other"}


def test_a_process_that_has_nothing_left_is_lent_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    both = Processes(monkeypatch)
    for lent in (1, 1):  # for good
        _, ((batches, num_items), num_samples, num_batches) = both.meet([batch_of(-100), batch_of(7, 8)], [])
        assert [sync.is_idle for sync in both.syncs] == [False, True]
        assert batches[0]["labels"].tolist() == [[7, 8]]
        assert (int(num_items), num_samples, num_batches) == (2, 2, 2)
        assert [sync.counted[:2] for sync in both.syncs] == [(3, 20)] * 2
        assert both.num_gathers == lent
        idle = both.syncs[1]
        [dummy] = idle.begin(batches, [idle.normalizer.count(batch) for batch in batches], STRATEGY, False)
        assert (dummy.is_dummy, dummy.is_required, dummy.counts.weight) == (True, True, 0)


def test_a_batch_of_a_single_target_is_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    both = Processes(monkeypatch)
    for lent, window in ((1, [batch_of(5)]), (1, [batch_of(6)]), (1, [batch_of(-100)])):
        both.meet(window, [])
        assert both.syncs[1].dummy_batch()["labels"].tolist() == [[5]]
        assert both.num_gathers == lent


def test_only_what_is_shared_is_weighed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lone micro-batch of processes that read the same data is the whole update: nothing to look at."""
    for mesh, size, expected in ((Mesh(tp=2), 1, False), (Mesh(tp=2), 2, True), (Mesh(dp_replicate=2), 1, True)):
        both = Processes(monkeypatch, mesh=mesh)
        window = [batch_of(1, 2), batch_of(1, -100)][:size]
        both.meet(window, window)
        for sync in both.syncs:
            counts = [sync.normalizer.count(batch) for batch in window]
            passes = sync.begin(window, counts, STRATEGY, False)
            assert len(passes) == size
            assert (sync.is_look_due, sync.normalizer.num_updates) == (expected, int(expected))


@pytest.mark.parametrize(("number", "label", "expected"), [(1, 1, True), (3, 1, False), (1, -100, False)])
def test_a_window_of_one_process_is_looked_at_when_that_is_due(number: int, label: int, expected: bool) -> None:
    normalizer = LossNormalizer(["labels"], declared="tokens")
    normalizer.num_updates = number - 1
    sync, strategy, window = LocalSync(normalizer), SimpleNamespace(delays_grad_sync=False), [batch_of(label)] * 2
    passes = sync.begin(window, [normalizer.count(batch) for batch in window], strategy, False)  # type: ignore[arg-type]
    assert (sync.is_look_due, normalizer.num_updates, len(passes)) == (expected, number, 2 if label > 0 else 0)


@pytest.mark.parametrize(("number", "expected"), [(1, True), (3, True), (5, False)])
def test_a_window_tells_something_where_rows_of_any_process_do(
    monkeypatch: pytest.MonkeyPatch, number: int, expected: bool
) -> None:
    both = Processes(monkeypatch, None)
    for sync in both.syncs:
        sync.normalizer.num_updates = number - 1
    ragged = {"labels": torch.tensor([[1, 2, 3], [4, -100, -100]])} if number != 5 else batch_of(4, 5, 6)
    both.meet([batch_of(1, 2, 3)], [ragged])
    assert [sync.is_informative for sync in both.syncs] == [expected] * 2


def test_own_weights_where_gradients_are_not_averaged(monkeypatch: pytest.MonkeyPatch) -> None:
    both = Processes(monkeypatch, averages=False)
    both.meet([batch_of(1, 2, 3)], [batch_of(4, -100, -100)])
    assert [(sync.weight, sync.total) for sync in both.syncs] == [(4, 3), (4, 1)]


def test_processes_that_read_the_same_data_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    both = Processes(monkeypatch, mesh=Mesh(tp=2))
    results = both.meet([batch_of(1, 2, 3)], [batch_of(1, 2, 3)])
    for sync, ((_, num_items), num_samples, _) in zip(both.syncs, results, strict=True):
        assert (sync.weight, sync.total, sync.counted) == (3, 3, (3, 10, 1, 7))
        assert (int(num_items), num_samples) == (3, 1)


def test_a_window_without_a_target_weighs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor where samples without a target count."""
    both = Processes(monkeypatch, LossReduction("all_samples"))
    both.meet([batch_of(-100)], [batch_of(-100)])
    assert [sync.weight for sync in both.syncs] == [0, 0]
    both.meet([batch_of(1)], [batch_of(-100)])
    assert [sync.weight for sync in both.syncs] == [2, 2]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_signal_to_one_is_obeyed_by_all(monkeypatch: pytest.MonkeyPatch, number: int, when: str) -> None:
    both = Processes(monkeypatch)
    both.syncs[1].signals.noted = number
    if when == "before":
        both.meet([batch_of(1)], [batch_of(1)])
    else:
        both.each(ProcessSync.agree, [TrainerControl(), TrainerControl()])
    assert [sync.signals.requested for sync in both.syncs] == [number, number]


def test_what_is_asked_for_on_one_is_done_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    both = Processes(monkeypatch)
    controls = [TrainerControl(), TrainerControl(should_save=True)]
    both.each(ProcessSync.agree, controls)
    assert controls == [TrainerControl(should_save=True)] * 2
    assert [sync.signals.requested for sync in both.syncs] == [None, None]


class Silent(TrainerCallback):
    """Hears no event after a step or an epoch."""


class Heard(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None: ...


@pytest.mark.parametrize(("callback", "expected"), [(Heard, True), (Silent, False), (DefaultFlowCallback, False)])
def test_flags_are_shared_where_a_users_callback_may_set_them(
    monkeypatch: pytest.MonkeyPatch, callback: Any, expected: bool
) -> None:
    """Ours set the same ones on every process, so that nothing need be sent after each step."""
    both = Processes(monkeypatch)
    handler = CallbackHandler([callback()])
    with synchronized_control(handler, both.syncs[0]):
        assert isinstance(handler.callbacks[-1], SyncControl) == expected
    assert [type(each) for each in handler.callbacks] == [callback]
    with synchronized_control(handler, LocalSync(both.syncs[0].normalizer)):
        assert [type(each) for each in handler.callbacks] == [callback]
