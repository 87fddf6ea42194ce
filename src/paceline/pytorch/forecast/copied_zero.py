"""Runs the optimizer step of processes under DeepSpeed on copies of the model: a second file of the facade."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.pytorch.distributed.memory import total
from paceline.pytorch.distributed.precision import make_precision, narrow
from paceline.pytorch.forecast.copied_stage import CopiedStage
from paceline.pytorch.forecast.other_process import as_process
from paceline.pytorch.forecast.rehearsal import NumItems, StepMemoryEstimate, rehearse
from paceline.pytorch.forecast.zero_alone import ZeroAlone

if TYPE_CHECKING:
    from paceline.args.plan import Plan
    from paceline.pytorch.trainer import Trainer


class CopiedZero(CopiedStage):
    """Runs the parts of an optimizer step on one process under DeepSpeed.

    Args:
        trainer: is left as it is.
        plan: the plan of the run.
        rank: of the process.
    """

    def __init__(self, trainer: Trainer, plan: Plan, rank: int) -> None:
        super().__init__(trainer, plan)
        world = self.trainer.world = replace(trainer.world, process_index=rank)
        precision = make_precision(plan.precision, world.device)
        self.strategy = self.own_strategy = ZeroAlone(world, precision, self.trainer._own_options)

    def compute_loss(self, model: nn.Module, inputs: Any, num_items: NumItems) -> Tensor:
        """Returns the loss of a micro-batch, whose numbers have the dtype of the weights."""
        if self.strategy.precision.autocasts:
            inputs = narrow(inputs, torch.bfloat16, ())
        return super().compute_loss(model, inputs, num_items)

    def give_gradients(self, trained: Sequence[nn.Parameter]) -> None:
        """Gives a gradient to each partition, or to each parameter without partitions."""
        if self.strategy.stage > 0:
            self.strategy.engine.give_gradients()
        else:
            super().give_gradients(trained)

    def kept_tensors(self) -> list[Tensor]:
        """Returns the master weights and the partitions of the gradients."""
        kept: list[Tensor] = self.strategy.engine.kept_tensors()
        return kept


def rehearse_zero(trainer: Trainer, plan: Plan, batches: Sequence[Any], num_items: NumItems) -> StepMemoryEstimate:
    """Returns the memory of a step under DeepSpeed, on the process with the largest peak of those that are traced.

    Processes differ in the parameters at the edges of their partitions, whose gradients are kept whole. The first one,
    the last one, and the one that keeps the most gradients are traced.

    Args:
        trainer: made under `simulated_processes`; is left as it is.
        plan: the plan of the run.
        batches: the first micro-batches of an accumulation window, two at most.
        num_items: `num_items_in_batch` of the window, or None.

    Raises:
        NotTraced: a setting of DeepSpeed that is not traced.
        CannotRehearse: the step cannot run on tensors without data.
    """

    def rehearse_on(rank: int) -> tuple[StepMemoryEstimate, ZeroAlone]:
        with as_process(rank):
            copied = CopiedZero(trainer, plan, rank)
            found = rehearse(copied, trainer.model, batches, num_items, trainer.strategy.device)
        return found, copied.strategy

    first, strategy = rehearse_on(0)
    found = [first]
    if strategy.stage > 0:
        kept = strategy.engine.gradients_by_process(plan.world_size)
        others = {kept.index(max(kept)), plan.world_size - 1} - {0}
        found += [rehearse_on(rank)[0] for rank in sorted(others)]
    largest = max(found, key=lambda each: each.peak)
    num_parts = plan.world_size if strategy.stage > 0 else 1
    masters = total(strategy.engine.masters())
    return replace(
        largest,
        optimizer=None if first.optimizer is None else first.optimizer + masters,
        optimizer_of_all=None if first.optimizer_of_all is None else first.optimizer_of_all * num_parts,
    )
