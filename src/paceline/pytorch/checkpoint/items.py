"""The items of a checkpoint: all objects with state that a run needs to resume, by name.

An additional item, such as the average of the weights named `averages`, is saved to `averages.pt`, restored from there,
and included in rollbacks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from torch import Tensor, nn

from paceline.checkpoint.layout import (
    AVERAGES,
    CALLBACKS,
    DATA,
    LOSS,
    MODEL,
    OPTIMIZER,
    PRECISION,
    PROGRESS,
    RNG,
    SCHEDULER,
)
from paceline.core.callback_states import callback_states, restore_callback_states
from paceline.core.contracts import Stateful
from paceline.core.events import CallbackHandler
from paceline.pytorch.checkpoint import files
from paceline.pytorch.checkpoint.saves import Job
from paceline.pytorch.distributed.random import capture_rng, restore_rng
from paceline.pytorch.distributed.strategy import SingleDevice
from paceline.pytorch.distributed.world import World
from paceline.pytorch.optim.modes import Average, evaluation_weights

Items = Mapping[str, Stateful]

FILE_NAMES = {
    OPTIMIZER: files.OPTIMIZER_NAME,
    SCHEDULER: files.SCHEDULER_NAME,
    PRECISION: files.SCALER_NAME,
}
# the model has its own files, random states have a file per process, and the rest is in `progress.json`
_APART = {MODEL, RNG, CALLBACKS, LOSS, DATA, PROGRESS}


def file_of(name: str) -> str:
    """Returns the name of the file that holds an item's state."""
    return FILE_NAMES.get(name, f"{name}.pt")


def further(items: Items) -> dict[str, Stateful]:
    """Returns the additional items: those that no method of the Trainer writes."""
    return {name: item for name, item in items.items() if name not in _APART and name not in FILE_NAMES}


class RandomStates:
    """The states of all random number generators of this process, as an item."""

    def state_dict(self) -> dict[str, Any]:
        """Returns a copy of the states."""
        return capture_rng()

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Restores the states."""
        restore_rng(state)


class CallbackStates:
    """The states of all callbacks, as an item."""

    def __init__(self, handler: CallbackHandler) -> None:
        self.handler = handler

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of each stateful callback by name."""
        return callback_states(self.handler)

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Restores the callbacks in place."""
        restore_callback_states(self.handler, state)


@dataclass(frozen=True)
class Contents:
    """The items and how their tensors are placed.

    Attributes:
        items: the items by name.
        strategy: places the tensors of model and optimizer.
        world: the processes.
        is_training: a run is in progress, whose optimizer may use different weights for evaluation.
        save_only_model: checkpoints do not contain the optimizer's state.
    """

    items: Items
    strategy: SingleDevice
    world: World
    is_training: bool
    save_only_model: bool

    @property
    def model(self) -> nn.Module:
        """Returns the model without the strategy's wrapper."""
        return self.strategy.unwrap(cast(nn.Module, self.items[MODEL]))

    @property
    def optimizer(self) -> Any:
        """Returns the optimizer; None if there is none."""
        return self.items.get(OPTIMIZER)

    @property
    def saved_optimizer(self) -> Any:
        """Returns the optimizer if its state is part of a checkpoint; else None."""
        return None if self.save_only_model else self.optimizer

    def evaluation_weights(self) -> AbstractContextManager[None]:
        """Returns a context in which the model has the weights with which it is evaluated and saved."""
        average = cast("Average | None", self.items.get(AVERAGES))
        return evaluation_weights(self.optimizer, self.is_training, average)


def tensors_in(nest: object) -> Iterator[Tensor]:
    """Yields the tensors in a nest of mappings, lists and tuples."""
    if isinstance(nest, Tensor):
        yield nest
    elif isinstance(nest, Mapping):
        for value in nest.values():
            yield from tensors_in(value)
    elif isinstance(nest, list | tuple):
        for value in nest:
            yield from tensors_in(value)


class Fill(Protocol):
    """Writes the parts of a checkpoint into the hidden folder of its job."""

    def __call__(self, job: Job, /) -> None: ...


class WhyAtOnce(Protocol):
    """Returns the reason for writing a checkpoint of `num_bytes` synchronously; None to write it asynchronously."""

    def __call__(self, num_bytes: int, /) -> str | None: ...


class Format(Protocol):
    """The format in which model and optimizer are stored: whole, or as the shards of each process.

    Attributes:
        all_write: every process writes files.
    """

    all_write: bool

    def gather(self) -> dict[str, Any] | None:
        """Returns the whole model and optimizer state if they are sharded and one process writes for all; else None."""
        ...

    def take(self, folder: Path, is_best: bool, fill: Fill, why_at_once: WhyAtOnce) -> Job:
        """Collects the contents of a checkpoint: copies them to be written later, or writes them now.

        Raises: OSError, if there is no disk space, or the disk refuses.
        """
        ...
