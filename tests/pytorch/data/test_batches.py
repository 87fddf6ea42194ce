"""Counting and cutting nested batches."""

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from paceline.pytorch.data.batches import batch_size_of, split_batch

Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Row:
    x: torch.Tensor
    name: str = "row"


@pytest.mark.parametrize(
    "batch",
    [
        torch.zeros(4, 2),
        np.zeros((4, 2)),
        {"temperature": torch.tensor(1.0), "x": torch.zeros(4)},
        {"inner": {"x": [torch.zeros(4, 1)]}},
        (torch.zeros(4), torch.zeros(4)),
        Pair(torch.zeros(4), None),
        Row(torch.zeros(4)),
        {"text": ["a", "b", "c", "d"], "x": torch.zeros(4)},
        [[1, 2], [3], [], [4]],
        {"labels": [{"boxes": torch.zeros(2, 4), "size": torch.zeros(2)}] * 4, "pixels": torch.zeros(4, 3, 8, 8)},
        {"images": [torch.zeros(3, 8, 8)] * 4, "targets": [{"boxes": torch.zeros(2, 4)}] * 4},
        ((torch.zeros(3, 8, 8),) * 4, tuple({"boxes": torch.zeros(n, 4)} for n in (1, 2, 3, 0))),
        {"labels": [torch.tensor(1)] * 4},
        {"pair": [{"x": torch.zeros(4, 2)}, {"x": torch.zeros(4, 3), "y": torch.zeros(4)}]},
        {"rows": [{"text": "a"}] * 4},
        {"images": [torch.zeros(3, 8, 8)] * 4, "targets": [{"boxes": torch.zeros(3, 4)}] * 4},
    ],
)
def test_batch_size_of(batch: Any) -> None:
    assert batch_size_of(batch) == 4


@pytest.mark.parametrize("batch", [{}, {"x": torch.tensor(1.0)}, 3, None, {"flag": True}])
def test_batch_size_of_nothing(batch: Any) -> None:
    with pytest.raises(ValueError, match=r"data.collator"):
        batch_size_of(batch)


def test_split_batch_cuts_rows_and_keeps_the_rest() -> None:
    batch = {
        "x": torch.arange(5),
        "nested": (np.arange(5), [torch.arange(10).view(5, 2)]),
        "row": Row(torch.arange(5)),
        "words": list("abcde"),
        "scale": torch.tensor(2.0),
        "vocabulary": torch.zeros(7),
    }
    parts = split_batch(batch, 2)
    assert [part["x"].tolist() for part in parts] == [[0, 1], [2, 3], [4]]
    assert [part["nested"][0].tolist() for part in parts] == [[0, 1], [2, 3], [4]]
    assert parts[2]["nested"][1][0].tolist() == [[8, 9]]
    assert [part["words"] for part in parts] == [["a", "b"], ["c", "d"], ["e"]]
    assert isinstance(parts[0]["row"], Row)
    assert parts[1]["row"].x.tolist() == [2, 3]
    assert all(part["scale"] is batch["scale"] and part["vocabulary"] is batch["vocabulary"] for part in parts)
    assert [part.x.tolist() for part in split_batch(Pair(torch.arange(3), 1), 2)] == [[0, 1], [2]]


def test_lists_of_one_entry_for_each_sample_are_cut() -> None:
    boxes = [torch.zeros(number, 4) for number in (2, 5)]
    batch: dict[str, Any] = {
        "labels": [{"boxes": rows, "size": torch.tensor([8, 8])} for rows in boxes],
        "images": [torch.zeros(3, 8, 8), torch.zeros(3, 6, 6)],
        "nest": [torch.arange(2), torch.zeros(2, 3), torch.zeros(2)],
        "pixels": torch.zeros(2, 3, 8, 8),
    }
    first, second = split_batch(batch, 1)
    assert first["labels"] == batch["labels"][:1]
    assert second["labels"] == batch["labels"][1:]
    assert [tuple(image.shape) for image in second["images"]] == [(3, 6, 6)]
    assert [value.shape[0] for value in second["nest"]] == [1, 1, 1]


def test_images_are_not_cut_by_their_channels() -> None:
    batch: dict[str, Any] = {"images": [torch.zeros(3, 8, 8)] * 3, "labels": [{"boxes": torch.zeros(3, 4)}] * 3}
    parts = split_batch(batch, 2)
    assert [len(part["labels"]) for part in parts] == [2, 1]
    assert [[tuple(image.shape) for image in part["images"]] for part in parts] == [[(3, 8, 8)] * 2, [(3, 8, 8)]]


def test_split_of_a_batch_encoding_keeps_its_type() -> None:
    transformers = pytest.importorskip("transformers")
    batch = transformers.BatchEncoding({"input_ids": torch.arange(6).view(3, 2)})
    parts = split_batch(batch, 2)
    assert [type(part) for part in parts] == [transformers.BatchEncoding] * 2
    assert parts[1]["input_ids"].tolist() == [[4, 5]]
    assert batch["input_ids"].shape == (3, 2)


def test_lists_of_one_entry_per_sample_are_cut() -> None:
    boxes = [torch.rand(2, 4), torch.rand(1, 4), torch.rand(2, 4)]
    masks = [torch.zeros(number, 4, 4) for number in (3, 1, 2)]
    labels = [{"boxes": each} for each in boxes]
    batch = {"labels": labels, "mask_labels": masks, "pixel_values": torch.zeros(3, 1)}
    assert batch_size_of(batch) == 3
    first, second = split_batch(batch, 2)
    assert [each["boxes"] for each in first["labels"] + second["labels"]] == boxes
    assert first["mask_labels"] + second["mask_labels"] == masks
