"""Packing in a run: what a model takes, seen before the first batch, and the collator and the edits that follow."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from paceline.pytorch.data.collators import DataCollatorWithPadding, DefaultDataCollator
from paceline.pytorch.data.packing import PackedForm, PackingCollator
from paceline.pytorch.loss_probe import leaving_no_trace
from paceline.pytorch.model.isolation import Isolation, find_isolation, isolated
from paceline.pytorch.side_effects import undoing

logger = logging.getLogger(__name__)

DEFAULTS = (DefaultDataCollator, DataCollatorWithPadding)  # pad inputs alone, and make no labels


@dataclass(frozen=True)
class Packing:
    """The packing of a run.

    Attributes:
        kind: "pack" or "flatten".
        length: tokens of a row; None: the longest document of each batch.
        model: it was seen with.
        isolation: what keeps its documents apart.
        form: of its batches.
    """

    kind: str
    length: int | None
    model: nn.Module
    isolation: Isolation
    form: PackedForm

    @property
    def asked(self) -> tuple[str, int | None]:
        """The options that asked for it."""
        return self.kind, self.length

    def collator(self, collate: Callable[[list[Any]], Any]) -> PackingCollator:
        """Returns the collator of packed batches.

        Args:
            collate: the Trainer's; what it makes of samples is packed, and samples themselves where it is a default.
        """
        inner = None if type(collate) in DEFAULTS else collate
        return PackingCollator(inner, self.form, self.kind, self.length)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """While entered, the model keeps the documents of packed rows apart."""
        logger.info("Batches are packed; their documents are kept apart by %s.", self.isolation.way.name)
        with isolated(self.model, self.isolation.way):
            yield

    def check_loader(self, loader: Any, owner: str) -> None:
        """Checks that a training loader packs.

        Args:
            loader: of the run.
            owner: class of the Trainer, for the error.

        Raises:
            ValueError: it is a loader of the user's.
        """
        collate = getattr(getattr(loader, "loader", loader), "collate_fn", None)
        while collate is not None and not isinstance(collate, PackingCollator):
            collate = getattr(collate, "data_collator", None)
        if collate is None:
            raise ValueError(
                f"packing={self.kind!r}: the training loader is {owner}'s own, and its batches are not packed. Leave "
                "packing out, or let the Trainer make the loader."
            )


def find_packing(
    model: nn.Module,
    compute_loss: Callable[..., Any],
    *,
    kind: str,
    length: int | None,
    pad_token_id: int | None,
    is_compiled: bool,
    is_half: bool,
    forward_context: Callable[[], AbstractContextManager[Any]],
) -> Packing:
    """Returns the packing for a model, as a few forward passes without side effects show it.

    Args:
        model: on its device.
        compute_loss: the Trainer's, bound: `(model, batch) -> loss`.
        kind, length: as in `Packing`.
        pad_token_id: fills the ends of rows; None: token 0.
        is_compiled: training passes are compiled.
        is_half, forward_context: the precision of the passes.

    Raises:
        UnsupportedOption: the model cannot keep documents apart.
    """

    @contextmanager
    def surroundings() -> Iterator[None]:
        owners = [model, *([owner] if (owner := getattr(compute_loss, "__self__", None)) is not None else [])]
        with undoing(owners), leaving_no_trace(model), forward_context():
            yield

    isolation = find_isolation(model, compute_loss, is_compiled=is_compiled, is_half=is_half, surroundings=surroundings)
    form = PackedForm(isolation.first_position, isolation.shifts, pad_token_id or 0)
    return Packing(kind, length, model, isolation, form)
