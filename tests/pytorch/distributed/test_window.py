"""An accumulation window: which passes one process makes of it, and in which order a strategy runs them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from paceline.pytorch.distributed.precision import make_precision
from paceline.pytorch.distributed.strategy import NOTHING, SingleDevice
from paceline.pytorch.distributed.window import Pass
from paceline.pytorch.distributed.world import World
from paceline.pytorch.model.loss import LossNormalizer
from paceline.pytorch.sync import LocalSync

CPU = torch.device("cpu")
NO_TARGET = {"labels": torch.tensor([-100, -100])}
TWO_TARGETS = {"labels": torch.tensor([1, 2])}


class Delaying(SingleDevice):
    """Notes in which pass the gradients are exchanged."""

    delays_grad_sync = True

    def __init__(self, calls: list[tuple[str, Any]]) -> None:
        super().__init__(World(device=CPU), make_precision("full", CPU))
        self.calls = calls

    def micro_step(self, last: bool, silent: bool = False) -> AbstractContextManager[Any]:
        self.calls.append(("enter", last))
        return NOTHING


class Recorder:
    """Stands in for the engine."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def run_pass(self, current: Pass, model: nn.Module | None = None) -> Tensor:
        self.calls.append(("run", current.index))
        return torch.tensor(float(current.index))

    def skip_pass(self, current: Pass) -> None:
        self.calls.append(("skip", current.index))

    def end_pass(self, current: Pass | None) -> None:
        self.calls.append(("end", current.index if current is not None else None))


def run_window(*batches: Any) -> tuple[list[tuple[str, Any]], list[Tensor]]:
    engine = Recorder()
    strategy, sync = Delaying(engine.calls), LocalSync(LossNormalizer(["labels"]))
    passes = sync.begin(batches, [sync.normalizer.count(batch) for batch in batches], strategy, copies=False)
    losses = sync.runner_of(strategy)(engine, passes) if passes else []  # type: ignore[arg-type]
    return engine.calls, losses


def test_gradients_are_exchanged_in_the_last_pass_that_has_some() -> None:
    calls, losses = run_window(TWO_TARGETS, NO_TARGET, TWO_TARGETS, NO_TARGET)
    assert calls == [
        ("enter", False),
        ("run", 0),
        ("end", 0),
        ("skip", 1),
        ("end", 1),
        ("enter", True),
        ("run", 2),
        ("end", 2),
        ("skip", 3),
    ]
    assert losses == [0.0, 2.0]


def test_a_window_without_a_target_has_no_passes() -> None:
    assert run_window(NO_TARGET, NO_TARGET) == ([], [])


def test_only_a_mean_that_is_all_of_its_window_needs_no_factor() -> None:
    sync = LocalSync(LossNormalizer(["labels"]))
    strategy = Delaying([])
    for batches, expected in (([TWO_TARGETS], [False]), ([TWO_TARGETS, TWO_TARGETS], [True, True])):
        passes = sync.begin(batches, [sync.normalizer.count(batch) for batch in batches], strategy, copies=True)
        assert [current.needs_factor for current in passes] == expected
        assert all(current.batch is not batch for current, batch in zip(passes, batches, strict=True))
