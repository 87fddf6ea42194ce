"""Samples to batches; where the reference defines the result, the same one."""

from collections import namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.pytorch.data.collators import (
    DataCollatorWithPadding,
    DefaultDataCollator,
    choose_collator,
    default_data_collator,
)

Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Row:
    x: list[int]
    label: int


def equal(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(equal(ours[key], theirs[key]) for key in ours)
    assert type(ours) is type(theirs)
    return ours.dtype == theirs.dtype and ours.shape == theirs.shape and bool((ours == theirs).all())


CASES: dict[str, list[Any]] = {
    "integer label": [{"input_ids": [1, 2], "label": 0}, {"input_ids": [3, 4], "label": 2}],
    "real label": [{"x": [1.0], "label": 0.5}, {"x": [2.0], "label": 1.5}],
    "tensor label": [{"label": torch.tensor(1)}, {"label": torch.tensor(0)}],
    "tensor real label": [{"label": torch.tensor(1.5)}, {"label": torch.tensor(0.5)}],
    "numpy label": [{"label": np.int64(1)}, {"label": np.int64(0)}],
    "label ids": [{"label_ids": [1, 2]}, {"label_ids": [3, 4]}],
    "real label ids": [{"label_ids": [1.0, 2.0]}, {"label_ids": [3.0, 4.0]}],
    "tensor label ids": [{"label_ids": torch.tensor([1, 2])}, {"label_ids": torch.tensor([3, 4])}],
    "label before label ids": [{"label_ids": [1], "label": 3}, {"label_ids": [2], "label": 4}],
    "none": [{"x": [1], "label": None, "extra": None}, {"x": [2], "label": None, "extra": None}],
    "tensors": [{"x": torch.ones(2, 2)}, {"x": torch.zeros(2, 2)}],
    "arrays": [{"x": np.ones((2, 2), np.float32)}, {"x": np.zeros((2, 2), np.float32)}],
    "numbers": [{"a": 1, "b": 2.0, "c": True}, {"a": 3, "b": 4.0, "c": False}],
    "nested lists": [{"x": [[1, 2], [3, 4]]}, {"x": [[5, 6], [7, 8]]}],
    "dataclasses": [Row([1], 0), Row([2], 1)],
}


@pytest.mark.parametrize("name", CASES)
def test_torch_batches_equal_the_reference(name: str) -> None:
    reference = pytest.importorskip("transformers.data.data_collator")
    assert equal(default_data_collator(CASES[name]), reference.default_data_collator(CASES[name]))
    assert equal(DefaultDataCollator()(CASES[name]), reference.DefaultDataCollator()(CASES[name]))


@pytest.mark.parametrize("name", [name for name in CASES if "tensor" not in name])
def test_numpy_batches_equal_the_reference(name: str) -> None:
    reference = pytest.importorskip("transformers.data.data_collator")
    theirs = reference.default_data_collator(CASES[name], return_tensors="np")
    assert equal(default_data_collator(CASES[name], return_tensors="np"), theirs)
    assert equal(DefaultDataCollator("np")(CASES[name]), theirs)


@given(st.integers(1, 5), st.integers(1, 4), st.sampled_from(["int64", "float32", "int32", "uint8"]))
def test_shapes_and_types(num: int, width: int, dtype: str) -> None:
    rows = [{"x": np.full((width, 2), place, dtype=dtype)} for place in range(num)]
    batch = default_data_collator(rows)
    assert batch["x"].shape == (num, width, 2)
    assert batch["x"].dtype == getattr(torch, dtype)
    assert default_data_collator([{"x": torch.from_numpy(row["x"])} for row in rows])["x"].equal(batch["x"])


def test_samples_that_are_no_dicts() -> None:
    batch = default_data_collator([(torch.ones(2), 1), (torch.zeros(2), 0)])
    assert isinstance(batch, tuple)
    assert batch[0].shape == (2, 2)
    assert batch[1].tolist() == [1, 0]
    batch = default_data_collator([(1.0, 2), (3.0, 4)])
    assert [part.tolist() for part in batch] == [[1.0, 3.0], [2, 4]]
    batch = default_data_collator([Pair([1, 2], {"z": 1}), Pair([3, 4], {"z": 2})])
    assert isinstance(batch, Pair)
    assert batch.x.tolist() == [[1, 2], [3, 4]]
    assert batch.y["z"].tolist() == [1, 2]
    assert default_data_collator([torch.ones(2), torch.zeros(2)]).shape == (2, 2)
    assert default_data_collator([1, 2]).tolist() == [1, 2]
    assert default_data_collator([[1, 2], [3, 4]]).tolist() == [[1, 2], [3, 4]]
    batch = default_data_collator([SimpleNamespace(x=[1], label=2), SimpleNamespace(x=[3], label=4)])
    assert batch["labels"].tolist() == [2, 4]


def test_nested_samples_and_text() -> None:
    rows = [
        {"image": {"pixels": np.ones(2), "size": (3, 4)}, "text": "a", "crops": [torch.ones(1), torch.ones(2)]},
        {"image": {"pixels": np.ones(2), "size": (5, 6)}, "text": "b", "crops": [torch.ones(1), torch.ones(2)]},
    ]
    batch = default_data_collator(rows)
    assert batch["image"]["pixels"].shape == (2, 2)
    assert batch["image"]["size"].tolist() == [[3, 4], [5, 6]]
    assert batch["text"] == ["a", "b"]
    assert [crop.shape for crop in batch["crops"]] == [(2, 1), (2, 2)]


def test_names_that_the_model_takes_are_kept() -> None:
    rows = [{"x": 1, "label": 0}, {"x": 2, "label": 1}]
    kept = DefaultDataCollator(keep_names=frozenset({"label"}))(rows)
    assert kept.keys() == {"x", "label"}
    both = [{"label": 1, "label_ids": [1]}, {"label": 2, "label_ids": [2]}]
    kept = DefaultDataCollator(keep_names=frozenset({"label"}))(both)
    assert (kept["label"].tolist(), kept["labels"].tolist()) == ([1, 2], [[1], [2]])


@pytest.mark.parametrize("tensors", ["pt", "np"])
@pytest.mark.parametrize("make", [list, np.array, lambda values: torch.tensor(values)])
def test_ragged_values_name_the_remedy(make: Any, tensors: str) -> None:
    rows = [{"input_ids": make([1, 2, 3])}, {"input_ids": make([4])}]
    with pytest.raises(ValueError, match=r"'input_ids' have different shapes.*DataCollatorWithPadding"):
        default_data_collator(rows, return_tensors=tensors)


def test_other_errors_name_the_column() -> None:
    with pytest.raises(ValueError, match=r"'x'.*sample 1 has only 'y'"):
        default_data_collator([{"x": 1}, {"y": 1}])
    with pytest.raises(ValueError, match=r"'when'.*cannot be made a tensor"):
        default_data_collator([{"when": object()}, {"when": object()}])
    with pytest.raises(ValueError, match=r"'x\[0\]'|'x' have different shapes"):
        default_data_collator([{"x": [torch.ones(1)]}, {"x": [torch.ones(1), torch.ones(1)]}])
    with pytest.raises(ValueError, match="return_tensors='tf'"):
        default_data_collator([{"x": 1}], return_tensors="tf")


class Padder:
    """Stands in for a tokenizer."""

    def __init__(self) -> None:
        self.deprecation_warnings: dict[str, bool] = {}
        self.told: list[Any] = []

    def pad(self, features: list[Any], **options: Any) -> dict[str, Any]:
        self.told.append((options, dict(self.deprecation_warnings)))
        longest = max(len(row["input_ids"]) for row in features)
        padded = [row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in features]
        rest = {name: torch.tensor([row[name] for row in features]) for name in features[0] if name != "input_ids"}
        return {"input_ids": torch.tensor(padded), **rest}


@pytest.mark.parametrize("name", ["label", "label_ids", "labels"])
def test_padding(name: str) -> None:
    padder = Padder()
    collator = DataCollatorWithPadding(padder, pad_to_multiple_of=8)
    batch = collator([{"input_ids": [1, 2], name: 0}, {"input_ids": [3], name: 1}])
    assert batch["input_ids"].tolist() == [[1, 2], [3, 0]]
    assert batch["labels"].tolist() == [0, 1]
    assert batch.keys() == {"input_ids", "labels"}
    options, flags = padder.told[0]
    assert options == {"padding": True, "max_length": None, "pad_to_multiple_of": 8, "return_tensors": "pt"}
    assert flags == {"Asking-to-pad-a-fast-tokenizer": True}
    assert padder.deprecation_warnings == {"Asking-to-pad-a-fast-tokenizer": False}


@pytest.mark.parametrize("value", [lambda n: n, lambda n: [n] * n])
def test_padding_keeps_the_name_that_the_model_takes(value: Any) -> None:
    """A number for each sample, or one for each token."""
    rows = [{"input_ids": [1, 2], "label": value(2)}, {"input_ids": [3], "label": value(1)}]
    batch = choose_collator(Padder(), ["input_ids", "label"])(rows)
    assert batch.keys() == {"input_ids", "label"}
    assert batch["label"].tolist() in ([2, 1], [[2, 2], [1, -100]])
    assert choose_collator(Padder(), ["input_ids", "labels"])(rows).keys() == {"input_ids", "labels"}


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_a_label_for_each_token_is_padded_with_its_token(side: str, kind: Any) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[PAD]": 0, "a": 1, "b": 2}, unk_token="[PAD]"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", padding_side=side)
    rows = [{"input_ids": [1, 2, 1], "labels": kind([4, 5, 6])}, {"input_ids": [1], "labels": kind([7])}]
    batch = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=4)(rows)
    ignored = [-100] * 3
    short = [7, *ignored] if side == "right" else [*ignored, 7]
    assert batch["labels"].tolist()[1] == short
    assert (batch["labels"] != -100).tolist() == (batch["input_ids"] != 0).tolist()
    assert sorted(rows[0]) == ["input_ids", "labels"]  # the sample is not changed


def test_a_number_for_each_class_is_no_list_to_pad() -> None:
    rows = [{"input_ids": [1, 2], "labels": [0.0, 1.0]}, {"input_ids": [3], "labels": [1.0, 1.0]}]
    batch = DataCollatorWithPadding(Padder())(rows)
    assert batch["labels"].tolist() == [[0.0, 1.0], [1.0, 1.0]]


def test_labels_of_their_own_length_are_padded_to_the_longest() -> None:
    rows = [{"input_ids": [1, 2], "labels": [4, 5, 6]}, {"input_ids": [3], "labels": [7]}]
    assert DataCollatorWithPadding(Padder())(rows)["labels"].tolist() == [[4, 5, 6], [7, -100, -100]]


def test_padding_with_a_tokenizer() -> None:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[PAD]": 0, "a": 1, "b": 2}, unk_token="[PAD]"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]")
    rows = [
        {"input_ids": [1, 2], "attention_mask": [1, 1], "label": 1},
        {"input_ids": [1], "attention_mask": [1], "label": 0},
    ]
    batch = DataCollatorWithPadding(tokenizer)(rows)
    assert batch["input_ids"].tolist() == [[1, 2], [1, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1], [1, 0]]
    assert batch["labels"].tolist() == [1, 0]
