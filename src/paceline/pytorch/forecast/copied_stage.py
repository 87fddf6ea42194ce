"""Runs the parts of an optimizer step of a Trainer on a copy of its model: a second file of the facade."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from paceline.args.places import WITHOUT_OUTPUT
from paceline.pytorch.model.prepare import prepare_model
from paceline.pytorch.parts import copy_of

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
        self.trainer._make_session().prepare_model(self.plan)
        return self.trainer.optimizer

    def compute_loss(self, model: nn.Module, inputs: Any, num_items: Any) -> Tensor:
        """Returns the loss of a micro-batch under the precision context."""
        with self.trainer.compute_loss_context_manager():
            counts = {} if num_items is None else {"num_items_in_batch": num_items}
            loss: Tensor = self.trainer.compute_loss(model, copy.copy(inputs), **counts)
        return loss

    def micro_step(self, last: bool) -> AbstractContextManager[Any]:
        """Returns the strategy's context of a micro-batch; gradients are exchanged in the last one."""
        return self.trainer.strategy.micro_step(last)

    def backward(self, loss: Tensor) -> None:
        """Runs the backward pass."""
        self.trainer.strategy.backward(loss)

    def bucket_bytes(self, gradients: int) -> int:
        """Returns the bytes that the strategy holds besides gradients, to exchange them."""
        return gradients if self.plan.parallel == "ddp" else 0

    def finish(self) -> None:
        """Clips the gradients, steps the optimizer and clears the gradients."""
        strategy = self.trainer.strategy
        strategy.clip(self.plan.max_grad_norm or float("inf"))
        strategy.step(None)
        strategy.clear_gradients()


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
