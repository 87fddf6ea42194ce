"""Optimizer steps. The engine handles tensors; it is independent of options, files and backends.

`Engine.step` counts the micro-batches of an accumulation window, accumulates their gradients (forward, scale,
backward), clips, steps the optimizer and the schedule, and logs. The strategy runs the passes of the window and calls
`run_pass` for each; the Trainer's `training_step` calls `run_micro_step` for its body.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.contracts import Emit, StepOutput, Strategy
from paceline.core.journal import NOT_COMPUTED
from paceline.core.ledger import BACKWARD, COMPUTE, FORWARD, OPTIMIZER, OTHER, TRANSFER, Ledger
from paceline.core.methods import is_ours
from paceline.core.micro_batches import may_retry
from paceline.pytorch.data.batches import recast, split_batches
from paceline.pytorch.distributed.precision import widened
from paceline.pytorch.distributed.strategy import empty_device_cache
from paceline.pytorch.distributed.window import LossOf, Pass
from paceline.pytorch.model.loss import Counts, LossNormalizer
from paceline.pytorch.model.objective import accepts, adapted
from paceline.pytorch.model.outputs import check_loss, detach, no_gradient
from paceline.pytorch.optim.layerwise import steps_in_backward
from paceline.pytorch.probes.audit import LossAudit
from paceline.pytorch.sync import RunWindow, StepRow, Sync

logger = logging.getLogger(__name__)

NOTHING = nullcontext()


class StepLog(list[tuple[Sequence[Tensor], Any, Any]]):
    """(contributions to the loss, grad_norm, learning rate) of each optimizer step since the last read.

    A step in which every target was ignored has no contributions. Tensors stay on the device until they are read.
    """

    def drain(self) -> list[tuple[float, float, float, bool]]:
        """Returns (loss, grad_norm, learning rate, True if there is a loss) of each step, and clears the log.

        Synchronizes with the device.
        """
        steps = list(self)
        self.clear()
        values = iter(to_floats([loss for losses, _, _ in steps for loss in losses]))
        known = iter(to_floats([norm for _, norm, _ in steps if norm is not None]))
        rows = []
        for losses, norm, rate in steps:
            loss = sum(itertools.islice(values, len(losses))) if losses else math.nan
            rows.append((loss, NOT_COMPUTED if norm is None else next(known), float(rate), len(losses) > 0))
        return rows


class Engine:
    """Makes optimizer steps.

    Args:
        strategy: places tensors on devices, and runs the passes of an accumulation window.
        normalizer: counts micro-batches and scales losses.
        sync: provides the weight of a window over all processes.
        model: the module to call, as the strategy prepared it.
        optimizer: the optimizer of the model's parameters.
        scheduler: stepped once per optimizer step, unless it follows metrics or the fp16 scaler skipped the step.
        scheduler_follows_metrics: evaluations step the scheduler, not the engine.
        training_step: the Trainer's, bound: `(model, inputs, num_items_in_batch) -> contribution to the loss`.
        compute_loss: the Trainer's, bound: `(model, inputs) -> loss`; also takes `num_items_in_batch` if it accepts it.
        prepare_inputs: the Trainer's: moves a batch to the device.
        max_grad_norm: clipping threshold; infinity only computes the norm, 0 disables both.
        skips_non_finite: a step with a non-finite loss or gradient norm is not applied; the schedule still advances.
        empty_cache_every: steps between releases of cached device memory; None disables them.
        ledger: records the time of each activity.

    Attributes:
        num_micro_steps: micro-batches of the window in progress.
        own_divisor: the divisor that user code sets for the losses of the window; None if not set.
        is_applied: the last step changed the parameters, as far as the host knows.
        is_bad: a flag on the device (0-dim) that the last step was not finite and hence not applied; None if steps are
            applied in either case.
        current: the pass in progress; None between passes.
        is_applying: the window in progress, or the one that failed, has begun to change the parameters.
        num_steps: optimizer steps so far.
        batches: micro-batches of the window in progress, or of the window that failed.
        after_read: called on all processes after each `read`.
        around_probe: functions that return contexts of the extra passes that infer the reduction of the loss.
    """

    num_micro_steps = 1
    own_divisor: int | None = None
    is_applied = True
    is_applying = False
    is_bad: Tensor | None = None

    def __init__(
        self,
        strategy: Strategy,
        normalizer: LossNormalizer,
        sync: Sync,
        *,
        model: nn.Module,
        optimizer: Any,
        scheduler: Any,
        scheduler_follows_metrics: bool,
        training_step: Callable[..., Tensor],
        compute_loss: Callable[..., Tensor],
        prepare_inputs: Callable[[Any], Any],
        max_grad_norm: float,
        skips_non_finite: bool = False,
        ledger: Ledger,
        empty_cache_every: int | None = None,
    ) -> None:
        self.strategy, self.normalizer, self.sync = strategy, normalizer, sync
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.steps_scheduler = scheduler is not None and not scheduler_follows_metrics
        self.training_step = adapted(training_step, 3)
        self.compute_loss, self.prepare_inputs = compute_loss, prepare_inputs
        self.max_grad_norm = max_grad_norm
        self.skips_non_finite = skips_non_finite
        self.empty_cache_every = empty_cache_every
        self._note, self._now = ledger.note, ledger.now
        # an overridden training_step may run the whole pass itself
        self._rest_of_pass = BACKWARD if is_ours(training_step) else COMPUTE
        self.log = StepLog()
        self.after_read: list[Callable[[], None]] = []
        self.around_probe: list[Callable[[], AbstractContextManager[None]]] = []
        self.keep_outputs = False
        self.keep_batches = False  # user code may pop labels from a batch; a copy keeps the original for a retry
        must_match = sync.must_match(strategy, compute_loss)
        self._audit = LossAudit(strategy, normalizer, model, compute_loss, prepare_inputs, must_match, sync.is_any)
        self._inner = strategy.unwrap(model)  # user code may have changed its training mode, but not the wrapper's
        # schedule-free optimizers keep two sets of weights and switch between them
        self._enter_train = getattr(optimizer, "train", None)
        self._run_window = sync.runner_of(strategy)
        self._asks_schedule = getattr(scheduler, "shows_rates", False)
        self._autocasts = strategy.precision.autocasts
        # only the device knows if a fused optimizer skipped a step, so the schedule advances on skipped steps with
        # every optimizer; with fp16 the result is read at each step anyway
        self._counts_skipped = skips_non_finite and not strategy.precision.scales
        self._passes_count = accepts(compute_loss, "num_items_in_batch")
        self.num_steps = 0
        # state of the window in progress
        self.batches: Sequence[Any] = ()
        self._counts: Sequence[Counts] = ()
        self._num_items: Any = None
        self._emit: Emit | None = None
        self.current: Pass | None = None
        self._seen: Any = None  # the model's last outputs
        self._kept: list[Any] = []  # outputs of the window's micro-batches, if a callback asks for them

    @property
    def is_last_micro_step(self) -> bool:
        """Returns True if the gradients are complete after the pass in progress; True between windows."""
        return self.current is None or self.current.is_last

    # ---- the contract of the loop

    def step(self, batches: Sequence[Any], num_items: Any, emit: Emit | None) -> StepOutput:
        """Makes one optimizer step. A window of weight 0 (every target ignored) changes and logs nothing."""
        if len(batches) < self.strategy.min_micro_batches:
            batches = self.strategy.divide(batches, split_batches)
        self.num_micro_steps, self.own_divisor, self.is_applying = len(batches), None, False
        self.batches, self._num_items, self._emit = batches, num_items, emit
        self._counts = counts = list(map(self.normalizer.count, batches))
        passes = self.sync.begin(batches, counts, self.strategy, self.keep_batches or self.keep_outputs)
        if not passes:
            return self._skip()
        note, now = self._note, self._now
        note((OTHER, now()))
        losses = self._run_window(self, passes)
        if self.strategy.runs_windows:
            note((COMPUTE, now()))
        self.batches, self.current = (), None
        norm = self.strategy.clip(self.max_grad_norm)
        if emit is not None:
            emit("on_pre_optimizer_step")
        self.is_bad = self._is_bad(losses, norm) if self.skips_non_finite else None
        self.is_applying = True
        self.is_applied = self.strategy.step(self.is_bad)
        if emit is not None:
            emit("on_optimizer_step")
        rate = self.optimizer.param_groups[0]["lr"]
        if rate is None or self._asks_schedule:  # Adafactor computes its own learning rate; its schedule reports it
            rate = self.scheduler.get_last_lr()[0]
        known_norm = norm if self.is_applied or not self.strategy.precision.has_rescaled else None
        self.log.append((losses, known_norm, rate if isinstance(rate, float) else float(rate)))
        if self.steps_scheduler and (self.is_applied or self._counts_skipped):
            self.scheduler.step()
        self.strategy.clear_gradients()
        if self.strategy.is_lazy:  # run_deferred computes all live tensors, so the gradients are dropped first
            self.strategy.run_deferred()
        self.num_steps += 1
        if self.empty_cache_every is not None and self.num_steps % self.empty_cache_every == 0:
            empty_device_cache(self.strategy.device)
        outputs, self._kept = self._kept, []
        note((OPTIMIZER, now()))
        return StepOutput(losses, outputs)

    def read(self) -> list[StepRow]:
        """Returns (loss, grad_norm, learning_rate, True if there is a loss) of each step since the last read."""
        rows = self.sync.mean_losses(self.log.drain())
        for follow in self.after_read:
            follow()
        return rows

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Returns True if smaller micro-batches may avoid this error and no part of the step has been applied yet.

        An out-of-memory while the update is applied gets a note with the reason why it is not retried.
        """
        if steps_in_backward(self.optimizer) or not self.sync.is_out_of_memory(error):
            return False
        return may_retry(error, self.is_applying)

    def limit_norm(self, max_norm: float) -> None:
        """Sets the norm to which the gradients of later steps are clipped; infinity only computes it."""
        self.max_grad_norm = max_norm

    def discard(self) -> None:
        """Drops the gradients and outputs of a failed step."""
        self.strategy.clear_gradients()
        self._seen = None
        self._kept = []
        self.current = None
        self.batches = ()
        self.sync.discard()
        empty_device_cache(self.strategy.device)

    def split(self, batches: Sequence[Any], micro_batch_size: int) -> list[Any]:
        """Returns the same samples in micro-batches of at most `micro_batch_size`."""
        self.sync.fit_spare(lambda batch: split_batches([batch], micro_batch_size))
        return split_batches(batches, micro_batch_size)

    # ---- where regularizers join

    def wrap(
        self,
        make_loss: Callable[[Callable[..., Tensor]], Callable[..., Tensor]],
        make_window: Callable[[RunWindow], RunWindow],
    ) -> None:
        """Replaces how the loss of a training micro-batch is computed and how the passes of a window are run.

        Probes of the loss, and evaluations, still call the Trainer's `compute_loss`.

        Args:
            make_loss: returns the new `compute_loss`, given the current one.
            make_window: returns the new `(engine, passes) -> contributions to the loss`, given the current one.
        """
        self.compute_loss, self._run_window = make_loss(self.compute_loss), make_window(self._run_window)
        self._passes_count = accepts(self.compute_loss, "num_items_in_batch")

    @contextmanager
    def unobserved(self) -> Iterator[None]:
        """Context in which passes fire no events and keep no outputs."""
        emit, keeps = self._emit, self.keep_outputs
        self._emit, self.keep_outputs = None, False
        try:
            yield
        finally:
            self._emit, self.keep_outputs = emit, keeps

    # ---- the window, run by the strategy

    def run_pass(self, current: Pass, model: nn.Module | None = None) -> Tensor:
        """Runs forward and backward of one micro-batch.

        Args:
            current: the pass.
            model: the module to call; None: the engine's model.

        Returns:
            The contribution to the window's loss, 0-dim, detached.
        """
        self.current = current
        if not current.counts.weight and current.is_required and not current.is_prepared:
            current.become_dummy(self.sync.dummy_batch())
        batch = recast(current.batch, self._spare) if self.keep_batches else current.batch
        loss = self.training_step(self.model if model is None else model, batch, self._num_items)
        self._note((self._rest_of_pass, self._now()))
        if self.keep_outputs and not current.is_dummy:
            self._kept.append(detach(self._seen))
        self._seen = None
        if current.is_dummy:
            return torch.zeros_like(loss)
        # it is read when a log is due: user code may keep the tensor, and add later losses to it in place
        return loss.detach().clone() if isinstance(loss, Tensor) else loss

    def _spare(self, value: Tensor) -> Tensor:
        """Returns a copy of a tensor that is on the device, which user code would change in place for a retry too."""
        return value.clone() if value.device.type == self.strategy.device.type else value

    def skip_pass(self, current: Pass) -> None:
        """Skips a micro-batch of weight 0."""
        if self.keep_outputs:
            self._kept.append(None)

    def end_pass(self, current: Pass | None) -> None:
        """Fires `on_substep_end` between two passes.

        Args:
            current: the pass in progress; None if there is none.
        """
        self.current = current
        if self._emit is not None:
            self._emit("on_substep_end")

    def enter_training(self, model: nn.Module) -> None:
        """Switches a model and the optimizer to training mode."""
        model.train()
        if callable(self._enter_train):
            self._enter_train()

    # ---- one pass

    def run_micro_step(self, model: nn.Module, inputs: object, num_items: object) -> Tensor:
        """Runs forward, scaling and backward: the body of `Trainer.training_step`.

        The loss is scaled before backward, so that a backend that reduces inside backward sees the final gradient.

        Returns:
            This micro-batch's contribution to the window's loss, 0-dim, detached.
        """
        if not (model.training and self._inner.training):
            self.enter_training(model)
        current = self.current or self.sync.lone_pass(inputs)
        if not current.is_prepared:
            inputs = self.prepare_inputs(inputs)
        note, now = self._note, self._now
        note((TRANSFER, now()))
        if self.sync.is_look_due and self.current is not None:
            self._look(inputs, current, num_items)
            if not current.counts.weight:  # none of its targets counts: its loss may be NaN, which times 0 is NaN
                current.become_dummy(self.sync.dummy_batch())
                if current.batch is None:
                    return torch.zeros((), device=self.strategy.device)
                inputs = self.prepare_inputs(current.batch)
        numbers = {"num_items_in_batch": num_items} if self._passes_count else {}
        handle = model.register_forward_hook(self._keep) if self.keep_outputs else None
        try:
            with self._autocasting(model) if self._autocasts else NOTHING:
                loss = self.compute_loss(model, inputs, **numbers)
        finally:
            if handle is not None:
                handle.remove()
        if not (isinstance(loss, Tensor) and loss.dim() == 0 and loss.is_floating_point()):
            loss = check_loss(loss, "compute_loss")
        if not loss.requires_grad:
            raise no_gradient()
        if self.own_divisor is not None and not self.normalizer.is_scaled:
            loss = loss * (self.num_micro_steps / self.own_divisor)
        if current.needs_factor or num_items is not None:
            loss = self._weigh(loss, current)
        note((FORWARD, now()))
        self.strategy.backward(loss)
        note((BACKWARD, now()))
        return loss.detach()

    def _weigh(self, loss: Tensor, current: Pass) -> Tensor:
        """Scales a loss to its term in the window's weighted mean."""
        total = self.sync.total if current is self.current else current.counts.weight
        is_nothing = current.is_dummy or not total
        factor = 0 if is_nothing else self.normalizer.factor(current.counts, total)
        if factor == 1:
            return loss
        return loss * (self.strategy.upload(factor) if self.strategy.is_lazy else factor)

    @contextmanager
    def _autocasting(self, model: nn.Module) -> Iterator[None]:
        """Enters autocast for a forward pass; the loss function gets the outputs in full precision."""
        with self.strategy.forward_context(), widened(model):
            yield

    def _keep(self, module: nn.Module, args: Any, outputs: object) -> None:
        self._seen = outputs

    # ---- probing the loss

    def _look(self, inputs: object, current: Pass, num_items: object) -> None:
        """Infers the reduction of the loss, in the first pass of a window."""
        observations = []
        if not current.is_dummy or self._audit.must_match:
            divisor = self.own_divisor
            with ExitStack() as stack:
                for context in self.around_probe:
                    stack.enter_context(context())
                observations = self._audit.observe(inputs, current.index, self.batches, self._counts, num_items)
            self.own_divisor = divisor  # an overridden compute_loss may set it at each call
        self.sync.learn([] if current.is_dummy else observations, self.batches)

    def look_ahead(self, passes: list[Pass], model: nn.Module, loss_of: LossOf) -> list[Pass]:
        """Infers the reduction of the loss before the first pass of a window, if a probe is due.

        Args:
            passes: the passes of the window.
            model: the model; the extra passes leave its state unchanged.
            loss_of: computes a loss as the strategy does, without gradients.

        Returns:
            The passes with their final weights.
        """
        if not self.sync.is_look_due:
            return passes
        observations = self._audit.observe_ahead(model, loss_of, self.batches, self._counts, self._num_items)
        self.sync.learn(observations, self.batches)
        return self.sync.begin_again(passes, self.batches, self.strategy)

    # ---- after the passes

    def _is_bad(self, losses: Sequence[Tensor], norm: Tensor) -> Tensor:
        """Returns a flag (0-dim, on the device) that is set if the step is not finite on any process."""
        norm = norm.detach()
        total = losses[0] + norm if len(losses) == 1 else torch.stack([*losses, norm]).sum()
        return self.sync.on_any((total - total).ne(0))  # infinity less itself is NaN; isfinite takes twice as long

    def _skip(self) -> StepOutput:
        """Completes a step in which every target is ignored: logs a warning and no loss."""
        logger.warning("Every target of this optimizer step is ignored: the step was skipped and no loss logged.")
        self.batches = ()
        self.log.append(((), None, self.optimizer.param_groups[0]["lr"]))
        return StepOutput(())


def to_floats(values: Sequence[Any]) -> list[float]:
    """Returns numbers and 0-dim tensors as floats, all tensors in one transfer."""
    # a list, not a generator: half the calls
    if not values or not all([isinstance(value, Tensor) for value in values]):
        return [float(value) for value in values]
    stacked = torch.stack([value.detach() for value in values])
    floats: list[float] = (stacked.double() if stacked.device.type != "mps" else stacked.float()).tolist()
    return floats
