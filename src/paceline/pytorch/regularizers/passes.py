"""The passes of the regularizers of a run: their interface, their order, and their connection to the engine."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor, nn

from paceline.args.errors import UnsupportedOption
from paceline.args.plan import Plan
from paceline.args.regularizers import Regularizer, regularizers_of
from paceline.core.optional import load
from paceline.pytorch.data.feed import StatefulDataIterator
from paceline.pytorch.distributed.strategy import SingleDevice
from paceline.pytorch.distributed.window import Pass
from paceline.pytorch.engine import Engine
from paceline.pytorch.model.objective import Objective, check_was_called, compute_loss_with_outputs
from paceline.pytorch.sync import RunWindow

__all__ = ["Context", "LossCall", "Passes", "RegularizerPass", "make_passes", "regularizers_of"]

# (model, inputs, num_items_in_batch) -> (loss, the model's outputs)
LossCall = Callable[[nn.Module, Any, Any], tuple[Tensor, Any]]


@dataclass(frozen=True)
class Context:
    """The parts of a run that a pass works on.

    Attributes:
        settings: all regularizers of the run, in their order.
        model: the model without the strategy's wrapper.
        strategy: places the tensors; its `parameters` have the gradients.
        optimizer: steps the model's parameters.
        objective: computes the loss by default.
        plan: the plan of the run.
        num_steps: returns the number of optimizer steps of the run so far, those before a resume included.
        feed: the data of the run: its loader, and the position of the window in progress.
        num_samples: training samples; None if unknown.
        owns_loss: the Trainer's `compute_loss` is not overridden.
    """

    settings: tuple[Regularizer, ...]
    model: nn.Module
    strategy: SingleDevice
    optimizer: Any
    objective: Objective
    plan: Plan
    num_steps: Callable[[], int]
    feed: StatefulDataIterator | None = None
    num_samples: int | None = None
    owns_loss: bool = True

    def generator(self, purpose: str, index: int = 0) -> np.random.Generator:
        """Returns the random numbers of one purpose in the optimizer step in progress.

        They are a function of the seed, the data-parallel rank, the number of the step, `purpose` and `index`, all of
        which a checkpoint determines: a resumed run draws the same ones.

        Args:
            purpose: a name; different names draw different numbers.
            index: the micro-batch, or another number.
        """
        rank = self.strategy.data_coordinates()[0]
        return np.random.default_rng([self.plan.seed, rank, self.num_steps(), index, zlib.crc32(purpose.encode())])


class RegularizerPass:
    """One regularizer in a run. A subclass overrides what it changes.

    Args:
        settings: the entry of `regularizers`.
        context: the parts of the run.

    Raises:
        UnsupportedOption: it cannot be applied in this run.

    Attributes:
        weighs_samples: it needs the reduction of the loss, also in optimizer steps of one micro-batch.
    """

    weighs_samples = False

    def __init__(self, settings: Any, context: Context) -> None:
        self.settings, self.context = settings, context

    def compute_loss(
        self, call: LossCall, model: nn.Module, inputs: Any, num_items: Any, current: Pass | None
    ) -> tuple[Tensor, Any]:
        """Returns the loss of a training micro-batch and the model's outputs.

        Args:
            call: computes both; the later passes, and at last the Trainer's `compute_loss`.
            model: the model to call, with the strategy's wrapper.
            inputs: the micro-batch, on the device.
            num_items: `num_items_in_batch`, or None.
            current: the pass in progress, with the index of the micro-batch.
        """
        return call(model, inputs, num_items)

    def run_window(self, call: RunWindow, engine: Engine, passes: list[Pass]) -> list[Tensor]:
        """Runs the passes of an accumulation window; afterwards the gradients of the optimizer step are complete.

        Args:
            call: runs forward and backward of all passes; the later regularizers included.
            engine: the engine of the run.
            passes: the passes.

        Returns:
            The contribution of each micro-batch to the loss that is logged.
        """
        return call(engine, passes)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Changes the model while entered, for a whole run."""
        yield

    def after_read(self) -> None:
        """Called on all processes whenever the losses of the last steps have been read from the device."""

    # ---- a meter of the run, and a checkpoint item

    def row(self, times: Mapping[str, float]) -> dict[str, float]:
        """Returns entries for a log row."""
        return {}

    def describe(self) -> str:
        """Returns a sentence for the end of the run; empty if there is nothing to say."""
        return ""

    def facts(self) -> dict[str, Any]:
        """Returns facts for the record of the run; empty if there are none."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that a checkpoint stores; empty if there is none."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the result of `state_dict`."""


class Passes:
    """The regularizers of a run, in order. A meter and a checkpoint item.

    Args:
        passes: by the name of the regularizer.
    """

    is_recorded = True

    def __init__(self, passes: Mapping[str, RegularizerPass]) -> None:
        self.passes = dict(passes)
        self._was_called = False  # a pass has computed a loss in the window in progress

    @property
    def is_stateful(self) -> bool:
        """Returns True if any pass has a state that a checkpoint must store."""
        return any(type(each).state_dict is not RegularizerPass.state_dict for each in self.passes.values())

    def join(self, engine: Engine) -> None:
        """Lets the engine compute losses and run windows through the passes that change them."""
        losses = [each for each in self.passes.values() if overrides(each, "compute_loss")]
        windows = [each for each in self.passes.values() if overrides(each, "run_window")]
        engine.after_read.extend(each.after_read for each in self.passes.values() if overrides(each, "after_read"))
        engine.wrap(partial(self._loss_of, losses, engine), partial(self._window_of, losses, windows))
        if any(each.weighs_samples for each in self.passes.values()):
            engine.sync.probe_single_batches()

    def _loss_of(
        self, passes: Sequence[RegularizerPass], engine: Engine, compute_loss: Callable[..., Tensor]
    ) -> Callable[..., Tensor]:
        if not passes:
            return compute_loss
        call: LossCall = partial(compute_loss_with_outputs, compute_loss)
        for each in reversed(passes):
            call = partial(chained, each, call, engine)

        def loss_of(model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            self._was_called = True
            return call(model, inputs, num_items_in_batch)[0]

        return loss_of

    def _window_of(
        self, losses: Sequence[RegularizerPass], windows: Sequence[RegularizerPass], run_window: RunWindow
    ) -> RunWindow:
        for each in reversed(windows):
            run_window = partial(each.run_window, run_window)
        option = f"regularizers: {', '.join(each.settings.name for each in losses)}"
        return partial(self._run_checked, option, run_window) if losses else run_window

    def _run_checked(self, option: str, run_window: RunWindow, engine: Engine, passes: list[Pass]) -> list[Tensor]:
        """Runs a window, and checks that its losses were computed by the passes.

        Raises:
            UnsupportedOption: user code computes them by itself.
        """
        self._was_called = False
        losses_of_window = run_window(engine, passes)
        check_was_called(option, self._was_called)
        return losses_of_window

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Enters the changes of each pass to the model."""
        with ExitStack() as stack:
            for each in self.passes.values():
                stack.enter_context(each.applied())
            yield

    def row(self, times: Mapping[str, float]) -> dict[str, float]:
        """Returns the entries of all passes for a log row."""
        return {key: value for each in self.passes.values() for key, value in each.row(times).items()}

    def describe(self) -> str:
        """Returns the sentences of all passes."""
        return ". ".join(filter(None, (each.describe() for each in self.passes.values())))

    def facts(self) -> dict[str, Any]:
        """Returns the entry `regularizers` of the record of the run, with the facts of each pass; empty without any."""
        found = {name: facts for name, each in self.passes.items() if (facts := each.facts())}
        return {"regularizers": found} if found else {}

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of each pass by its name."""
        return {name: state for name, each in self.passes.items() if (state := each.state_dict())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores each pass that the state has an entry for."""
        for name, each in self.passes.items():
            if name in state:
                each.load_state_dict(state[name])


def overrides(each: RegularizerPass, method: str) -> bool:
    """Returns True if the class of a pass replaces a method of `RegularizerPass`."""
    return getattr(type(each), method) is not getattr(RegularizerPass, method)


def chained(
    each: RegularizerPass, call: LossCall, engine: Engine, model: nn.Module, inputs: Any, num_items: Any
) -> tuple[Tensor, Any]:
    """Computes a loss by a pass, which is given the pass of the engine."""
    return each.compute_loss(call, model, inputs, num_items, engine.current)


def make_passes(context: Context) -> Passes:
    """Returns the passes of a run.

    Raises:
        UnsupportedOption: a regularizer cannot be applied in this run; the message names it and the remedy.
    """
    made = {}
    for settings in context.settings:
        found = settings.implementation
        each = (load(found) if isinstance(found, str) else found)(settings, context)
        is_of_windows = overrides(each, "run_window") or overrides(each, "compute_loss")
        if is_of_windows and (context.strategy.runs_windows or context.strategy.is_lazy):
            raise UnsupportedOption(
                f"regularizers: {settings.name} is not supported with pipelines, DeepSpeed's pipelines and XLA "
                "devices, which run forward and backward themselves: use parallel='ddp', or leave it out."
            )
        made[settings.name] = each
    return Passes(made)
