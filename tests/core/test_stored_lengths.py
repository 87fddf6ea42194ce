"""Lengths from the offsets of Arrow data, and from the cache of samples that a transform makes."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.core.lengths import find_lengths
from paceline.core.stored_lengths import cache_path, list_lengths, stored_numbers

datasets = pytest.importorskip("datasets")

SIZES = [3, 0, 5, 1, 4, 2, 9, 7]
ROWS = {"input_ids": [list(range(size)) for size in SIZES], "length": SIZES, "text": ["a"] * len(SIZES)}


@pytest.fixture
def stored(tmp_path: Path) -> Any:
    """A dataset with files."""
    datasets.Dataset.from_dict(ROWS).save_to_disk(str(tmp_path / "data"))
    return datasets.load_from_disk(str(tmp_path / "data"))


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data,
        lambda data: data.shuffle(seed=1),
        lambda data: data.select([4, 2, 2, 0]),
        lambda data: data.select(range(2, 6)),
        lambda data: data.filter(lambda row: len(row["input_ids"]) > 1),
        lambda data: datasets.concatenate_datasets([data, data]).shuffle(seed=2),
        lambda data: data.with_format("torch"),
        lambda data: data.cast_column("input_ids", datasets.LargeList(datasets.Value("int32"))),
    ],
)
def test_lengths_come_from_the_offsets(stored: Any, change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    data = change(stored)
    expected = [len(row["input_ids"]) for row in data]
    for found in (list_lengths(data, "input_ids"), stored_numbers(data, "length")):
        assert found is not None
        assert found.dtype == np.int64
        assert found.tolist() == expected
    monkeypatch.setattr(type(data), "__getitem__", None)  # no sample is read
    assert find_lengths(data, "none").tolist() == expected
    assert find_lengths(data).tolist() == expected


def test_what_the_offsets_do_not_tell(stored: Any) -> None:
    assert list_lengths(stored, "text") is None
    assert list_lengths(stored, "length") is None
    assert stored_numbers(stored, "text") is None
    assert list_lengths([{"input_ids": [1]}], "input_ids") is None
    assert list_lengths(stored.with_transform(lambda batch: batch), "input_ids") is None
    missing = datasets.Dataset.from_dict({"input_ids": [[1], None]})
    assert list_lengths(missing, "input_ids") is None
    with pytest.raises(TypeError):
        find_lengths(missing)
    fixed = datasets.Dataset.from_dict(
        {"input_ids": [[1, 2], [3, 4]]}, datasets.Features({"input_ids": datasets.List(datasets.Value("int8"), 2)})
    )
    assert find_lengths(fixed).tolist() == [2, 2]


class Tokens:
    """A transform that counts the samples it makes."""

    made = 0

    def __call__(self, batch: Any) -> Any:
        Tokens.made += len(batch["text"])
        return {"input_ids": [[0] * (2 * len(ids)) for ids in batch["input_ids"]]}


def lazily(stored: Any) -> Any:
    return stored.remove_columns("length").with_transform(Tokens())


def counted(data: Any) -> tuple[list[int], int]:
    Tokens.made = 0
    return find_lengths(data).tolist(), Tokens.made


DOUBLED = [2 * size for size in SIZES]


def test_lengths_of_a_transform_are_cached(stored: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    first, made = counted(lazily(stored))
    assert first == DOUBLED
    assert made > len(SIZES)
    again, made = counted(lazily(stored))
    assert again == DOUBLED
    assert made == len(SIZES)  # those that are compared; 16 of a large dataset
    assert "were read from" in caplog.text
    path = cache_path(lazily(stored), "length or input_ids")
    assert path is not None
    assert [each.name for each in path.parent.glob("lengths-*")] == [path.name]
    part = lazily(stored).select([1, 2])
    assert find_lengths(part).tolist() == DOUBLED[1:3]


def framed(array: Any) -> bytes:
    return hashlib.sha256(array.tobytes()).digest() + bytes(array.tobytes())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"x" * 300,
        b"x" * 10**6,
        framed(np.arange(len(SIZES)))[:-1],
        framed(np.arange(3)),
        framed(np.arange(len(SIZES) + 1)),
        framed(np.full(len(SIZES), -1)),
        hashlib.sha256(b"pickle").digest() + b"pickle",
    ],
)
def test_a_damaged_cache_is_measured_anew(stored: Any, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    path = cache_path(lazily(stored), "length or input_ids")
    assert path is not None
    path.write_bytes(content)
    assert find_lengths(lazily(stored)).tolist() == DOUBLED
    assert "is damaged: the lengths of the samples are measured anew" in caplog.text
    caplog.clear()
    assert find_lengths(lazily(stored)).tolist() == DOUBLED
    assert not caplog.records


def test_a_cache_that_does_not_fit_is_measured_anew(stored: Any, caplog: pytest.LogCaptureFixture) -> None:
    path = cache_path(lazily(stored), "length or input_ids")
    assert path is not None
    path.write_bytes(framed(np.asarray(SIZES)))
    assert find_lengths(lazily(stored)).tolist() == DOUBLED
    assert "has the length 6, and the cached one is 3" in caplog.text


def test_a_folder_that_cannot_be_written_is_no_error(
    stored: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("paceline.core.stored_lengths.cache_path", lambda dataset, name: Path("/dev/null/l.bin"))
    assert find_lengths(lazily(stored)).tolist() == DOUBLED
    assert "are not cached" in caplog.text


def test_data_without_files_is_measured_each_time() -> None:
    data = datasets.Dataset.from_dict(ROWS)
    assert cache_path(data, "length") is None
    assert find_lengths(lazily(data)).tolist() == DOUBLED
