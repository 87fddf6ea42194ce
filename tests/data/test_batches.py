"""Counting and cutting nested batches."""

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from paceline.data.batches import batch_size_of, split_batch

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
    ],
)
def test_batch_size_of(batch: Any) -> None:
    assert batch_size_of(batch) == 4


@pytest.mark.parametrize("batch", [{}, {"x": torch.tensor(1.0)}, 3, None, {"flag": True}])
def test_batch_size_of_nothing(batch: Any) -> None:
    with pytest.raises(ValueError, match="data collator"):
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


def test_split_of_a_batch_encoding_keeps_its_type() -> None:
    transformers = pytest.importorskip("transformers")
    batch = transformers.BatchEncoding({"input_ids": torch.arange(6).view(3, 2)})
    parts = split_batch(batch, 2)
    assert [type(part) for part in parts] == [transformers.BatchEncoding] * 2
    assert parts[1]["input_ids"].tolist() == [[4, 5]]
    assert batch["input_ids"].shape == (3, 2)
