"""The contracts between the parts. A Protocol stands here where there are two real implementations, or a user's own.

Nothing here names a framework: the loop is driven by torch and by TensorFlow engines alike, so tensors are `Any`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from paceline.core.journal import UpdateRow


@runtime_checkable
class Stateful(Protocol):
    """Anything that survives a restart."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> Any: ...


@dataclass(slots=True)
class StepOutput:
    """What one update did. Tensors stay on the device until a log is due.

    Attributes:
        losses: the contributions of its micro-batches; their sum is the update's loss. Empty when nothing weighed.
        grad_norm: the total norm before clipping, or None.
        applied: whether the parameters changed (not after an overflow in float16, nor when every target was ignored).
        outputs: the model's outputs per micro-batch, where a callback asked for them.
    """

    losses: Sequence[Any]
    grad_norm: Any
    applied: bool
    outputs: Sequence[Any] = ()


Emit = Callable[..., None]


class Engine(Protocol):
    """Does one optimizer step. Knows tensors and the optimizer; knows no options, files or schedules of events.

    Attributes:
        keep_outputs: keep what the model returned in `StepOutput.outputs`: a callback asked for it.
        keep_batches: leave the batches whole, whatever user code takes out of them: they are needed again.
    """

    keep_outputs: bool
    keep_batches: bool

    def step(self, batches: Sequence[Any], num_items: Any, emit: Emit | None) -> StepOutput:
        """One update from the micro-batches of one window.

        Args:
            batches: collated micro-batches, on the host.
            num_items: what the window was counted as for the model (`num_items_in_batch`), or None.
            emit: called with the name of each event inside the step; None when nobody listens.
        """
        ...

    def read(self) -> list[tuple[float, float, float, bool]]:
        """(loss, grad_norm, learning_rate, whether it has a loss) of each update since the last read.

        The one place where the host waits for the device.
        """
        ...

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether smaller micro-batches could cure this error."""
        ...

    def discard(self) -> None:
        """Forget the gradients of an update that failed half-way, and free what memory can be freed."""
        ...

    def split(self, batches: Sequence[Any], micro_batch_size: int) -> list[Any]:
        """The same samples in micro-batches of at most `micro_batch_size`."""
        ...


class Feed(Protocol):
    """Hands out the micro-batches of one update at a time. Its position counts samples consumed, never prefetched."""

    epoch: int
    consumed: int
    batches: int

    @property
    def is_restored(self) -> bool:
        """Whether a position was loaded that `start_epoch` has not gone to yet."""
        ...

    def start_epoch(self, epoch: int) -> None: ...

    def draw(self) -> tuple[list[Any], Any]: ...

    def finish_epoch(self) -> None: ...

    def close(self) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> None: ...


class Pending(Protocol):
    """Work under way on another thread.

    Attributes:
        is_due: it has ended, and something is to be done about that on the main thread.
    """

    is_due: bool

    def settle(self) -> None:
        """Do that."""
        ...


@dataclass(frozen=True)
class Hooks:
    """What the loop calls back: bound from the Trainer's instance at the start of each run, overrides included.

    Attributes:
        log: `(logs, start_time)`: stamp, store and hand on one row of numbers.
        act: what is due after a step or an epoch; forwards to `Loop.log_evaluate_save`.
        evaluate: evaluate now and return the metrics.
        save: write a checkpoint of this moment; whether it is there now, or is being written behind the training.
        record: `(rows)`: keep the updates just read in the journal.
        snapshot: everything that changes in training, as it is now, in memory.
        rewind: `(snapshot, bad)`: back to a snapshot, and record what the bad update saw.
        count: `(batches)`: add up the input tokens and operations of a window; None where nothing is to be counted.
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
    """Where tensors live. One file per strategy; nothing else names a backend.

    It takes an optimizer *factory*, so that each calls it when its parameters are final: before wrapping, after
    sharding, or inside an engine's own initialisation.
    """

    device: Any
    precision: Any
    mesh: Any  # how the processes are laid out: `paceline.args.mesh.Mesh`
    reduces_late: bool  # whether gradients are averaged by `reduce_gradients`, once all backward passes are done
    in_step: bool  # whether forward and backward wait for the other processes, so that all must run as many
    is_sharded: bool  # whether parameters and optimizer state are parts of tensors
    runs_windows: bool  # whether it runs forward and backward of all micro-batches of an update itself
    is_opaque: bool  # whether tensors have no address, by which one could tell which are the same
    defers: bool  # whether operations are put off until `run_deferred`
    takes_whole_models: bool  # whether a model is put on the device as a whole before `prepare`
    holds_back: bool  # whether `micro_step` does anything, so that a step of one process need not enter it
    place: Callable[[Any], Any]  # the batch, its tensors on the device

    def prepare(self, model: Any, make_optimizer: Callable[[Any], Any] | None) -> Any: ...

    def forward_context(self) -> AbstractContextManager[Any]: ...

    def micro_step(self, last: bool, silent: bool = False) -> AbstractContextManager[Any]: ...

    def reduce_gradients(self) -> None: ...

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
