"""Whatever shape a model's author chose: the loss is found, predictions are never sliced."""

from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch

from paceline.pytorch.model.outputs import (
    LossPlace,
    ModelOutputError,
    candidate_logits,
    find_loss,
    read_loss,
    read_predictions,
)

LOSS = torch.tensor(1.5)
LOGITS = torch.arange(12.0).reshape(4, 3)


@dataclass
class Output:
    logits: torch.Tensor
    loss: torch.Tensor | None = None


Named = namedtuple("Named", ["loss", "logits"])
Unnamed = namedtuple("Unnamed", ["first", "second"])


@pytest.mark.parametrize(
    "outputs",
    [
        (LOSS, LOGITS),
        [LOSS, LOGITS],
        {"loss": LOSS, "logits": LOGITS},
        {"logits": LOGITS, "loss": LOSS.reshape(1)},
        Output(LOGITS, LOSS),
        Named(LOSS, LOGITS),
        Unnamed(LOSS, LOGITS),
    ],
    ids=["tuple", "list", "dict", "dict-1-element", "dataclass", "namedtuple", "namedtuple-positional"],
)
def test_loss_and_predictions_are_told_apart(outputs: object) -> None:
    assert read_loss(outputs, {}).shape == ()
    assert float(read_loss(outputs, {})) == 1.5
    assert torch.equal(read_predictions(outputs), LOGITS)


def test_a_bare_tensor_is_all_predictions() -> None:
    assert find_loss(LOGITS) is None
    assert torch.equal(read_predictions(LOGITS), LOGITS)


def test_one_prediction_for_a_batch_of_one_is_no_loss() -> None:
    outputs = (torch.tensor([0.3]), torch.ones(1, 2))
    assert find_loss(outputs) is None
    assert len(read_predictions(outputs)) == 2


def test_a_scalar_alone_is_a_loss() -> None:
    assert float(read_loss(LOSS, {})) == 1.5
    assert read_predictions(LOSS) is None


@pytest.mark.parametrize("outputs", [None, "text", {"logits": LOGITS}, LOGITS, (LOGITS, LOSS), ()])
def test_what_cannot_be_understood_is_described(outputs: object) -> None:
    with pytest.raises(ModelOutputError, match=r"compute_loss_func=") as caught:
        read_loss(outputs, {"x": 1})
    assert "its inputs were: x" in str(caught.value)


def test_a_loss_per_sample_is_refused_with_its_shape() -> None:
    with pytest.raises(ModelOutputError, match=r"tensor\(4,\)"):
        read_loss({"loss": torch.ones(4)}, {})


def test_a_scalar_is_a_prediction_where_larger_batches_had_rows() -> None:
    place = LossPlace()
    assert not place.holds((LOGITS, LOGITS), LOSS, 4)
    assert not place.holds((LOGITS[0, 0], LOGITS[0, 0]), LOSS, 1)
    place = LossPlace()
    assert place.holds((LOSS, LOGITS), LOSS, 4)
    assert place.holds((LOSS, LOGITS[:1]), LOSS * 2, 1)
    assert not place.holds(LOGITS[:, 0], None, 4)
    assert not place.holds(LOGITS[0, 0], LOGITS[0, 0], 1)
    assert not place.holds((LOGITS[:, 0], LOGITS), None, 4, has_labels=False)
    assert not place.holds((LOGITS[0, 0], LOGITS[0]), None, 1, has_labels=False)


def test_a_scalar_of_a_single_sample_is_a_loss_where_the_loss_was_read_from_it() -> None:
    first = torch.tensor(0.3)
    assert LossPlace().holds((first, LOGITS[:1]), first.reshape(()), 1)
    assert not LossPlace().holds((first, first), first * 2, 1)
    assert not LossPlace().holds(first, None, 1)


def test_without_a_loss_nothing_is_taken_out() -> None:
    assert read_predictions(LOSS, holds_loss=False) is LOSS
    assert read_predictions((LOSS, LOGITS), holds_loss=False) == (LOSS, LOGITS)
    assert read_predictions({"loss": LOSS, "logits": LOGITS}, holds_loss=False) is LOGITS


def test_ignored_keys_are_left_out() -> None:
    outputs = {"loss": LOSS, "logits": LOGITS, "past_key_values": LOGITS, "nothing": None}
    assert torch.equal(read_predictions(outputs, ["past_key_values"]), LOGITS)


def test_candidates_are_float_tensors_with_rows() -> None:
    assert candidate_logits({"loss": LOSS, "logits": LOGITS, "ids": torch.ones(2, 2, dtype=torch.long)}) == [LOGITS]
