"""Evaluation by several processes: each sample once, on one of them; loss, rows and metrics are those of one process.

Every process runs its part of the batches through the model. Before each round they tell each other whether a batch is
left and whether one was asked to stop, so none waits for another that has ended.
"""

from __future__ import annotations

import copy
import signal
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from paceline.core.rows import RowCollector, map_nest
from paceline.core.signals import Interrupted
from paceline.core.spill import Spill
from paceline.distributed.collectives import gather_objects, share_object, sum_floats, sum_ints
from paceline.distributed.world import World
from paceline.evaluation import EvaluationLoop, LossSum, ReadingSum
from paceline.model.loss import LossRule
from paceline.predictions import EvaluationOptions, Kept, to_host

CHUNK_BYTES = 2**26  # of rows that a process sends at a time

Rows = dict[str, Any]


class SharedLossSum(LossSum):
    """The weighted mean of the losses of all processes."""

    def __init__(self, rule: LossRule, world: World, speaks: bool) -> None:
        super().__init__(rule)
        self.world, self.speaks = world, speaks

    def mean(self) -> float | None:
        """The mean loss of all, under what they identified together; None when no batch had one."""
        self.rule.merge(gather_objects(self.world, self.rule.state_dict()))
        reading = self._sum_under(self.rule.meaning)
        own = [float(reading.total), reading.weight, reading.divisors, float(bool(self._sums))]
        total, weight, divisors, number = sum_floats(self.world, own if self.speaks else [0.0] * len(own))
        return self._divide(ReadingSum(total, weight, divisors)) if number > 0 else None


class SharedKept(Kept):
    """What all processes keep: each holds its own rows until the end, when they are put together in their order."""

    def __init__(self, options: EvaluationOptions, spill: Spill, world: World, speaks: bool) -> None:
        super().__init__(options, spill)
        self.world, self.speaks = world, speaks
        self._collectors = {name: RowCollector(concatenate=False, spill=spill) for name in self._collectors}
        self._sizes: dict[str, list[int]] = {name: [] for name in self._collectors}

    def add(self, rows: Rows, size: int, loader: Any) -> None:
        """Keep one batch; nothing in a round that this process has none in."""
        if size > 0:
            super().add(rows, size, loader)

    def _flush(self) -> None:
        for rows, size in self._waiting:
            for name, value in rows.items():
                if value is not None:
                    self._sizes[name].append(size)
        super()._flush()

    def result(self, order: Sequence[int] | None = None) -> Rows:
        """Everything of all processes, on each of them."""
        self._flush()
        self.num_samples = sum_ints(self.world, [self.num_samples if self.speaks else 0])[0]
        whole = {name: RowCollector(self.options.concatenate, spill=self.spill) for name in self._collectors}
        for name, collector in self._collectors.items():
            own = list(zip(collector.result() or [], self._sizes[name], strict=True)) if self.speaks else []
            for parts in self._rounds(own, collector.num_bytes):
                if self.options.concatenate:
                    for nest, size in parts:
                        whole[name].add(nest, size)
                else:
                    whole[name].add(join(parts), sum(size for _, size in parts))
        return {name: collector.result(order) for name, collector in whole.items()}

    def _rounds(self, own: list[tuple[Any, int]], num_bytes: int) -> Iterator[list[tuple[Any, int]]]:
        """What each round gave, by rank; sent some batches at a time."""
        known = gather_objects(self.world, (len(own), num_bytes))
        number = max(count for count, _ in known)
        largest = max((size // count for count, size in known if count), default=0)
        step = max(CHUNK_BYTES // max(largest, 1), 1)
        for start in range(0, number, step):
            chunks = gather_objects(self.world, own[start : start + step])
            for index in range(max(map(len, chunks))):
                yield [chunk[index] for chunk in chunks if index < len(chunk)]


class SharedEvaluation(EvaluationLoop):
    """The evaluation of one of several processes.

    Args:
        world: the processes.
        run: of the training in progress, whose signals are agreed on; None: there is none.
        options: of `EvaluationLoop`.
    """

    def __init__(self, *, world: World, run: Any, **options: Any) -> None:
        super().__init__(**options)
        self.world, self.signals = world, run.signals if run is not None else None
        self._speaks = self.strategy.mesh.speaks(world.process_index)  # or another does, with the same rows
        self._filler: Any = None

    def _make_sum(self) -> LossSum:
        return SharedLossSum(self.rule, self.world, self._speaks)

    def _make_kept(self, spill: Spill) -> Kept:
        return SharedKept(self.options, spill, self.world, self._speaks)

    def _batches(self, loader: Any) -> Iterator[tuple[Any, bool]]:
        """Each round's batch of this process, None where it has none left, and whether the round is the last."""
        iterator = iter(loader)
        held = next(iterator, None)
        while True:
            after = next(iterator, None) if held is not None else None
            noted = self.signals.noted if self.signals is not None else None
            here, more, asked, by_keyboard = sum_ints(
                self.world,
                [int(held is not None), int(after is not None), int(noted is not None), int(noted == signal.SIGINT)],
            )
            if asked and self.signals is not None:
                self.signals.agree(bool(by_keyboard))
                raise Interrupted
            if not here:
                return
            if self.strategy.in_step and here < self.world.world_size and self._filler is None:
                self._filler = self._find_filler(held)
            yield held, more == 0
            held = after

    def _find_filler(self, held: Any) -> Any:
        """A batch of another process, to go through the model with where there never was one."""
        offers = gather_objects(self.world, held)
        return next(self.name_inputs(offer) for offer in offers if offer is not None)

    def _take(
        self, batch: Any, total: LossSum, kept: Kept, loader: Any, loss_only: bool, ignore_keys: list[str] | None
    ) -> tuple[Rows, int]:
        if batch is None:
            if self.strategy.in_step:
                self.prediction_step(self.model, copy.copy(self._filler), loss_only, ignore_keys)
            return {}, 0
        self._filler = copy.copy(self.name_inputs(batch)) if self.strategy.in_step else None
        return super()._take(batch, total, kept, loader, loss_only, ignore_keys)

    def _stream(self, rows: Rows, size: int, is_last: bool) -> None:
        """Give the metrics the batches of all processes, as one."""
        own = {name: to_host(value) for name, value in rows.items()}
        parts = gather_objects(self.world, (own, size) if self._speaks else ({}, 0))
        names = dict.fromkeys(name for part, _ in parts for name in part)
        whole = {name: join([(part[name], count) for part, count in parts if name in part]) for name in names}
        if self.metric is None:  # a function gets tensors, as it does from one process
            place = partial(to_tensor, device=self.strategy.device)
            whole = {name: map_nest(place, nest) for name, nest in whole.items()}
        super()._stream({"predictions": None, "labels": None, **whole}, sum(count for _, count in parts), is_last)

    def _metrics(self, gathered: Rows, loss_only: bool) -> Rows:
        """The first process's metrics, for all: what is decided by them is decided alike everywhere."""
        metrics: Rows = share_object(self.world, super()._metrics(gathered, loss_only))
        return metrics


class StagedEvaluation(SharedEvaluation):
    """Of processes that run parts of the model on the same batches: the one with the last part predicts for all."""

    strategy: Any  # one that runs windows

    def _predict(self, batch: Any, total: LossSum, loss_only: bool, ignore_keys: list[str] | None) -> Rows:
        batch = self.strategy.place(batch)
        if not self.strategy.is_last:
            self.strategy.forward(batch, None)
            return {}
        self.strategy.last.expect(batch)
        self.strategy.last.receive(None)
        rows = super()._predict(batch, total, loss_only, ignore_keys)
        self.strategy.last.check_called("prediction_step")
        return rows


def to_tensor(array: Any, device: torch.device) -> Any:
    """An array as a tensor; one of Python objects, or text, as it is."""
    return torch.as_tensor(array, device=device) if array.dtype.kind in "biufc" else array


def join(parts: list[tuple[Any, int]]) -> Any:
    """The nests of several processes as one; None where none has any."""
    collector = RowCollector()
    for nest, size in parts:
        collector.add(nest, size)
    return collector.result()
