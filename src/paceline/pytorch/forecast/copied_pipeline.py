"""Runs the optimizer step of each process of a pipeline on copies of its stages: a second file of the facade."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.pytorch.data.batches import split_batches
from paceline.pytorch.distributed.activation_meta import ActivationMeta, Signature
from paceline.pytorch.distributed.precision import make_precision
from paceline.pytorch.distributed.stages import make_stages, named, owners_of
from paceline.pytorch.forecast.copied_stage import CopiedStage
from paceline.pytorch.forecast.other_process import as_process
from paceline.pytorch.forecast.pipeline_alone import PipelineAlone, find_handed
from paceline.pytorch.forecast.rehearsal import NumItems, StepMemoryEstimate, explained, rehearse, tensors_in
from paceline.pytorch.short_runs.module_memory import make_tracker

if TYPE_CHECKING:
    from paceline.args.plan import Plan
    from paceline.pytorch.trainer import Trainer


class CopiedPipeline(CopiedStage):
    """Runs the parts of an optimizer step on one process of a pipeline.

    Args:
        trainer: is left as it is.
        plan: the plan of the run.
        rank: of the process, among all.
        handed: by the signature of a micro-batch, what each stage except the last hands on.
    """

    def __init__(
        self, trainer: Trainer, plan: Plan, rank: int, handed: Mapping[Signature, list[ActivationMeta]]
    ) -> None:
        super().__init__(trainer, plan)
        world = self.trainer.world = replace(trainer.world, process_index=rank)
        precision = make_precision(plan.precision, world.device)
        self.strategy = self.own_strategy = PipelineAlone(world, precision, self.trainer._own_options, handed)

    def called(self, model: nn.Module) -> nn.Module:
        """Returns the module that is called in place of the model; it computes on the process with the last stage."""
        last: nn.Module = self.strategy.last
        return last

    def make_tracker(self, model: nn.Module) -> Any:
        """Returns a tracker of the tensors alone: calls of modules overlap, which torch's cannot follow."""
        tracker = make_tracker(model)
        tracker._track_module_params_and_buffers(model)  # their gradients are named as such
        tracker._mod_tracker = WithoutModules()
        return tracker

    def run_forward(self, model: nn.Module, inputs: Any, num_items: NumItems) -> None:
        """Runs the forward pass of this process's stages."""
        self.strategy.run_own_stages(inputs, lambda batch: self.compute_loss(model, batch, num_items))

    def run_window(
        self,
        model: nn.Module,
        batches: Sequence[Any],
        num_items: NumItems,
        after_each: Callable[[], None] | None = None,
    ) -> None:
        """Runs forward and backward of all micro-batches, in the order of the schedule."""
        last = self.strategy.last

        def make_loss(number: int) -> Tensor:
            inputs = copy.copy(batches[number if number < len(batches) else 0])
            last.expect(inputs)
            return self.compute_loss(last, inputs, num_items)

        self.strategy.run_schedule(list(batches), make_loss)

    def kept_tensors(self) -> list[Tensor]:
        """Returns the tensors that the process receives into."""
        return self.strategy.receive_buffers()

    def checkpointed_bytes(self) -> int:
        """Returns the bytes of the optimizer's state that this process contributes to a checkpoint."""
        state = self.trainer.optimizer.state
        tensors = [tensor for parameter in self.strategy.counted for tensor in tensors_in(state.get(parameter))]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class WithoutModules:
    """Takes the place of the part of torch's tracker that follows calls of modules."""

    parents = frozenset({"Global"})

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def register_user_hooks(self, *_: object) -> None:
        """Does nothing."""

    def clear_user_hooks(self) -> None:
        """Does nothing."""

    @property
    def is_bw(self) -> bool:
        """True in a backward pass."""
        return bool(torch._C._current_graph_task_id() != -1)


def rehearse_pipeline(trainer: Trainer, plan: Plan, batches: Sequence[Any], num_items: NumItems) -> StepMemoryEstimate:
    """Returns the memory of a step on the process of a pipeline whose peak is the largest.

    Args:
        trainer: made under `simulated_processes`; is left as it is.
        plan: the plan of the run.
        batches: all micro-batches of an accumulation window, since the schedule keeps several at once.
        num_items: `num_items_in_batch` of the window, or None.

    Raises:
        CannotRehearse: the step cannot run on tensors without data.
        ValueError: the model offers no stages, or too few.
    """
    first = CopiedPipeline(trainer, plan, 0, {}).strategy
    if len(batches) < first.min_micro_batches:
        batches = first.divide(batches, split_batches)
    stages = make_stages(trainer.model, first.layout.number)
    owners = owners_of(trainer.model, stages)
    with explained():
        handed = find_handed(trainer.model, stages, batches, first)
    estimates, checkpointed = [], []
    for place in range(first.size):
        rank = first.process_of(place)
        with as_process(rank):
            copied = CopiedPipeline(trainer, plan, rank, handed)
            absent = [
                parameter
                for name, parameter in named(trainer.model, "parameters")
                if not any(map(copied.strategy.is_here, owners[name]))
            ]
            device = trainer.strategy.device
            estimates.append(rehearse(copied, trainer.model, batches, num_items, device, absent))
        checkpointed.append(copied.checkpointed_bytes())
    largest = max(estimates, key=lambda each: each.peak)
    return replace(
        largest,
        optimizer_of_all=sum(checkpointed) if all(each.has_optimizer_step for each in estimates) else None,
        peaks=tuple(each.peak for each in estimates),
    )
