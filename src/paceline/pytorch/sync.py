"""Synchronizes processes around an optimizer step: each scales its losses by the global accumulation window.

`LocalSync` serves a single process. `ProcessSync` runs one collective on the host before each window. It sums the
weights of the micro-batches, counts the processes that have data left, and shares stop requests. Losses are therefore
scaled before the backward pass, processes without data run dummy passes, and all processes stop at the same step.
"""

from __future__ import annotations

import copy
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.args.mesh import Mesh
from paceline.core.contracts import Strategy
from paceline.core.events import CallbackHandler, TrainerCallback
from paceline.core.ledger import BACKWARD, COMMUNICATION, DATA, OTHER, Ledger
from paceline.core.methods import is_ours
from paceline.core.signals import StopSignals
from paceline.core.state import Requests, TrainerControl
from paceline.pytorch.distributed.collectives import any_on_device, gather_objects, sum_floats, sum_ints
from paceline.pytorch.distributed.strategy import DistributedOutOfMemory, is_out_of_memory
from paceline.pytorch.distributed.watchdog import Watchdog
from paceline.pytorch.distributed.window import Pass, PassRunner
from paceline.pytorch.distributed.world import World
from paceline.pytorch.model.loss import Counts, LossNormalizer
from paceline.pytorch.model.operations import Counted
from paceline.pytorch.model.reductions import OF_TARGETS, Observation
from paceline.pytorch.optim.layerwise import steps_in_backward

FLAGS = ("should_training_stop", "should_epoch_stop", "should_log", "should_evaluate", "should_save")
OF_ONE_PROCESS = (
    "auto_find_batch_size does not retry it: memory ran out on this process, outside of the forward and backward "
    "passes, and the others have continued. They will fail with an error of their connection to this one."
)
AccumulationWindow = tuple[list[Any], Any]
Measure = Callable[[Sequence[Any]], Counted]
RunWindow = Callable[[PassRunner, list[Pass]], list[Tensor]]
StepRow = tuple[float, float, float, bool]  # loss, grad_norm, learning_rate, True if there is a loss


class LocalSync:
    """Sync of a single process, which has the whole accumulation window.

    Args:
        normalizer: counts micro-batches and weighs losses.

    Attributes:
        total: weight of the window.
        is_look_due: the loss must be probed before the first loss of the window is scaled.
    """

    def __init__(self, normalizer: LossNormalizer) -> None:
        self.normalizer = normalizer
        self.total = 0.0
        self.is_look_due = False
        self._probes_single_batches = False
        self._counts: Sequence[Counts] = ()

    def probe_single_batches(self) -> None:
        """Probes the loss in windows of one micro-batch too, for a part of the run that weighs single samples."""
        self._probes_single_batches = True

    # ---- one window

    def begin(self, batches: Sequence[Any], counts: Sequence[Counts], strategy: Strategy, copies: bool) -> list[Pass]:
        """Computes the weight of a window and makes its passes.

        Args:
            batches: micro-batches of the window.
            counts: the counts of each micro-batch.
            strategy: may delay gradient synchronization to the last pass of non-zero weight.
            copies: pass shallow copies of the batches, because user code may pop labels and the originals are needed
                later.

        Returns:
            One pass per micro-batch; those of weight 0 are skipped at run time. Empty if the window's weight is 0.
        """
        normalizer, self._counts = self.normalizer, counts
        self.total = total = counts[0].weight
        if len(counts) > 1 or self._probes_single_batches:
            self.total = total = sum([item.weight for item in counts])
            self.is_look_due = total > 0 and normalizer.is_due(counts, by_row=self._probes_single_batches)
            normalizer.num_updates += 1
        if not total or (normalizer.reduction.unit not in OF_TARGETS and not normalizer.has_target(counts)):
            return []
        closing = last = len(counts) - 1
        if strategy.delays_grad_sync or counts[last].weight == 0:
            closing = max((index for index, item in enumerate(counts) if item.weight > 0), default=last)
        passes = []
        for index, item in enumerate(counts):
            batch = copy.copy(batches[index]) if copies else batches[index]
            passes.append(Pass(batch, item, index, index == last, index == closing, item.weight != total))
        return passes

    def begin_again(self, passes: list[Pass], batches: Sequence[Any], strategy: Strategy) -> list[Pass]:
        """Returns the passes of the window after `learn` updated its weights.

        The passes are unchanged: they read the weights when they run.
        """
        return passes

    def lone_pass(self, inputs: object) -> Pass:
        """Returns the pass of a micro-batch outside of a window, for user code that calls `training_step` directly."""
        return Pass(inputs, self.normalizer.count(inputs))

    def runner_of(self, strategy: Strategy) -> RunWindow:
        """Returns `(engine, passes) -> contributions to the window's loss`."""
        return strategy.run_window

    def discard(self) -> None:
        """Resets the state of a failed window; a due probe runs when the window is retried."""
        self.normalizer.num_updates -= self.is_look_due
        self.is_look_due = False

    def fit_spare(self, split: Callable[[Any], list[Any]]) -> None:
        """Does nothing: there are no dummy passes."""

    def dummy_batch(self) -> Any:
        """Returns None: there are no dummy passes."""

    # ---- probing the loss

    def must_match(self, strategy: Strategy, compute_loss: object) -> bool:
        """Returns True if all processes must run the same number of extra passes."""
        return strategy.in_step

    def is_any(self, flag: bool) -> bool:
        """Returns True if a host-side flag is set on any process."""
        return flag

    def learn(self, observations: list[Observation], batches: Sequence[Any] = ()) -> None:
        """Records the observations of a probe and recomputes the weight of the window.

        Args:
            observations: of this process.
            batches: the micro-batches of the window.
        """
        self.is_look_due = False
        self.normalizer.learn(observations, self._counts)
        self.total = self.normalizer.recount(self._counts)

    # ---- after the passes

    def on_any(self, flag: Tensor) -> Tensor:
        """Returns a flag (0-dim, on the device) that is set if it is set on any process."""
        return flag

    def mean_losses(self, rows: list[StepRow]) -> list[StepRow]:
        """Returns the rows with each loss averaged over the processes."""
        return rows

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Returns True if smaller micro-batches may avoid this error."""
        return is_out_of_memory(error)

    def measured(self, measure: Measure, batches: Sequence[Any]) -> Counted:
        """Returns the counts of a window.

        Args:
            measure: `(micro-batches) -> counts`.
            batches: micro-batches of the window.
        """
        return measure(batches)

    def expect(self, accumulation: int) -> None:
        """Does nothing: windows of any size are drawn."""

    def enter(self, stage: str) -> None:
        """Does nothing: no other process waits for this one."""

    def make_control(self) -> TrainerCallback | None:
        """Returns None: there are no other processes to share control flags with."""
        return None


class Tally(NamedTuple):
    """Numbers of the next accumulation window, which are summed over all processes.

    Of ranks that read the same data, one adds `weight`, `items` and `samples`.

    Attributes:
        weight: weight of the micro-batches in the loss.
        items: `num_items_in_batch`.
        num_counting: processes that have an `items`.
        samples: samples in the micro-batches.
        num_due: processes that are due to probe the loss.
        num_stopping: processes that received a signal to stop.
        num_interrupted: processes that received SIGINT.
        num_lacking: processes without a batch for dummy passes.
        num_requests: pending requests to change settings.
        num_with_target: processes whose micro-batches have a target.
        num_shifting: processes that have seen another shift of the targets than is known of the model.
    """

    weight: float
    items: int
    num_counting: int
    samples: int
    num_due: int
    num_stopping: int
    num_interrupted: int
    num_lacking: int
    num_requests: int
    num_with_target: int
    num_shifting: int


class ProcessSync:
    """Sync of one of several processes that share each accumulation window.

    Args:
        world: the processes.
        normalizer: counts micro-batches and weighs losses.
        accumulation: maximum number of micro-batches in a window.
        signals: stop requests; one received by any process stops all.
        averages: divide losses by the weight over all processes; otherwise by the weight of each process.
        measure: `(micro-batches) -> counts`; None disables counting.
        watchdog: receives the current stage of this process, and reports late processes.
        mesh: the layout of the ranks. Ranks that read the same data count once; None: all read different data.
        ledger: records the time spent waiting for other processes; None creates a new one.
        requests: changes of settings that callbacks and commands request, exchanged before each window.

    Attributes:
        total: divisor of this process's losses: the global weight divided by the number of data-parallel ranks,
            because gradients are averaged over them afterwards; the local weight if not `averages`.
        weight: weight of the window over all processes.
        is_idle: this process has no micro-batch in the window.
        is_served: another process reads the data for this one.
        is_informative: the processes agreed to probe the loss of the window.
        is_look_due: that probe must still run, before the first loss is scaled.
        num_batches: largest number of micro-batches of any process.
        counted: totals of the window over all processes.
    """

    def __init__(
        self,
        world: World,
        normalizer: LossNormalizer,
        accumulation: int,
        signals: StopSignals,
        *,
        averages: bool = True,
        measure: Measure | None = None,
        watchdog: Watchdog,
        mesh: Mesh | None = None,
        ledger: Ledger | None = None,
        requests: Requests | None = None,
    ) -> None:
        self.ledger = Ledger() if ledger is None else ledger
        self.requests = Requests() if requests is None else requests
        self.mesh = mesh or Mesh(dp_replicate=world.world_size)
        self._is_leader = int(self.mesh.is_data_leader(world.process_index))  # of the ranks that read the same data
        self.world = world
        self.normalizer = normalizer
        self.accumulation = accumulation
        self.signals = signals
        # a loss divided by the global count is averaged over the ranks afterwards: multiply by their number
        normalizer.scaled_factor = self.mesh.data_size if averages else 1
        self.averages, self.measure, self.watchdog = averages, measure, watchdog
        self.is_served = False
        self.total = self.weight = 0.0
        self.num_batches = 0
        self.is_idle = self.is_informative = self.is_look_due = False
        self.counted = Counted()
        self._counts: Sequence[Counts] = ()
        self._must_match = False  # an overridden compute_loss may run collectives: all processes call it equally often
        self._spare: Any = None  # the batch of dummy passes
        self._gate: Any = None  # the `MemoryGate` of a sharded model with `auto_find_batch_size`

    # ---- before a window

    def expect(self, accumulation: int) -> None:
        """Sets the maximum number of micro-batches in the windows to come."""
        self.accumulation = accumulation

    def probe_single_batches(self) -> None:
        """Does nothing: windows of one micro-batch of each process are probed in any case."""

    def synchronize(self, window: AccumulationWindow, num_samples: int) -> tuple[AccumulationWindow, int, int]:
        """Agrees on the next window with the other processes.

        Args:
            window: micro-batches of this process, and their `num_items_in_batch`.
            num_samples: samples in these micro-batches.

        Returns:
            The window of this process (empty only if no process has data left), its samples over all processes, and
            the largest number of micro-batches of any process.
        """
        batches, num_items = window
        counts, own_weight, total, rest = self._sum(window, num_samples)
        size = len(rest) - self.accumulation
        self.counted, slots = Counted(*rest[:size]), rest[size:]
        if total.num_stopping:
            self.signals.agree(bool(total.num_interrupted))
        if total.num_requests:
            self.requests.agree(gather_objects(self.world, self.requests.pending))
        is_weighed = self.normalizer.reduction.unit in OF_TARGETS or total.num_with_target
        self.weight = total.weight if is_weighed else 0.0
        self.is_informative = total.num_due > 0
        self._weigh(total.weight, own_weight)
        num_batches = sum(slot > 0 for slot in slots)
        if num_batches == 0:
            return ([], None), 0, 0
        self.num_batches = num_batches
        if own_weight > 0:
            self._spare = copy.copy(next(b for b, item in zip(batches, counts, strict=True) if item.weight > 0))
        if total.num_lacking and self.weight > 0:
            self._spare = self._find_spare()
        if self.averages and total.num_counting:
            num_items = torch.tensor(total.items)
        self.is_idle = not batches
        if self.is_idle:
            batches = [self.dummy_batch()]
            if total.num_counting and num_items is None:
                num_items = self.normalizer.num_items(batches)
        self.watchdog.enter("making an update")
        return (batches, num_items), total.samples, num_batches

    def _sum(self, window: AccumulationWindow, num_samples: int) -> tuple[list[Counts], float, Tally, list[int]]:
        """Returns the counts and the weight of this process's window, and the sums over all processes: the tally, then
        the measured counts and the processes with a micro-batch in each slot. A collective.
        """
        batches, num_items = window
        counts = [self.normalizer.count(batch) for batch in batches]
        own_weight = sum(item.weight for item in counts)
        measured = self.measure(batches) if self.measure is not None and batches else Counted()
        own = self._tally(counts, own_weight, num_items, num_samples)
        counted = [int(number) * self._is_leader for number in measured]
        slots = [int(len(batches) > slot) for slot in range(self.accumulation)]
        with self._waiting("waiting for the others before an update", DATA):
            sums = sum_floats(self.world, [*own, *counted, *slots])  # exact for integers below 2**53
        total = Tally(sums[0], *map(int, sums[1 : len(own)]))
        if 0 < total.num_shifting < self.world.world_size:
            self.normalizer.know_other_shift()
            return self._sum(window, num_samples)  # all of them count alike now
        return counts, own_weight, total, [int(number) for number in sums[len(own) :]]

    def _tally(self, counts: Sequence[Counts], own_weight: float, num_items: Any, num_samples: int) -> Tally:
        """Returns what this process adds to the sums over all processes."""
        noted = self.signals.noted
        return Tally(
            weight=own_weight * self._is_leader,
            items=int(num_items) * self._is_leader if num_items is not None else 0,
            num_counting=int(num_items is not None),
            samples=num_samples * self._is_leader,
            num_due=int(bool(counts) and self.normalizer.is_due(counts, by_row=True)),
            num_stopping=int(noted is not None),
            num_interrupted=int(noted == signal.SIGINT),
            num_lacking=int(own_weight == 0 and self._spare is None),
            num_requests=len(self.requests.pending),
            num_with_target=int(bool(counts) and self.normalizer.has_target(counts)),
            num_shifting=int(self.normalizer.has_other_shift),
        )

    def draw(self, collect: Callable[..., AccumulationWindow], *arguments: Any) -> AccumulationWindow:
        """Draws a window with `collect`, and reports the stage to the watchdog."""
        if self.is_served:
            with self.watchdog.waiting("waiting for the first process to read data"):
                return collect(*arguments)
        self.watchdog.enter("reading data")
        return collect(*arguments)

    def _weigh(self, weight: float, own_weight: float) -> None:
        self.total = weight / self.mesh.data_size if self.averages else own_weight

    def dummy_batch(self) -> Any:
        """Returns a batch for a dummy pass, whose weight is 0."""
        return copy.copy(self._spare)

    def fit_spare(self, split: Callable[[Any], list[Any]]) -> None:
        """Replaces the batch of dummy passes by the part of it with the largest weight.

        Args:
            split: returns the parts of a batch, in the current micro-batch size.
        """
        if self._spare is not None:
            self._spare = max(split(self._spare), key=lambda part: self.normalizer.count(part).weight)

    def _find_spare(self) -> Any:
        """Returns the spare batch of this process, or that of another process if this one has none. A collective."""
        offers = gather_objects(self.world, self._spare)
        found = next(offer for offer in offers if offer is not None)
        return found if self._spare is None else self._spare

    # ---- one window

    def begin(self, batches: Sequence[Any], counts: Sequence[Counts], strategy: Strategy, copies: bool) -> list[Pass]:
        """Returns the passes of the synchronized window; empty if its global weight is 0."""
        if self.weight == 0:
            return []
        self._counts = counts
        if self.is_idle:
            for item in counts:
                item.weight = 0
        # a single micro-batch on a single data rank needs no weight
        is_shared = self.mesh.data_size > 1 or len(counts) > 1
        if self._gate is not None:  # a retried window has smaller micro-batches, and so more of them
            self.num_batches = self._gate.all_reduce_max(len(batches))
        self.is_look_due = is_shared and self.is_informative
        self.normalizer.num_updates += is_shared
        return self._make_passes(batches, strategy)

    def begin_again(self, passes: list[Pass], batches: Sequence[Any], strategy: Strategy) -> list[Pass]:
        """Returns the passes of the window after `learn` updated its weights."""
        return self._make_passes(batches, strategy)

    def _make_passes(self, batches: Sequence[Any], strategy: Strategy) -> list[Pass]:
        """Makes the passes of the micro-batches with a weight, and dummy passes.

        If passes themselves run collectives, all processes make the same number; else one pass suffices for gradient
        synchronization.
        """
        chosen = [index for index, item in enumerate(self._counts) if item.weight > 0]
        waits = strategy.in_step or (self._must_match and not strategy.runs_windows)
        wanted = max(self.num_batches if waits else 1, len(chosen))
        passes = []
        for place in range(wanted):
            is_dummy, is_last = place >= len(chosen), place == wanted - 1
            index = 0 if is_dummy else chosen[place]
            batch = self.dummy_batch() if is_dummy else copy.copy(batches[index])
            counts = Counts(0, None, 0) if is_dummy else self._counts[index]
            # needs_factor=True even for a single micro-batch: gradients are averaged over the ranks afterwards
            passes.append(Pass(batch, counts, index, is_last, is_last, True, is_required=True, is_dummy=is_dummy))
        return passes

    def lone_pass(self, inputs: object) -> Pass:
        """Returns the pass of a micro-batch outside of a window, for user code that calls `training_step` directly."""
        return Pass(inputs, self.normalizer.count(inputs), needs_factor=True)

    def runner_of(self, strategy: Strategy) -> RunWindow:
        """Returns `(engine, passes) -> contributions to the window's loss`."""
        self._gate = strategy.memory_gate
        agrees = strategy.reduces_late or self._gate is not None
        return partial(self._run_and_agree, strategy) if agrees else strategy.run_window

    def _run_and_agree(self, strategy: Strategy, engine: PassRunner, passes: list[Pass]) -> list[Tensor]:
        """Runs the passes of a window, and reduces the gradients once all processes have completed them.

        Raises:
            DistributedOutOfMemory: a process ran out of memory. Raised on all processes.
        """
        gate = self._gate
        losses: list[Tensor] = []
        reason, is_agreed = None, False
        try:
            with gate.opened(self.watchdog) if gate is not None else nullcontext():
                losses = strategy.run_window(engine, passes)
        except Exception as error:
            if steps_in_backward(engine.optimizer) or not is_out_of_memory(error):
                raise
            is_agreed = isinstance(error, DistributedOutOfMemory)  # the gate has notified all processes
            reason = str(error)  # not the error: its traceback keeps the tensors of the failed pass alive
        if reason is not None and self.is_look_due and gate is None:
            self.learn([])  # joins the collective in which the others wait
        number = int(is_agreed)
        if not is_agreed:
            with self._waiting("waiting for the others after the backward passes", BACKWARD):
                is_out = reason is not None
                number = gate.num_out_of_memory(is_out) if gate is not None else sum_ints(self.world, [int(is_out)])[0]
        if number:
            strategy.recover()
            raise DistributedOutOfMemory(reason or f"{number} of the other processes ran out of memory")
        strategy.reduce_gradients()
        self.ledger.note((COMMUNICATION, self.ledger.now()))
        return losses

    @contextmanager
    def _waiting(self, stage: str, before: int) -> Iterator[None]:
        """Reports to the watchdog and the ledger that this process waits for others.

        Args:
            stage: name of the stage, for the watchdog.
            before: the ledger's activity that ends now.
        """
        self.ledger.note((before, self.ledger.now()))
        with self.watchdog.waiting(stage):
            yield
        self.ledger.note((COMMUNICATION, self.ledger.now()))

    def discard(self) -> None:
        """Resets the state of a failed window; a due probe runs when the window is retried."""
        self.normalizer.num_updates -= self.is_look_due
        self.is_look_due = False

    # ---- probing the loss

    def must_match(self, strategy: Strategy, compute_loss: object) -> bool:
        """Returns True if all processes must run the same number of extra passes."""
        self._must_match = strategy.in_step or not is_ours(compute_loss)  # a user's may run collectives, as TRL's do
        return self._must_match

    def is_any(self, flag: bool) -> bool:
        """Returns True if a host-side flag is set on any process, if all processes ask; otherwise its own flag."""
        if not self._must_match:
            return flag
        self._pass_gate()
        return sum_ints(self.world, [int(flag)])[0] > 0

    def _pass_gate(self) -> None:
        """Raises `DistributedOutOfMemory` on all processes, before a collective, if one of them ran out of memory."""
        if self._gate is not None:
            self._gate.pass_through()

    def learn(self, observations: list[Observation], batches: Sequence[Any] = ()) -> None:
        """Records the observations of all data leaders and recomputes the weight of the window. A collective.

        Args:
            observations: of this process.
            batches: the micro-batches of the window. One whose targets count is the batch of dummy passes from now on.
        """
        self._pass_gate()
        self.is_look_due = False
        own = observations if self._is_leader else []
        gathered = gather_objects(self.world, (own, self.normalizer.has_other_shift))
        if any(has_other_shift for _, has_other_shift in gathered):  # the last stage of a pipeline sees it alone
            self.normalizer.know_other_shift()
        self.normalizer.learn([observation for each, _ in gathered for observation in each], self._counts)
        own_weight = 0 if self.is_idle else self.normalizer.recount(self._counts)
        if self._spare is None or not self.normalizer.count(self._spare).weight:  # no target of it counts any more
            counting = (b for b, item in zip(batches, self._counts, strict=False) if item.weight > 0)
            self._spare = copy.copy(next(counting, None))
        self.weight, num_lacking = sum_floats(self.world, [own_weight * self._is_leader, float(self._spare is None)])
        if num_lacking and self.weight > 0:
            self._spare = self._find_spare()
        self._weigh(self.weight, own_weight)

    # ---- after the passes

    def on_any(self, flag: Tensor) -> Tensor:
        """Returns a flag (0-dim, on the device) that is set if it is set on any process."""
        return any_on_device(self.world, flag)

    def mean_losses(self, rows: list[StepRow]) -> list[StepRow]:
        """Returns the rows with each loss averaged over the processes, in one collective."""
        if not rows:
            return rows
        sums = sum_floats(self.world, [row[0] if row[3] else 0.0 for row in rows])
        size = self.world.world_size
        return [(total / size, *row[1:]) if row[3] else row for total, row in zip(sums, rows, strict=True)]

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Returns True if smaller micro-batches may avoid this error, which must have been raised on all processes.

        An error of this process alone gets a note.
        """
        if is_out_of_memory(error) and not isinstance(error, DistributedOutOfMemory):
            error.add_note(OF_ONE_PROCESS)
        return isinstance(error, DistributedOutOfMemory)

    def measured(self, measure: Measure, batches: Sequence[Any]) -> Counted:
        """Returns the counts of the window over all processes, as `synchronize` computed them."""
        return self.counted

    def enter(self, stage: str) -> None:
        """Reports the current stage of this process to the watchdog."""
        self.watchdog.enter(stage)

    def make_control(self) -> TrainerCallback | None:
        """Returns the callback that shares control flags with the other processes."""
        return SyncControl(self)

    def agree(self, control: TrainerControl) -> None:
        """Sets each control flag that is set on any process, and shares stop signals. A collective."""
        with self._waiting("waiting for the others after an update", OTHER):
            noted = self.signals.noted
            flags = [int(getattr(control, name)) for name in FLAGS]
            sums = sum_ints(self.world, [int(noted is not None), int(noted == signal.SIGINT), *flags])
        if sums[0]:
            self.signals.agree(sums[1] > 0)
        for name, number in zip(FLAGS, sums[2:], strict=True):
            if number:
                setattr(control, name, True)


Sync = LocalSync | ProcessSync


class SyncControl(TrainerCallback):
    """The last callback; sets a control flag on all processes if another callback set it on any of them."""

    def __init__(self, sync: ProcessSync) -> None:
        self.sync = sync

    def on_step_end(self, args: Any, state: object, control: TrainerControl, **kwargs: Any) -> None:
        self.sync.agree(control)

    def on_epoch_end(self, args: Any, state: object, control: TrainerControl, **kwargs: Any) -> None:
        self.sync.agree(control)


@contextmanager
def synchronized_control(handler: CallbackHandler, sync: Sync) -> Iterator[None]:
    """Shares control flags while entered: a flag that a user's callback sets on one process is set on all."""
    last = sync.make_control()
    heard = [*handler.listening("on_step_end"), *handler.listening("on_epoch_end")]
    is_needed = any(not type(each).__module__.startswith("paceline.") or hears_later(each) for each in heard)
    if last is None or not is_needed:
        yield
        return
    handler.add_callback(last)
    try:
        yield
    finally:
        handler.remove_callback(last)


def hears_later(callback: object) -> bool:
    """True if a callback of ours adds the user's callbacks during the run."""
    return getattr(callback, "adds_callbacks", False) is True
