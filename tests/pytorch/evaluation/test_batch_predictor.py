"""The prediction step, given a model, a loss and hooks, without a Trainer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.pytorch.evaluation.batch_predictor import BatchPredictor, ignored_keys
from paceline.pytorch.validation import ModelFacts, read_model


class Scorer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor, labels: Tensor, weights: Tensor | None = None) -> dict[str, Tensor]:
        scores = self.linear(x)
        return {"loss": nn.functional.cross_entropy(scores, labels), "scores": scores, "past_key_values": scores}


def facts_of(model: nn.Module, label_names: Sequence[str] | None = None) -> ModelFacts:
    return read_model(
        model,
        compute_loss=lambda: None,
        compute_loss_func=None,
        label_names=label_names,
        loss_weight=None,
        smoothing=0.0,
        loss_is_scaled=None,
        linear_cross_entropy=False,
    )


def make(facts: ModelFacts, requires_all_labels: bool = False, **hooks: Any) -> BatchPredictor:
    def compute_loss(model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False) -> Any:
        loss, outputs = facts.objective(model, inputs)
        return (loss, outputs) if return_outputs else loss

    parts = {"count_items": lambda batches: None, "prepare_inputs": dict, "compute_loss": compute_loss, **hooks}
    return BatchPredictor(
        objective=facts.objective,
        label_names=facts.label_names,
        requires_all_labels=requires_all_labels,
        can_return_loss=facts.signature.can_return_loss,
        autocasts=False,
        forward_context=nullcontext,
        **parts,
    )


BATCH = {"x": torch.ones(4, 3), "labels": torch.zeros(4, dtype=torch.long)}


def test_loss_predictions_and_labels_of_a_batch() -> None:
    model = Scorer()
    loss, predictions, labels = make(facts_of(model)).predict(model, BATCH, False, ["past_key_values"])
    outputs = model(**BATCH)
    assert loss is not None
    assert loss.item() == outputs["loss"].item()
    assert not loss.requires_grad
    assert torch.equal(predictions, outputs["scores"])
    assert torch.equal(labels, BATCH["labels"])
    assert make(facts_of(model)).predict(model, BATCH, True, [])[1:] == (None, None)


def test_labels_are_taken_before_a_loss_pops_them() -> None:
    model, order = Scorer(), []

    def pop_labels(model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False) -> Any:
        order.append("loss")
        outputs = model(inputs["x"], inputs.pop("labels"))
        return outputs["loss"], outputs

    def count_items(batches: Sequence[Any]) -> None:
        order.append("count")
        assert [sorted(batch) for batch in batches] == [["labels", "x"]]

    predictor = make(facts_of(model), compute_loss=pop_labels, count_items=count_items)
    labels = predictor.predict(model, BATCH, False, [])[2]
    assert torch.equal(labels, BATCH["labels"])
    assert order == ["count", "loss"]


@pytest.mark.parametrize(
    ("declared", "fields", "found"),
    [
        (None, ["x", "labels"], ["labels"]),
        (None, ["x"], []),
        (["labels", "weights"], ["x", "labels"], []),  # what is declared is required
        (["labels", "weights"], ["x", "labels", "weights"], ["labels", "weights"]),
        (["weights"], ["x", "labels"], []),
    ],
)
def test_labels_in_a_batch(declared: list[str] | None, fields: list[str], found: list[str]) -> None:
    predictor = make(facts_of(Scorer(), declared), requires_all_labels=declared is not None)
    assert predictor.labels_in(dict.fromkeys(fields, torch.ones(4))) == found
    assert predictor.labels_in([torch.ones(4)]) == []


def test_ignored_keys_are_those_of_the_config() -> None:
    model = Scorer()
    assert ignored_keys(model) == []
    model.config = SimpleNamespace()  # type: ignore[assignment]
    assert ignored_keys(model) == ["past_key_values"]
    model.config = SimpleNamespace(keys_to_ignore_at_inference=["mems"])  # type: ignore[assignment]
    assert ignored_keys(model) == ["mems"]
