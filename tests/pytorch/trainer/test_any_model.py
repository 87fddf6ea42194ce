"""Other people's models: the documentation of transformers warns of "surprising behaviours" with them. Here are none.

Each test is one such case: a plain module, in a shape its author chose, trained, evaluated and predicted with.
"""

from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_models import Classifier, classification, losses, make_trainer, weights
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from paceline import Trainer
from paceline.pytorch.model.outputs import ModelOutputError

DATA = classification()


@dataclass
class Output:
    loss: Tensor | None
    logits: Tensor


Named = namedtuple("Named", ["loss", "logits"])

SHAPES = {
    "tuple": lambda loss, logits: (loss, logits),
    "list": lambda loss, logits: [loss, logits],
    "dict": lambda loss, logits: {"loss": loss, "logits": logits},
    "dict, logits first": lambda loss, logits: {"logits": logits, "loss": loss},
    "dataclass": lambda loss, logits: Output(loss, logits),
    "namedtuple": lambda loss, logits: Named(loss, logits),
    "loss with one element": lambda loss, logits: {"loss": loss.reshape(1), "logits": logits},
}


class Shaped(Classifier):
    def __init__(self, shape: str) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.logits(x)
        return SHAPES[self.shape](functional.cross_entropy(logits, labels), logits)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_of_output_trains_alike(tmp_path: Path, shape: str) -> None:
    reference, shaped = Shaped("tuple"), Shaped(shape)
    for model in (reference, shaped):
        make_trainer(tmp_path, model, DATA).train()
    assert torch.equal(weights(reference), weights(shaped))
    trainer = make_trainer(tmp_path, shaped, eval_dataset=DATA[:13])
    assert trainer.predict(DATA[:13]).predictions.shape == (13, 4)
    assert trainer.evaluate()["eval_loss"] > 0


class Logits(Classifier):
    def forward(self, x: Tensor) -> Tensor:
        return self.logits(x)


def mean_cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, labels)


def summed_cross_entropy(outputs: Tensor, labels: Tensor, num_items_in_batch: Tensor | None = None) -> Tensor:
    if num_items_in_batch is None:
        return functional.cross_entropy(outputs, labels)
    return functional.cross_entropy(outputs, labels, reduction="sum") / num_items_in_batch


@pytest.mark.parametrize("function", [mean_cross_entropy, summed_cross_entropy])
def test_a_bare_tensor_with_compute_loss_func(tmp_path: Path, function: Any) -> None:
    plain, bare = Classifier(), Logits()
    make_trainer(tmp_path, plain, DATA, gradient_accumulation_steps=3).train()
    trainer = make_trainer(
        tmp_path,
        bare,
        DATA,
        gradient_accumulation_steps=3,
        compute_loss_func=function,
        eval_dataset=DATA[:13],
        compute_metrics=lambda p: {"accuracy": (p.predictions.argmax(-1) == p.label_ids).mean()},
        label_names=["labels"],
    )
    trainer.train()
    torch.testing.assert_close(weights(plain), weights(bare), rtol=1e-6, atol=1e-7)
    assert "eval_accuracy" in trainer.evaluate()


def test_bare_logits_predict_one_row_per_sample(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, Logits(), label_names=["labels"])
    output = trainer.predict(DATA[:24])
    assert output.predictions.shape == (24, 4)
    assert output.label_ids.shape == (24,)


class OldStyle(Trainer):
    """As the documentation of version 3 printed it."""

    def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        return functional.cross_entropy(outputs, labels)


class NewStyle(Trainer):
    """As the documentation of version 4 printed it."""

    def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], return_outputs: bool = False) -> Any:  # type: ignore[override]
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = functional.cross_entropy(outputs, labels)
        return (loss, outputs) if return_outputs else loss


class NewestStyle(Trainer):
    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = functional.cross_entropy(outputs, labels)
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize("cls", [OldStyle, NewStyle, NewestStyle])
def test_overridden_compute_loss_trains_evaluates_predicts(tmp_path: Path, cls: type[Trainer]) -> None:
    plain, model = Classifier(), Classifier()
    make_trainer(tmp_path, plain, DATA, gradient_accumulation_steps=2).train()
    trainer = make_trainer(
        tmp_path,
        model,
        DATA,
        cls=cls,
        gradient_accumulation_steps=2,
        eval_dataset=DATA[:13],
        compute_metrics=lambda p: {"rows": len(p.predictions), "labels": len(p.label_ids)},
    )
    trainer.train()
    assert torch.equal(weights(plain), weights(model))
    metrics = trainer.evaluate()
    assert metrics["eval_rows"] == metrics["eval_labels"] == 13
    assert trainer.predict(DATA[:5]).predictions.shape == (5, 4)


class UnknownTarget(Trainer):
    def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], return_outputs: bool = False) -> Any:  # type: ignore[override]
        outputs = model(inputs["x"])
        loss = functional.cross_entropy(outputs, inputs["y"])
        return (loss, outputs) if return_outputs else loss


def test_a_target_the_model_does_not_know_reaches_compute_loss(tmp_path: Path) -> None:
    data = [{"x": sample["x"], "y": sample["labels"]} for sample in DATA]
    trainer = make_trainer(tmp_path, Logits(), data, cls=UnknownTarget, eval_dataset=data[:13])
    trainer.train()
    assert losses(trainer)[-1] < losses(trainer)[0] * 1.5
    assert trainer.evaluate()["eval_loss"] > 0


class LabelParameter(Classifier):
    def forward(self, x: Tensor, label: Tensor) -> Any:
        return super().forward(x, label)


def test_a_forward_parameter_called_label(tmp_path: Path) -> None:
    data = [{"x": sample["x"], "label": int(sample["labels"])} for sample in DATA]
    trainer = make_trainer(tmp_path, LabelParameter(), data, eval_dataset=data[:13])
    trainer.train()
    assert trainer.predict(data[:5]).label_ids.shape == (5,)


class LabelOfTokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(10, 4), nn.Linear(4, 3)

    def forward(self, input_ids: Tensor, label: Tensor | None = None) -> Any:
        logits = self.head(self.embedding(input_ids).mean(1))
        return {"loss": None if label is None else functional.cross_entropy(logits, label), "logits": logits}


class Padder:
    """Stands in for a tokenizer."""

    def pad(self, features: list[Any], **options: Any) -> dict[str, Tensor]:
        longest = max(len(row["input_ids"]) for row in features)
        ids = [row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in features]
        rest = {name: torch.tensor([row[name] for row in features]) for name in features[0] if name != "input_ids"}
        return {"input_ids": torch.tensor(ids), **rest}

    def save_pretrained(self, folder: str) -> None: ...


def test_a_forward_parameter_called_label_beside_a_tokenizer(tmp_path: Path) -> None:
    data = [{"input_ids": [1] * (1 + index % 3), "label": index % 3} for index in range(12)]
    trainer = make_trainer(tmp_path, LabelOfTokens(), data, eval_dataset=data, processing_class=Padder())
    trainer.train()
    assert trainer.evaluate()["eval_loss"] > 0
    assert trainer.predict(data).label_ids.tolist() == [sample["label"] for sample in data]


class TwoLabels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.start, self.end = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor, start_positions: Tensor, end_positions: Tensor) -> Any:
        first, last = self.start(x), self.end(x)
        loss = functional.cross_entropy(first, start_positions) + functional.cross_entropy(last, end_positions)
        return loss, first, last


def test_several_label_arguments(tmp_path: Path) -> None:
    data = [{"x": s["x"], "start_positions": s["labels"], "end_positions": 3 - s["labels"]} for s in DATA]
    trainer = make_trainer(tmp_path, TwoLabels(), data, gradient_accumulation_steps=2)
    trainer.train()
    output = trainer.predict(data[:13])
    assert [rows.shape for rows in output.predictions] == [(13, 4), (13, 4)]
    assert [rows.shape for rows in output.label_ids] == [(13,), (13,)]


class SpareLabels(Classifier):
    """Two parameters for labels, of which one may stay without data."""

    def forward(self, x: Tensor, labels: Tensor | None = None, aux_labels: Tensor | None = None) -> Any:
        logits = self.logits(x)
        loss = None if labels is None else functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


def test_label_arguments_without_data(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, Any] = {"eval_dataset": DATA[:13], "compute_metrics": lambda p: {"rows": len(p.label_ids)}}
    trainer = make_trainer(tmp_path, SpareLabels(), DATA, **options)
    trainer.train()
    metrics = trainer.evaluate()
    assert metrics["eval_rows"] == 13
    whole = make_trainer(tmp_path, trainer.model, label_names=["labels"], **options).evaluate()
    assert metrics["eval_loss"] == pytest.approx(whole["eval_loss"], rel=1e-6)
    assert trainer.predict(DATA[:5]).label_ids.shape == (5,)
    assert "no eval_loss" not in caplog.text
    unlabelled = trainer.predict([{"x": sample["x"]} for sample in DATA[:5]])
    assert (unlabelled.label_ids, unlabelled.predictions.shape) == (None, (5, 4))
    declared = make_trainer(tmp_path, SpareLabels(), label_names=["labels", "aux_labels"], **options)
    assert "eval_loss" not in declared.evaluate()  # what was declared is needed
    assert "no eval_loss" in caplog.text


class Nested(Classifier):
    def forward(self, batch: dict[str, Tensor], labels: Tensor) -> Any:
        return super().forward(batch["left"] + batch["right"], labels)


def test_nested_inputs(tmp_path: Path) -> None:
    data = [{"batch": {"left": s["x"], "right": s["x"] * 0}, "labels": s["labels"]} for s in DATA]
    plain, nested = Classifier(), Nested()
    make_trainer(tmp_path, plain, DATA).train()
    make_trainer(tmp_path, nested, data).train()
    assert torch.equal(weights(plain), weights(nested))


def test_tuples_are_given_forwards_names(tmp_path: Path) -> None:
    tuples = TensorDataset(torch.stack([s["x"] for s in DATA]), torch.stack([s["labels"] for s in DATA]))
    plain, model = Classifier(), Classifier()
    make_trainer(tmp_path, plain, DATA).train()
    trainer = make_trainer(tmp_path, model, tuples, eval_dataset=tuples)
    trainer.train()
    assert torch.equal(weights(plain), weights(model))
    assert trainer.predict(tuples).predictions.shape == (48, 4)
    assert trainer.evaluate()["eval_loss"] > 0


class PoppingLabels(Trainer):
    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False) -> Any:
        labels = inputs.pop("labels")
        logits = model(inputs["input"])
        loss = functional.cross_entropy(logits, labels)
        return (loss, logits) if return_outputs else loss


@pytest.mark.parametrize("as_tuples", [True, False])
@pytest.mark.parametrize("way", ["function", "override"])
def test_a_forward_without_labels_is_evaluated_with_them(tmp_path: Path, as_tuples: bool, way: str) -> None:
    """The commonest of all: an nn.Sequential, a dataset of (input, target), and a loss function."""
    x, y = torch.stack([s["x"] for s in DATA]), torch.stack([s["labels"] for s in DATA])
    data: Any = TensorDataset(x, y) if as_tuples else [{"input": a, "labels": b} for a, b in zip(x, y, strict=True)]
    seen: list[Any] = []

    def compute_metrics(prediction: Any) -> dict[str, float]:
        seen.append((prediction.predictions.shape, prediction.label_ids.tolist()))
        return {"accuracy": 1.0}

    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    trainer = make_trainer(
        tmp_path,
        model,
        data,
        cls=PoppingLabels if way == "override" else Trainer,
        eval_dataset=data,
        compute_metrics=compute_metrics,
        compute_loss_func=mean_cross_entropy if way == "function" else None,
    )
    trainer.train()
    metrics = trainer.evaluate()
    with torch.no_grad():
        assert metrics["eval_loss"] == pytest.approx(float(functional.cross_entropy(model(x), y)))
    assert metrics["eval_accuracy"] == 1.0
    predicted = trainer.predict(data)
    assert seen == [((len(DATA), 4), y.tolist())] * 2
    assert predicted.label_ids.tolist() == y.tolist()


def test_a_batch_without_what_forward_needs_says_so(tmp_path: Path) -> None:
    data = [{"features": s["x"], "labels": s["labels"]} for s in DATA]
    trainer = make_trainer(tmp_path, Logits(), data, compute_loss_func=mean_cross_entropy)
    with pytest.raises(TypeError, match=r"forward\(x\) needs x, and the batch holds nothing else: .*remove_unused"):
        trainer.train()


class NeedsLabels(Classifier):
    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return super().forward(x, labels)


def test_a_label_that_forward_needs_and_the_batch_lacks_says_so(tmp_path: Path) -> None:
    """Columns of other names were left out, so that what is left fits forward but for what it lacks."""
    for cls, data, message in (
        (LabelParameter, DATA, r"forward\(x, label\) needs label, and the batch holds x: .*remove_unused_columns"),
        (NeedsLabels, [{"x": s["x"]} for s in DATA], r"forward\(x, labels\) needs labels, and the batch holds x"),
    ):
        trainer = make_trainer(tmp_path, cls(), data)
        for act in (trainer.train, lambda trainer=trainer, data=data: trainer.predict(data)):
            with pytest.raises(TypeError, match=message) as caught:
                act()
            assert isinstance(caught.value.__cause__, TypeError)


class Failing(Classifier):
    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return x + None


def test_a_type_error_inside_forward_stays_as_it_is(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, Failing(), DATA)
    for act in (trainer.train, lambda: trainer.predict(DATA)):
        with pytest.raises(TypeError, match="NoneType"):
            act()


class Detached(Classifier):
    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        loss, logits = super().forward(x, labels)
        return loss.detach(), logits


def test_a_loss_without_a_gradient_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelOutputError, match="does not depend on any parameter"):
        make_trainer(tmp_path, Detached(), DATA).train()


def test_an_optimizer_of_another_model_is_refused(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(Classifier().parameters(), lr=1.0)
    trainer = make_trainer(tmp_path, Classifier(), DATA, optimizers=(optimizer, None))
    with pytest.raises(ValueError, match="none of the model's parameters"):
        trainer.train()


class Deep(Classifier):
    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.logits(x)
        return {"loss": functional.cross_entropy(logits, labels), "heads": {"main": logits, "others": [x]}}


def test_logits_in_a_nest_identify_the_loss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = [*DATA[:7]]  # windows of unequal micro-batches: what the loss is a mean over matters
    make_trainer(tmp_path, Deep(), data, gradient_accumulation_steps=2).train()
    assert "could not be identified" not in caplog.text


def test_label_smoothing_without_a_config(tmp_path: Path) -> None:
    model = Classifier()
    trainer = make_trainer(tmp_path, model, DATA[:4], label_smoothing_factor=0.1, max_grad_norm=0, optim="sgd")
    expected = Classifier()
    loss = functional.cross_entropy(
        expected.logits(torch.stack([s["x"] for s in DATA[:4]])),
        torch.stack([s["labels"] for s in DATA[:4]]),
        label_smoothing=0.1,
    )
    trainer.train()
    assert losses(trainer) == [pytest.approx(float(loss.detach()), rel=1e-6)]


class SelfSupervised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        rebuilt = self.layer(x)
        return {"loss": (rebuilt - x).pow(2).mean(), "rebuilt": rebuilt}


def test_a_loss_without_labels(tmp_path: Path) -> None:
    data = [{"x": sample["x"]} for sample in DATA]
    trainer = make_trainer(tmp_path, SelfSupervised(), data, eval_dataset=data[:13], gradient_accumulation_steps=2)
    trainer.train()
    assert trainer.evaluate()["eval_loss"] > 0
    assert trainer.predict(data[:13]).predictions.shape == (13, 8)


class Wrong(Classifier):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return self.value(self.logits(x), labels)


WRONG = {
    "nothing": lambda logits, labels: None,
    "logits only": lambda logits, labels: logits,
    "a key of another name": lambda logits, labels: {"error": logits.mean(), "logits": logits},
    "a loss per sample": lambda logits, labels: {"loss": functional.cross_entropy(logits, labels, reduction="none")},
}


@pytest.mark.parametrize("case", WRONG)
def test_an_output_without_a_loss_is_an_error_before_the_first_update(tmp_path: Path, case: str) -> None:
    model = Wrong(WRONG[case])
    before = weights(model).clone()
    with pytest.raises(ModelOutputError, match="compute_loss"):
        make_trainer(tmp_path, model, DATA).train()
    assert torch.equal(weights(model), before)


class RaggedLogits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 3)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        return {"loss": self.layer(x).mean(), "logits": self.layer(x)}


def collate_ragged(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    longest = max(len(sample["x"]) for sample in samples)
    x = torch.stack([functional.pad(sample["x"], (0, 0, 0, longest - len(sample["x"]))) for sample in samples])
    return {"x": x, "labels": torch.zeros(len(samples), longest, dtype=torch.long)}


@pytest.mark.parametrize("concatenate", [True, False])
def test_ragged_predictions(tmp_path: Path, concatenate: bool) -> None:
    data = [{"x": torch.ones(1 + index, 1)} for index in range(10)]
    trainer = make_trainer(
        tmp_path,
        RaggedLogits(),
        data_collator=collate_ragged,
        per_device_eval_batch_size=4,
        eval_do_concat_batches=concatenate,
    )
    output = trainer.predict(data)
    if concatenate:
        assert output.predictions.shape == (10, 10, 3)
        assert (output.predictions[0, 4:] == -100).all()
        assert output.label_ids.shape == (10, 10)
    else:
        assert [rows.shape for rows in output.predictions] == [(4, 4, 3), (4, 8, 3), (2, 10, 3)]


class LayerOutputs(Classifier):
    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        logits = self.logits(x)
        loss = functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits, "scale": logits.abs().max(), "layers": torch.stack([logits] * 3)}


def test_outputs_without_rows_do_not_break_those_with(tmp_path: Path) -> None:
    output = make_trainer(tmp_path, LayerOutputs()).predict(DATA[:10])
    logits, scale, layers = output.predictions
    assert logits.shape == (10, 4)
    assert scale.shape == (10,)
    assert isinstance(layers, list)
    assert np.concatenate(layers, axis=1).shape == (3, 10, 4)


class Counting(Classifier):
    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Any]:
        logits = self.logits(x)
        return {"loss": functional.cross_entropy(logits, labels), "number": len(x), "logits": logits}


def test_a_number_among_the_outputs_is_repeated_for_each_sample(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path, Counting(), eval_dataset=DATA[:10], compute_metrics=lambda p: {"rows": len(p.predictions[1])}
    )
    assert trainer.evaluate()["eval_rows"] == 10
    numbers, logits = trainer.predict(DATA[:10]).predictions
    assert numbers.tolist() == [8] * 8 + [2] * 2
    assert logits.shape == (10, 4)


class Squeezed(nn.Module):
    """One number per sample, without a dimension when there is one sample."""

    def __init__(self, shape: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 1)
        self.shape = shape

    def forward(self, x: Tensor) -> Any:
        output = self.layer(x).squeeze()
        return {"bare": output, "tuple": (output, output), "dict": {"a": output}}[self.shape]


class SquaredError(Trainer):
    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = squared_error(outputs, labels)
        return (loss, outputs) if return_outputs else loss


def squared_error(outputs: Any, labels: Tensor) -> Tensor:
    values = outputs["a"] if isinstance(outputs, dict) else outputs[0] if isinstance(outputs, tuple) else outputs
    return functional.mse_loss(values.reshape(-1), labels)


# without a loss and one at a time, nothing tells such a row from a loss that needs no labels
WAYS = [*((way, size) for way in ("function", "override") for size in (1, 19, 20)), ("no loss", 19), ("no loss", 20)]


@pytest.mark.parametrize(("way", "batch_size"), WAYS)
@pytest.mark.parametrize("shape", ["bare", "tuple", "dict"])
def test_a_single_sample_without_a_dimension_is_a_row(tmp_path: Path, shape: str, way: str, batch_size: int) -> None:
    """19 samples and 1 more: `squeeze()` leaves a scalar, which looks like a loss."""
    data = [{"x": sample["x"], "labels": float(sample["labels"])} for sample in DATA[:20]]
    rows: list[Any] = []

    def compute_metrics(prediction: Any) -> dict[str, float]:
        rows.append(prediction.predictions)
        return {}

    trainer = make_trainer(
        tmp_path,
        Squeezed(shape),
        cls=SquaredError if way == "override" else Trainer,
        eval_dataset=data,
        compute_metrics=compute_metrics if way != "no loss" else None,
        compute_loss_func=squared_error if way == "function" else None,
        per_device_eval_batch_size=batch_size,
    )
    metrics = trainer.evaluate() if way != "no loss" else {}
    output = trainer.predict(data)
    with torch.no_grad():
        expected = trainer.model.layer(torch.stack([sample["x"] for sample in data]))[:, 0].numpy()
    for predictions in (output.predictions, *rows):
        for values in predictions if isinstance(predictions, tuple) else [predictions]:
            np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-6)
    assert ("test_loss" in output.metrics) == (way != "no loss")
    if metrics:
        labels = np.array([sample["labels"] for sample in data])
        assert metrics["eval_loss"] == pytest.approx(np.mean((expected - labels) ** 2), rel=1e-5)


def test_a_streaming_metric_sees_a_row_for_a_single_sample(tmp_path: Path) -> None:
    data = [{"x": sample["x"], "labels": float(sample["labels"])} for sample in DATA[:20]]
    shapes: list[Any] = []

    def compute_metrics(prediction: Any, compute_result: bool) -> dict[str, float]:
        shapes.append((prediction.predictions.shape, prediction.label_ids.shape))
        return {}

    make_trainer(
        tmp_path,
        Squeezed("bare"),
        eval_dataset=data,
        compute_loss_func=squared_error,
        compute_metrics=compute_metrics,
        batch_eval_metrics=True,
        per_device_eval_batch_size=19,
    ).evaluate()
    assert shapes == [((19,), (19,)), ((1,), (1,))]


class Detector(nn.Module):
    """Labels as detection models take them: a list with a dict of boxes for each sample."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 4)

    def forward(self, x: Tensor, labels: list[dict[str, Tensor]] | None = None) -> dict[str, Any]:
        boxes = self.layer(x)
        loss = None
        if labels is not None:
            loss = torch.stack([(box - each["boxes"]).pow(2).mean() for box, each in zip(boxes, labels, strict=True)])
        found = [box.repeat(1 + index % 2, 1) for index, box in enumerate(boxes)]
        return {"loss": None if loss is None else loss.mean(), "logits": boxes, "found": found}


def collate_boxes(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {"x": torch.stack([s["x"] for s in samples]), "labels": [s["labels"] for s in samples]}


@pytest.mark.parametrize("batch_size", [1, 5, 8])
@pytest.mark.parametrize("concatenate", [True, False])
def test_labels_in_a_list_of_samples(tmp_path: Path, concatenate: bool, batch_size: int) -> None:
    numbers = [1 + index % 3 for index in range(10)]
    data = [
        {"x": DATA[index]["x"], "labels": {"boxes": torch.full((number, 4), 1.0 * index), "class": torch.ones(number)}}
        for index, number in enumerate(numbers)
    ]
    seen: list[Any] = []

    def compute_metrics(prediction: Any) -> dict[str, float]:
        seen.append(prediction.label_ids)
        return {}

    trainer = make_trainer(
        tmp_path,
        Detector(),
        data,
        eval_dataset=data,
        data_collator=collate_boxes,
        compute_metrics=compute_metrics,
        per_device_eval_batch_size=batch_size,
        eval_do_concat_batches=concatenate,
    )
    trainer.train()
    assert trainer.evaluate()["eval_loss"] > 0
    output = trainer.predict(data)
    sizes = [len(data[start : start + batch_size]) for start in range(0, 10, batch_size)]
    for labels in (output.label_ids, *seen):
        if not concatenate:
            assert [len(batch) for batch in labels] == sizes
            labels = [row for batch in labels for row in batch]
        assert [row["boxes"].tolist() for row in labels] == [s["labels"]["boxes"].tolist() for s in data]
        assert [len(row["class"]) for row in labels] == numbers
    if concatenate:
        logits, found = output.predictions
        assert (logits.shape, len(found)) == ((10, 4), 10)


class DetectorOfImages(Detector):
    """... and its images, of several sizes, as a list."""

    def forward(self, images: list[Tensor], labels: list[dict[str, Tensor]] | None = None) -> dict[str, Any]:  # type: ignore[override]
        return super().forward(torch.stack([image.mean((0, 1)) for image in images]), labels)


def test_lists_of_samples_weigh_the_same_however_they_are_split(tmp_path: Path) -> None:
    data = [
        {"images": DATA[index]["x"].expand(3, 1 + index, 8), "labels": {"boxes": torch.randn(1 + index % 3, 4)}}
        for index in range(11)
    ]

    def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
        return {name: [sample[name] for sample in samples] for name in ("labels", "images")}

    options: dict[str, Any] = {"train_sampling_strategy": "sequential", "optim": "sgd", "max_grad_norm": 0}
    found = []
    for batch_size in (1, 2, 4):
        trainer = make_trainer(
            tmp_path,
            DetectorOfImages(),
            data,
            data_collator=collate,
            eval_dataset=data,
            per_device_train_batch_size=batch_size,
            per_device_eval_batch_size=batch_size,
            gradient_accumulation_steps=4 // batch_size,
            **options,
        )
        trainer.train()
        found.append([*losses(trainer), trainer.evaluate()["eval_loss"]])
    assert len(found[0]) == 4
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert found[2] == pytest.approx(found[0], rel=1e-5)
