"""Runs the parts of an optimizer step of a Trainer on a copy of its model: a second file of the facade."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.args.places import WITHOUT_OUTPUT
from paceline.pytorch.distributed.strategy import SingleDevice
from paceline.pytorch.forecast.rehearsal import NumItems, StepMemoryEstimate, rehearse
from paceline.pytorch.model.prepare import prepare_model
from paceline.pytorch.parts import copy_of
from paceline.pytorch.short_runs.module_memory import make_tracker

if TYPE_CHECKING:
    from paceline.args.plan import Plan
    from paceline.pytorch.trainer import Trainer

QUIET: dict[str, Any] = {
    **WITHOUT_OUTPUT,
    "disable_tqdm": True,
    "phases": None,
    "push_to_hub": False,
    "torch_compile": False,
}


class CopiedStage:
    """Runs the parts of an optimizer step of a Trainer on another model, which has no data.

    Args:
        trainer: is left as it is.
        plan: the plan of the run.
    """

    def __init__(self, trainer: Trainer, plan: Plan) -> None:
        self.real, self.plan = trainer, plan
        self.trainer = copy_of(trainer, {**QUIET, "output_dir": trainer.args.output_dir}, [])
        self.own_strategy: SingleDevice | None = None  # in place of the one that the plan names

    @contextmanager
    def edited(self, model: nn.Module) -> Iterator[None]:
        """Edits the model as training does, with the rows of a packing."""
        packing = self.real._find_packing()
        edits = prepare_model(model, self.trainer._own_options)
        try:
            with packing.applied() if packing is not None else nullcontext():
                yield
        finally:
            edits.undo()

    def prepare(self, model: nn.Module) -> Any:
        """Prepares model and optimizer with the strategy, and returns the optimizer."""
        self.trainer.model = self.trainer.model_wrapped = model
        given = self.real.optimizer
        self.trainer.optimizer = None if given is None else moved_to(given, self.real.model, model)
        session: Any = self.trainer._make_session()
        if self.own_strategy is not None:
            session.make_strategy = lambda plan: self.own_strategy
        session.prepare_model(self.plan)
        return self.trainer.optimizer

    def called(self, model: nn.Module) -> nn.Module:
        """Returns the module that computes the outputs: the model."""
        return model

    def make_tracker(self, model: nn.Module) -> Any:
        """Returns the tracker of a step."""
        return make_tracker(model)

    def compute_loss(self, model: nn.Module, inputs: Any, num_items: NumItems) -> Tensor:
        """Returns the loss of a micro-batch under the precision context."""
        with self.trainer.compute_loss_context_manager():
            counts: dict[str, Any] = {} if num_items is None else {"num_items_in_batch": num_items}
            loss: Tensor = self.trainer.compute_loss(model, copy.copy(inputs), **counts)
        return loss

    def run_forward(self, model: nn.Module, inputs: Any, num_items: NumItems) -> None:
        """Runs the forward pass of a micro-batch."""
        self.compute_loss(model, inputs, num_items)

    def run_window(
        self,
        model: nn.Module,
        batches: Sequence[Any],
        num_items: NumItems,
        after_each: Callable[[], None] | None = None,
    ) -> None:
        """Runs forward and backward of each micro-batch.

        Args:
            model, batches, num_items: without data.
            after_each: called after each micro-batch.
        """
        strategy = self.trainer.strategy
        for index, batch in enumerate(batches):
            with strategy.micro_step(index == len(batches) - 1):  # gradients are exchanged in the last one
                strategy.backward(self.compute_loss(model, batch, num_items))
            if after_each is not None:
                after_each()

    def give_gradients(self, trained: Sequence[nn.Parameter]) -> None:
        """Gives each parameter a gradient, as a backward pass leaves it."""
        for parameter in trained:
            parameter.grad = torch.empty_like(parameter)

    def kept_tensors(self) -> list[Tensor]:
        """Returns the tensors that the strategy keeps beside those of the model: none."""
        return []

    def bucket_bytes(self, gradients: int) -> int:
        """Returns the bytes that the strategy holds besides gradients, to exchange them."""
        return gradients if self.plan.parallel == "ddp" else 0

    def finish(self) -> None:
        """Clips the gradients, steps the optimizer and clears the gradients."""
        strategy = self.trainer.strategy
        strategy.clip(self.plan.max_grad_norm or float("inf"))
        strategy.step(None)
        strategy.clear_gradients()


def rehearse_step(trainer: Trainer, plan: Plan, batches: Sequence[Any], num_items: NumItems) -> StepMemoryEstimate:
    """Returns the memory of a step whose processes all run the same passes; see `rehearse`."""
    return rehearse(CopiedStage(trainer, plan), trainer.model, batches, num_items, trainer.strategy.device)


def moved_to(optimizer: Any, before: nn.Module, after: nn.Module) -> Any:
    """Returns a copy of an optimizer, without state, of the same parameters of another model."""
    twins = {id(old): new for old, new in zip(before.parameters(), after.parameters(), strict=True)}
    moved = copy.copy(optimizer)
    vars(moved).pop("step", None)  # a scheduler's wrapper, bound to the original optimizer
    moved.state = defaultdict(dict)
    moved.param_groups = [
        {**group, "params": [twins.get(id(parameter), parameter) for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    return moved


def first_batches(trainer: Trainer, loader: Any, number: int) -> list[Any]:
    """Returns the first micro-batches of a loader, named by the parameters of forward.

    Raises:
        ValueError: it gives none.
    """
    batches = [trainer.objective.name_inputs(batch) for batch in islice(loader, number)]
    if not batches:
        raise ValueError("The training data gives no batch.")
    return batches
