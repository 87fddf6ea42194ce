"""One optimizer step: forward, backward, clip, update. Knows tensors; knows no options, files or kinds of machine."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.contracts import Emit, StepOutput, Strategy
from paceline.core.journal import NOT_COMPUTED
from paceline.data.loading import batch_size_of, split_batch
from paceline.distributed.precision import widened
from paceline.distributed.strategy import empty_device_cache, is_out_of_memory
from paceline.model.loss import Counts, LossRule
from paceline.model.objective import WatchedCount, accepts, adapted
from paceline.model.outputs import check_loss, detach, no_gradient
from paceline.optim.layerwise import steps_in_backward

logger = logging.getLogger(__name__)

NOTHING = nullcontext()


@dataclass(slots=True)
class MicroStep:
    """Where the engine stands inside an update, for `run_micro_step`, which user code calls through training_step."""

    counts: Counts
    total: float  # weights of all micro-batches of the update
    last: bool


class UpdateLog:
    """Losses, norms and rates of the updates since the last read; nothing is read back from the device until then."""

    def __init__(self) -> None:
        self.contributions: list[Tensor] = []
        self.sizes: list[int] = []  # contributions per update; 0: every target was ignored
        self.norms: list[Any] = []
        self.rates: list[Any] = []

    def add(self, losses: Sequence[Tensor], norm: Any, rate: Any) -> None:
        self.contributions.extend(losses)
        self.sizes.append(len(losses))
        self.norms.append(norm)
        self.rates.append(rate)

    def drain(self) -> list[tuple[float, float, float, bool]]:
        """(loss, norm, rate, whether it has a loss) of each update; waits for the device."""
        contributions, sizes, norms, rates = self.contributions, self.sizes, self.norms, self.rates
        self.__init__()  # type: ignore[misc]
        if not sizes:
            return []
        values = to_floats(contributions)
        known = iter(to_floats([norm for norm in norms if norm is not None]))
        rows, start = [], 0
        for size, norm, rate in zip(sizes, norms, rates, strict=True):
            loss = sum(values[start : start + size]) if size else math.nan
            rows.append((loss, NOT_COMPUTED if norm is None else next(known), float(rate), size > 0))
            start += size
        return rows


def to_floats(values: Sequence[Any]) -> list[float]:
    """Numbers and 0-dim tensors as floats, all tensors in one transfer."""
    # a list, not a generator: half the calls
    if not values or not all([isinstance(value, Tensor) for value in values]):
        return [float(value) for value in values]
    stacked = torch.stack([value.detach() for value in values])
    floats: list[float] = (stacked.double() if stacked.device.type != "mps" else stacked.float()).tolist()
    return floats


class TorchEngine:
    """Updates a torch model.

    Args:
        strategy: where the tensors live.
        model: the module to call, as the strategy prepared it.
        optimizer: over its parameters.
        scheduler: stepped once per update, unless `scheduler_follows_metrics`; not for one that float16 left out.
        training_step: the Trainer's, bound: `(model, inputs, num_items_in_batch) -> contribution to the loss`.
        compute_loss: the Trainer's, bound: `(model, inputs) -> loss`, and `num_items_in_batch` where it accepts that.
        prepare_inputs: the Trainer's: moves a batch to the device.
        rule: counts micro-batches and weighs losses.
        max_grad_norm: 0 leaves the gradients as they are.
        skips_non_finite: an update whose loss or gradient norm is not finite is not applied; the schedule goes on.
        empty_cache_every: give cached device memory back every so many updates (None: never).
    """

    shares = False  # whether other processes have part in each update: see `paceline.shared_engine`

    def __init__(
        self,
        *,
        strategy: Strategy,
        model: nn.Module,
        optimizer: Any,
        scheduler: Any,
        scheduler_follows_metrics: bool,
        training_step: Callable[..., Tensor],
        compute_loss: Callable[..., Tensor],
        prepare_inputs: Callable[[Any], Any],
        rule: LossRule,
        max_grad_norm: float,
        skips_non_finite: bool = False,
        empty_cache_every: int | None = None,
    ) -> None:
        self.strategy, self.model, self.optimizer, self.scheduler = strategy, model, optimizer, scheduler
        self.steps_scheduler = scheduler is not None and not scheduler_follows_metrics
        self.training_step = adapted(training_step, 3)
        self.compute_loss, self.prepare_inputs = compute_loss, prepare_inputs
        self._inner = strategy.unwrap(model)  # its mode is not the wrapper's, when a user has changed it
        self.rule = rule
        self.max_grad_norm = max_grad_norm
        self.skips_non_finite = skips_non_finite
        self.empty_cache_every = empty_cache_every
        self.log = UpdateLog()
        self.keep_outputs = False
        self.keep_batches = False  # user code may take labels out of a batch; a copy leaves it whole for a retry
        self._seen: Any = None  # the model's last outputs, while they are looked at or a callback wants them
        self._kept: list[Any] = []
        self._current: MicroStep | None = None
        self._window: Sequence[Counts] = ()
        self._losses: list[Tensor] = []  # contributions of the update in progress
        self._weighed: list[tuple[Counts, float]] = []  # with what factor, while that may still turn out to be wrong
        self._num_updates = 0
        self.num_micro_steps = 1  # of the update in progress
        self.own_divisor: int | None = None  # what a subclass says instead, for the update in progress
        self.is_applied = True  # whether the last update was
        # some optimizers (schedule-free) keep two sets of weights and are told which one is in use
        self._enter_train = getattr(optimizer, "train", None)
        self._autocasts = strategy.precision.autocasts
        # only the device knows that a fused optimizer left an update out: the schedule goes on, whatever the optimizer;
        # float16 asks at each update anyway
        self._counts_skipped = skips_non_finite and not strategy.precision.scales
        self._passes_count = accepts(compute_loss, "num_items_in_batch")

    @property
    def is_last_micro_step(self) -> bool:
        """Whether the gradients are whole after the micro-batch in progress; True between updates."""
        return self._current is None or self._current.last

    # ---- the contract of the loop

    def step(self, batches: Sequence[Any], num_items: Any, emit: Emit | None) -> StepOutput:
        """One update. A window in which nothing weighs (every target ignored) changes nothing and logs no loss."""
        rule = self.rule
        counts = list(map(rule.count, batches))
        total = counts[0].weight
        order: list[int] | None = None
        if len(batches) > 1:
            if not rule.is_settled:
                order = self._most_telling_first(counts)
                batches, counts = [batches[index] for index in order], [counts[index] for index in order]
            total = sum([item.weight for item in counts])
        losses: list[Tensor] = []
        self._kept = []
        self.num_micro_steps, self.own_divisor = len(batches), None
        if self.shares or (total > 0 and (rule.meaning.unit != "all_samples" or rule.has_target(counts))):
            losses = self._accumulate(batches, counts, total, num_items, emit)
        if not losses:
            return self._skip()
        norm = self.strategy.clip(self.max_grad_norm)
        if emit is not None:
            emit("on_pre_optimizer_step")
        applied = self.strategy.step(self._is_bad(losses, norm) if self.skips_non_finite else None)
        self.is_applied = applied
        if emit is not None:
            emit("on_optimizer_step")
        rate = self.optimizer.param_groups[0]["lr"]
        if rate is None:  # Adafactor with rates of its own; only its schedule tells them, and waits for the device
            rate = self.scheduler.get_last_lr()[0]
        known_norm = norm if applied or not self.strategy.precision.has_rescaled else None
        self.log.add(losses, known_norm, rate if isinstance(rate, float) else float(rate))
        if self.steps_scheduler and (applied or self._counts_skipped):
            self.scheduler.step()
        self.strategy.clear_gradients()
        if self.strategy.defers:  # with the gradients gone: what is still there has to be kept
            self.strategy.run_deferred()
        self._num_updates += 1
        if self.empty_cache_every is not None and self._num_updates % self.empty_cache_every == 0:
            empty_device_cache(self.strategy.device)
        outputs, self._kept = self._kept, []
        if order is not None and outputs:  # as the batches came
            outputs = [outputs[order.index(place)] for place in range(len(order))]
        return StepOutput(losses, norm, applied, outputs)

    def read(self) -> list[tuple[float, float, float, bool]]:
        """(loss, grad_norm, learning_rate, whether it has a loss) of each update since the last read."""
        return self.log.drain()

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether smaller micro-batches could cure this error: not where a part of the update may be done already."""
        return not steps_in_backward(self.optimizer) and is_out_of_memory(error)

    def discard(self) -> None:
        """Drop the gradients and outputs of a failed update."""
        self.strategy.clear_gradients()
        self._seen, self._kept, self._current = None, [], None
        empty_device_cache(self.strategy.device)

    def split(self, batches: Sequence[Any], micro_batch_size: int) -> list[Any]:
        """The same samples in micro-batches of at most `micro_batch_size`."""
        parts: list[Any] = []
        for batch in batches:
            parts += split_batch(batch, micro_batch_size) if batch_size_of(batch) > micro_batch_size else [batch]
        return parts

    # ---- inside an update

    def _accumulate(
        self, batches: Sequence[Any], counts: Sequence[Counts], total: float, num_items: Any, emit: Emit | None
    ) -> list[Tensor]:
        """Forward and backward of every micro-batch that weighs something; their contributions to the loss."""
        self._losses = losses = []
        closing = last = len(batches) - 1
        if self.strategy.holds_back:  # gradients are exchanged in the last micro-batch that has some
            closing = max((index for index, item in enumerate(counts) if item.weight > 0), default=last)
        self._window, self._weighed = counts, []
        for index, batch in enumerate(batches):
            self._current = current = MicroStep(counts[index], total, index == last)
            if self.keep_batches or self.keep_outputs:
                batch = copy.copy(batch)
            if counts[index].weight > 0:
                with self.strategy.micro_step(index == closing) if self.strategy.holds_back else NOTHING:
                    loss = self.training_step(self.model, batch, num_items)
                losses.append(loss)
                total = current.total  # a look may have changed what everything weighs
            if self.keep_outputs:
                self._kept.append(detach(self._seen))
            self._seen = None
            if emit is not None and index < last:
                emit("on_substep_end")
        self._current = None
        return losses

    def run_micro_step(self, trainer_model: nn.Module, inputs: Any, num_items: Any) -> Tensor:
        """Forward, weigh, backward: the body of `Trainer.training_step`.

        The loss is scaled before backward, so that an engine that reduces inside backward sees the true gradient.

        Returns:
            This micro-batch's contribution to the update's loss, 0-dim, detached.
        """
        if not (trainer_model.training and self._inner.training):
            trainer_model.train()
            if callable(self._enter_train):
                self._enter_train()
        current = self._current
        counts = current.counts if current is not None else self.rule.count(inputs)
        total = current.total if current is not None else counts.weight
        # a mean that is alone in its update needs no weight: then nothing is looked at, and no forward hook set
        matters = num_items is not None or counts.weight != total or self.shares
        looking = matters and self._is_telling(counts)
        given = WatchedCount.of(num_items) if looking and isinstance(num_items, Tensor) else num_items
        inputs = self.prepare_inputs(inputs)
        handle = trainer_model.register_forward_hook(self._keep) if looking or self.keep_outputs else None
        try:
            with self._autocasting(trainer_model) if self._autocasts else NOTHING:
                if self._passes_count:
                    loss = self.compute_loss(trainer_model, inputs, num_items_in_batch=given)
                else:
                    loss = self.compute_loss(trainer_model, inputs)
        finally:
            if handle is not None:
                handle.remove()
        if not (isinstance(loss, Tensor) and loss.dim() == 0 and loss.is_floating_point()):
            loss = check_loss(loss, "compute_loss")
        if not loss.requires_grad:
            raise no_gradient()
        if looking:
            total = self._look(loss, current, counts, num_items, given)
        if self.own_divisor is not None and not self.rule.meaning.scaled:
            loss = loss * (self.num_micro_steps / self.own_divisor)
        factor = 1
        if matters:
            factor = self.rule.factor(counts, total, num_items) if total else 0
            if factor != 1:
                loss = loss * (self.strategy.upload(factor) if self.strategy.defers else factor)
        if current is not None and not self.rule.is_settled:
            self._weighed.append((counts, factor))
        self.strategy.backward(loss)
        return loss.detach()

    @contextmanager
    def _autocasting(self, model: nn.Module) -> Iterator[None]:
        """Mixed precision for a forward pass; who makes the loss gets the outputs in full precision."""
        with self.strategy.forward_context(), widened(model):
            yield

    def _is_telling(self, counts: Counts) -> bool:
        """Whether a look at this micro-batch's loss could tell what it is a mean over."""
        return self.rule.telling(counts) > 0

    def _look(self, loss: Tensor, current: MicroStep | None, counts: Counts, num_items: Any, given: Any) -> float:
        """Identify the loss by this micro-batch; returns the update's total after that."""
        if type(given) is WatchedCount and given.is_used and not self.rule.is_assumed_scaled:
            self.rule.assume_scaled(True)
        self.rule.look(loss.detach(), self._seen, counts, num_items)
        if current is None:
            return self.rule.recount([counts])
        current.total = self.rule.recount(self._window)
        if self._weighed:
            self._weigh_again(current.total, num_items)
        return current.total

    def _weigh_again(self, total: float, num_items: Any) -> None:
        """Correct what this update holds so far, after a look at a later micro-batch changed what it weighs.

        All of it by one factor: what changes the share of one micro-batch in another one's is told by the first look.
        """
        wanted = [self.rule.factor(counts, total, num_items) if total else 0 for counts, _ in self._weighed]
        ratios = [now / then for now, (_, then) in zip(wanted, self._weighed, strict=True) if then]
        if not ratios or ratios == [1] * len(ratios):
            return
        if max(ratios) - min(ratios) > 1e-9 * max(ratios):
            logger.warning(
                "What the loss is a mean over showed late in this update: its first micro-batches weigh up to %.3g "
                "times what they should. Later updates are right.",
                max(ratios) / min(ratios) if min(ratios) else math.inf,
            )
        self._weighed = [(counts, factor) for (counts, _), factor in zip(self._weighed, wanted, strict=True)]
        self._losses[:] = [loss * ratios[0] for loss in self._losses]
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(ratios[0])

    def _keep(self, module: nn.Module, args: Any, outputs: Any) -> None:
        self._seen = outputs

    def _most_telling_first(self, counts: Sequence[Counts]) -> list[int]:
        """An order of the window's micro-batches, those in front that tell the hypotheses apart: then all of it weighs
        alike."""
        telling = [self.rule.telling(item) for item in counts]
        return sorted(range(len(counts)), key=lambda index: -telling[index])

    def _is_bad(self, losses: Sequence[Tensor], norm: Tensor) -> Tensor:
        """Whether the update is not finite, on the device."""
        return ~torch.isfinite(torch.stack([*losses, norm.detach()]).sum())

    def _skip(self) -> StepOutput:
        """An update without a single target that counts."""
        logger.warning("Every target of this update is ignored: no step was made and no loss counted.")
        self.log.add((), None, self.optimizer.param_groups[0]["lr"])
        return StepOutput((), None, False)
