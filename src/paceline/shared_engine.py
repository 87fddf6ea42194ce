"""One update made by several processes: what each window is for all of them, and the engine that weighs by it.

Before an update the processes tell each other, in one exchange on the host, how much their micro-batches weigh, which
of them have none left, and whether one was asked to stop. So losses are scaled before the backward pass, ranks that ran
out take part with zeros, and all of them stop at the same update.
"""

from __future__ import annotations

import copy
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from paceline.args.mesh import Mesh
from paceline.core.contracts import Emit
from paceline.core.events import TrainerCallback
from paceline.core.signals import StopSignals
from paceline.core.state import TrainerControl
from paceline.distributed.collectives import any_on_device, gather_objects, sum_floats, sum_ints
from paceline.distributed.watchdog import Watchdog
from paceline.distributed.world import World
from paceline.engine import MicroStep, TorchEngine
from paceline.model.loss import Counts, LossRule
from paceline.model.objective import WatchedCount
from paceline.model.outputs import detach

FLAGS = ("should_training_stop", "should_epoch_stop", "should_log", "should_evaluate", "should_save")
Window = tuple[list[Any], Any]
Measure = Callable[[Sequence[Any]], tuple[int, int]]


class Exchange:
    """What the processes tell each other about each window, and what came of it for the present one.

    Args:
        world: the processes.
        rule: counts micro-batches.
        accumulation: micro-batches of a window, at most.
        signals: noted on any process, obeyed by all.
        averages: losses are divided by the weight over all processes, else by each one's own.
        measure: `(micro-batches) -> (input tokens, operations)`; None: they are not counted.
        watchdog: told what this process does; says who is late.
        mesh: which of them read the same data, and count once; None: none do.

    Attributes:
        total: what the window weighs, as this process divides by it: a share of the whole, since gradients are
            averaged over the processes afterwards; its own weight if not `averages`.
        weight: what it weighs on all processes.
        is_idle: this process has nothing in it.
        is_served: another process reads the data for this one.
        is_telling: the loss is to be looked at, on some process, at the first micro-batch.
        num_batches: micro-batches of the process that has most.
        tokens, operations: of the window, over all processes.
    """

    def __init__(
        self,
        world: World,
        rule: LossRule,
        accumulation: int,
        signals: StopSignals,
        *,
        averages: bool = True,
        measure: Measure | None = None,
        watchdog: Watchdog,
        mesh: Mesh | None = None,
    ) -> None:
        self.mesh = mesh or Mesh(dp_replicate=world.world_size)
        self._speaks = int(self.mesh.speaks(world.process_index))  # or another does, with the same data
        self.world, self.rule, self.accumulation, self.signals = world, rule, accumulation, signals
        self.averages, self.measure, self.watchdog = averages, measure, watchdog
        self.is_served = False
        self.total = 0.0
        self.weight = self.num_batches = 0
        self.is_idle = self.is_telling = False
        self.tokens = self.operations = 0
        self._filler: Any = None  # a batch to go through the model with where there is none

    def meet(self, window: Window, num_samples: int) -> tuple[Window, int, int]:
        """The window as it is for all: what `Feed.meet` says. Empty only when no process has anything left."""
        batches, num_items = window
        counts = [self.rule.count(batch) for batch in batches]
        own_weight = sum(item.weight for item in counts)
        tokens, operations = self.measure(batches) if self.measure is not None and batches else (0, 0)
        noted = self.signals.noted
        values = [
            own_weight * self._speaks,
            int(num_items) * self._speaks if num_items is not None else 0,
            int(num_items is not None),
            num_samples * self._speaks,
            int(any(self.rule.telling(item) for item in counts)),
            int(noted is not None),
            int(noted == signal.SIGINT),
            int(own_weight == 0 and self._filler is None),
            tokens * self._speaks,
            int(operations) * self._speaks,
            int(bool(counts) and self.rule.has_target(counts)),
            *(int(len(batches) > slot) for slot in range(self.accumulation)),
        ]
        with self.watchdog.waiting("waiting for the others before an update"):
            sums = sum_ints(self.world, values)
        (weight, items, num_counting, samples, telling, asked, interrupted, lacking, tokens, operations, targets,
         *slots) = sums  # fmt: skip
        self.tokens, self.operations = tokens, operations
        if asked:
            self.signals.agree(bool(interrupted))
        self.weight = weight if self.rule.meaning.unit != "all_samples" or targets else 0
        self.is_telling = telling > 0
        self._weigh(weight, own_weight)
        num_batches = sum(slot > 0 for slot in slots)
        if num_batches == 0:
            return ([], None), 0, 0
        self.num_batches = num_batches
        if own_weight > 0:
            self._filler = copy.copy(next(b for b, item in zip(batches, counts, strict=True) if item.weight > 0))
        if lacking and self.weight > 0:
            self._filler = self._find_filler(own_weight)
        if self.averages and num_counting:
            num_items = torch.tensor(items)
        self.is_idle = not batches
        if self.is_idle:
            batches = [self.filler()]
        self.watchdog.enter("making an update")
        return (batches, num_items), samples, num_batches

    def draw(self, collect: Callable[..., Window], *arguments: Any) -> Window:
        """Draw a window with the Trainer's method, and let the watchdog know."""
        if self.is_served:
            with self.watchdog.waiting("waiting for the first process to read data"):
                return collect(*arguments)
        self.watchdog.enter("reading data")
        return collect(*arguments)

    def agree(self, control: TrainerControl) -> None:
        """Raise the flags that a callback raised on any process, and note a signal: all do the same after this step."""
        with self.watchdog.waiting("waiting for the others after an update"):
            noted = self.signals.noted
            flags = [int(getattr(control, name)) for name in FLAGS]
            sums = sum_ints(self.world, [int(noted is not None), int(noted == signal.SIGINT), *flags])
        if sums[0]:
            self.signals.agree(sums[1] > 0)
        for name, number in zip(FLAGS, sums[2:], strict=True):
            if number:
                setattr(control, name, True)

    def weigh_again(self, own_weight: int) -> None:
        """The weights after the processes agreed on another meaning of the loss."""
        self.weight = sum_ints(self.world, [own_weight * self._speaks])[0]
        self._weigh(self.weight, own_weight)

    def _weigh(self, weight: int, own_weight: int) -> None:
        self.total = weight / self.mesh.data_size if self.averages else own_weight

    def filler(self) -> Any:
        """A batch to go through the model with where there is none that weighs anything."""
        return copy.copy(self._filler)

    def _find_filler(self, own_weight: int) -> Any:
        """A batch of another process, for one that never had any."""
        offers = gather_objects(self.world, self._filler if own_weight > 0 else None)
        found = next(offer for offer in offers if offer is not None)
        return found if self._filler is None else self._filler


class Agree(TrainerCallback):
    """The last of the callbacks: what the others asked for on any process is then asked for on all."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        self.exchange.agree(control)

    def on_epoch_end(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        self.exchange.agree(control)


@contextmanager
def agreeing(trainer: Any, exchange: Exchange | None) -> Iterator[None]:
    """While entered, callbacks of the user's that hear of updates may ask for something on one process only."""
    handler = trainer.callback_handler
    heard = [*handler.listening("on_step_end"), *handler.listening("on_epoch_end")]
    is_needed = any(not type(callback).__module__.startswith("paceline.") for callback in heard)
    if exchange is None or not is_needed:
        yield
        return
    last = Agree(exchange)
    trainer.add_callback(last)
    try:
        yield
    finally:
        handler.remove_callback(last)


class SharedOutOfMemory(MemoryError):
    """One of the processes, or several, ran out of memory in this update, and all of them know it."""


class SharedEngine(TorchEngine):
    """The engine of one of several processes that share each update.

    Args:
        exchange: what the present window is for all.
        options: of `TorchEngine`.
    """

    shares = True

    def __init__(self, *, exchange: Exchange, **options: Any) -> None:
        super().__init__(**options)
        self.exchange = exchange
        # what was divided by the count of all processes is averaged over them: so it is multiplied by their number
        self.rule.scaled_factor = exchange.mesh.data_size if exchange.averages else 1
        self._is_silent = False
        self._looks_now = False

    def read(self) -> list[tuple[float, float, float, bool]]:
        """As for one process; the losses are means over the processes, in one exchange."""
        rows = super().read()
        if not rows:
            return rows
        size = self.exchange.world.world_size
        sums = sum_floats(self.exchange.world, [row[0] if row[3] else 0.0 for row in rows])
        return [(total / size, *row[1:]) if row[3] else row for total, row in zip(sums, rows, strict=True)]

    def _accumulate(
        self, batches: Sequence[Any], counts: Sequence[Counts], total: float, num_items: Any, emit: Emit | None
    ) -> list[Tensor]:
        """As for one process; a process whose micro-batches weigh nothing goes through one of them in silence."""
        exchange = self.exchange
        if exchange.weight == 0:
            return []
        if exchange.is_idle:
            for item in counts:
                item.weight = 0
        self._losses = []
        self._window, self._weighed = counts, []
        self._looks_now = exchange.is_telling
        if self.strategy.reduces_late:
            self._go_through_and_agree(batches, counts, num_items, emit)
        else:
            self._go_through(batches, counts, num_items, emit)
        self._current, self._is_silent = None, False
        return self._losses

    def _go_through_and_agree(
        self, batches: Sequence[Any], counts: Sequence[Counts], num_items: Any, emit: Emit | None
    ) -> None:
        """All passes, and the exchange of gradients only once every process has come through.

        Raises:
            SharedOutOfMemory: one of them ran out of memory. It is raised on all.
        """
        reason = None
        try:
            self._go_through(batches, counts, num_items, emit)
        except Exception as error:
            if not super().is_out_of_memory(error):
                raise
            reason = str(error)  # not the error: its traceback holds the tensors of the pass that failed
        if reason is not None and self._looks_now:
            self._agree_on_rule()  # the others are waiting there
        with self.exchange.watchdog.waiting("waiting for the others after the backward passes"):
            number = sum_ints(self.exchange.world, [int(reason is not None)])[0]
        if number:
            raise SharedOutOfMemory(reason or f"{number} of the other processes ran out of memory")
        self.strategy.reduce_gradients()

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether smaller micro-batches could cure this error: only one that all processes know of."""
        return isinstance(error, SharedOutOfMemory)

    def _go_through(
        self, batches: Sequence[Any], counts: Sequence[Counts], num_items: Any, emit: Emit | None
    ) -> None:
        """Forward and backward of every micro-batch that weighs something, and the passes in silence."""
        exchange, losses, passes = self.exchange, self._losses, self._passes(counts)
        for place, index in enumerate(passes):
            is_last = place == len(passes) - 1
            self._is_silent = index is None
            now = Counts(0, None, 0) if index is None else counts[index]
            self._current = MicroStep(now, 0.0 if index is None else exchange.total, is_last)
            batch = exchange.filler() if index is None else copy.copy(batches[index])
            with self.strategy.micro_step(is_last, self._is_silent):
                loss = self.training_step(self.model, batch, num_items)
            losses.append(torch.zeros_like(loss) if self._is_silent else loss)
            if self.keep_outputs and index is not None:
                self._kept.append(detach(self._seen))
            self._seen = None
            if emit is not None and not is_last:
                emit("on_substep_end")

    def _passes(self, counts: Sequence[Counts]) -> list[int | None]:
        """The micro-batches that weigh something, and None for each pass in which this process only takes part.

        Where the passes themselves wait for the other processes, all make as many; else one is enough for the exchange.
        """
        chosen: list[int | None] = [index for index, item in enumerate(counts) if item.weight > 0]
        wanted = self.exchange.num_batches if self.strategy.in_step else 1
        return chosen + [None] * (wanted - len(chosen))

    def _is_telling(self, counts: Counts) -> bool:
        """Whether all processes look now: at the first micro-batch that each goes through."""
        return self._looks_now and self._current is not None

    def _look(self, loss: Tensor, current: MicroStep | None, counts: Counts, num_items: Any, given: Any) -> float:
        """Look at this process's loss, and agree with the others on what they saw."""
        assert current is not None
        if type(given) is WatchedCount and given.is_used:
            self.rule.scaled_factor = 1  # of an own compute_loss, as in transformers: used as it is, if it is unknown
        if not self._is_silent:
            super()._look(loss, None, counts, num_items, given)
        self._agree_on_rule()
        current.total = 0.0 if self._is_silent else self.exchange.total
        return current.total

    def _agree_on_rule(self) -> None:
        """What all processes saw together, and what the window weighs by that."""
        self._looks_now = False
        self.rule.merge(gather_objects(self.exchange.world, self.rule.state_dict()))
        own = 0 if self.exchange.is_idle else self.rule.recount(self._window)
        self.exchange.weigh_again(own)

    def _is_bad(self, losses: Sequence[Tensor], norm: Tensor) -> Tensor:
        """Whether the update is not finite on any process."""
        return any_on_device(self.exchange.world, super()._is_bad(losses, norm))
