"""Distributed evaluation: each sample is evaluated once; loss, predictions and metrics equal those of one process.

Every process runs its shard of the batches through the model. Before each round the processes agree if a batch is left
and if the run was asked to stop, so no process waits for one that has ended.
"""

from __future__ import annotations

import copy
import logging
import signal
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from paceline.core.disk_buffer import DiskBuffer
from paceline.core.methods import is_ours
from paceline.core.rows import RowCollector, map_nest
from paceline.core.signals import Interrupted, StopSignals
from paceline.pytorch.data.loading import is_split
from paceline.pytorch.distributed.collectives import gather_objects, share_object, sum_floats, sum_ints
from paceline.pytorch.distributed.world import World
from paceline.pytorch.evaluation.loss_sum import LossSum
from paceline.pytorch.evaluation.prediction_buffer import EvaluationOptions, PredictionBuffer, to_host
from paceline.pytorch.evaluation.predictor import EvaluationLoop
from paceline.pytorch.model.loss import Counts, LossNormalizer
from paceline.pytorch.model.objective import Objective
from paceline.pytorch.model.reductions import Observation
from paceline.pytorch.probes.loss import LossProbe, Part

logger = logging.getLogger(__name__)

MULTIPLE_TOLERANCE = 0.02  # relative; above the rounding error of a loss in 16 bits
UNKNOWN_MULTIPLE = (
    "Whether compute_loss multiplies by the number of processes in an evaluation could not be seen, as without "
    "num_items_in_batch its loss is no mean: the losses are used as they are, and are too high by that factor if it "
    "does. Multiply only if model.training is set."
)
NOT_SPLIT = (
    "The evaluation loader was not made by paceline, and each of the %d processes reads all of it: samples count, and "
    "are returned, several times. Pass it through trainer.accelerator.prepare()."
)
CHUNK_BYTES = 2**26  # maximum bytes of predictions that a process sends at a time

Rows = dict[str, Any]


class DistributedLossSum(LossSum):
    """The weighted mean of the losses of all processes."""

    def __init__(self, normalizer: LossNormalizer, world: World, is_data_leader: bool) -> None:
        super().__init__(normalizer)
        self.world = world
        self.is_data_leader = is_data_leader

    def share(self, values: list[float]) -> list[float]:
        return sum_floats(self.world, values if self.is_data_leader else [0.0] * len(values))


class DistributedPredictionBuffer(PredictionBuffer):
    """The predictions of all processes. Each process stores its own until they are merged in order at the end."""

    def __init__(self, options: EvaluationOptions, disk_buffer: DiskBuffer, world: World, is_data_leader: bool) -> None:
        super().__init__(options, disk_buffer)
        self.world = world
        self.is_data_leader = is_data_leader
        self._collectors = {name: RowCollector(concatenate=False, disk_buffer=disk_buffer) for name in self._collectors}
        self._sizes: dict[str, list[int]] = {name: [] for name in self._collectors}

    def add(self, rows: Rows, size: int, loader: object) -> None:
        """Adds one batch; does nothing in a round in which this process has no batch."""
        if size > 0:
            super().add(rows, size, loader)

    def _flush(self) -> None:
        for rows, size in self._waiting:
            for name, value in rows.items():
                if value is not None:
                    self._sizes[name].append(size)
        super()._flush()

    def result(self, order: Sequence[int] | None = None) -> Rows:
        """Returns the rows of all processes on each process. A collective."""
        self._flush()
        self.num_samples = sum_ints(self.world, [self.num_samples if self.is_data_leader else 0])[0]
        whole = {
            name: RowCollector(self.options.concatenate, disk_buffer=self.disk_buffer) for name in self._collectors
        }
        for name, collector in self._collectors.items():
            own = list(zip(collector.result() or [], self._sizes[name], strict=True)) if self.is_data_leader else []
            for parts in self._rounds(own, collector.num_bytes):
                if self.options.concatenate:
                    for nest, size in parts:
                        whole[name].add(nest, size)
                else:
                    whole[name].add(join(parts), sum(size for _, size in parts))
        return {name: collector.result(order) for name, collector in whole.items()}

    def _rounds(self, own: list[tuple[Any, int]], num_bytes: int) -> Iterator[list[tuple[Any, int]]]:
        """Yields the rows of each round by rank; several batches are sent at a time."""
        known = gather_objects(self.world, (len(own), num_bytes))
        number = max(count for count, _ in known)
        largest = max((size // count for count, size in known if count), default=0)
        step = max(CHUNK_BYTES // max(largest, 1), 1)
        for start in range(0, number, step):
            chunks = gather_objects(self.world, own[start : start + step])
            for index in range(max(map(len, chunks))):
                yield [chunk[index] for chunk in chunks if index < len(chunk)]


class DistributedEvaluation(EvaluationLoop):
    """The evaluation loop of one of several processes.

    Args:
        world: the processes.
        signals: stop requests of the training in progress, which are synchronized; None outside of training.
        compute_loss: the Trainer's, bound; an override may run collectives, so all processes call it equally often.
        objective: calls the model; passes `num_items_in_batch`.
        options: arguments of `EvaluationLoop`.
    """

    def __init__(
        self,
        *,
        world: World,
        signals: StopSignals | None,
        compute_loss: Callable[..., Any],
        objective: Objective,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.world = world
        self.signals = signals
        self.compute_loss = compute_loss
        self.objective = objective
        makes_loss = objective.has_function or not is_ours(compute_loss)
        # transformers lets an overridden compute_loss multiply by the number of processes
        self._asks_multiple = makes_loss and objective.wants_num_items and self.strategy.mesh.data_size > 1
        # of ranks that read the same data, only the leader contributes results
        self._is_leader = self.strategy.mesh.is_data_leader(world.process_index)
        self._dummy_batch: Any = None

    def _make_sum(self) -> LossSum:
        return DistributedLossSum(self.normalizer, self.world, self._is_leader)

    def _make_buffer(self, disk_buffer: DiskBuffer) -> PredictionBuffer:
        return DistributedPredictionBuffer(self.options, disk_buffer, self.world, self._is_leader)

    def _batches(self, loader: Any) -> Iterator[tuple[Any, bool]]:
        """Yields (batch, is_last) for each round; the batch is None if this process has none left."""
        warn_of_repeats(loader, self.strategy.mesh.data_size)
        iterator = iter(loader)
        held = next(iterator, None)
        while True:
            after = next(iterator, None) if held is not None else None
            noted = self.signals.noted if self.signals is not None and self.signals.stops_evaluation else None
            looks = held is not None and self._is_due(self.name_inputs(held), is_last=False)
            flags = [held is not None, after is not None, noted is not None, noted == signal.SIGINT, looks]
            here, more, asked, by_keyboard, looking = sum_ints(self.world, list(map(int, flags)))
            self._looks = looking > 0
            if asked and self.signals is not None:
                self.signals.agree(bool(by_keyboard))
                raise Interrupted
            if not here:
                return
            if self._needs_dummy and here < self.world.world_size and self._dummy_batch is None:
                self._dummy_batch = self._find_dummy(held)
            yield held, more == 0
            self.normalizer.num_updates += 1
            held = after

    def _find_dummy(self, held: object) -> Any:
        """Returns a batch of another process, for dummy passes on a process without batches. A collective."""
        offers = gather_objects(self.world, held)
        return next(self.name_inputs(offer) for offer in offers if offer is not None)

    def _take(
        self,
        batch: object,
        total: LossSum,
        kept: PredictionBuffer,
        loader: object,
        loss_only: bool,
        ignore_keys: list[str] | None,
    ) -> tuple[Rows, int]:
        if self._asks_multiple:
            self._asks_multiple = False
            self._observe_multiple(batch)
        if batch is None:
            if self._looks:
                self._observe_nothing()
            if self._needs_dummy:
                self._step(copy.copy(self._dummy_batch), loss_only, ignore_keys)
            return {}, 0
        self._dummy_batch = copy.copy(self.name_inputs(batch)) if self._needs_dummy else None
        return super()._take(batch, total, kept, loader, loss_only, ignore_keys)

    def _observe_multiple(self, batch: Any) -> None:
        """Finds out if user code multiplies a loss that it divides by the count by the number of processes."""
        ratio = 0.0
        if batch is not None or self._needs_dummy:
            inputs = self._dummy_batch if batch is None else self.name_inputs(batch)
            part = Part(copy.copy(inputs), self.normalizer.count(inputs))
            probe = LossProbe(
                self.model, self._loss_of, must_match=self.waits_for_others, owners=[self.prediction_step]
            )
            ratio = probe.ratio_of_counted(part, self.objective.without_count)
        ratios = [each for each in gather_objects(self.world, ratio if batch is not None else 0.0) if each]
        for number in {self.strategy.mesh.data_size, self.world.world_size}:
            if ratios and all(abs(each / number - 1) < MULTIPLE_TOLERANCE for each in ratios):
                self.multiple = float(number)
        is_one = bool(ratios) and all(abs(each - 1) < MULTIPLE_TOLERANCE for each in ratios)
        if self.multiple == 1 and not is_one and not self.objective.has_function:
            logger.warning(UNKNOWN_MULTIPLE)

    def _observe_nothing(self) -> None:
        """Takes part in the collectives of the other processes' probe."""
        if self._needs_dummy:
            probe = LossProbe(self.model, self._loss_of, must_match=True)
            probe.look(self.normalizer, [Part(self._dummy_batch, Counts(0, None, 0))], None)
        self.normalizer.learn(self._gather([]))

    @property
    def waits_for_others(self) -> bool:  # type: ignore[override]
        makes_loss = (self.prediction_step, self.compute_loss)
        return self.strategy.in_step or not all(map(is_ours, makes_loss))  # TRL's overrides run collectives

    @property
    def _needs_dummy(self) -> bool:
        """Returns True if a process without a batch runs a dummy pass."""
        return self.waits_for_others

    def _gather(self, observations: list[Observation]) -> list[Observation]:
        gathered = gather_objects(self.world, observations if self._is_leader else [])
        return [observation for each in gathered for observation in each]

    def _stream(self, rows: Rows, size: int, is_last: bool) -> None:
        """Passes the batches of all processes to the metrics as one batch."""
        own = {name: to_host(value) for name, value in rows.items()}
        parts = gather_objects(self.world, (own, size) if self._is_leader else ({}, 0))
        names = dict.fromkeys(name for part, _ in parts for name in part)
        whole = {name: join([(part[name], count) for part, count in parts if name in part]) for name in names}
        if self.metric is None:  # compute_metrics gets tensors, as with one process
            place = partial(to_tensor, device=self.strategy.device)
            whole = {name: map_nest(place, nest) for name, nest in whole.items()}
        super()._stream({"predictions": None, "labels": None, **whole}, sum(count for _, count in parts), is_last)

    def _metrics(self, gathered: Rows, loss_only: bool) -> Rows:
        """Returns the first process's metrics on all processes, so that decisions based on them agree."""
        metrics: Rows = share_object(self.world, super()._metrics(gathered, loss_only))
        return metrics


class PipelineEvaluation(DistributedEvaluation):
    """The evaluation loop of pipeline stages on the same batches; the process with the last stage predicts for all."""

    strategy: Any  # a strategy that runs accumulation windows

    @property
    def _needs_dummy(self) -> bool:
        return bool(self.strategy.in_step)  # only the process with the last stage computes the loss

    def _predict(self, batch: object, total: LossSum, loss_only: bool, ignore_keys: list[str] | None) -> Rows:
        batch = self.strategy.place(batch)
        if self._looks:
            self._observe(batch, self.normalizer.count(batch))
            self._looks = False
        if not self.strategy.is_last:
            self.strategy.forward(batch, None)
            return {}
        self.strategy.last.expect(batch)
        self.strategy.last.receive(None)
        rows = super()._predict(batch, total, loss_only, ignore_keys)
        self.strategy.last.check_called("prediction_step")
        return rows

    def _loss_of(self, batch: object, num_items: object) -> torch.Tensor | None:
        """Returns the loss of a batch on all processes of the pipeline, through whose stages the batch is passed."""
        loss_of = super()._loss_of

        def compute() -> tuple[float, torch.dtype] | None:
            loss = loss_of(batch, num_items)
            return None if loss is None else (float(loss), loss.dtype)

        told = self.strategy.from_last(batch, compute)
        return None if told is None else torch.tensor(told[0], dtype=told[1])


def warn_of_repeats(loader: object, num_shares: int) -> None:
    """Warns of a user's own loader that each of `num_shares` processes, which read different data, reads as a whole."""
    if num_shares == 1 or not isinstance(loader, DataLoader) or is_split(loader):
        return
    if getattr(loader.dataset, "_distributed", None) is None:  # set by `split_dataset_by_node`
        logger.warning(NOT_SPLIT, num_shares)


def to_tensor(array: Any, device: torch.device) -> Any:
    """Returns an array as a tensor; arrays of Python objects or text are unchanged."""
    return torch.as_tensor(array, device=device) if array.dtype.kind in "biufc" else array


def join(parts: list[tuple[Any, int]]) -> Any:
    """Returns the concatenated arrays of several processes; None if no process has any."""
    collector = RowCollector()
    for nest, size in parts:
        collector.add(nest, size)
    return collector.result()
