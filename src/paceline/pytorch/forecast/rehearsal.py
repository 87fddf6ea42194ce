"""The peak memory of an optimizer step, found by running it on tensors without data.

A copy of the model on FakeTensors runs forward, loss, backward, clipping and the optimizer's step, through the
Trainer's own `compute_loss`, strategy and optimizer. The bytes of the tensors are counted as by `measure_memory`.
Only the attributes of the tensors are allocated, so a model that does not fit into memory can be rehearsed.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from paceline.core.optional import LateModule
from paceline.pytorch.distributed.memory import count_state, total
from paceline.pytorch.distributed.memory_report import recording, tensors_of
from paceline.pytorch.model.tensor_parts import is_dtensor
from paceline.pytorch.short_runs.module_memory import KINDS, TOTAL, on_device

fake_tensor: Any = LateModule("torch._subclasses.fake_tensor")


NumItems = Tensor | int | None  # `num_items_in_batch` of an accumulation window


class CannotRehearse(RuntimeError):
    """The step reads values of tensors, or cannot run on tensors without data; the message gives the reason."""


class NotTraced(RuntimeError):
    """A setting of a strategy is not traced; the message names it."""


class Stage(Protocol):
    """The parts of a Trainer's copy that a rehearsal calls; the copy's model is the one without data."""

    def prepare(self, model: nn.Module) -> Any:
        """Prepares model and optimizer with the strategy, and returns the optimizer."""

    def called(self, model: nn.Module) -> nn.Module:
        """Returns the module that computes the outputs of this process."""

    def make_tracker(self, model: nn.Module) -> Any:
        """Returns torch's tracker of the tensors, which is not entered yet."""

    def run_forward(self, model: nn.Module, inputs: Any, num_items: NumItems) -> None:
        """Runs the forward pass of a micro-batch under the precision context; `model` is the `called` one."""

    def run_window(
        self,
        model: nn.Module,
        batches: Sequence[Any],
        num_items: NumItems,
        after_each: Callable[[], None] | None = None,
    ) -> None:
        """Runs forward and backward of all micro-batches; `after_each` is called between those that do not overlap."""

    def give_gradients(self, trained: Sequence[nn.Parameter]) -> None:
        """Gives each trained parameter a gradient, as the last backward pass of a window leaves it."""

    def kept_tensors(self) -> list[Tensor]:
        """Returns the tensors that the strategy keeps at this moment, beside parameters and their gradients."""

    def bucket_bytes(self, gradients: int) -> int:
        """Returns the bytes that the strategy holds besides gradients, to exchange them."""

    def finish(self) -> None:
        """Clips the gradients, steps the optimizer and clears the gradients."""

    def edited(self, model: nn.Module) -> AbstractContextManager[None]:
        """Edits the model as training does: activation checkpointing, noise, kernels."""


@dataclass(frozen=True)
class StepMemoryEstimate:
    """The memory of an optimizer step of one process, in bytes, found without running it.

    Of a sharded model the process's own shards are counted; the first process has the largest ones. Of a pipeline the
    process with the largest peak is described.

    Attributes:
        peak: the largest total of all tensors.
        by_kind: what it consists of at that moment, as in `StepMemory.by_kind`.
        parameters, buffers, gradients: of the model.
        optimizer: state of the optimizer after its first step; None if it cannot be found without a step.
        optimizer_of_all: the same over all shards, as a checkpoint holds it.
        activations: kept by the forward pass of one micro-batch for its backward pass.
        logits: the largest floating-point output of the model.
        has_optimizer_step: False if the optimizer's step reads values: `peak` then holds its state, but not the tensors
            that exist during the step only.
        peaks: the peak of each process of a pipeline, in the order of their first stages; empty where all processes
            run the same passes.
    """

    peak: int
    by_kind: Mapping[str, int]
    parameters: int
    buffers: int
    gradients: int
    optimizer: int | None
    optimizer_of_all: int | None
    activations: int
    logits: int
    has_optimizer_step: bool
    peaks: tuple[int, ...] = ()


def rehearse(
    stage: Stage,
    model: nn.Module,
    batches: Sequence[Any],
    num_items: NumItems,
    device: torch.device,
    absent: Iterable[Tensor] = (),
) -> StepMemoryEstimate:
    """Returns the memory of an optimizer step.

    Args:
        stage: runs the parts of the step.
        model: the real model; only its shapes are read.
        batches: collated micro-batches of one accumulation window. Two of the same shape stand for any larger number.
        num_items: `num_items_in_batch` of the window, or None.
        device: the device of the model.
        absent: parameters that this process does not hold.

    Raises:
        CannotRehearse: the step cannot run on tensors without data.
    """
    with explained():
        with fake_tensor.FakeTensorMode(allow_non_fake_inputs=True) as mode:
            twin = fake_copy(model, mode, absent)
            fakes = [fake_batch(batch, mode, device) for batch in batches]
        with stage.edited(twin), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the tracker warns of modules that ended before their backward pass
            return measure(stage, twin.train(), fakes, num_items, device, mode)


@contextmanager
def explained() -> Iterator[None]:
    """Raises CannotRehearse in place of any error."""
    try:
        yield
    except NotTraced:
        raise
    except Exception as error:  # kernels, and modules that cannot be copied, may raise any error
        text = str(error).strip() or "no message"
        raise CannotRehearse(f"{type(error).__name__}: {text.splitlines()[0][:300]}") from error


def fake_copy(model: nn.Module, mode: Any, absent: Iterable[Tensor] = ()) -> nn.Module:
    """Returns a copy of a module whose tensors have no data; the absent parameters are on the device "meta"."""
    twins: dict[int, Any] = {id(tensor): mode.from_tensor(tensor) for tensor in tensors_of(model)}
    for tensor in absent:
        twins[id(tensor)] = nn.Parameter(torch.empty_like(tensor, device="meta"), tensor.requires_grad)
    return copy.deepcopy(model, twins)


def fake_batch(batch: Any, mode: Any, device: torch.device) -> Any:
    """Returns a batch on the device whose tensors have no data."""
    return tree_map(lambda value: mode.from_tensor(value).to(device) if isinstance(value, Tensor) else value, batch)


def measure(
    stage: Stage, model: nn.Module, batches: Sequence[Any], num_items: NumItems, device: torch.device, mode: Any
) -> StepMemoryEstimate:
    """Runs the step on a model without data, and counts its tensors."""
    optimizer = stage.prepare(model)
    own = [parameter for parameter in model.parameters() if not parameter.is_meta]
    trained = [parameter for parameter in own if parameter.requires_grad]
    steps = begin_optimizer(stage, trained)
    state = state_bytes(optimizer) if steps else count_state(optimizer)
    activations, logits = trace_forward(stage, stage.called(model), batches[0], num_items, mode)
    held = [model, *([optimizer] if isinstance(optimizer, Optimizer) and steps else [])]
    if any(map(is_dtensor, trained)):
        # the first call of an operation on DTensors infers its layout on tensors of the whole size, which are no memory
        with mode:
            stage.run_window(model, batches, num_items)
        for parameter in trained:
            parameter.grad = None
    passes = stage.make_tracker(model)
    passes.track_external(*held, *stage.kept_tensors())
    with mode, passes:  # a tracker keeps the statistics of one call of each module
        stage.run_window(model, batches, num_items, passes.reset_mod_stats)
    trackers = [passes]
    if steps:  # not under the mode: optimizers read their step counts, which are real tensors
        step = stage.make_tracker(model)
        gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
        step.track_external(*held, *gradients, *stage.kept_tensors())
        with step:
            stage.finish()
        trackers.append(step)
    peaks = [dict(on_device(tracker.get_tracker_snapshot("peak"), device)) for tracker in trackers]
    peak = max(peaks, key=lambda found: int(found.get(TOTAL, 0)))
    whole = peak.pop(TOTAL, 0)
    by_kind = {KINDS[kind.value]: size for kind, size in peak.items()}
    if not steps and state is not None:  # held during the passes
        by_kind["optimizer"], whole = state, whole + state
    if buckets := stage.bucket_bytes(total(trained)):
        by_kind["buckets"], whole = buckets, whole + buckets
    return StepMemoryEstimate(
        peak=whole,
        by_kind=by_kind,
        parameters=total(own),
        buffers=total(model.buffers()),
        gradients=total(trained),
        optimizer=state,
        optimizer_of_all=state_bytes(optimizer, of_all=True) if steps or not any(map(is_dtensor, trained)) else None,
        activations=activations,
        logits=logits,
        has_optimizer_step=steps,
    )


def begin_optimizer(stage: Stage, trained: Sequence[nn.Parameter]) -> bool:
    """Steps the optimizer once, so that its state exists; returns False if the step reads values of tensors."""
    stage.give_gradients(trained)
    try:
        stage.finish()
    except Exception:  # optimizers of libraries may raise any error
        return False
    finally:
        for parameter in trained:
            parameter.grad = None
    return True


def trace_forward(stage: Stage, model: nn.Module, batch: Any, num_items: NumItems, mode: Any) -> tuple[int, int]:
    """Returns the bytes of the activations that a forward pass keeps, and of the model's largest output."""
    sizes = [0]

    def note(module: nn.Module, args: Any, outputs: Any) -> None:
        tree_map(lambda value: sizes.append(float_bytes(value)), outputs)

    handle = model.register_forward_hook(note)
    try:
        with mode, without_new_hooks(model), recording(model) as found:
            stage.run_forward(model, batch, num_items)
    finally:
        handle.remove()
    return found.total, max(sizes)


@contextmanager
def without_new_hooks(model: nn.Module) -> Iterator[None]:
    """Removes on exit the hooks that were added to modules while entered."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_always_called")
    before = [(module, kind, set(getattr(module, kind))) for module in model.modules() for kind in kinds]
    try:
        yield
    finally:
        for module, kind, known in before:
            hooks = getattr(module, kind)
            for key in set(hooks) - known:
                del hooks[key]


def float_bytes(value: object) -> int:
    """Returns the bytes of a floating-point tensor of two or more dimensions; 0 for anything else."""
    is_output = isinstance(value, Tensor) and value.dim() > 1 and value.is_floating_point()
    return value.numel() * value.element_size() if is_output and isinstance(value, Tensor) else 0


def state_bytes(optimizer: Any, of_all: bool = False) -> int | None:
    """Returns the bytes of an optimizer's state, or of all shards of it; None if it has no `state`."""
    state = getattr(optimizer, "state", None)
    if state is None:
        return None
    values = tensors_in(list(state.values()))
    return sum(value.numel() * value.element_size() for value in values) if of_all else total(values)


def tensors_in(nest: object) -> list[Tensor]:
    """Returns the tensors in a nest of dicts and lists."""
    found: list[Tensor] = []
    tree_map(lambda value: found.append(value) if isinstance(value, Tensor) else None, nest)
    return found
