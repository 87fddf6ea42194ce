"""Packing in a run: probes before the first batch how the model can isolate documents, then packs batches that way."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paceline.pytorch.data.collators import DataCollatorWithPadding, DefaultDataCollator
from paceline.pytorch.data.packing import PackedForm, PackingCollator
from paceline.pytorch.distributed.strategy import SingleDevice
from paceline.pytorch.model.isolation import Isolation, find_isolation, isolated
from paceline.pytorch.model.tensor_parts import local_part
from paceline.pytorch.probes.loss import leaving_no_trace
from paceline.pytorch.probes.side_effects import undoing

logger = logging.getLogger(__name__)

DEFAULTS = (DefaultDataCollator, DataCollatorWithPadding)  # these only stack or pad inputs, and make no labels
FAINT = 1e-3  # weights up to this number may hide from the outputs what a module computes
STIRRED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Packing:
    """The packing of a run.

    Attributes:
        kind: "pack" or "flatten".
        length: maximum tokens per row; None: rows of nearly the same length in each batch.
        model: the model that was probed.
        isolation: how documents of a row are isolated from each other.
        form: the format of packed batches.
    """

    kind: str
    length: int | None
    model: nn.Module
    isolation: Isolation
    form: PackedForm

    @property
    def asked(self) -> tuple[str, int | None]:
        """Returns the options (kind, length) that this packing was made for."""
        return self.kind, self.length

    def collator(self, collate: Callable[[list[Any]], Any]) -> PackingCollator:
        """Returns the collator of packed batches.

        Args:
            collate: the Trainer's collator. Its output is packed; with a default collator, the samples are packed
                directly.
        """
        inner = None if type(collate) in DEFAULTS else collate
        return PackingCollator(inner, self.form, self.kind, self.length)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Isolates the documents of packed rows in the model while entered."""
        logger.info("Batches are packed; their documents are kept apart by %s.", self.isolation.way.name)
        with isolated(self.model, self.isolation.way):
            yield

    def check_loader(self, loader: Any, owner: str) -> None:
        """Checks that a training loader packs its batches.

        Args:
            loader: the training loader of the run.
            owner: class name of the Trainer, for the error message.

        Raises:
            ValueError: the loader is the user's own, and does not pack.
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
    strategy: SingleDevice,
) -> Packing:
    """Returns the packing for a model, determined by a few forward passes without side effects.

    Args:
        model: the model, on its device.
        compute_loss: the Trainer's, bound: `(model, batch) -> loss`.
        kind, length: see `Packing`.
        pad_token_id: fills the ends of rows; None: token 0.
        is_compiled: training passes are compiled.
        is_half: passes run in a 16-bit type.
        strategy: the strategy of the run; it may already have sharded the model.

    Raises:
        UnsupportedOption: the model cannot isolate documents.
    """

    @contextmanager
    def surroundings() -> Iterator[None]:
        owners = [model, *([owner] if (owner := getattr(compute_loss, "__self__", None)) is not None else [])]
        with undoing(owners), leaving_no_trace(model), strategy.forward_context():
            yield

    find = partial(
        find_isolation,
        model,
        compute_loss,
        is_compiled=is_compiled,
        is_half=is_half,
        in_parts=strategy.mesh.num_parts > 1,
        num_rows=1 if kind == "flatten" else 2,
        surroundings=surroundings,
    )
    with stirred(model):
        isolation = strategy.run_within(model, find)
    form = PackedForm(isolation.first_position, isolation.shifts, pad_token_id or 0)
    return Packing(kind, length, model, isolation, form)


@contextmanager
def stirred(model: nn.Module) -> Iterator[None]:
    """Gives parameters that are about zero random values while entered.

    A head, an output projection or a gate that is initialized to zero keeps what the model computes out of its outputs:
    documents would look isolated until the first optimizer step. The values are the same on processes that hold the
    same part of a parameter.
    """
    generator = torch.Generator().manual_seed(0)
    before: list[tuple[Tensor, Tensor]] = []
    drop_gathered(model)
    try:
        with torch.no_grad():
            for part in map(local_part, model.parameters()):
                if is_faint(part):
                    before.append((part, part.clone()))
                    scale = 0.5 * part.shape[-1] ** -0.5 if part.dim() > 1 else 0.1
                    part.copy_(scale * torch.randn(part.shape, generator=generator))
        yield
    finally:
        drop_gathered(model)
        with torch.no_grad():
            for part, values in before:
                part.copy_(values)


def is_faint(values: Tensor) -> bool:
    """Returns True if all values of a parameter are about zero; reads all of them only if the first ones are."""
    if values.is_meta or values.dtype not in STIRRED or not values.numel():
        return False
    return all(float(torch.linalg.vector_norm(each, torch.inf)) <= FAINT for each in (values.reshape(-1)[:64], values))


def drop_gathered(model: nn.Module) -> None:
    """Frees parameters that FSDP gathered for a forward pass and may have kept: the shards change."""
    for module in model.modules():
        if hasattr(module, "_get_fsdp_state"):
            sharded: Any = module
            sharded.reshard()
