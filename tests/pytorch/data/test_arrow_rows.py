"""Batches from Arrow buffers: those of the dataset's own rows bit for bit, and where the usual rows are kept."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from paceline import TrainingArguments
from paceline.pytorch.data.arrow_rows import ArrayRows, as_arrays
from paceline.pytorch.data.collate_language import DataCollatorForLanguageModeling
from paceline.pytorch.data.collate_seq2seq import DataCollatorForSeq2Seq
from paceline.pytorch.data.collators import DataCollatorWithPadding, DefaultDataCollator, default_data_collator
from paceline.pytorch.data.indexed import LocalBatches
from paceline.pytorch.data.loading import make_loader
from paceline.pytorch.data.sampling import random_sampler

datasets = pytest.importorskip("datasets")
transformers = pytest.importorskip("transformers")

SIZE = 23


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from tokenizers import Tokenizer, models

    backend = Tokenizer(models.WordLevel({"[PAD]": 0, "a": 1, "[MASK]": 2}, unk_token="a"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", mask_token="[MASK]")


def data_of(kind: str) -> Any:
    """Columns of fixed or ragged lists, and of numbers, in several types."""
    rng = np.random.default_rng(0)
    sizes = [4] * SIZE if kind == "fixed" else rng.integers(1, 9, SIZE).tolist()
    lists = {"input_ids": "int32", "attention_mask": "int8", "labels": "int64"}
    columns: dict[str, Any] = {
        name: [rng.integers(0, 2 if name == "attention_mask" else 3, size) for size in sizes] for name in lists
    }
    features: dict[str, Any] = {name: datasets.List(datasets.Value(dtype)) for name, dtype in lists.items()}
    if kind == "fixed":
        columns |= {"weights": rng.random((SIZE, 3)), "small": rng.random((SIZE, 2)).astype(np.float16)}
        features |= {name: datasets.LargeList(datasets.Value("float64")) for name in ("weights", "small")}
        features["small"] = datasets.List(datasets.Value("float16"))
        columns |= {"label": rng.integers(0, 3, SIZE), "score": rng.random(SIZE).astype(np.float32)}
        features |= {"label": datasets.ClassLabel(3), "score": datasets.Value("float32")}
    return datasets.Dataset.from_dict(columns, datasets.Features(features))


CHANGES: dict[str, Any] = {
    "whole": lambda data: data,
    "shuffled": lambda data: data.shuffle(seed=1),
    "part": lambda data: data.select(range(3, 17)),
    "chunks": lambda data: datasets.concatenate_datasets([data.select(range(9)), data, data.select([2, 1])]),
    "shuffled chunks": lambda data: datasets.concatenate_datasets([data, data]).shuffle(seed=2).select(range(5, 30)),
}


def collators(kind: str, tokenizer: Any) -> list[Any]:
    if kind == "fixed":
        return [default_data_collator, DefaultDataCollator(), DefaultDataCollator("pt", frozenset(["label"]))]
    return [
        DataCollatorWithPadding(tokenizer),
        DataCollatorWithPadding(tokenizer, padding="max_length", max_length=12, return_tensors="np"),
        DataCollatorForLanguageModeling(tokenizer, mlm=False, pad_to_multiple_of=8),
        DataCollatorForLanguageModeling(tokenizer, seed=3),
        DataCollatorForSeq2Seq(tokenizer),
    ]


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert type(found[name]) is type(value)
        assert found[name].dtype == value.dtype
        assert found[name].shape == value.shape
        assert np.asarray(found[name]).tobytes() == np.asarray(value).tobytes()
        assert not isinstance(value, torch.Tensor) or found[name].stride() == value.stride()


def epoch(dataset: Any, collate: Any) -> list[Any]:
    places = [list(range(start, min(start + 5, len(dataset)))) for start in range(0, len(dataset), 5)]
    return list(LocalBatches(dataset, collate, iter(places)))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", ["fixed", "ragged"])
def test_the_batches_are_the_same(kind: str, change: str, tokenizer: Any) -> None:
    data = CHANGES[change](data_of(kind))
    for plain, again in zip(collators(kind, tokenizer), collators(kind, tokenizer), strict=True):
        fast, collate = as_arrays(data, again)
        assert isinstance(fast, ArrayRows)
        expected = epoch(data, plain)
        for found, each in zip(epoch(fast, collate), expected, strict=True):
            assert_same(found, each)
        restored = pickle.loads(pickle.dumps(fast))
        assert_same(collate(restored.__getitems__([4, 2])), plain(data.__getitems__([4, 2])))


class Counting:
    """Counts the rows that the dataset makes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, read = 0, datasets.Dataset.__getitems__

        def counted(dataset: Any, keys: list[int]) -> Any:
            self.count += len(keys)
            return read(dataset, keys)

        monkeypatch.setattr(datasets.Dataset, "__getitems__", counted)


@pytest.mark.parametrize("workers", [0, 1])
def test_loaders_read_arrays(workers: int, monkeypatch: pytest.MonkeyPatch, tokenizer: Any) -> None:
    data, collate = data_of("ragged"), DataCollatorWithPadding(tokenizer)
    args = TrainingArguments("x", dataloader_num_workers=workers, use_cpu=True)

    def batches(collate: Any) -> list[Any]:
        options: dict[str, Any] = {"batch_size": 4, "args": args, "train": True, "seed": 0}
        loader = make_loader(data, sampler=random_sampler(SIZE, 5), collate=collate, **options)
        assert loader.dataset is data
        assert loader.collate_fn is collate
        found = list(loader)
        loader.close()
        return found

    expected = batches(lambda rows: collate(rows))
    counting = Counting(monkeypatch)
    for found, each in zip(batches(collate), expected, strict=True):
        assert_same(found, each)
    assert counting.count == 0


def as_is(rows: list[Any]) -> Any:
    return rows


class Own(DataCollatorWithPadding):
    """A subclass, which may use the rows in another way."""


@pytest.mark.parametrize(
    "data",
    [
        [{"input_ids": [1]}],
        data_of("ragged").with_format("torch"),
        data_of("ragged").with_format(None, columns=["input_ids"]),
        data_of("ragged").with_transform(lambda batch: batch),
        data_of("ragged").add_column("text", ["a"] * SIZE),
        data_of("ragged").add_column("flags", [[True]] * SIZE),
        data_of("ragged").add_column("gaps", [[1, None]] * SIZE),
        data_of("ragged").add_column("missing", [None, *[1] * (SIZE - 1)]),
        data_of("ragged").add_column("nested", [[[1]]] * SIZE),
        data_of("ragged").add_column("floats", [[0.5]] * SIZE),
        data_of("ragged").to_iterable_dataset(),
    ],
)
def test_other_data_is_read_as_it_is(data: Any, tokenizer: Any) -> None:
    collate = DataCollatorWithPadding(tokenizer)
    assert as_arrays(data, collate) == (data, collate)


def test_other_collators_get_lists(tokenizer: Any) -> None:
    data = data_of("ragged")
    patched = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    patched.torch_call = as_is  # type: ignore[method-assign]
    for collate in (
        as_is,
        Own(tokenizer),
        DataCollatorWithPadding(tokenizer, padding=False),
        patched,
        DefaultDataCollator("np"),
    ):
        assert as_arrays(data, collate) == (data, collate)


def test_empty_rows_and_other_indices_are_read_by_the_dataset() -> None:
    data = datasets.Dataset.from_dict({"x": [[1], [], [2, 3], []]}).cast_column(
        "x", datasets.List(datasets.Value("int16"))
    )
    fast, collate = as_arrays(data, default_data_collator)
    assert_same(collate(fast.__getitems__([1, 3])), default_data_collator(data.__getitems__([1, 3])))
    assert_same(collate(fast.__getitems__([-2])), default_data_collator(data.__getitems__([-2])))
    with pytest.raises(IndexError):
        fast.__getitems__([4])
    with pytest.raises(ValueError, match=r"different shapes in one batch \(length 1, length 2\)"):
        collate(fast.__getitems__([0, 2]))
