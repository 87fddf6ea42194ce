"""Rows of whole documents: each token once, positions that restart, and what cannot be packed."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ragged import pad, texts

from paceline.pytorch.data import packing
from paceline.pytorch.data.packing import PackedForm, PackingCollator, balanced_rows, best_fit_decreasing


def documents_in(batch: dict[str, torch.Tensor], name: str = "input_ids") -> list[list[int]]:
    """The values of each document, by its positions."""
    found: list[list[int]] = []
    for values, positions in zip(batch[name].tolist(), batch["position_ids"].tolist(), strict=True):
        previous = None
        for value, position in zip(values, positions, strict=True):
            if previous is None or position != previous + 1:
                found.append([])
            found[-1].append(value)
            previous = position
    return found


@given(st.lists(st.integers(1, 20), min_size=1, max_size=60), st.integers(20, 40))
def test_rows_hold_each_document_once_and_no_more_than_their_length(lengths: list[int], capacity: int) -> None:
    rows = best_fit_decreasing(lengths, capacity)
    assert sorted(place for row in rows for place in row) == list(range(len(lengths)))
    fill = [sum(lengths[place] for place in row) for row in rows]
    assert max(fill) <= capacity
    for later, row in enumerate(rows):  # a row is begun where no other has room
        assert all(used + lengths[row[0]] > capacity for used in fill[:later])


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40))
def test_rows_without_a_length_hold_each_document_once_and_are_short(lengths: list[int]) -> None:
    rows = balanced_rows(lengths)
    assert sorted(place for row in rows for place in row) == list(range(len(lengths)))
    assert all(rows)
    # the most even filling is at most the mean and a document above it
    assert max(sum(lengths[place] for place in row) for row in rows) < 3 * max(lengths)


def test_rows_without_a_length_are_even() -> None:
    """Rows as long as the longest document would have 10 % of padding."""
    generator = random.Random(0)
    num_tokens = num_slots = 0
    for _ in range(50):
        lengths = [min(round(90 * generator.lognormvariate(-0.32, 0.8)) + 1, 476) for _ in range(16)]
        rows = balanced_rows(lengths)
        num_tokens += sum(lengths)
        num_slots += len(rows) * max(sum(lengths[place] for place in row) for row in rows)
    assert num_tokens > 0.97 * num_slots


def test_rows_without_a_length_are_found_for_empty_documents_and_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    assert balanced_rows([0, 0]) == [[0, 1]]
    calls: list[int] = []
    fill = packing.fill_evenly

    def counted(lengths: list[int], number: int) -> list[list[int]]:
        calls.append(number)
        return fill(lengths, number)

    monkeypatch.setattr(packing, "fill_evenly", counted)
    rows = balanced_rows([90 + index % 7 for index in range(512)])
    assert len(calls) <= packing.MOST_CANDIDATES + 1
    assert sorted(place for row in rows for place in row) == list(range(512))


def test_a_document_longer_than_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match=r"packing_length=8: a sample has 9 tokens\. Raise packing_length"):
        best_fit_decreasing([3, 9], 8)


@pytest.mark.parametrize("kind", ["pack", "flatten"])
@pytest.mark.parametrize("inner", [None, pad], ids=["samples", "padded"])
def test_all_documents_are_in_the_batch(kind: str, inner: Any) -> None:
    samples = texts(9)
    batch = PackingCollator(inner, PackedForm(), kind)(samples)
    assert set(batch) == {"input_ids", "labels", "position_ids"}
    assert len({tuple(value.shape) for value in batch.values()}) == 1
    if kind == "flatten":
        assert batch["input_ids"].shape == (1, sum(len(sample["input_ids"]) for sample in samples))
    else:
        lengths = [len(sample["input_ids"]) for sample in samples]
        num_rows, width = batch["input_ids"].shape
        assert num_rows > 1
        assert max(lengths) <= width < 2 * max(lengths)
    found = [row for row in documents_in(batch) if any(row)]
    assert sorted(found) == sorted(sample["input_ids"] for sample in samples)
    targets = [row for row in documents_in(batch, "labels") if any(each != -100 for each in row)]
    assert sorted(targets) == sorted([-100, *sample["labels"][1:]] for sample in samples)


def test_what_fills_a_row_has_no_target_and_positions_in_range() -> None:
    samples: list[Any] = [{"input_ids": [5] * 4, "labels": [5] * 4} for _ in range(3)]
    batch = PackingCollator(None, PackedForm(pad_token_id=7), "pack", length=11)(samples)
    assert batch["input_ids"].tolist() == [[5] * 8, [5] * 4 + [7] * 4]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3] * 2] * 2
    assert batch["labels"][1, 4:].tolist() == [-100] * 4


def test_labels_that_are_not_shifted_stay() -> None:
    samples: list[Any] = [{"input_ids": [5, 6], "labels": [1, 2]}, {"input_ids": [7], "labels": [3]}]
    batch = PackingCollator(None, PackedForm(first_position=2, shifts=False), "flatten")(samples)
    assert batch["labels"].tolist() == [[1, 2, 3]]
    assert batch["position_ids"].tolist() == [[2, 3, 2]]


def test_padding_in_samples_and_on_the_left_is_left_out() -> None:
    samples: list[Any] = [{"input_ids": [0, 5, 6], "labels": [-100, 5, 6], "attention_mask": [0, 1, 1]}]
    for inner in (None, lambda features: {name: torch.tensor([features[0][name]]) for name in features[0]}):
        batch = PackingCollator(inner, PackedForm(), "flatten")(samples)
        assert batch["input_ids"].tolist() == [[5, 6]]


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"x": [1]}, "needs samples that are dicts with 'input_ids'"),
        ({"input_ids": [1, 2], "label": 1}, "'label' does not hold one value for each token"),
        ({"input_ids": [1, 2], "labels": [1]}, "'labels' does not hold one value for each token"),
        ({"input_ids": []}, "a sample has no token"),
        ({"input_ids": [1], "position_ids": [0]}, "the samples have their own"),
        ({"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]}, "in the middle of a sample"),
        ({"input_ids": [1, 2], "labels": [1, 2], "attention_mask": [1, 0]}, "have labels other than -100"),
    ],
)
def test_samples_that_cannot_be_packed_are_refused(sample: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PackingCollator(None, PackedForm(), "pack")([sample])


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": torch.ones(1, 2)}, "a tensor 'input_ids' of shape"),
        ({"input_ids": torch.ones(1, 2), "position_ids": torch.ones(1, 2)}, "packs by itself"),
        ({"input_ids": torch.ones(2, 2)}, "packs by itself"),
        ({"input_ids": torch.tensor([[5]]), "labels": torch.ones(1)}, "'labels' does not hold one value"),
        ({"input_ids": torch.tensor([[0, 5]])}, "cannot tell where the samples end"),
    ],
)
def test_batches_that_cannot_be_packed_are_refused(batch: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PackingCollator(lambda features: batch, PackedForm(), "pack")([{"input_ids": [5]}])


def test_columns_of_samples_have_the_types_that_padded_batches_have() -> None:
    sample = {
        "input_ids": np.array([5, 6], dtype=np.uint16),
        "labels": np.array([5, -100], dtype=np.int32),
        "weights": [0.5, 1.0],
        "is_answer": [False, True],
    }
    batch = PackingCollator(None, PackedForm(), "pack")([sample, {**sample, "weights": [0, 1]}])
    types = {name: values.dtype for name, values in batch.items()}
    whole = dict.fromkeys(["input_ids", "labels", "position_ids"], torch.int64)
    assert types == {**whole, "weights": torch.float32, "is_answer": torch.bool}
    assert batch["weights"].flatten().tolist() == [0.5, 1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([{}, {"labels": [1]}], "sample 1 of a micro-batch has 'labels', and sample 0 has not"),
        ([{"labels": [1]}, {"labels": None}], "sample 0 of a micro-batch has 'labels', and sample 1 has not"),
        ([{"label": [1]}, {"labels": [1]}], "'label'"),
        ([{"labels": [1], "label": [1]}], "sample 0 of a micro-batch has labels under two names, 'labels' and 'label'"),
        ([{"text": ["a"]}], "'text' does not hold one value for each token"),
    ],
)
def test_samples_with_other_columns_are_refused(samples: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PackingCollator(None, PackedForm(), "pack")([{"input_ids": [5], **each} for each in samples])
