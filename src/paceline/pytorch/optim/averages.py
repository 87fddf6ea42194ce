"""Averages of the weights, with which the model is evaluated and saved while training continues with its own weights.

An exponential moving average weighs the last steps most (Polyak & Juditsky, 1992, SIAM J. Control Optim. 30(4), for
averages of iterates); stochastic weight averaging is the plain mean from a step on (Izmailov et al., 2018,
arXiv:1803.05407). Frozen parameters are not averaged, and tied ones are averaged once. Statistics of batch norm are
averaged like weights by the moving average, and recomputed from training data for the mean. Other buffers are not
averaged: the model's current ones are used.

A checkpoint's model files hold the average, and its item `averages` holds the training weights, as they were exchanged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import compress
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.args.averages import SWA, AverageSettings, averaging_of
from paceline.args.errors import UnsupportedOption
from paceline.core.events import CallbackHandler, TrainerCallback
from paceline.core.optional import LateModule
from paceline.core.schedules import Settled
from paceline.pytorch.data.loading import is_stream, loader_length
from paceline.pytorch.distributed.random import preserved_rng
from paceline.pytorch.distributed.strategy import SingleDevice
from paceline.pytorch.model.tensor_parts import is_dtensor, local_part, placed_like
from paceline.pytorch.optim.schedulers import MultiplierLR

if TYPE_CHECKING:
    from torch.distributed import tensor as dtensor
else:
    dtensor = LateModule("torch.distributed.tensor")

__all__ = ["AveragedWeights", "Averaging", "averaging", "averaging_of", "make_averages"]

logger = logging.getLogger(__name__)

IS_TRAINED = attrgetter("requires_grad")
STATISTICS = ("running_mean", "running_var")


class Steps(Protocol):
    """The members of the engine that show if an optimizer step changed the weights."""

    num_steps: int
    is_applied: bool
    is_bad: Tensor | None


class Slot:
    """One tensor of the model and its average, which can be exchanged in place.

    The exchange needs memory for one more tensor at a time, and can be undone after an interruption at any point.

    Args:
        tensor: a parameter or a buffer of the model; may be sharded.
        on_host: the average is in host memory.

    Attributes:
        average: the average; while the tensor holds it, the tensor's own values.
        held: the tensor's own values during an exchange, or, if the average is in another dtype, until its end.
    """

    def __init__(self, tensor: Tensor, on_host: bool) -> None:
        self.tensor = tensor
        dtype = torch.float32 if tensor.dtype in (torch.bfloat16, torch.float16) else tensor.dtype
        # with 16 bits, the small changes of an average would be lost in rounding
        own = tensor.detach()
        self.average: Tensor = own.to("cpu" if on_host else own.device, dtype, copy=True)
        self.kept = local_part(self.average)
        self._is_sharded = is_dtensor(tensor)
        self.is_lossless = dtype == tensor.dtype
        self.held: Tensor | None = None
        # 0: own values in place; 1: they are held, and the average is whole; 2: they are held, and the tensor holds the
        # average; 3: exchanged
        self._stage = 0

    @property
    def live(self) -> Tensor:
        """Returns this process's part of the tensor; looked up each time, because its storage may be replaced."""
        return local_part(self.tensor) if self._is_sharded else self.tensor

    @property
    def raw(self) -> Tensor:
        """Returns the tensor's own values while it holds the average."""
        if self.is_lossless:
            return self.average
        assert self.held is not None
        return self.wrapped(self.held)

    def wrapped(self, part: Tensor) -> Tensor:
        """Returns this process's part of the tensor in the form of the tensor."""
        if not is_dtensor(self.tensor):
            return part
        like: Any = self.tensor
        made: Tensor = dtensor.DTensor.from_local(
            part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )
        return made

    def part_of(self, value: Tensor) -> Tensor:
        """Returns this process's part of a value that may be whole."""
        return local_part(placed_like(value, self.tensor))

    def swap_in(self) -> None:
        """Puts the average into the tensor."""
        self.held = self.live.clone()
        self._stage = 1
        self.live.copy_(self.kept)
        if self.is_lossless:
            self._stage = 2
            self.kept.copy_(self.held)
            self._stage = 3
            self.held = None

    def swap_out(self) -> None:
        """Puts the tensor's own values back, also after an exchange that was interrupted."""
        if self._stage == 3:
            self.held = self.kept.to(self.live.device, copy=True)
            self._stage = 2
        if self._stage == 2:
            self.kept.copy_(self.live)
            self._stage = 1
        if self._stage == 1:
            assert self.held is not None
            self.live.copy_(self.held)
            self._stage = 0
        self.held = None


class AveragedWeights:
    """Keeps the average of a model's weights, and exchanges it with the weights to evaluate and to save.

    Args:
        model: without the strategy's wrapper; its parameters are final.
        settings: the average's kind and settings.
        refresh: recomputes the statistics of batch norm for the weights in the model; None if it has none, or if they
            are averaged.

    Attributes:
        num_updates: updates of the average so far.
        projections: given pairs of a tensor and this process's part of its average, set what pruning has removed to 0.
    """

    def __init__(self, model: nn.Module, settings: AverageSettings, refresh: Callable[[], None] | None = None) -> None:
        self.model, self.settings, self.refresh = model, settings, refresh
        self.num_updates = 0
        self.projections: list[Callable[[Iterable[tuple[Tensor, Tensor]]], None]] = []
        self._slots: dict[str, Slot] = {}
        self._is_stale = refresh is not None  # the statistics of batch norm are not those of the average
        self._is_in_model = False
        self._drop_gathered()
        self._parameters = list(model.parameters())
        self._trained: tuple[bool, ...] = ()
        if settings.kind != SWA:
            self._follow()

    @property
    def exists(self) -> bool:
        """True if there is an average to exchange: before the first update of a mean there is none."""
        return bool(self._slots)

    def _follow(self) -> None:
        """Makes averages of the tensors that are trained and have none; a new average begins with their values."""
        statistics = (
            (f"{prefix}.{name}" if prefix else name, getattr(module, name))
            for prefix, module in self.model.named_modules()
            for name in STATISTICS
            if isinstance(module, _BatchNorm)
        )
        found = [(name, each) for name, each in self.model.named_parameters() if each.requires_grad]
        for name, tensor in (*found, *statistics):
            if name not in self._slots and tensor is not None:
                self._slots[name] = Slot(tensor, self.settings.on_host)
        self._trained = tuple(map(IS_TRAINED, self._parameters))

    # ---- the average

    @torch.no_grad()
    def update(self) -> None:
        """Adds the current weights to the average."""
        if tuple(map(IS_TRAINED, self._parameters)) != self._trained:  # first, or a callback has thawed parameters
            self._follow()
        weight = self.settings.weight(self.num_updates)
        self.num_updates += 1
        self._is_stale = self.refresh is not None
        slots = list(self._slots.values())
        if self.settings.on_host:
            for slot in slots:
                slot.kept.lerp_(slot.live.to(slot.kept.device, slot.kept.dtype), weight)
            return
        alike = [slot.is_lossless for slot in slots]
        same = list(compress(slots, alike))
        if same:
            torch._foreach_lerp_([slot.kept for slot in same], [slot.live for slot in same], weight)
        for slot in slots if len(same) < len(slots) else ():
            if not slot.is_lossless:
                slot.kept.lerp_(slot.live.to(slot.kept.dtype), weight)

    # ---- the exchange

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Returns a context in which the model holds the average. Does nothing if it holds it, or if there is none."""
        if self._is_in_model or not self.exists:
            yield
            return
        try:
            self._swap_in()
            yield
        finally:
            try:
                self.restore()
            except BaseException:  # such as a Ctrl-C between two tensors: the rest is put back first
                self.restore()
                raise

    @torch.no_grad()
    def _swap_in(self) -> None:
        self._drop_gathered()
        for project in self.projections:
            project((slot.tensor, slot.kept) for slot in self._slots.values())
        self._is_in_model = True
        for slot in self._slots.values():
            slot.swap_in()
        self._drop_gathered()
        if self._is_stale and self.refresh is not None:
            self.refresh()
            self._is_stale = False

    @torch.no_grad()
    def restore(self) -> None:
        """Puts the model's own weights back, if it holds the average or a part of it."""
        if not self._is_in_model:
            return
        for slot in self._slots.values():
            slot.swap_out()
        self._is_in_model = False
        self._drop_gathered()

    def adopt(self) -> None:
        """Puts the average into the model for good, and frees the model's own weights."""
        if not self.exists:
            return
        try:
            self._swap_in()
        except BaseException:
            self.restore()
            raise
        self._slots = {}

    def _drop_gathered(self) -> None:
        """Frees parameters that were gathered from shards for a forward pass, which may outlive it: the shards change.

        While they are gathered, the modules of FSDP have plain parameters in the place of the shards.
        """
        for module in self.model.modules():
            if hasattr(module, "_get_fsdp_state"):
                sharded: Any = module
                sharded.reshard()

    # ---- a checkpoint item

    def state_dict(self) -> dict[str, Any]:
        """Returns the average; while the model holds it, the model's own weights instead.

        An average in another dtype than its tensor is returned in either case.
        """
        slots, is_in_model = self._slots.items(), self._is_in_model
        return {
            "kind": self.settings.kind,
            "num_updates": self.num_updates,
            "is_stale": self._is_stale,
            "raw": {name: slot.raw for name, slot in slots} if is_in_model else {},
            "average": {name: slot.average for name, slot in slots if not (is_in_model and slot.is_lossless)},
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the average, and the model's own weights if the state holds them; then the model holds the average.

        The average of another kind is not restored: the run continues with the model's own weights.
        """
        raw, average = state["raw"], state["average"]
        self._drop_gathered()
        is_same = state["kind"] == self.settings.kind
        tensors = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        self._slots = {}
        for name in dict.fromkeys((*raw, *average)):
            if name not in tensors:
                raise ValueError(f"the model has no parameter or buffer {name!r}")
            slot = Slot(tensors[name], self.settings.on_host)  # the model's values: the average, if `raw` has others
            if name in average:
                slot.kept.copy_(slot.part_of(average[name]))
            if name in raw:
                slot.live.copy_(slot.part_of(raw[name]))
            self._slots[name] = slot
        self.num_updates, self._is_stale = int(state["num_updates"]), bool(state["is_stale"])
        self._trained = ()
        if not is_same:
            logger.warning(
                "The checkpoint holds an average of the kind %r: the run resumes from the weights that were trained, "
                "and %s begins a new average.",
                state["kind"],
                self.settings.option,
            )
            self._slots, self.num_updates, self._is_stale = {}, 0, self.refresh is not None
            if self.settings.kind != SWA:
                self._follow()


class Averaging(TrainerCallback):
    """Updates the average after each optimizer step that changed the weights.

    Args:
        averages: the average.
        steps: the engine.
    """

    def __init__(self, averages: AveragedWeights, steps: Steps) -> None:
        self.averages, self.steps = averages, steps
        self._num_seen = steps.num_steps

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Adds the weights to the average if this step is due; a skipped step adds nothing."""
        steps = self.steps
        is_empty, self._num_seen = steps.num_steps == self._num_seen, steps.num_steps
        if is_empty or not self.averages.settings.is_due(state.global_step) or not steps.is_applied:
            return
        if steps.is_bad is not None and bool(steps.is_bad):  # a read from the device, with nonfinite_policy="skip"
            return
        self.averages.update()


@contextmanager
def averaging(averages: AveragedWeights | None, steps: Steps, handler: CallbackHandler) -> Iterator[None]:
    """Returns a context in which the average follows the optimizer steps; the model leaves it with its own weights,
    unless it has adopted the average.
    """
    if averages is None:
        yield
        return
    callback = Averaging(averages, steps)
    found = [getattr(each, "project_average", None) for each in handler.callbacks]
    averages.projections[:] = [project for project in found if callable(project)]
    handler.callbacks.insert(0, callback)  # before callbacks that use the average
    try:
        yield
    finally:
        handler.pop_callback(callback)
        averages.restore()


# ---- the statistics of batch norm


def batch_norms(model: nn.Module) -> list[_BatchNorm]:
    """Returns the modules that keep running statistics."""
    return [each for each in model.modules() if isinstance(each, _BatchNorm) and each.running_mean is not None]


def refresh_statistics(model: nn.Module, make_loader: Callable[[], Any], run_batch: Callable[[Any], None]) -> None:
    """Recomputes the statistics of batch norm from one pass over the training data, without gradients.

    The random states are restored afterwards, so that training is unchanged.

    Args:
        model: the model, with the weights to compute the statistics for.
        make_loader: makes a loader of the training data.
        run_batch: runs the model's forward pass on a batch.

    """
    with preserved_rng():
        loader = make_loader()
        with torch.no_grad(), recomputing(model):
            for batch in loader:
                run_batch(batch)


@contextmanager
def recomputing(model: nn.Module) -> Iterator[None]:
    """Returns a context in which forward passes compute the statistics of batch norm anew, as means over batches.

    Modules that stay in evaluation mode during training, by their own `train`, keep their statistics.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.train()
    norms = [norm for norm in batch_norms(model) if norm.training]
    before = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        count = norm.num_batches_tracked
        norm.num_batches_tracked = None if count is None else count.clone()
        norm.reset_running_stats()
        norm.momentum = None  # a plain mean
    try:
        yield
    finally:
        for norm, momentum, count in before:
            norm.momentum, norm.num_batches_tracked = momentum, count
        for module, mode in modes:
            module.training = mode


# ---- one run


def check_support(settings: AverageSettings, strategy: SingleDevice, optimizer: object) -> None:
    """Refuses runs whose weights cannot be averaged.

    Raises:
        UnsupportedOption: the weights are not all on this process, the optimizer steps other parameters than the
            model's, or it keeps an average itself.
    """
    if strategy.runs_windows or strategy.is_lazy or strategy.is_spmd:
        raise UnsupportedOption(
            f"{settings.option} is not supported with pipelines and on XLA devices: use parallel='ddp' or 'fsdp'."
        )
    if strategy.precision.has_masters:
        raise UnsupportedOption(f"{settings.option} is not supported with Apex' master weights: set bf16=True instead.")
    if callable(getattr(optimizer, "eval", None)):
        raise UnsupportedOption(
            f"{settings.option} with {type(optimizer).__name__}, which averages the weights itself: leave it out, or "
            "choose another optim."
        )


def settle_rate(settings: AverageSettings, scheduler: object, is_own: bool) -> None:
    """Lets the schedule end in the constant rate `swa_lr`.

    Raises:
        UnsupportedOption: the schedule is the user's, or no function of the step.
    """
    if settings.rate is None:
        return
    if not is_own or not isinstance(scheduler, MultiplierLR):
        raise UnsupportedOption(
            f"swa_lr with a {type(scheduler).__name__} is not supported: it needs a schedule of lr_scheduler_type that "
            "is a function of the step. Leave swa_lr out, and let your schedule end in that rate."
        )
    scheduler.compose(lambda factor: Settled(factor, settings.start, settings.anneal_steps, settings.rate or 0.0))


def make_averages(
    model: nn.Module, settings: AverageSettings, strategy: SingleDevice, refresh: Callable[[], None], loader: object
) -> AveragedWeights:
    """Returns the averages of a run.

    Args:
        model: without the strategy's wrapper.
        settings: the settings of the average.
        strategy: places the model's tensors.
        refresh: recomputes the statistics of batch norm for the weights in the model.
        loader: the training data.

    Raises:
        UnsupportedOption: a mean of weights with batch norm on several processes, or with a stream of data, whose
            position a second pass would change.
    """
    needs_pass = settings.kind == SWA and bool(batch_norms(model))
    if needs_pass and strategy.world.is_distributed:
        raise UnsupportedOption(
            "swa_start with batch norm on several processes is not supported, where its statistics are recomputed: "
            "set ema_decay instead, which averages them, or train on one process."
        )
    if needs_pass and (loader_length(loader) is None or is_stream(getattr(loader, "dataset", None))):
        raise UnsupportedOption(
            "swa_start with batch norm and a stream of training data is not supported: its statistics are recomputed "
            "in a second pass. Set ema_decay instead, which averages them."
        )
    return AveragedWeights(model, settings, refresh if needs_pass else None)
