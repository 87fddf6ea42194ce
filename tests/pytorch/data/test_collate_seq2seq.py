"""The seq2seq collator: the reference's batches for random samples, and errors that say what to do."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import DataCollatorForSeq2Seq

transformers = pytest.importorskip("transformers", minversion="5.23")

from transformers_models import bart, t5, tokenizer  # noqa: E402

# of transformers, which makes tensors of lists of arrays
pytestmark = pytest.mark.filterwarnings("ignore")

TOKENIZERS = {side: tokenizer(side) for side in ("left", "right")}
MODELS = {"none": None, "t5": t5(), "bart": bart()}
CONTAINERS: dict[str, Any] = {"list": list, "np": np.array, "pt": torch.tensor}
tokens = st.lists(st.integers(4, 30), min_size=1, max_size=9)
samples = st.lists(st.tuples(tokens, tokens), min_size=1, max_size=5)


def features_of(pairs: list[tuple[list[int], list[int]]], container: str, name: str | None) -> list[dict[str, Any]]:
    make = CONTAINERS[container]
    features = []
    for source, target in pairs:
        feature = {"input_ids": make(source), "attention_mask": make([1] * len(source))}
        features.append(feature if name is None else {**feature, name: make(target)})
    return features


def assert_same(ours: Any, theirs: Any) -> None:
    assert set(ours) == set(theirs)
    for name, expected in theirs.items():
        found = ours[name]
        assert type(found) is type(expected), name
        if expected is not None:
            assert found.dtype == expected.dtype
            assert found.tolist() == expected.tolist(), name


@settings(max_examples=150, deadline=None)
@given(
    pairs=samples,
    side=st.sampled_from(sorted(TOKENIZERS)),
    model=st.sampled_from(sorted(MODELS)),
    container=st.sampled_from(sorted(CONTAINERS)),
    name=st.sampled_from(["labels", "label", None]),
    padding=st.sampled_from([True, "longest", "max_length"]),
    multiple=st.sampled_from([None, 4, 8]),
    kind=st.sampled_from(["pt", "np"]),
    filler=st.sampled_from([-100, 0]),
)
def test_the_same_batch(
    pairs: Any, side: str, model: str, container: str, name: str | None, padding: Any, multiple: Any, kind: str,
    filler: int,
) -> None:  # fmt: skip
    if kind == "np":
        model = "none"  # theirs hands the model's method an array, which it cannot take
    options = {
        "model": MODELS[model],
        "padding": padding,
        "max_length": 12 if padding == "max_length" else None,
        "pad_to_multiple_of": multiple,
        "label_pad_token_id": filler,
        "return_tensors": kind,
    }
    features = features_of(pairs, container, name)
    given_features = copy.deepcopy(features)
    ours = DataCollatorForSeq2Seq(TOKENIZERS[side], **options)(features)
    assert [sorted(feature) for feature in features] == [sorted(feature) for feature in given_features]
    theirs = transformers.DataCollatorForSeq2Seq(TOKENIZERS[side], **options)(given_features)
    assert_same(ours, theirs)
    assert ("decoder_input_ids" in ours) == (name is not None and model != "none")


@pytest.mark.parametrize("padding", [False, "do_not_pad"])
@pytest.mark.parametrize("kind", ["pt", "np"])
def test_without_padding(padding: Any, kind: str) -> None:
    features = features_of([([5, 6], [7, 8, 9]), ([8, 9], [4, 5, 6])], "list", "labels")
    collators = [
        library(TOKENIZERS["right"], padding=padding)
        for library in (DataCollatorForSeq2Seq, transformers.DataCollatorForSeq2Seq)
    ]
    assert_same(*(collator(features, return_tensors=kind) for collator in collators))
    with pytest.raises(ValueError, match=r"labels of one batch have 1 to 3 tokens.*padding=True"):
        collators[0]([*features, {**features[0], "labels": [5]}])


def test_labels_beyond_max_length_stay_whole() -> None:
    features = features_of([([5], [7] * 6), ([8], [4])], "list", "labels")
    batch = DataCollatorForSeq2Seq(TOKENIZERS["right"], padding="max_length", max_length=3)(features)
    assert batch["labels"].tolist() == [[7] * 6, [4, *[-100] * 5]]


def test_decoder_inputs_as_arrays() -> None:
    features = features_of([([5], [7, 8]), ([8], [4])], "list", "labels")
    collator = DataCollatorForSeq2Seq(TOKENIZERS["right"], model=MODELS["t5"])
    arrays, tensors = collator(features, return_tensors="np"), collator(features)
    assert arrays["decoder_input_ids"].tolist() == tensors["decoder_input_ids"].tolist() == [[0, 7], [0, 4]]
    assert isinstance(arrays["decoder_input_ids"], np.ndarray)


def test_labels_that_some_samples_lack() -> None:
    collator = DataCollatorForSeq2Seq(TOKENIZERS["right"])
    one, other = features_of([([5], [7]), ([8], [4])], "list", "labels")
    with pytest.raises(ValueError, match="Sample 1 of a batch has no 'labels'"):
        collator([one, {**other, "labels": None}])
    with pytest.raises(ValueError, match=r"first sample of a batch has 'labels', sample 1 has only"):
        collator([one, {"input_ids": [1], "attention_mask": [1]}])
    assert collator([{**one, "labels": None}, {**other, "labels": None}])["labels"] is None


def test_it_travels_to_worker_processes() -> None:
    features = features_of([([5], [7, 8]), ([8], [4])], "list", "labels")
    collator = pickle.loads(pickle.dumps(DataCollatorForSeq2Seq(TOKENIZERS["left"])))
    assert collator(features)["labels"].tolist() == [[7, 8], [-100, 4]]
