"""A collator for sequence-to-sequence samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from paceline.pytorch.data.collators import missing_name
from paceline.pytorch.data.padding import pad_features


@dataclass
class DataCollatorForSeq2Seq:
    """Pads the inputs with a tokenizer's (or other processor's) `pad`, and the labels separately.

    The labels are `labels` or `label` of each sample, a list, array or tensor of token ids. They become `labels` of the
    batch, int64 of shape (samples, longest), or None if the samples have no labels.

    Attributes:
        tokenizer: has `pad(features, padding=, max_length=, pad_to_multiple_of=, return_tensors=)` and `padding_side`.
        model: makes `decoder_input_ids` from the labels, if it has `prepare_decoder_input_ids_from_labels`. With label
            smoothing, this avoids computing the loss twice.
        padding: True or `longest`: to the longest of the batch; `max_length`: to `max_length`, labels too; False or
            `do_not_pad`: no padding.
        max_length: in tokens. Longer rows are unchanged.
        pad_to_multiple_of: round the lengths up to a multiple, for tensor cores and fewer compilations.
        label_pad_token_id: pads the labels; losses ignore -100.
        return_tensors: `pt` or `np`.

    Raises:
        ValueError: some samples have no labels, or labels of different lengths are not padded.
    """

    tokenizer: Any
    model: Any = None
    padding: bool | str = True
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    label_pad_token_id: int = -100
    return_tensors: str = "pt"

    def __call__(self, features: Sequence[Mapping[str, Any]], return_tensors: str | None = None) -> Any:
        kind = return_tensors or self.return_tensors
        name = "label" if "label" in features[0] else "labels"
        labels = take_labels(features, name)
        batch = pad_features(
            self.tokenizer,
            [{key: value for key, value in feature.items() if key != name} for feature in features],
            padding=self.padding,
            max_length=self.max_length,
            pad_to_multiple_of=self.pad_to_multiple_of,
            return_tensors=kind,
        )
        batch["labels"] = None
        if labels is None:
            return batch
        rows = torch.from_numpy(self._join(labels))
        batch["labels"] = rows if kind == "pt" else rows.numpy()
        prepare = getattr(self.model, "prepare_decoder_input_ids_from_labels", None)
        if prepare is not None:
            prepared = prepare(labels=rows)
            batch["decoder_input_ids"] = prepared if kind == "pt" else prepared.numpy()
        return batch

    def _join(self, labels: list[Any]) -> Any:
        """Returns the labels as one array, padded on the tokenizer's side."""
        lengths = list(map(len, labels))
        width = max(lengths)
        if self.padding in (False, "do_not_pad"):
            if min(lengths) < width:
                raise ValueError(
                    f"padding={self.padding!r}: the labels of one batch have {min(lengths)} to {width} tokens and "
                    "cannot be stacked; set padding=True, or pad them beforehand."
                )
        else:
            if self.padding == "max_length" and self.max_length is not None:
                width = max(width, self.max_length)
            multiple = self.pad_to_multiple_of or 1
            width = -(-width // multiple) * multiple
        rows = np.full((len(labels), width), self.label_pad_token_id, dtype=np.int64)
        from_left = getattr(self.tokenizer, "padding_side", "right") == "right"
        for row, label, length in zip(rows, labels, lengths, strict=True):
            row[slice(0, length) if from_left else slice(width - length, width)] = label
        return rows


def take_labels(features: Sequence[Mapping[str, Any]], name: str) -> list[Any] | None:
    """Returns the labels of every sample; None if no sample has labels.

    Raises:
        ValueError: only some samples have labels.
    """
    if name not in features[0]:
        return None
    try:
        labels = [feature[name] for feature in features]
    except KeyError:
        raise missing_name(features, name) from None
    missing = [place for place, label in enumerate(labels) if label is None]
    if 0 < len(missing) < len(labels):
        raise ValueError(
            f"Sample {missing[0]} of a batch has no {name!r}, others have: give every sample labels, or none."
        )
    return None if missing else labels
