"""Takes in-memory snapshots of everything that training changes, to rewind to when a loss is not finite."""

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
        items: objects whose state training changes, by name.
        model: its buffers are restored too.
        state: the state of the Trainer.
        feed: the data iterator of the run; provides the sample ids of a bad step.
        retry_writer: writes the journal.
        folder: the folder of the journal and the sample ids; None: this process writes no files.
    """

    items: Items
    model: nn.Module
    state: TrainerState
    feed: StatefulDataIterator
    retry_writer: RetryWriter
    folder: Path | None

    def take(self) -> Snapshot:
        """Copies everything that training changes; takes as much memory as the model and the optimizer."""
        return Snapshot(
            items={name: copy.deepcopy(item.state_dict()) for name, item in self.items.items()},
            buffers=copy_buffers(self.model),
            state=self.state.copied(),
        )

    def rewind(self, snapshot: Snapshot, bad: UpdateRow) -> None:
        """Restores a snapshot, and writes the sample ids of the bad step."""
        put_buffers(self.model, snapshot.buffers)  # first, because load_state_dict needs buffers of the saved shapes
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
    """Returns copies of all buffers by name, including non-persistent ones."""
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


def put_buffers(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Restores buffers; a buffer whose shape or dtype has changed is replaced."""
    present = dict(model.named_buffers())
    for name, value in saved.items():
        buffer = present.get(name, value)
        is_alike = (buffer.shape, buffer.dtype) == (value.shape, value.dtype)
        if name in present and is_alike and not buffer.requires_grad:
            buffer.copy_(value)
        else:
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, value.clone())
