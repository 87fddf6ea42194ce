"""Padding at once: what `tokenizer.pad` returns, for random samples, and the tokenizer's own way where it has one."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.pytorch.data.padding import pad_at_once, pad_features, pad_token_rows, pads_as_base

transformers = pytest.importorskip("transformers", minversion="5.23")

from transformers_models import tokenizer as make_tokenizer  # noqa: E402

# of transformers: max_length without padding="max_length"; tensors of lists of arrays
pytestmark = pytest.mark.filterwarnings("ignore")

CONTAINERS: dict[str, Any] = {
    "list": list,
    "tuple": tuple,
    "np": np.array,
    "np32": lambda row: np.array(row, dtype=np.int32),
    "pt": torch.tensor,
    "pt32": lambda row: torch.tensor(row, dtype=torch.int32),
    "float": lambda row: [float(number) for number in row],
    "bool": lambda row: [bool(number % 2) for number in row],
}
NAMES = ["attention_mask", "token_type_ids", "special_tokens_mask", "labels", "score", "length", "pair"]


def tokenizer(side: str, has_mask: bool = True) -> Any:
    made = make_tokenizer(side)
    made.model_input_names = ["input_ids", "token_type_ids", *(["attention_mask"] if has_mask else [])]
    made._pad_token_type_id = 7
    return made


TOKENIZERS = {(side, has_mask): tokenizer(side, has_mask) for side in ("left", "right") for has_mask in (True, False)}


def sample(length: int, make: Any, names: list[str], number: int) -> dict[str, Any]:
    row = [4 + (number + place) % 20 for place in range(length)]
    values = {
        "attention_mask": make([1] * length),
        "token_type_ids": make([0] * length),
        "special_tokens_mask": make([0] * length),
        "labels": number,
        "score": 0.5 * number,
        "length": np.int64(number),
        "pair": make([number, number + 1]),
    }
    return {"input_ids": make(row), **{name: values[name] for name in names}}


def outcome(pad: Any) -> Any:
    """The batch as plain values with types, or the kind of error."""
    try:
        batch = pad()
    except Exception as error:  # whatever it is, it has to be the same
        return type(error)
    assert type(batch).__name__ == "BatchEncoding"
    return {name: (type(value), getattr(value, "dtype", None), str(value.tolist())) for name, value in batch.items()}


@pytest.mark.slow
@settings(max_examples=400)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    make=st.sampled_from(sorted(CONTAINERS.keys() - {"tuple"})),  # theirs cannot pad a tuple
    names=st.lists(st.sampled_from(NAMES), unique=True),
    which=st.sampled_from(sorted(TOKENIZERS)),
    padding=st.sampled_from([True, True, "longest", "max_length", "max_length", False, "do_not_pad"]),
    max_length=st.sampled_from([None, None, 4, 9, 12]),
    multiple=st.sampled_from([None, None, 1, 4, 8]),
    kind=st.sampled_from(["pt", "np"]),
)
def test_the_same_batch(
    lengths: list[int], make: str, names: list[str], which: Any, padding: Any, max_length: Any, multiple: Any, kind: str
) -> None:
    features = [sample(length, CONTAINERS[make], names, number) for number, length in enumerate(lengths)]
    before = copy.deepcopy(features)
    options = {"padding": padding, "max_length": max_length, "pad_to_multiple_of": multiple, "return_tensors": kind}
    theirs = outcome(lambda: TOKENIZERS[which].pad(copy.deepcopy(features), **options))
    ours = outcome(lambda: pad_features(TOKENIZERS[which], features, **options))
    assert ours == theirs
    assert not isinstance(ours, dict) or list(ours) == list(theirs)
    assert str(features) == str(before)


@pytest.mark.parametrize("make", ["list", "tuple", "np", "np32", "pt", "pt32"])
def test_the_usual_batch_is_computed_at_once(make: str) -> None:
    features = [sample(length, CONTAINERS[make], NAMES, length) for length in (3, 5)]
    tool = TOKENIZERS["right", True]
    assert pads_as_base(tool)
    batch = pad_at_once(tool, features, return_tensors="pt")
    assert batch["token_type_ids"].tolist() == [[0, 0, 0, 7, 7], [0] * 5]


def test_the_batch_shares_no_memory_with_the_samples() -> None:
    features = [{"input_ids": make([5, 6])} for make in (np.array, np.array)]
    batch = pad_features(TOKENIZERS["right", True], features, return_tensors="pt")
    batch["input_ids"].zero_()
    assert features[0]["input_ids"].tolist() == [5, 6]


def test_a_tokenizer_that_pads_otherwise_is_asked() -> None:
    class Own(type(TOKENIZERS["right", True])):  # type: ignore[misc]
        def _pad(self, *args: Any, **options: Any) -> Any:
            return {**super()._pad(*args, **options), "own": 1}

    tool = make_tokenizer()
    features = [{"input_ids": [5, 6]}, {"input_ids": [5]}]
    tool.__class__ = Own
    assert pad_features(tool, features, return_tensors="pt")["own"].tolist() == [1, 1]
    tool = make_tokenizer()
    tool.pad = lambda features, **options: "own"
    assert pad_features(tool, features, return_tensors="pt") == "own"


def test_advice_and_errors_are_the_tokenizers() -> None:
    tool = make_tokenizer()
    features = [{"input_ids": [5, 6]}, {"input_ids": [5]}]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        pad_features(tool, features, padding=True, max_length=4, return_tensors="pt")
    assert ["max_length" in str(warning.message) for warning in told] == [True]
    tool.pad_token = None
    with pytest.raises(ValueError, match="padding token"):
        pad_features(tool, features, return_tensors="pt")
    with pytest.raises(ValueError, match="input_ids"):
        pad_features(tool, [{"labels": 1}], return_tensors="pt")


def test_nothing_at_once_for_masks_of_two_dimensions() -> None:
    features = [{"input_ids": [5, 6], "attention_mask": np.ones((2, 2), int)} for _ in range(2)]
    assert pad_at_once(TOKENIZERS["right", True], features, return_tensors="pt") is None


def test_rows_without_names() -> None:
    tool = TOKENIZERS["left", True]
    assert pad_token_rows(tool, [[5, 6], [7]], "pt", 4).tolist() == [[0, 0, 5, 6], [0, 0, 0, 7]]
    assert pad_token_rows(tool, [np.array([5], np.int32)], "np").dtype == np.int32
    assert pad_token_rows(tool, [torch.tensor([5], dtype=torch.int32)], "pt").dtype == torch.int32
    bare = make_tokenizer()
    bare.pad_token = None
    assert pad_token_rows(bare, [[5, 6]], "np").tolist() == [[5, 6]]
    with pytest.raises(ValueError, match=r"1 to 2 tokens.*set tokenizer.pad_token"):
        pad_token_rows(bare, [[5, 6], [7]], "pt")
