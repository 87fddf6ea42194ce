"""Checksums of the rows of a batch, which show if a model reads the same sample again.

A checksum is computed with integers where the batch is, and does not depend on the other samples of the batch:
positions that the attention mask or the targets leave out do not count, nor do trailing zeros.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

IGNORED = -100
DERIVED = "decoder_"  # inputs that collators make from the targets
FACTORS = (-7046029254386353131, -4658895280553007687)  # odd, of splitmix64
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def row_checks(inputs: Mapping[str, Any], label_names: Collection[str], num_rows: int) -> Tensor:
    """Returns a checksum `(num_rows,)`, int64, of each sample of a batch, from its tensors of numbers.

    Args:
        inputs: the batch.
        label_names: the names of the targets, of which -100 is left out.
        num_rows: samples of the batch; tensors of another length are left out.
    """
    mask = inputs.get("attention_mask")
    found = torch.zeros(num_rows, dtype=torch.int64)
    for name in sorted(map(str, inputs)):
        value = inputs.get(name)
        if not isinstance(value, Tensor) or not is_numbers(value, num_rows) or name.startswith(DERIVED):
            continue
        kept = None
        if name in label_names or name == "shift_labels":
            is_several = value.dim() > 1 and not value.is_floating_point()
            kept = value != IGNORED if is_several else None
        elif isinstance(mask, Tensor) and mask.dim() == 2 and value.shape[:2] == mask.shape:
            kept = mask != 0
        part = checks_of(value, kept) * (zlib.crc32(name.encode()) | 1)
        found = found.to(part.device) + part
    return found


def is_numbers(value: Tensor, num_rows: int) -> bool:
    """Returns True for a dense tensor of numbers with a row for each sample."""
    has_rows = value.dim() > 0 and len(value) == num_rows
    return has_rows and not value.is_complex() and not value.is_sparse and value.element_size() in INTEGERS


def checks_of(value: Tensor, kept: Tensor | None) -> Tensor:
    """Returns a checksum `(rows,)` of each row of a tensor.

    Args:
        value: `(rows, ...)`.
        kept: mask of the positions that count, of the first dimensions of `value`; they are numbered without the
            others. None: all do.
    """
    bits = value.detach().contiguous()
    bits = (bits.to(torch.uint8) if bits.dtype == torch.bool else bits.view(INTEGERS[bits.element_size()])).to(
        torch.int64
    )
    bits = bits.reshape(len(value), -1)
    if kept is None:
        places = torch.arange(1, bits.shape[1] + 1, device=bits.device)
        return (bits * mixed(places)).sum(1)
    flat = kept.reshape(len(kept), -1)
    width = bits.shape[1] // max(flat.shape[1], 1)
    places = (flat.cumsum(1) * width).unsqueeze(-1) - torch.arange(width, device=bits.device)
    parts = (bits.reshape(*flat.shape, width) + 1) * mixed(places)  # + 1: a zero that counts is not one that does not
    return torch.where(flat.unsqueeze(-1), parts, torch.zeros_like(parts)).sum((1, 2))


def mixed(places: Tensor) -> Tensor:
    """Returns pseudo-random odd integers for positions."""
    found = places * FACTORS[0]
    found = (found ^ (found >> 29)) * FACTORS[1]
    return found | 1
