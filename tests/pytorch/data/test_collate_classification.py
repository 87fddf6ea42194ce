"""Token classification and multiple choice: the reference's batches for random samples, and errors that help."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import paceline
from paceline import DataCollatorForMultipleChoice, DataCollatorForTokenClassification

transformers = pytest.importorskip("transformers", minversion="5.23")

from transformers_models import tokenizer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers

TOKENIZERS = {side: tokenizer(side) for side in ("left", "right")}
CONTAINERS: dict[str, Any] = {"list": list, "np": np.array, "pt": torch.tensor}
settings_of_padding = {
    "side": st.sampled_from(sorted(TOKENIZERS)),
    "padding": st.sampled_from([(True, None), ("longest", None), ("max_length", 12)]),
    "multiple": st.sampled_from([None, 4]),
    "container": st.sampled_from(sorted(CONTAINERS)),
}


def assert_same(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    assert set(ours) == set(theirs)
    for name, expected in theirs.items():
        assert type(ours[name]) is type(expected), name
        assert ours[name].dtype == expected.dtype, name
        assert ours[name].tolist() == expected.tolist(), name


@given(
    rows=st.lists(st.lists(st.integers(4, 30), min_size=1, max_size=9), min_size=1, max_size=5),
    name=st.sampled_from(["label", "labels", None]),
    kind=st.sampled_from(["pt", "np"]),
    filler=st.sampled_from([-100, 3]),
    **settings_of_padding,
)
def test_token_classification(
    rows: Any, name: str | None, kind: str, filler: int, side: str, padding: Any, multiple: Any, container: str
) -> None:
    make = CONTAINERS[container]
    features = [{"input_ids": make(row), "attention_mask": make([1] * len(row))} for row in rows]
    if name is not None:
        features = [{**f, name: make([n % 3 for n in row])} for f, row in zip(features, rows, strict=True)]
    options = {"padding": padding[0], "max_length": padding[1], "pad_to_multiple_of": multiple}
    ours, theirs = (
        library.DataCollatorForTokenClassification(TOKENIZERS[side], label_pad_token_id=filler, **options)
        for library in (paceline, transformers)
    )
    assert_same(ours(features, return_tensors=kind), theirs(copy.deepcopy(features), return_tensors=kind))


def test_token_classes_that_do_not_fit() -> None:
    collator = DataCollatorForTokenClassification(TOKENIZERS["right"])
    with pytest.raises(ValueError, match=r"has 3 labels, the batch is 2 tokens long"):
        collator([{"input_ids": [5, 6], "labels": [1, 2, 0]}])
    with pytest.raises(ValueError, match="sample 1 has only 'input_ids'"):
        collator([{"input_ids": [5, 6], "labels": [1, 2]}, {"input_ids": [5]}])
    with pytest.raises(ValueError, match="return_tensors='tf' is unknown"):
        collator([{"input_ids": [5]}], return_tensors="tf")


@given(
    rows=st.lists(st.lists(st.integers(1, 9), min_size=2, max_size=2), min_size=1, max_size=4),
    name=st.sampled_from(["label", "labels"]),
    **settings_of_padding,
)
def test_multiple_choice(rows: Any, name: str, side: str, padding: Any, multiple: Any, container: str) -> None:
    make = CONTAINERS[container]
    features = [
        {
            "input_ids": [make(list(range(4, 4 + length))) for length in lengths],
            "attention_mask": [make([1] * length) for length in lengths],
            name: place % 2,
        }
        for place, lengths in enumerate(rows)
    ]
    options = {"padding": padding[0], "max_length": padding[1], "pad_to_multiple_of": multiple}
    ours = DataCollatorForMultipleChoice(TOKENIZERS[side], **options)(features)
    assert_same(ours, transformers.DataCollatorForMultipleChoice(TOKENIZERS[side], **options)(copy.deepcopy(features)))
    arrays = DataCollatorForMultipleChoice(TOKENIZERS[side], return_tensors="np", **options)(features)
    assert {key: value.tolist() for key, value in arrays.items()} == {k: v.tolist() for k, v in ours.items()}
    assert all(isinstance(value, np.ndarray) for value in arrays.values())


def test_choices_without_a_right_one_and_choices_that_differ_in_number() -> None:
    collator = pickle.loads(pickle.dumps(DataCollatorForMultipleChoice(TOKENIZERS["right"])))
    batch = collator([{"input_ids": [[5], [6, 7]]}])
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (1, 2, 2)
    assert "labels" not in batch
    with pytest.raises(ValueError, match=r"'input_ids' of sample 1 has 1 choices, the batch has 2"):
        collator([{"input_ids": [[5], [6]]}, {"input_ids": [[5]]}])
    with pytest.raises(ValueError, match=r"'id' of sample 0 has no choices.*drop columns"):
        collator([{"input_ids": [[5], [6]], "id": 3}])
