"""In-memory snapshots of everything that training changes, to roll back to when a loss is not finite."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from paceline.core.callback_states import callback_states, restore_callback_states
from paceline.core.events import CallbackHandler
from paceline.core.journal import JOURNAL_FILE, SKIPPED_FILE, UpdateRow, truncate
from paceline.core.retry_writer import RetryWriter, append_line
from paceline.core.state import TrainerState
from paceline.tensorflow.checkpoint.resume_state import schedule_state
from paceline.tensorflow.checkpoint.variables import assign, changing_variables, values_of
from paceline.tensorflow.data.feed import TFFeed
from paceline.tensorflow.randomness import capture_random, restore_random


@dataclass(frozen=True)
class Snapshot:
    """A copy of everything that training changes; the values are on the host."""

    values: list[Any]
    state: TrainerState
    position: dict[str, Any]
    random: dict[str, Any]
    callbacks: dict[str, Any]
    schedule: dict[str, Any] | None


@dataclass(eq=False, kw_only=True)
class Rollback:
    """Takes and restores snapshots of a run.

    Args:
        model, optimizer: their variables are copied.
        schedule: the learning-rate schedule.
        callback_handler: holds the callbacks.
        feed: iterates over the data.
        retry_writer: writes the files.
        folder: contains the journal and the file of skipped samples; None writes neither.
    """

    model: Any
    optimizer: Any
    schedule: Any
    callback_handler: CallbackHandler
    feed: TFFeed
    retry_writer: RetryWriter
    folder: Path | None

    def take_snapshot(self, state: TrainerState) -> Snapshot:
        """Copies everything that training changes; takes as much host memory as model and optimizer."""
        return Snapshot(
            values=values_of(changing_variables(self.model, self.optimizer)),
            state=state.copied(),
            position=self.feed.state_dict(),
            random=capture_random(),
            callbacks=copy.deepcopy(callback_states(self.callback_handler)),
            schedule=schedule_state(self.schedule),
        )

    def rewind(self, snapshot: Snapshot, bad: UpdateRow) -> None:
        """Restores a snapshot, except the trainer's state, and writes the sample ids of the bad step."""
        assign(changing_variables(self.model, self.optimizer), snapshot.values)
        restore_callback_states(self.callback_handler, copy.deepcopy(snapshot.callbacks))
        if snapshot.schedule is not None:
            self.schedule.load_state_dict(snapshot.schedule)
        restore_random(snapshot.random)
        self.feed.load_state_dict(snapshot.position)
        if self.folder is not None:
            self._record(self.folder, snapshot.state.global_step, bad)

    def _record(self, folder: Path, step: int, bad: UpdateRow) -> None:
        journal, skipped = folder / JOURNAL_FILE, folder / SKIPPED_FILE
        self.retry_writer.put(journal, partial(truncate, journal, step))
        ids = self.feed.source.sample_ids(bad.epoch, bad.first, bad.num_samples)
        line = json.dumps({**bad._asdict(), "loss": str(bad.loss), "grad_norm": str(bad.grad_norm), "sample_ids": ids})
        self.retry_writer.put(skipped, partial(append_line, skipped, f"{line}\n"))
