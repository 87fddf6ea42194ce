"""Batches without padding: samples are packed into rows, or concatenated into one row, with positions that restart.

A packed batch has `input_ids`, `position_ids`, `labels` and any other column with one value per token, all of shape
(rows, tokens). A document begins at each position that is not its predecessor plus one. The batch has no other
description of the documents, so its rows can be split, moved and counted like those of any batch.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.core.lengths import describe_sample

IGNORED = -100
IDS, LABELS, MASK, POSITIONS = "input_ids", "labels", "attention_mask", "position_ids"
LABEL_NAMES = ("label", "label_ids")
MOST_CANDIDATES = 32  # arrangements of a batch that are compared; each takes about 1 microsecond per document

Column = NDArray[Any]


@dataclass(frozen=True)
class PackedForm:
    """The format of packed batches that a model takes.

    Attributes:
        first_position: the position of a document's first token: 2 for RoBERTa and similar models.
        shifts: the loss compares the output at i with the label at i + 1, so each document's first label is ignored.
        pad_token_id: the token that fills the end of a row.
    """

    first_position: int = 0
    shifts: bool = True
    pad_token_id: int = 0


def best_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Returns rows of indices into `lengths`, each row of at most `capacity` tokens.

    Best-fit decreasing: from the longest to the shortest, each goes into the fullest row that has room for it.

    Raises:
        ValueError: a length is above the capacity.
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, row), ascending
    for place in sorted(range(len(lengths)), key=lambda each: (-lengths[each], each)):
        length = lengths[place]
        if length > capacity:
            raise ValueError(
                f"packing_length={capacity}: a sample has {length} tokens. Raise packing_length, or cut the samples "
                "when they are tokenized."
            )
        found = bisect.bisect_left(room, (length, -1))
        if found < len(room):
            left, row = room.pop(found)
        else:
            left, row = capacity, len(rows)
            rows.append([])
        rows[row].append(place)
        bisect.insort(room, (left - length, row))
    return rows


def balanced_rows(lengths: Sequence[int]) -> list[list[int]]:
    """Returns rows of indices into `lengths` of nearly the same number of tokens, for rows without a given length.

    As many rows as the longest document fits into the tokens, or down to three quarters of them if that leaves less
    padding: a row is at most about twice as long as the longest document.
    """
    most = max(sum(lengths) // max([*lengths, 1]), 1)
    least = max(round(0.75 * most), 1)
    numbers = range(most, least - 1, -((most - least) // MOST_CANDIDATES + 1))
    candidates = [fill_evenly(lengths, number) for number in numbers]
    return min(candidates, key=lambda rows: len(rows) * max(sum(lengths[place] for place in row) for row in rows))


def fill_evenly(lengths: Sequence[int], number: int) -> list[list[int]]:
    """Returns a number of rows of indices into `lengths`: from the longest to the shortest, each goes into the
    emptiest row (longest processing time first; Graham, 1969).
    """
    rows: list[list[int]] = [[] for _ in range(number)]
    fill = [(0, row) for row in range(number)]  # (tokens, row), a heap
    for place in sorted(range(len(lengths)), key=lambda each: (-lengths[each], each)):
        tokens, row = fill[0]
        rows[row].append(place)
        heapq.heapreplace(fill, (tokens + lengths[place], row))
    return rows


class PackingCollator:
    """Collates samples into rows of whole documents.

    Args:
        inner: the user's collator, whose batch is packed; it may pad and make labels. None: the samples themselves,
            mappings with `input_ids`, are packed.
        form: the format that the model takes.
        kind: "pack": rows of at most `length` tokens, padded to the fullest row; "flatten": one row.
        length: maximum tokens per row; None: rows of nearly the same length, at least that of the longest document.

    Raises:
        ValueError: samples have columns without exactly one value per token, or are already packed.
    """

    def __init__(
        self, inner: Callable[[list[Any]], Any] | None, form: PackedForm, kind: str, length: int | None = None
    ) -> None:
        self.inner = inner
        self.form = form
        self.kind = kind
        self.length = length

    def __call__(self, features: list[Any]) -> dict[str, torch.Tensor]:
        if self.inner is None:
            lengths, columns = read_samples(features)
        else:
            lengths, columns = read_padded(self.inner(features), features)
        rows = [list(range(len(lengths)))]
        if self.kind == "pack":
            rows = best_fit_decreasing(lengths, self.length) if self.length else balanced_rows(lengths)
        return self.fill(rows, lengths, columns)

    def fill(self, rows: list[list[int]], lengths: list[int], columns: Mapping[str, Column]) -> dict[str, torch.Tensor]:
        """Returns the batch with the documents arranged in rows.

        Args:
            rows: indices of the documents of each row.
            lengths: tokens of each document.
            columns: the concatenated values of all documents, by name.
        """
        ends = np.cumsum(lengths)
        starts = ends - np.asarray(lengths)
        fill = [sum(lengths[place] for place in row) for row in rows]
        width, longest = max(fill), max(lengths)
        source = np.concatenate([np.arange(starts[place], ends[place]) for row in rows for place in row])
        target = np.concatenate([np.arange(used) + number * width for number, used in enumerate(fill)])
        begins = np.concatenate([number * width + self._begins(row, lengths) for number, row in enumerate(rows)])
        batch = {}
        for name, column in columns.items():
            empty = {IDS: self.form.pad_token_id, LABELS: IGNORED}.get(name, 0)
            values = np.full(len(rows) * width, empty, dtype=column.dtype)
            values[target] = column[source]
            if name == LABELS and self.form.shifts:
                values[begins] = IGNORED
            batch[name] = torch.from_numpy(values.reshape(len(rows), width))
        # padding is split into documents no longer than the longest real one, so that its positions stay in range
        positions = np.tile(np.arange(width), (len(rows), 1))
        for number, row in enumerate(rows):
            restarts = [*self._begins(row, lengths).tolist(), *range(fill[number], width, longest)]
            sizes = np.diff([*restarts, width])
            positions[number] -= np.repeat(restarts, sizes)
        batch[POSITIONS] = torch.from_numpy(positions + self.form.first_position)
        return batch

    @staticmethod
    def _begins(row: list[int], lengths: list[int]) -> NDArray[np.int64]:
        """Returns the index of each document's first token in its row."""
        own = np.asarray([lengths[place] for place in row], dtype=np.int64)
        begins: NDArray[np.int64] = np.cumsum(own) - own
        return begins


def read_samples(features: Sequence[Any]) -> tuple[list[int], dict[str, Column]]:
    """Returns the lengths of samples, and their concatenated values by name, both without padding.

    Raises:
        ValueError: samples are no mappings with `input_ids`, have different columns, or have columns without exactly
            one value per token.
    """
    names = names_of(features)
    if POSITIONS in names:
        raise ValueError(f"packing makes {POSITIONS}, and the samples have their own: leave them out of the data.")
    rows = {name: [np.asarray(sample[name]) for sample in features] for name in names}
    if MASK in names:
        kept = [attended(mask) for mask in rows.pop(MASK)]
        check_masked(rows.get(LABELS, ()), kept)
        rows = {
            name: [row[mask] if row.shape == mask.shape else row for row, mask in zip(values, kept, strict=True)]
            for name, values in rows.items()
        }
    lengths = [len(row) for row in rows[IDS]]
    columns = {}
    for name, values in rows.items():
        if any(row.shape != (length,) for row, length in zip(values, lengths, strict=True)):
            raise not_by_token(name)
        columns[LABELS if name in LABEL_NAMES else name] = joined(name, values)
    return check_not_empty(lengths), columns


def names_of(features: Sequence[Any]) -> list[str]:
    """Returns the names of the samples' columns whose values are not None.

    Raises:
        ValueError: a sample is no mapping with `input_ids`, has other columns than the first, or has labels under two
            names.
    """
    first: dict[str, None] = {}
    for place, sample in enumerate(features):
        if not isinstance(sample, Mapping) or IDS not in sample:
            raise ValueError(f"packing needs samples that are dicts with {IDS!r}; one is {describe_sample(sample)}.")
        names = {name: None for name, value in sample.items() if value is not None}
        labels = [name for name in (LABELS, *LABEL_NAMES) if name in names]
        if len(labels) > 1:
            raise ValueError(
                f"packing: sample {place} of a micro-batch has labels under two names, {labels[0]!r} and "
                f"{labels[1]!r}: leave one of them out of the data."
            )
        first = first or names
        other = min(first.keys() ^ names.keys(), default=None)
        if other is not None:
            has, lacks = (0, place) if other in first else (place, 0)
            raise ValueError(
                f"packing: sample {has} of a micro-batch has {other!r}, and sample {lacks} has not. Give each sample "
                "the same columns."
            )
    return list(first)


def joined(name: str, values: Sequence[Column]) -> Column:
    """Returns the concatenated values of all documents as int64, as float32 if some are floats, or as booleans.

    Raises:
        ValueError: the values are not numbers.
    """
    kinds = {each.dtype.kind for each in values}
    if not kinds <= set("biuf"):
        raise not_by_token(name)
    if kinds == {"b"}:
        return np.concatenate(values)
    dtype = np.float32 if "f" in kinds else np.int64
    return np.concatenate([each.astype(dtype) for each in values])


def read_padded(batch: Any, features: Sequence[Any]) -> tuple[list[int], dict[str, Column]]:
    """Returns the lengths of the documents in a padded batch, and their concatenated values by name.

    Args:
        batch: from a collator: `input_ids` of shape (samples, tokens), with an `attention_mask` if it is padded.
        features: the samples of the batch.

    Raises:
        ValueError: the batch has columns without exactly one value per token, or is already packed.
    """
    ids = batch.get(IDS) if isinstance(batch, Mapping) else None
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        raise ValueError(
            f"packing needs batches with a tensor {IDS!r} of shape (samples, tokens) from the data_collator; it gave "
            f"{describe_sample(batch)}."
        )
    if POSITIONS in batch or len(ids) != len(features):
        raise ValueError(
            f"packing with a data_collator that packs by itself ({len(features)} samples in {len(ids)} rows, with "
            f"{', '.join(map(str, batch))}): leave one of them out."
        )
    if MASK in batch:
        masks = [attended(mask) for mask in batch[MASK].numpy()]
    else:
        masks = [np.arange(ids.shape[1]) < length for length in unpadded_lengths(features, ids)]
    check_masked(batch[LABELS].numpy() if LABELS in batch and batch[LABELS].shape == ids.shape else (), masks)
    kept = np.stack(masks)
    columns = {}
    for name, value in batch.items():
        if name == MASK:
            continue
        if not isinstance(value, torch.Tensor) or value.shape != ids.shape:
            raise not_by_token(str(name))
        columns[str(name)] = value.numpy()[kept]
    return check_not_empty(kept.sum(1).tolist()), columns


def unpadded_lengths(features: Sequence[Any], ids: torch.Tensor) -> Iterator[int]:
    """Yields the number of tokens of each sample in a batch without an attention mask that may be padded on the right.

    Raises:
        ValueError: a row of the batch does not begin with the tokens of its sample.
    """
    for sample, row in zip(features, ids.numpy(), strict=True):
        own = np.asarray(sample[IDS]) if isinstance(sample, Mapping) and IDS in sample else row
        if len(own) > len(row) or not np.array_equal(own, row[: len(own)]):
            raise ValueError(
                f"packing cannot tell where the samples end in a batch without {MASK!r}: let the data_collator return "
                "one."
            )
        yield len(own)


def attended(mask: Any) -> NDArray[np.bool_]:
    """Returns an attention mask as booleans.

    Raises:
        ValueError: it masks tokens in the middle of a sample.
    """
    kept = np.asarray(mask).astype(bool)
    places = np.flatnonzero(kept)
    if kept.ndim != 1 or (len(places) and places[-1] - places[0] + 1 != len(places)):
        raise ValueError(
            f"packing leaves out what the {MASK} masks, and here that is in the middle of a sample: let it mask "
            "padding alone."
        )
    return kept


def check_masked(labels: Sequence[Any], kept: Sequence[NDArray[np.bool_]]) -> None:
    """Raises ValueError if a masked token has a target, which packing would drop."""
    for row, mask in zip(labels, kept, strict=False):
        if np.shape(row) == mask.shape and np.any(np.asarray(row)[~mask] != IGNORED):
            raise ValueError(
                f"packing leaves out masked tokens, and some of them have labels other than {IGNORED}: set these to "
                f"{IGNORED}, as the usual collators do."
            )


def check_not_empty(lengths: list[int]) -> list[int]:
    """Returns the lengths; raises ValueError if a sample has no tokens."""
    if min(lengths) == 0:
        raise ValueError("packing: a sample has no token. Leave empty samples out of the data.")
    return lengths


def not_by_token(name: str) -> ValueError:
    """Returns the error for a column that cannot be packed."""
    return ValueError(
        f"packing joins samples token by token, and {name!r} does not hold one value for each token of input_ids. Use "
        "packing='group', which keeps one row for each sample, or leave the column out of the data."
    )
