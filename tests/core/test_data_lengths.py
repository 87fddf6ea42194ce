"""The line of a run's header about the samples of its training data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, IterableDataset, Subset, TensorDataset

from paceline.core.data_lengths import describe_samples


class Unread:
    """A dataset whose own code makes the samples: with side effects, slowly, or at random."""

    tensors = (torch.zeros(3),)

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> dict[str, Any]:
        raise AssertionError("nothing is read")


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        raise AssertionError("nothing is read")


def rows(number: int) -> list[dict[str, Any]]:
    return [{"input_ids": list(range(1 + index)), "labels": 0} for index in range(number)]


PIXELS = TensorDataset(torch.zeros(500, 3, 8, 8), torch.zeros(500, dtype=torch.long))


@pytest.mark.parametrize(
    ("dataset", "line"),
    [
        (rows(9), "lengths    1 to 9 tokens, mean 5.0"),
        (rows(1000), "lengths    about 1 to 1,000 tokens, mean 500.1 in 64 of 1,000 samples"),
        ({"input_ids": np.zeros((500, 128), int), "labels": np.zeros(500)}, "lengths    128 tokens each"),
        (PIXELS, "shapes     (3, 8, 8), ()"),
        (Subset(PIXELS, range(100)), "shapes     (3, 8, 8), () in 64 of 100 samples"),
        (ConcatDataset([rows(2), rows(4)]), "lengths    1 to 4 tokens, mean 2.2"),
        ((np.zeros((50, 64)), np.zeros(50)), "shapes     (64,), ()"),
        ([{"image": np.zeros((3, size, 9)), "text": "?"} for size in (8, 4)], "shapes     image (3, 4-8, 9)"),
        ([{"x": torch.zeros(2)}, {"x": torch.zeros(2, 3)}], "shapes     x of 1 to 2 dimensions"),
        ([{"input_values": [0.5] * size} for size in (900, 800)], "shapes     input_values (800-900,)"),
        ([{"a\n\x1b[31m": 1.0}], "shapes     a??[31m ()"),
    ],
)
def test_lines(dataset: Any, line: str) -> None:
    assert describe_samples(dataset) == [line]


@pytest.mark.parametrize(
    "dataset",
    [Unread(), Subset(Unread(), [0]), Stream(), ConcatDataset([rows(2), Unread()]), [], ["text"], None, [object()]],
)
def test_what_is_not_read(dataset: Any) -> None:
    assert describe_samples(dataset) == []


def test_many_fields_fit_a_terminal() -> None:
    (line,) = describe_samples([{f"measurement of sensor {index}": np.zeros(99) for index in range(20)}] * 70)
    assert line == ("shapes     measurement of sensor 0 (99,), 19 more in 64 of 70 samples")
    assert len(line) < 78


def test_of_datasets_every_sample_counts() -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list(rows(300)).shuffle(seed=0)
    assert describe_samples(data) == ["lengths    1 to 300 tokens, mean 150.5"]
    assert describe_samples(data.select(range(3)).with_transform(lambda batch: batch / 0)) == []
    assert describe_samples(data.to_iterable_dataset()) == []
