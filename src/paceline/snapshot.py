"""Everything that training changes, held in memory: what a run rewinds to when a loss is not finite."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core.events import callback_states, restore_callback_states
from paceline.core.journal import JOURNAL_FILE, UpdateRow, truncate
from paceline.core.state import TrainerState
from paceline.data.feed import Feed
from paceline.data.identity import sample_ids
from paceline.distributed.random import capture_rng, restore_rng

if TYPE_CHECKING:
    from paceline.trainer import Trainer

SKIPPED_FILE = "skipped_samples.jsonl"


@dataclass(frozen=True)
class Snapshot:
    """All that training changes, at one moment."""

    items: dict[str, Any]
    state: TrainerState
    position: dict[str, Any]
    random: dict[str, Any]
    callbacks: dict[str, Any]
    loss_rule: dict[str, Any]


def changing_items(trainer: Trainer) -> dict[str, Any]:
    """What has tensors that training changes."""
    items = {"model": trainer.model, "optimizer": trainer.optimizer, "scheduler": trainer.lr_scheduler}
    return {name: item for name, item in {**items, **trainer.strategy.stateful()}.items() if item is not None}


def take_snapshot(trainer: Trainer, feed: Feed) -> Snapshot:
    """Copy everything that training changes: as much memory again as model and optimizer take."""
    return Snapshot(
        items={name: copy.deepcopy(item.state_dict()) for name, item in changing_items(trainer).items()},
        state=copy.deepcopy(trainer.state),
        position=feed.state_dict(),
        random=capture_rng(),
        callbacks=copy.deepcopy(callback_states(trainer.callback_handler)),
        loss_rule=trainer.loss_rule.state_dict(),
    )


def rewind(trainer: Trainer, feed: Feed, snapshot: Snapshot, bad: UpdateRow) -> None:
    """Put a snapshot back, and write down which samples the bad update saw."""
    for name, item in changing_items(trainer).items():
        item.load_state_dict(copy.deepcopy(snapshot.items[name]))
    for field in fields(snapshot.state):
        setattr(trainer.state, field.name, copy.deepcopy(getattr(snapshot.state, field.name)))
    restore_callback_states(trainer.callback_handler, copy.deepcopy(snapshot.callbacks))
    trainer.loss_rule.load_state_dict(snapshot.loss_rule)
    restore_rng(snapshot.random)
    feed.load_state_dict(snapshot.position)
    if trainer.args.should_save:
        folder = Path(trainer._get_output_dir(None))
        truncate(folder / JOURNAL_FILE, trainer.state.global_step)
        ids = sample_ids(feed.loader, bad.epoch, bad.first, bad.num_samples)
        line = {**bad._asdict(), "loss": str(bad.loss), "grad_norm": str(bad.grad_norm), "sample_ids": ids}
        with (folder / SKIPPED_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
