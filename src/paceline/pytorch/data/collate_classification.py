"""Collators for token classification and multiple choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from paceline.pytorch.data.collators import DataCollatorMixin, take_column
from paceline.pytorch.data.padding import fill_rows, pad_features, to_rows


@dataclass
class DataCollatorForTokenClassification(DataCollatorMixin):
    """Pads the inputs with a tokenizer's `pad`, and the token labels to the same length on the same side.

    The labels are `label` or `labels` of each sample, one per token: a list, array or tensor. The batch has them under
    the same name, int64 of shape (samples, longest). Samples may have no labels.

    Attributes:
        tokenizer: has `pad` and `padding_side`.
        padding: True or `longest`: to the longest of the batch; `max_length`: to `max_length`, or the model's
            maximum input length; False or `do_not_pad`: no padding.
        max_length: in tokens.
        pad_to_multiple_of: round the length up to a multiple, for tensor cores and fewer compilations.
        label_pad_token_id: pads the labels; losses ignore -100.
        return_tensors: `pt` or `np`.

    Raises:
        ValueError: only some samples have labels, or a sample has more labels than the batch has tokens.
    """

    tokenizer: Any
    padding: bool | str = True
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    label_pad_token_id: int = -100
    return_tensors: str = "pt"

    def collate(self, examples: Sequence[Any], kind: str) -> Any:
        """Returns the batch as tensors (`pt`) or arrays (`np`)."""
        name = "label" if "label" in examples[0] else "labels"
        labels = take_column(examples, name) if name in examples[0] else None
        batch = pad_features(
            self.tokenizer,
            [{key: value for key, value in example.items() if key != name} for example in examples],
            padding=self.padding,
            max_length=self.max_length,
            pad_to_multiple_of=self.pad_to_multiple_of,
            return_tensors=kind,
        )
        if labels is None:
            return batch
        rows = to_rows(labels) or [np.asarray(label) for label in labels]
        width = batch[self.tokenizer.model_input_names[0]].shape[1]
        longest = max(map(len, rows))
        if longest > width:
            raise ValueError(
                f"A sample has {longest} {name}, the batch is {width} tokens long: give each token one class "
                f"({self.label_pad_token_id} for those that do not count)."
            )
        filled = fill_rows(rows, width, self.label_pad_token_id, self.tokenizer.padding_side)
        batch[name] = torch.from_numpy(filled) if kind == "pt" else filled
        return batch


@dataclass
class DataCollatorForMultipleChoice(DataCollatorMixin):
    """Pads samples that have one row of tokens per choice; all samples have the same number of choices.

    The correct choice is `label` or `labels` of each sample, an integer. It becomes `labels` of the batch, int64 of
    shape (samples,), if the samples have it. Inputs have shape (samples, choices, longest).

    Attributes:
        tokenizer: has `pad`.
        padding: see `DataCollatorForTokenClassification`.
        max_length: in tokens.
        pad_to_multiple_of: round the length up to a multiple, for tensor cores and fewer compilations.
        return_tensors: `pt` or `np`.

    Raises:
        ValueError: a sample lacks an input that the first sample has, or has another number of choices.
    """

    tokenizer: Any
    padding: bool | str = True
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    return_tensors: str = "pt"

    def collate(self, examples: Sequence[Any], kind: str) -> Any:
        """Returns the batch as tensors (`pt`) or arrays (`np`)."""
        name = "label" if "label" in examples[0] else "labels"
        columns = {key: take_column(examples, key) for key in examples[0] if key != name}
        num_choices = len(columns[self.tokenizer.model_input_names[0]][0])
        for key, values in columns.items():
            check_choices(key, values, num_choices)
        flat = [
            {key: values[place][choice] for key, values in columns.items()}
            for place in range(len(examples))
            for choice in range(num_choices)
        ]
        padded = pad_features(
            self.tokenizer,
            flat,
            padding=self.padding,
            max_length=self.max_length,
            pad_to_multiple_of=self.pad_to_multiple_of,
            return_tensors=kind,
        )
        batch = {key: value.reshape(len(examples), num_choices, -1) for key, value in padded.items()}
        if name in examples[0]:
            labels = np.array([int(label) for label in take_column(examples, name)], dtype=np.int64)
            batch["labels"] = torch.from_numpy(labels) if kind == "pt" else labels
        return batch


def check_choices(name: str, values: Sequence[Any], num_choices: int) -> None:
    """Checks that an input has one entry per choice in every sample.

    Raises:
        ValueError: it has not; the message names the sample, the input and the counts.
    """
    for place, value in enumerate(values):
        found = len(value) if hasattr(value, "__len__") and not isinstance(value, str) else None
        if found != num_choices:
            raise ValueError(
                f"{name!r} of sample {place} has {'no' if found is None else found} choices, the batch has "
                f"{num_choices} of each sample. Give all samples as many choices, and drop columns that have none."
            )
