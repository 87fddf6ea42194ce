"""Everything that training changes, held in memory: what a run rewinds to when a loss is not finite."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from paceline.core.events import callback_states, restore_callback_states
from paceline.core.journal import JOURNAL_FILE, SKIPPED_FILE, UpdateRow, truncate
from paceline.core.outbox import Outbox, append_whole
from paceline.core.state import TrainerState
from paceline.data.feed import Feed
from paceline.data.identity import sample_ids
from paceline.distributed.random import capture_rng, restore_rng

if TYPE_CHECKING:
    from paceline.trainer import Trainer


@dataclass(frozen=True)
class Snapshot:
    """All that training changes, at one moment."""

    items: dict[str, Any]
    buffers: dict[str, Tensor]
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
        buffers=copy_buffers(trainer.model),
        state=copy.deepcopy(trainer.state),
        position=feed.state_dict(),
        random=capture_rng(),
        callbacks=copy.deepcopy(callback_states(trainer.callback_handler)),
        loss_rule=trainer.loss_rule.state_dict(),
    )


def copy_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all buffers by name, of those too that no checkpoint holds: training changes them all the same."""
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


def put_buffers(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Give buffers their values back; one that has another shape or type by now is replaced."""
    present = dict(model.named_buffers())
    for name, value in saved.items():
        buffer = present.get(name, value)
        is_alike = (buffer.shape, buffer.dtype) == (value.shape, value.dtype)
        if name in present and is_alike and not buffer.requires_grad:
            buffer.copy_(value)
        else:
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, value.clone())


def rewind(
    trainer: Trainer, feed: Feed, outbox: Outbox, folder: Path | None, snapshot: Snapshot, bad: UpdateRow
) -> None:
    """Put a snapshot back, and write down in `folder` which samples the bad update saw."""
    put_buffers(trainer.model, snapshot.buffers)  # first: the state is only loaded into buffers of its shapes
    for name, item in changing_items(trainer).items():
        item.load_state_dict(copy.deepcopy(snapshot.items[name]))
    for field in fields(snapshot.state):
        setattr(trainer.state, field.name, copy.deepcopy(getattr(snapshot.state, field.name)))
    restore_callback_states(trainer.callback_handler, copy.deepcopy(snapshot.callbacks))
    trainer.loss_rule.load_state_dict(snapshot.loss_rule)
    restore_rng(snapshot.random)
    feed.load_state_dict(snapshot.position)
    if folder is not None:
        outbox.put(folder / JOURNAL_FILE, partial(truncate, folder / JOURNAL_FILE, trainer.state.global_step))
        ids = sample_ids(feed.loader, bad.epoch, bad.first, bad.num_samples)
        line = json.dumps({**bad._asdict(), "loss": str(bad.loss), "grad_norm": str(bad.grad_norm), "sample_ids": ids})
        outbox.put(folder / SKIPPED_FILE, partial(append_whole, folder / SKIPPED_FILE, f"{line}\n".encode()))
