"""Flattening: the reference's batches for random samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import paceline
from paceline import DataCollatorWithFlattening

transformers = pytest.importorskip("transformers", minversion="5.23")

CONTAINERS: dict[str, Any] = {"list": list, "np": np.array, "pt": torch.tensor}
flags = st.booleans()


def plain(batch: Any) -> Any:
    return {
        name: (type(value), getattr(value, "dtype", None), value.tolist() if hasattr(value, "tolist") else value)
        for name, value in batch.items()
    }


@given(
    rows=st.lists(st.lists(st.integers(4, 30), min_size=1, max_size=9), min_size=1, max_size=5),
    container=st.sampled_from(sorted(CONTAINERS)),
    has_labels=flags,
    kind=st.sampled_from(["pt", "np"]),
    separator=st.sampled_from([None, -1]),
    options=st.fixed_dictionaries(
        {
            "return_position_ids": flags,
            "return_flash_attn_kwargs": flags,
            "return_seq_idx": flags,
            "separator_id": st.sampled_from([-100, 5]),
            "position_ids_start": st.sampled_from([0, 2]),
        }
    ),
)
def test_the_same_batch(
    rows: Any, container: str, has_labels: bool, kind: str, separator: int | None, options: dict[str, Any]
) -> None:
    make = CONTAINERS[container]
    features = [{"input_ids": make(row), "attention_mask": make([1] * len(row))} for row in rows]
    if has_labels:
        features = [{**f, "labels": make([n + 1 for n in row])} for f, row in zip(features, rows, strict=True)]
    ours, theirs = (
        library.DataCollatorWithFlattening(**options)(features, return_tensors=kind, separator_id=separator)
        for library in (paceline, transformers)
    )
    assert plain(ours) == plain(theirs)


def test_a_sample_without_tokens_leaves_nothing() -> None:
    batch = DataCollatorWithFlattening("np", return_flash_attn_kwargs=True, return_seq_idx=True)(
        [{"input_ids": [5, 6]}, {"input_ids": []}, {"input_ids": [7]}, {"input_ids": []}]
    )
    assert batch["labels"].tolist() == [[-100, 6, -100]]
    assert batch["seq_idx"].tolist() == [[0, 0, 2]]
    assert batch["position_ids"].tolist() == [[0, 1, 0]]
    assert batch["cu_seq_lens_q"].tolist() == [0, 2, 2, 3, 3]


def test_labels_that_do_not_fit() -> None:
    collator = DataCollatorWithFlattening()
    with pytest.raises(ValueError, match="Sample 1 of a batch has 2 input_ids and 1 labels"):
        collator([{"input_ids": [5], "labels": [5]}, {"input_ids": [5, 6], "labels": [5]}])
    with pytest.raises(ValueError, match="sample 1 has only 'input_ids'"):
        collator([{"input_ids": [5], "labels": [5]}, {"input_ids": [5]}])
    with pytest.raises(ValueError, match="return_tensors='tf' is unknown"):
        collator([{"input_ids": [5]}], return_tensors="tf")
