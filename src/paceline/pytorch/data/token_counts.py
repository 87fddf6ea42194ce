"""Counts the useful tokens of training batches, which are those that are not padding."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from paceline.pytorch.data.packing import IDS, LABELS, MASK, POSITIONS, PackedForm

logger = logging.getLogger(__name__)


class PaddingCounter:
    """Counts the useful tokens of batches on the host, and warns once about a batch above the token budget.

    Args:
        name: the name of the model's main input.
        pad_token_id: identifies padding in batches without an `attention_mask`; None: such batches are not counted.
        tokens: the token budget of a micro-batch, or None.
        form: the format of packed batches; None: batches are padded.
    """

    def __init__(self, name: str, pad_token_id: int | None, tokens: int | None, form: PackedForm | None) -> None:
        self.name, self.pad_token_id, self.form = name, pad_token_id, form
        self.tokens = tokens

    def __call__(self, batch: Any) -> tuple[int, int]:
        """Returns (useful tokens, all tokens) of a batch; (0, 0) if padding cannot be identified."""
        ids = batch.get(self.name) if isinstance(batch, Mapping) else None
        if not isinstance(ids, Tensor):
            return 0, 0
        if self.tokens is not None and ids.numel() > self.tokens:
            logger.warning(
                "A micro-batch has %d tokens, and per_device_train_tokens=%d: the data_collator pads to more than the "
                "longest sample, or adds tokens. Let it not, or lower per_device_train_tokens.",
                ids.numel(),
                self.tokens,
            )
            self.tokens = None
        if self.form is not None and POSITIONS in batch:
            return ids.numel() - num_filling(batch, self.form), ids.numel()
        mask = batch.get(MASK)
        if isinstance(mask, Tensor) and mask.shape == ids.shape:
            return int(mask.sum()), ids.numel()
        if self.pad_token_id is None:
            return 0, 0
        return int((ids != self.pad_token_id).sum()), ids.numel()


def num_filling(batch: Mapping[str, Any], form: PackedForm) -> int:
    """Returns the number of tokens that fill the ends of packed rows: documents that only contain padding tokens."""
    starts = np.flatnonzero((batch[POSITIONS] == form.first_position).reshape(-1).numpy())
    is_filling = (batch[IDS] == form.pad_token_id).reshape(-1).numpy()
    if LABELS in batch:
        is_filling &= (batch[LABELS] < 0).reshape(-1).numpy()
    sizes = np.diff(np.append(starts, len(is_filling)))
    return int(sizes[np.logical_and.reduceat(is_filling, starts)].sum())
