"""A collator that concatenates samples into one row, without padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.pytorch.data.collators import DefaultDataCollator, take_column
from paceline.pytorch.data.padding import to_rows


@dataclass
class DataCollatorWithFlattening(DefaultDataCollator):
    """Concatenates the samples of a batch into one row of tokens, for attention that isolates samples.

    Inputs other than `input_ids` and `labels` are dropped. If the samples have no `labels`, the labels are the input
    ids. The first label of each sample is `separator_id`, so that no sample predicts the start of the next one.

    Attributes:
        return_tensors: `pt` or `np`.
        return_position_ids: add `position_ids`, each token's position in its sample, int64 of shape (1, tokens).
        separator_id: the label at each sample's start; losses ignore -100.
        return_flash_attn_kwargs: add the boundaries of the samples, `cu_seq_lens_q` and `cu_seq_lens_k`, int32 of shape
            (samples + 1,), and the longest length, `max_length_q` and `max_length_k`, as int.
        return_seq_idx: add `seq_idx`, each token's sample, int32 of shape (1, tokens).
        position_ids_start: the position of a sample's first token: 2 for RoBERTa and similar models, which count from
            `padding_idx + 1`.

    Raises:
        ValueError: a sample has no labels while others do, or its numbers of labels and tokens differ.
    """

    _: KW_ONLY
    return_position_ids: bool = True
    separator_id: int = -100
    return_flash_attn_kwargs: bool = False
    return_seq_idx: bool = False
    position_ids_start: int = 0

    def __call__(
        self,
        features: Sequence[Mapping[str, Any]],
        return_tensors: str | None = None,
        separator_id: int | None = None,
    ) -> dict[str, Any]:
        kind = return_tensors or self.return_tensors
        if kind not in ("pt", "np"):
            raise ValueError(f"return_tensors={kind!r} is unknown: use 'pt' or 'np'.")
        rows = rows_of(features, "input_ids")
        lengths = np.array([len(row) for row in rows])
        ends = lengths.cumsum()
        starts = ends - lengths
        batch: dict[str, Any] = {"input_ids": np.concatenate(rows)[None]}
        labels = self._labels(features, batch["input_ids"], lengths)
        labels[0, starts[lengths > 0]] = self.separator_id if separator_id is None else separator_id
        batch["labels"] = labels
        if self.return_position_ids:
            batch["position_ids"] = (np.arange(ends[-1]) - np.repeat(starts - self.position_ids_start, lengths))[None]
        if self.return_seq_idx:
            batch["seq_idx"] = np.repeat(np.arange(len(rows), dtype=np.int32), lengths)[None]
        if self.return_flash_attn_kwargs:
            bounds = np.concatenate([[0], ends]).astype(np.int32)
            batch |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds.copy()}
        if kind == "pt":
            batch = {name: torch.from_numpy(value) for name, value in batch.items()}
        if self.return_flash_attn_kwargs:
            batch["max_length_q"] = batch["max_length_k"] = int(lengths.max())
        return batch

    def _labels(
        self,
        features: Sequence[Mapping[str, Any]],
        tokens: NDArray[np.int64],
        lengths: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        """Returns the labels of all samples in one row, or a copy of the tokens if there are no labels."""
        if "labels" not in features[0]:
            return tokens.copy()
        rows = rows_of(features, "labels")
        for place, (row, length) in enumerate(zip(rows, lengths.tolist(), strict=True)):
            if len(row) != length:
                raise ValueError(f"Sample {place} of a batch has {length} input_ids and {len(row)} labels.")
        return np.concatenate(rows)[None]


def rows_of(features: Sequence[Mapping[str, Any]], name: str) -> list[NDArray[np.int64]]:
    """Returns the values of one column as an int64 row per sample."""
    values = take_column(features, name)
    return to_rows(values) or [np.asarray(value).astype(np.int64) for value in values]
