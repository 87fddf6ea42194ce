"""Protocols between the components. Each has at least two implementations, or one by the user.

They are independent of the framework: the loop drives torch and TensorFlow engines alike, so tensors are `Any`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from paceline.core.journal import UpdateRow
from paceline.core.outputs import EvalPrediction


@runtime_checkable
class Stateful(Protocol):
    """An object whose state is saved to a checkpoint and restored from it."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> Any: ...


@runtime_checkable
class StreamingMetric(Protocol):
    """The interface of a `compute_metrics` object that the Trainer updates batch by batch."""

    def reset(self) -> None:
        """Resets the state; called before each evaluation."""
        ...

    def update(self, prediction: EvalPrediction, /) -> None:
        """Adds one batch."""
        ...

    def merge(self, other: object, /) -> None:
        """Merges the state of another metric of the same type."""
        ...

    def compute(self) -> dict[str, float]:
        """Returns the values so far; an empty dict without samples."""
        ...


@dataclass(slots=True)
class StepOutput:
    """The result of one optimizer step. Tensors stay on the device until the next log.

    Attributes:
        losses: the contribution of each micro-batch; their sum is the loss of the step. Empty if every target was
            ignored.
        outputs: the model's outputs per micro-batch, if a callback asked for them.
    """

    losses: Sequence[Any]
    outputs: Sequence[Any] = ()


Emit = Callable[..., None]


class Engine(Protocol):
    """Runs one optimizer step. Handles tensors and the optimizer, but no options, files or events.

    Attributes:
        keep_outputs: store the model's outputs in `StepOutput.outputs`, because a callback asked for them.
        keep_batches: protect the batches from changes by user code, because they are used again.
    """

    keep_outputs: bool
    keep_batches: bool

    def step(self, batches: Sequence[Any], num_items: Any, emit: Emit | None) -> StepOutput:
        """Runs one optimizer step on the micro-batches of one accumulation window.

        Args:
            batches: collated micro-batches, on the host.
            num_items: the window's `num_items_in_batch` for the model, or None.
            emit: called with the name of each event inside the step; None if no callback listens.
        """
        ...

    def read(self) -> list[tuple[float, float, float, bool]]:
        """Returns (loss, grad_norm, learning_rate, has a loss) of each optimizer step since the last call.

        The only place where the host waits for the device.
        """
        ...

    def is_out_of_memory(self, error: BaseException) -> bool:
        """True if smaller micro-batches may avoid an out-of-memory, and no part of the step has been applied yet."""
        ...

    def discard(self) -> None:
        """Clears the gradients of a failed step and frees cached memory."""
        ...

    def split(self, batches: Sequence[Any], micro_batch_size: int) -> list[Any]:
        """Returns the same samples in micro-batches of at most `micro_batch_size`."""
        ...


class StatefulDataIterator(Protocol):
    """Yields the micro-batches of one optimizer step at a time. Its position counts consumed samples only."""

    epoch: int
    consumed: int
    batches: int

    @property
    def is_restored(self) -> bool:
        """True if a position was loaded that `start_epoch` has not moved to yet."""
        ...

    def start_epoch(self, epoch: int) -> None: ...

    def draw(self) -> tuple[list[Any], Any]: ...

    def finish_epoch(self) -> None: ...

    def close(self) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> None: ...


class Pending(Protocol):
    """Work in progress on another thread.

    Attributes:
        is_due: True if it has finished and `settle` must be called on the main thread.
    """

    is_due: bool

    def settle(self) -> None:
        """Handles the finished work on the main thread."""
        ...


class Notifying(Pending, Protocol):
    """Work in progress on another thread, which notifies a listener when it has finished."""

    def listen(self, wake: Callable[[], None]) -> None:
        """Sets the function that the other thread calls after it has set `is_due`."""
        ...


@dataclass(frozen=True)
class Hooks:
    """Functions that the loop calls, bound from the Trainer's instance at the start of each run, overrides included.

    Attributes:
        log: `(logs, start_time)`: stamps, stores and reports one row of metrics.
        act: logs, evaluates and saves if due; forwards to `Loop.log_evaluate_save`.
        evaluate: evaluates and returns the metrics.
        save: writes a checkpoint; returns True if it is complete, False if it is being written in the background.
        record: `(rows)`: appends the optimizer steps just read to the journal.
        snapshot: returns a copy of all training state in memory.
        rewind: `(snapshot, bad)`: restores a snapshot and records the samples of the bad step.
        count: `(batches)`: counts the input tokens and operations of an accumulation window; None if disabled.
    """

    log: Callable[[dict[str, float], float | None], None]
    act: Callable[[], None]
    evaluate: Callable[[bool], dict[str, float]]
    save: Callable[[], bool]
    record: Callable[[Sequence[UpdateRow]], None]
    snapshot: Callable[[], Any]
    rewind: Callable[[Any, UpdateRow], None]
    count: Callable[[Sequence[Any]], None] | None = None


class Strategy(Protocol):
    """Places and shards tensors on devices. Each strategy has its own file; no other module names a backend.

    `prepare` takes an optimizer *factory*, so that each strategy calls it when the parameters are final: before
    wrapping, after sharding, or inside the initialization of a backend's engine.
    """

    device: Any
    precision: Any
    mesh: Any  # the layout of the ranks: `paceline.args.mesh.Mesh`
    reduces_late: bool  # gradients are averaged by `reduce_gradients`, after all backward passes
    memory_gate: Any  # agrees on an out-of-memory before each collective of a pass; None: no agreement
    in_step: bool  # forward and backward run collectives, so all ranks must run the same number of passes
    is_sharded: bool  # parameters and optimizer state are sharded
    runs_windows: bool  # the strategy itself runs forward and backward of all micro-batches of an optimizer step
    is_spmd: bool  # tensors have no address, so aliases cannot be detected
    is_lazy: bool  # operations are deferred until `run_deferred`
    clips_itself: bool  # the backend clips by its own configuration and ignores the argument of `clip`
    accepts_full_model: bool  # the full model is put on the device before `prepare`
    delays_grad_sync: bool  # `micro_step` has an effect; a single-process step may skip it otherwise
    min_micro_batches: int  # the fewest micro-batches that `run_window` accepts; `divide` splits a window into more
    place: Callable[[Any], Any]  # returns the batch with its tensors on the device

    def prepare(self, model: Any, make_optimizer: Callable[[Any], Any] | None) -> Any: ...

    def forward_context(self) -> AbstractContextManager[Any]: ...

    def micro_step(self, last: bool, silent: bool = False) -> AbstractContextManager[Any]: ...

    def check_training_step(self, training_step: Callable[..., Any]) -> None: ...

    def divide(self, batches: Sequence[Any], split: Callable[[Sequence[Any], int], list[Any]]) -> list[Any]: ...

    def run_window(self, engine: Any, passes: list[Any]) -> list[Any]: ...

    def reduce_gradients(self) -> None: ...

    def recover(self) -> None: ...

    def evaluation_model(self, model: Any) -> Any: ...

    def run_within(self, model: Any, function: Callable[[], Any]) -> Any: ...

    def cast_model(self, model: Any, dtype: Any) -> AbstractContextManager[Any]: ...

    def backward(self, loss: Any) -> None: ...

    def clip(self, max_norm: float) -> Any: ...

    def clear_gradients(self) -> None: ...

    def step(self, is_bad: Any = None) -> bool: ...

    def run_deferred(self) -> None: ...

    def upload(self, number: float) -> Any: ...

    def data_coordinates(self) -> tuple[int, int]: ...

    def stateful(self) -> dict[str, Any]: ...

    def holds_part_of(self, model: Any) -> bool: ...

    def awaits_weights(self, model: Any) -> bool: ...

    def full_weights(self, model: Any) -> dict[str, Any]: ...

    def full_state(self, state: Any) -> Any: ...

    def load_full(self, model: Any, weights: Any) -> tuple[list[str], list[str]]: ...

    def shard_state(self, optimizer: Any) -> None: ...

    def unwrap(self, model: Any) -> Any: ...
