"""Replays one recorded optimizer step, bit for bit, to find the batch behind a loss spike."""

from __future__ import annotations

import dataclasses
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.args.errors import UnsupportedOption
from paceline.args.places import WITHOUT_OUTPUT
from paceline.callbacks.defaults import DISPLAYS
from paceline.checkpoint import folders
from paceline.core.events import TrainerCallback
from paceline.core.journal import CHANGES_FILE, JOURNAL_FILE, UpdateRow, find_row, read_changes, read_rows
from paceline.core.state import TrainerControl, TrainerState
from paceline.pytorch.data.identity import has_ids, sample_ids
from paceline.pytorch.distributed.collectives import on_first
from paceline.pytorch.distributed.random import preserved_rng
from paceline.pytorch.distributed.strategy import SingleDevice
from paceline.pytorch.optim.schedulers import follows_metrics
from paceline.pytorch.replay.blame import BlamedSample, StepSnapshot, single_samples
from paceline.pytorch.replay.blame import blame as blame_step
from paceline.pytorch.short_runs.trial_run import check_one_process

if TYPE_CHECKING:
    from paceline.pytorch.trainer import Trainer

logger = logging.getLogger(__name__)

# callbacks that a replay leaves out beside reporters: displays, and what needs the evaluations of the run. By name, so
# that those of transformers count too
LEFT_OUT = {"EarlyStoppingCallback", *(kind.__name__ for kind in DISPLAYS)}


@dataclasses.dataclass(frozen=True)
class Replayed:
    """The result of a replayed optimizer step.

    Attributes:
        step: `global_step` after it.
        sample_ids: training set indices of the samples, in order; if `is_indexed` is False, their positions in the
            epoch (of a stream, for instance).
        loss, grad_norm: the replayed values; the norm is -1 if it is not computed.
        learning_rate: the learning rate of the replayed step.
        epoch: the epoch of the samples.
        recorded: the step as the run recorded it.
        started_from: the checkpoint that the replay started from; None: the beginning of the run.
        is_indexed: the sample ids are indices.
        samples: the samples ranked by their own loss and gradient norm, with `blame=True`; else empty.
    """

    step: int
    sample_ids: list[int]
    loss: float
    grad_norm: float
    learning_rate: float
    epoch: int
    recorded: UpdateRow
    started_from: Path | None
    is_indexed: bool = True
    samples: list[BlamedSample] = dataclasses.field(default_factory=list)

    @property
    def is_exact(self) -> bool:
        """Returns True if loss, norm and rate equal the recorded values bit for bit; two NaNs are equal."""
        pairs = [(getattr(self, name), getattr(self.recorded, name)) for name in ("loss", "grad_norm", "learning_rate")]
        return all(now == then or (now != now and then != then) for now, then in pairs)


class StopAfter(TrainerCallback):
    """Makes the recorded changes of a run's settings, and ends training after a step."""

    def __init__(self, step: int, changes: Sequence[Mapping[str, Any]]) -> None:
        self.step, self.changes = step, changes

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        control.steering.follow(self.changes)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step >= self.step:
            control.should_training_stop = True


class LeftOut(TrainerCallback):
    """Takes the place of a callback that a replay leaves out, so that its state in the checkpoint has an owner.

    Args:
        callback: the callback.
    """

    def __init__(self, callback: Any) -> None:
        self.state_key = getattr(callback, "state_key", None) or type(callback).__name__

    def state_dict(self) -> dict[str, Any]:
        """Returns nothing: a replay saves no checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Ignores the state: the callback keeps its own."""


@contextmanager
def unobserved(callbacks: list[Any]) -> Iterator[None]:
    """Leaves out those callbacks of a Trainer that would record, show or stop the replayed steps as steps of the run.

    A tracker would continue the run of the checkpoint, and hide what it holds of later steps.

    Args:
        callbacks: the list of the callback handler; on exit as it was.
    """
    before = list(callbacks)
    callbacks[:] = [LeftOut(callback) if is_left_out(callback) else callback for callback in before]
    try:
        yield
    finally:
        callbacks[:] = before


def is_left_out(callback: object) -> bool:
    """Returns True for reporters (`may_fail`), displays and early stopping."""
    names = {base.__name__ for base in type(callback).__mro__}
    return getattr(callback, "may_fail", False) is True or not names.isdisjoint(LEFT_OUT)


def replay(
    trainer: Trainer,
    step: int,
    run: str | Path | None = None,
    say: Callable[[str], None] = logger.info,
    blame: bool = False,
) -> Replayed:
    """Trains up to `step` from the newest valid checkpoint before it, or from the beginning; the run is unchanged.

    Reporters, displays and early stopping are left out, so that its trackers are unchanged too.

    With `blame` the trainer's model is left with the weights that the step started from.

    Args:
        trainer: built as for the run, with the same initial model, data and arguments.
        step: `global_step` after the optimizer step to replay.
        run: the run's output folder; None: the trainer's.
        say: called with a message that names the replayed steps.
        blame: compute the loss and the gradient norm of each sample alone, at the weights that the step started from
            and without dropout, and rank the samples by them (`Replayed.samples`).

    Raises:
        ValueError: the run's journal does not contain this step; the learning rate followed evaluations; the step
            has other samples with these arguments; or the loss of a sample cannot be computed alone.
        UnsupportedOption: `blame` with several processes or a sharded model.
    """
    if blame:
        check_blame(trainer.strategy)
    snapshot = StepSnapshot(step) if blame else None
    folder = Path(run) if run is not None else trainer._output_folder()
    recorded = recorded_row(folder / JOURNAL_FILE, step)
    start = newest_before(folder, step)
    first = 1 if start is None else folders.step_of(start) + 1
    source = start.name if start is not None else "the beginning"
    say(f"Replaying optimizer steps {first:,} to {step:,} from {source}.")
    with tempfile.TemporaryDirectory(prefix="paceline-replay-") as temporary:
        options = {**WITHOUT_OUTPUT, "output_dir": temporary}
        callbacks: list[TrainerCallback] = [StopAfter(step, read_changes(folder / CHANGES_FILE))]
        if snapshot is not None:
            callbacks.append(snapshot)
        with unobserved(trainer.callback_handler.callbacks):
            trainer._train_with(options, callbacks, str(start) if start is not None else None)
        if follows_metrics(trainer.lr_scheduler):
            raise ValueError("The learning rate of this run followed its evaluations, which a replay does not make.")
        made = on_first(trainer.world, lambda: find_row(Path(temporary) / JOURNAL_FILE, step))
    if made is None:
        raise ValueError(f"step={step} was not reached: the run seems to have had other data or arguments.")
    if made[1:4] != recorded[1:4]:
        raise ValueError(
            f"step={step} was made of {place_of(recorded)}; with these arguments it is made of {place_of(made)}. Build "
            "the trainer with the per_device_train_batch_size and gradient_accumulation_steps in force at that step."
        )
    loader = trainer.callback_handler.train_dataloader
    ids = sample_ids(loader, recorded.epoch, recorded.first, recorded.num_samples)
    samples = blame_samples(trainer, snapshot, loader, ids) if snapshot is not None else []
    numbers = (made.loss, made.grad_norm, made.learning_rate, made.epoch)
    return Replayed(step, ids, *numbers, recorded, start, has_ids(loader), samples)


def check_blame(strategy: SingleDevice) -> None:
    """Raises UnsupportedOption if the gradients of single samples cannot be computed."""
    check_one_process("replay(blame=True)", strategy)
    if strategy.is_sharded:  # its gradients are made by hooks of whole steps
        raise UnsupportedOption(
            f"replay(blame=True): {type(strategy).__name__} shards the model. Build the trainer without fsdp and "
            "deepspeed, or replay without blame, which shows the samples of the step."
        )


def recorded_row(journal: Path, step: int) -> UpdateRow:
    """Returns the row of an optimizer step.

    Raises:
        ValueError: the journal does not contain this step.
    """
    found = find_row(journal, step)
    if found is None:
        steps = [row.step for row in read_rows(journal)]
        held = f"steps {min(steps)} to {max(steps)}" if steps else "nothing"
        raise ValueError(f"step={step} is not in {journal}, which holds {held}.")
    return found


def blame_samples(trainer: Trainer, snapshot: StepSnapshot, loader: Any, ids: list[int]) -> list[BlamedSample]:
    """Ranks the samples of the replayed step; the random generators are left as they are."""
    model = trainer.model
    snapshot.restore(model)
    with preserved_rng():
        return blame_step(
            ids,
            single_samples(loader, ids, snapshot.batches),
            model,
            compute_loss=trainer.compute_loss,
            prepare=trainer._prepare_inputs,
            precision=trainer.compute_loss_context_manager,
            has_targets=lambda batch: trainer.loss_normalizer.count(batch).weight > 0,
        )


def place_of(row: UpdateRow) -> str:
    """Returns text that names the samples of an optimizer step."""
    return f"{row.num_samples} samples of epoch {row.epoch} from {row.first} on"


def newest_before(folder: Path, step: int) -> Path | None:
    """Returns the newest valid checkpoint of the run before `step`; None if there is none."""
    for checkpoint in reversed(folders.own_checkpoints(folder)[0]):
        if folders.step_of(checkpoint) < step:
            problems = folders.verify(checkpoint)
            if not problems:
                return checkpoint
            logger.warning("%s is passed over: %s", checkpoint, "; ".join(problems[:3]))
    return None
