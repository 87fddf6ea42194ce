"""Make one recorded update again, bit for bit: what one needs to find the batch behind a spike."""

from __future__ import annotations

import dataclasses
import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core import folders
from paceline.core.events import TrainerCallback
from paceline.core.journal import JOURNAL_FILE, UpdateRow, find_row, read_rows
from paceline.core.state import TrainerControl, TrainerState
from paceline.data.identity import has_ids, sample_ids
from paceline.optim.schedulers import follows_metrics

if TYPE_CHECKING:
    from paceline.trainer import Trainer

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Replayed:
    """An update made again.

    Attributes:
        step: `global_step` after it.
        sample_ids: indices in the training set of the samples it saw, in order; where `is_indexed` is False, their
            positions in the epoch (of a stream, for instance).
        loss, grad_norm: as they are now; the norm is -1 where none is computed.
        learning_rate: that the update was made with now.
        epoch: whose samples it saw.
        recorded: the update as the run recorded it.
        started_from: the checkpoint that the replay started from; None: the beginning of the run.
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

    @property
    def is_exact(self) -> bool:
        """Whether loss, norm and rate came out as recorded, to the last bit (NaN counts as NaN)."""
        pairs = [(getattr(self, name), getattr(self.recorded, name)) for name in ("loss", "grad_norm", "learning_rate")]
        return all(now == then or (now != now and then != then) for now, then in pairs)


class StopAfter(TrainerCallback):
    """Ends training after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step >= self.step:
            control.should_training_stop = True


def replay(
    trainer: Trainer, step: int, run: str | Path | None = None, say: Callable[[str], None] = logger.info
) -> Replayed:
    """Train from the newest good checkpoint before `step`, or from the beginning, up to it; the run is not touched.

    Args:
        trainer: built as for the run: same model (as it was at the start), data and arguments.
        step: `global_step` after the update that is looked for.
        run: the run's output folder; None: the trainer's.
        say: told which updates are made again.

    Raises:
        ValueError: the run's journal does not hold this step; its learning rate followed an evaluation; or the update
            is made of other samples with these arguments than it was.
    """
    folder = Path(run if run is not None else trainer._get_output_dir(None))
    recorded = find_row(folder / JOURNAL_FILE, step)
    if recorded is None:
        steps = [row.step for row in read_rows(folder / JOURNAL_FILE)]
        held = f"steps {min(steps)} to {max(steps)}" if steps else "nothing"
        raise ValueError(f"step={step} is not in {folder / JOURNAL_FILE}, which holds {held}.")
    start = newest_before(folder, step)
    first = 1 if start is None else step_of(start) + 1
    say(f"Making updates {first:,} to {step:,} again, from {start.name if start is not None else 'the beginning'}.")
    with replaying(trainer, step) as temporary:
        trainer.train(resume_from_checkpoint=str(start) if start is not None else None)
        if follows_metrics(trainer.lr_scheduler):
            raise ValueError("The learning rate of this run followed its evaluations, which a replay does not make.")
        made = find_row(temporary / JOURNAL_FILE, step)
    if made is None:
        raise ValueError(f"step={step} was not reached: the run seems to have had other data or arguments.")
    if made[1:4] != recorded[1:4]:
        raise ValueError(
            f"step={step} was made of {place_of(recorded)}; with these arguments it is made of {place_of(made)}. Build "
            "the trainer with the per_device_train_batch_size and gradient_accumulation_steps in force at that step."
        )
    loader = trainer.callback_handler.train_dataloader
    ids = sample_ids(loader, recorded.epoch, recorded.first, recorded.num_samples)
    return Replayed(
        step, ids, made.loss, made.grad_norm, made.learning_rate, made.epoch, recorded, start, has_ids(loader)
    )


def place_of(row: UpdateRow) -> str:
    """An update's samples in words."""
    return f"{row.num_samples} samples of epoch {row.epoch} from {row.first} on"


def newest_before(folder: Path, step: int) -> Path | None:
    """The newest checkpoint with fewer updates than `step` that verifies."""
    for checkpoint in reversed(folders.list_checkpoints(folder)):
        if step_of(checkpoint) < step:
            problems = folders.verify(checkpoint)
            if not problems:
                return checkpoint
            logger.warning("%s is passed over: %s", checkpoint, "; ".join(problems[:3]))
    return None


def step_of(checkpoint: Path) -> int:
    """`global_step` of a checkpoint, from its name."""
    return int(checkpoint.name.rsplit("-", 1)[1])


@contextmanager
def replaying(trainer: Trainer, step: int) -> Iterator[Path]:
    """The trainer, ending at `step`, with arguments that write into a temporary folder only and evaluate nothing."""
    original, callback = trainer.args, StopAfter(step)
    with tempfile.TemporaryDirectory(prefix="paceline-replay-") as temporary:
        trainer.args = dataclasses.replace(
            original,
            output_dir=temporary,
            save_strategy="no",
            eval_strategy="no",
            eval_on_start=False,
            load_best_model_at_end=False,
            metric_for_best_model=None,
            greater_is_better=None,
            report_to="none",
        )
        trainer.add_callback(callback)
        trainer.reports_changes = False  # those made here
        try:
            yield Path(temporary)
        finally:
            trainer.remove_callback(callback)
            trainer.reports_changes = True
            trainer.args = original
