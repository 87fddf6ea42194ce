"""Everything that training changes, held in memory: what a run rewinds to when a loss is not finite."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from paceline.core.events import callback_states, restore_callback_states
from paceline.core.journal import JOURNAL_FILE, SKIPPED_FILE, UpdateRow, truncate
from paceline.core.outbox import Outbox, append_whole
from paceline.core.state import TrainerState
from paceline.tf.feed import TFFeed
from paceline.tf.framework import plain
from paceline.tf.randomness import capture_random, random_variables, restore_random
from paceline.tf.saving import optimizer_variables, schedule_state


@dataclass(frozen=True)
class Snapshot:
    """All that training changes, at one moment; the values are on the host."""

    values: list[Any]
    state: TrainerState
    position: dict[str, Any]
    random: dict[str, Any]
    callbacks: dict[str, Any]
    schedule: dict[str, Any] | None


def changing_variables(trainer: Any) -> list[Any]:
    """The variables that training changes, each once."""
    found = [*trainer.model.variables, *optimizer_variables(trainer), *random_variables(trainer.model)]
    return list({id(variable): variable for variable in map(plain, found)}.values())


def take_snapshot(trainer: Any, feed: TFFeed) -> Snapshot:
    """Copy everything that training changes: as much memory again as model and optimizer take."""
    return Snapshot(
        values=[variable.numpy().copy() for variable in changing_variables(trainer)],
        state=copy.deepcopy(trainer.state),
        position=feed.state_dict(),
        random=capture_random(),
        callbacks=copy.deepcopy(callback_states(trainer.callback_handler)),
        schedule=schedule_state(trainer.lr_scheduler),
    )


def rewind(
    trainer: Any, feed: TFFeed, outbox: Outbox, folder: Path | None, snapshot: Snapshot, bad: UpdateRow
) -> None:
    """Put a snapshot back, and write down in `folder` which samples the bad update saw."""
    for variable, value in zip(changing_variables(trainer), snapshot.values, strict=True):
        variable.assign(value)
    for field in fields(snapshot.state):
        setattr(trainer.state, field.name, copy.deepcopy(getattr(snapshot.state, field.name)))
    restore_callback_states(trainer.callback_handler, copy.deepcopy(snapshot.callbacks))
    if snapshot.schedule is not None:
        trainer.lr_scheduler.load_state_dict(snapshot.schedule)
    restore_random(snapshot.random)
    feed.load_state_dict(snapshot.position)
    if folder is not None:
        outbox.put(folder / JOURNAL_FILE, partial(truncate, folder / JOURNAL_FILE, trainer.state.global_step))
        ids = feed.source.sample_ids(bad.epoch, bad.first, bad.num_samples)
        line = json.dumps({**bad._asdict(), "loss": str(bad.loss), "grad_norm": str(bad.grad_norm), "sample_ids": ids})
        outbox.put(folder / SKIPPED_FILE, partial(append_whole, folder / SKIPPED_FILE, f"{line}\n".encode()))
