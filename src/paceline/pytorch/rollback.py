"""Snapshots in memory of everything that training changes, for rewinding when a loss is not finite."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from paceline.core.journal import JOURNAL_FILE, SKIPPED_FILE, UpdateRow, truncate
from paceline.core.retry_writer import RetryWriter, append_line
from paceline.core.state import TrainerState
from paceline.pytorch.checkpoint.items import Items
from paceline.pytorch.data.feed import StatefulDataIterator
from paceline.pytorch.data.identity import sample_ids


@dataclass(frozen=True)
class Snapshot:
    """Everything that training changes, at one moment."""

    items: dict[str, Any]
    buffers: dict[str, Tensor]
    state: TrainerState


@dataclass(eq=False)
class Rollback:
    """Takes snapshots, and restores them.

    Args:
        items: with state that training changes, by name.
        model: whose buffers are restored too.
        state: of the Trainer.
        feed: of the run, for the ids of the samples of a bad step.
        retry_writer: writes the journal.
        folder: for the journal and the ids; None: this process writes no files.
    """

    items: Items
    model: nn.Module
    state: TrainerState
    feed: StatefulDataIterator
    retry_writer: RetryWriter
    folder: Path | None

    def take(self) -> Snapshot:
        """Copies everything that training changes: as much memory again as model and optimizer take."""
        return Snapshot(
            items={name: copy.deepcopy(item.state_dict()) for name, item in self.items.items()},
            buffers=copy_buffers(self.model),
            state=self.state.copied(),
        )

    def rewind(self, snapshot: Snapshot, bad: UpdateRow) -> None:
        """Restores a snapshot, and writes the sample ids of the bad step."""
        put_buffers(self.model, snapshot.buffers)  # first: the state is only loaded into buffers of its shapes
        for name, item in self.items.items():
            item.load_state_dict(copy.deepcopy(snapshot.items[name]))
        self.state.take_back(snapshot.state)
        if self.folder is None:
            return
        journal, skipped = self.folder / JOURNAL_FILE, self.folder / SKIPPED_FILE
        self.retry_writer.put(journal, partial(truncate, journal, self.state.global_step))
        ids = sample_ids(self.feed.loader, bad.epoch, bad.first, bad.num_samples)
        line = json.dumps({**bad._asdict(), "loss": str(bad.loss), "grad_norm": str(bad.grad_norm), "sample_ids": ids})
        self.retry_writer.put(skipped, partial(append_line, skipped, f"{line}\n"))


def copy_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Copies all buffers by name, also those that no checkpoint holds: training changes them all the same."""
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


def put_buffers(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Restores buffers; one that has another shape or dtype by now is replaced."""
    present = dict(model.named_buffers())
    for name, value in saved.items():
        buffer = present.get(name, value)
        is_alike = (buffer.shape, buffer.dtype) == (value.shape, value.dtype)
        if name in present and is_alike and not buffer.requires_grad:
            buffer.copy_(value)
        else:
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, value.clone())
