"""Language modelling: the reference's batches for random texts and the same seed, and errors that say what to do."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import paceline
from paceline import (
    DataCollatorForLanguageModeling,
    DataCollatorForPermutationLanguageModeling,
    DataCollatorForSOP,
    DataCollatorForWholeWordMask,
)

transformers = pytest.importorskip("transformers", minversion="5.23")

# of transformers: whole words with the default shares; tensors of lists of arrays
pytestmark = pytest.mark.filterwarnings("ignore")

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
MASK = SPECIAL.index("[MASK]")


def pieces(side: str = "right") -> Any:
    """Words of the letters a to h, a token for each letter; [CLS] before and [SEP] after."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tokens = [*SPECIAL, *"abcdefgh", *[f"##{letter}" for letter in "abcdefgh"]]
    words = Tokenizer(models.WordPiece({token: number for number, token in enumerate(tokens)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    words.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=words, mask_token="[MASK]", padding_side=side, **names)


TOKENIZERS = {side: pieces(side) for side in ("left", "right")}
CONTAINERS: dict[str, Any] = {"list": list, "np": np.array, "pt": torch.tensor}
texts_of_letters = st.lists(st.text("abcdefgh ", max_size=20), min_size=1, max_size=5)
kinds = st.sampled_from(["pt", "np"])
sides = st.sampled_from(sorted(TOKENIZERS))
containers = st.sampled_from(sorted(CONTAINERS))


def plain(batch: Any) -> Any:
    return {name: (type(value), value.dtype, value.tolist()) for name, value in batch.items()}


def seeded(collator: Any, features: Any, rounds: int = 2) -> Any:
    """Several batches and what the global generators give after them."""
    torch.manual_seed(3)
    np.random.seed(3)
    batches = [plain(collator(copy.deepcopy(features))) for _ in range(rounds)]
    return batches, torch.rand(1).item(), np.random.rand()


def encode(tool: Any, texts: list[str], **options: Any) -> list[dict[str, Any]]:
    encoded = tool(texts, **options)
    return [{name: values[place] for name, values in encoded.items()} for place in range(len(texts))]


@settings(max_examples=200)
@given(
    texts=texts_of_letters,
    side=sides,
    container=containers,
    kind=kinds,
    has_names=st.booleans(),
    has_special=st.booleans(),
    options=st.fixed_dictionaries(
        {
            "mlm": st.booleans(),
            "mlm_probability": st.sampled_from([0, 0.15, 0.5, 1]),
            "pad_to_multiple_of": st.sampled_from([None, 8]),
            "seed": st.sampled_from([None, 7]),
        }
    ),
    shares=st.sampled_from([(0.8, 0.1), (1, 0), (0, 1), (0.5, 0.5), (0.3, 0), (0, 0)]),
)
def test_tokens(
    texts: Any, side: str, container: str, kind: str, has_names: bool, has_special: bool, options: Any, shares: Any
) -> None:
    tool = TOKENIZERS[side]
    features: list[Any] = encode(tool, texts, return_special_tokens_mask=has_special)
    make = CONTAINERS[container]
    features = [{name: make(value) for name, value in feature.items()} for feature in features]
    if not has_names:
        features = [feature["input_ids"] for feature in features]
    if kind == "np" and container == "pt" and not has_names:
        return  # theirs cannot
    options |= {"mask_replace_prob": shares[0], "random_replace_prob": shares[1], "return_tensors": kind}
    ours, theirs = (library.DataCollatorForLanguageModeling(tool, **options) for library in (paceline, transformers))
    assert seeded(ours, features) == seeded(theirs, features)


@pytest.mark.slow
@settings(max_examples=150)
@given(
    texts=texts_of_letters, side=sides, kind=kinds, seed=st.sampled_from([None, 7]), has_special=st.booleans(),
    share=st.sampled_from([0.15, 0.6]),
)  # fmt: skip
def test_words(texts: Any, side: str, kind: str, seed: int | None, has_special: bool, share: float) -> None:
    tool = TOKENIZERS[side]
    options = {"whole_word_mask": True, "return_tensors": kind, "seed": seed, "mlm_probability": share}
    wanted = {"return_offsets_mapping": True, "return_special_tokens_mask": has_special}
    features = encode(tool, texts, padding=True, **wanted)
    ours, theirs = (library.DataCollatorForLanguageModeling(tool, **options) for library in (paceline, transformers))
    found = seeded(ours, features)
    assert found == seeded(theirs, features)
    # theirs needs samples of one length
    assert seeded(DataCollatorForLanguageModeling(tool, **options), encode(tool, texts, **wanted)) == found


def test_words_are_masked_whole() -> None:
    tool = TOKENIZERS["right"]
    texts = ["abc de f", "gh abcd"]
    torch.manual_seed(0)
    collator = DataCollatorForWholeWordMask(tool, mlm_probability=0.5)
    features = encode(tool, texts, return_offsets_mapping=True)
    seen = set()
    for _ in range(50):
        batch = collator(features)
        row = (batch["labels"][0] != -100).tolist()
        assert row[1] == row[2] == row[3]
        assert row[4] == row[5]
        assert not row[0]
        assert not row[7]
        assert (batch["input_ids"][batch["labels"] != -100] == MASK).all()
        seen.add(tuple(row))
    assert len(seen) == 8


def test_labels_of_the_samples_are_replaced() -> None:
    collator = DataCollatorForLanguageModeling(TOKENIZERS["right"], mlm=False)
    batch = collator([{"input_ids": [5, 6], "labels": [1]}, {"input_ids": [7], "labels": [1]}])
    assert batch["labels"].tolist() == [[5, 6], [7, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1], [1, 0]]


def test_methods_of_subclasses_are_called() -> None:
    class Own(DataCollatorForLanguageModeling):
        def torch_mask_tokens(self, inputs: Any, special_tokens_mask: Any = None, offset_mapping: Any = None) -> Any:
            return inputs, inputs + 1

        def numpy_call(self, examples: Any) -> Any:
            return "own"

    own = Own(TOKENIZERS["right"])
    assert own([{"input_ids": [5]}])["labels"].tolist() == [[6]]
    assert own([{"input_ids": [5]}], return_tensors="np") == "own"


def test_a_tokenizer_with_its_own_special_tokens() -> None:
    class Own(type(TOKENIZERS["right"])):  # type: ignore[misc]
        def get_special_tokens_mask(self, ids: Any, **options: Any) -> Any:
            return [int(number == 5) for number in ids]

    tool = pieces()
    tool.__class__ = Own
    batch = DataCollatorForLanguageModeling(tool, mlm_probability=1)([{"input_ids": [2, 5, 6]}])
    assert batch["labels"].tolist() == [[2, -100, 6]]


def test_workers_draw_masks_of_their_own() -> None:
    collator = DataCollatorForLanguageModeling(TOKENIZERS["right"], seed=7, mlm_probability=0.5)
    rows = [list(range(5, 20))] * 4
    loader = DataLoader(rows, batch_size=2, num_workers=2, collate_fn=collator)
    theirs = transformers.DataCollatorForLanguageModeling(TOKENIZERS["right"], seed=7, mlm_probability=0.5)
    first, second = (batch["labels"].tolist() for batch in loader)
    assert first != second
    expected = DataLoader(rows, batch_size=2, num_workers=2, collate_fn=theirs)
    assert [first, second] == [batch["labels"].tolist() for batch in expected]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mlm_probability": 1.5}, "mlm_probability=1.5 is not a probability"),
        ({"mlm_probability": None}, "mlm_probability=None is not a probability"),
        ({"mask_replace_prob": -1}, "mask_replace_prob=-1 is not a probability"),
        ({"random_replace_prob": 2}, "random_replace_prob=2 is not a probability"),
        ({"random_replace_prob": 0.5}, "add up to 1 or less"),
        ({"mlm": False, "whole_word_mask": True}, "set mlm=True"),
    ],
)
def test_options_that_do_not_work(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataCollatorForLanguageModeling(TOKENIZERS["right"], **options)
    with pytest.raises(ValueError):
        transformers.DataCollatorForLanguageModeling(TOKENIZERS["right"], **options)


def test_shares_that_whole_words_leave_out() -> None:
    with pytest.warns(UserWarning, match=r"mask_replace_prob=0.5 is taken as 1"):
        DataCollatorForWholeWordMask(TOKENIZERS["right"], mask_replace_prob=0.5)
    with pytest.raises(ValueError, match="return_offsets_mapping=True"):
        DataCollatorForWholeWordMask(TOKENIZERS["right"])([{"input_ids": [5, 6]}])
    with pytest.raises(ValueError, match="set mlm=True"):
        DataCollatorForWholeWordMask(TOKENIZERS["right"], mlm=False)


def test_no_mask_token() -> None:
    tool = pieces()
    tool.mask_token = None
    with pytest.raises(ValueError, match=r"mlm=True needs a mask token.*mlm=False"):
        DataCollatorForLanguageModeling(tool)
    with pytest.raises(ValueError, match="needs a mask token"):
        DataCollatorForPermutationLanguageModeling(tool)([[5, 6]])


@settings(max_examples=100)
@given(
    halves=st.lists(st.lists(st.integers(2, 20), min_size=1, max_size=8), min_size=1, max_size=4),
    side=sides,
    container=containers,
    has_names=st.booleans(),
    options=st.fixed_dictionaries(
        {"plm_probability": st.sampled_from([1 / 6, 0.5]), "max_span_length": st.sampled_from([1, 5])}
    ),
)
def test_permutations(halves: Any, side: str, container: str, has_names: bool, options: Any) -> None:
    rows = [CONTAINERS[container](half + half) for half in halves]
    features = [{"input_ids": row} for row in rows] if has_names else rows
    ours, theirs = (
        library.DataCollatorForPermutationLanguageModeling(TOKENIZERS[side], **options)
        for library in (paceline, transformers)
    )
    assert seeded(ours, features) == seeded(theirs, features)


def test_permutations_as_arrays() -> None:
    collator = DataCollatorForPermutationLanguageModeling(TOKENIZERS["right"], return_tensors="np")
    features = [{"input_ids": [2, *[5 + place % 8 for place in range(30)], 3]}, {"input_ids": [2, 5, 6, 3]}]
    batch = collator(features)
    masked = batch["labels"] != -100
    tokens = np.where(masked, batch["labels"], batch["input_ids"])
    assert tokens[0].tolist() == features[0]["input_ids"]
    assert tokens[1].tolist() == [2, 5, 6, 3, *[0] * 28]
    assert (batch["input_ids"][masked] == MASK).all()
    assert masked.any()
    assert not batch["perm_mask"][:, :, ~masked.any(axis=0)].any()  # what is not masked is seen by all
    assert (np.einsum("sll->sl", batch["perm_mask"])[masked] == 1).all()  # no masked token sees itself
    assert {name: value.dtype for name, value in batch.items()} == {
        "input_ids": np.int64, "perm_mask": np.float32, "target_mapping": np.float32, "labels": np.int64,
    }  # fmt: skip


def test_permutations_need_an_even_length() -> None:
    with pytest.raises(ValueError, match=r"3 tokens long.*even"):
        DataCollatorForPermutationLanguageModeling(TOKENIZERS["right"])([[5, 6, 7]])


def test_the_order_of_sentences() -> None:
    features = [
        {"input_ids": [2, 5, 3, 6, 3], "token_type_ids": [0, 0, 0, 1, 1], "sentence_order_label": 1},
        {"input_ids": [2, 5, 3], "token_type_ids": [0, 0, 0], "sentence_order_label": torch.tensor(0)},
    ]
    collator = pickle.loads(pickle.dumps(DataCollatorForSOP(TOKENIZERS["right"], mlm_probability=1)))
    batch = collator(features)
    assert batch["sentence_order_label"].tolist() == [1, 0]
    assert batch["labels"].tolist() == [[-100, 5, -100, 6, -100], [-100, 5, -100, -100, -100]]
    assert batch["token_type_ids"].shape == batch["input_ids"].shape == (2, 5)
    assert batch["attention_mask"].tolist() == [[1] * 5, [1, 1, 1, 0, 0]]
    assert isinstance(collator(features, return_tensors="np")["sentence_order_label"], np.ndarray)


def test_a_seed_makes_the_generator_of_the_kind_asked_for() -> None:
    """`return_tensors` of the call, not only that of the collator, decides: arrays need numpy's generator."""
    collator = DataCollatorForLanguageModeling(TOKENIZERS["right"], seed=7)
    examples = [{"input_ids": [5, 6, 7, 8]}, {"input_ids": [5, 6, 7, 8]}]
    batch = collator(examples, return_tensors="np")
    assert isinstance(batch["input_ids"], np.ndarray)
    assert isinstance(collator.generator, np.random.Generator)
