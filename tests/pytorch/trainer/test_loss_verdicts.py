"""Losses of modules and functions, trained and evaluated in parts: right, or warned of; never wrong in silence."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from floor_job import DATA, FLOORS, Floored, FlooredCount, Head
from small_models import RecordGradient, Tagger, losses, make_trainer, tagging
from torch import Tensor
from torch.nn import functional

PARTS = [(6, 2), (3, 4), (2, 6), (1, 12)]
CLASS_WEIGHTS = torch.linspace(0.1, 6, 11).double()


class Ctc(Head):
    reduction = "mean"

    def make_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        kept = (labels[:, :3] > 0) & (labels[:, :3] != -100)
        sizes = torch.full((len(logits),), logits.shape[1])
        targets, numbers = labels[:, :3][kept], kept.sum(1)
        log_probabilities = logits.log_softmax(-1).transpose(0, 1)
        return functional.ctc_loss(log_probabilities, targets, sizes, numbers, reduction=self.reduction)


class CtcSum(Ctc):
    reduction = "sum"


class Ignores255(Head):
    def make_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        labels = labels.masked_fill(labels == -100, 255)
        return functional.cross_entropy(logits.mT, labels, ignore_index=255)


class Padded255(Head):
    """The batch holds 255."""

    def make_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(logits.mT, labels, ignore_index=255)


class Padded77(Head):
    """The batch holds a value that nobody would guess."""

    def make_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(logits.mT, labels, ignore_index=77)


class Masked77(Head):
    """The same, by a mask."""

    def make_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        kept = labels != 77
        losses = functional.cross_entropy(logits.mT, labels.where(kept, 0), reduction="none")
        return (losses * kept).sum() / kept.sum()


class MaskedByTensor(Head):
    """The value is a tensor, and the targets are shifted by the model."""

    def make_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        value, labels = torch.tensor(77), functional.pad(labels, (0, 1), value=77)[:, 1:]
        kept = value != labels
        losses = functional.cross_entropy(logits.mT, labels.where(kept, 0), reduction="none")
        return (losses * kept).sum() / kept.sum()


class ClassWeights(Head):
    def make_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(logits.mT, labels, weight=CLASS_WEIGHTS)


class Smoothed(Head):
    def make_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(logits.mT, labels, label_smoothing=0.3)


class CountsIgnored(Head):
    """Ignored places add nothing, and are divided by all the same."""

    def make_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(logits.mT, labels, reduction="none").mean()


class TwoHeads(Head):
    """A mean over targets and one over samples."""

    def make_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(logits.mT, labels) + 3 * functional.cross_entropy(logits[:, 0], labels[:, 0])


class Negatives(Head):
    def make_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        rows = functional.normalize(logits.flatten(1), dim=1)
        return functional.cross_entropy(rows @ rows.T, torch.arange(len(rows)))


class NamesCount(Head):
    """Names the count, and does with it what divides nothing."""

    def forward(self, input_ids: Tensor, labels: Tensor, num_items_in_batch: Any = None) -> dict[str, Tensor]:  # type: ignore[override]
        if num_items_in_batch is not None:
            assert num_items_in_batch > 0
            logging.getLogger("test").debug("%d targets, %s", num_items_in_batch, num_items_in_batch * 2)
        return super().forward(input_ids, labels)


class PartlyScaled(Head):
    """Adds something of each batch to what is divided by the count."""

    def forward(self, input_ids: Tensor, labels: Tensor, num_items_in_batch: Any = None) -> dict[str, Tensor]:  # type: ignore[override]
        logits = super().forward(input_ids, labels)["logits"]
        loss = functional.cross_entropy(logits.mT, labels, reduction="sum")
        number = (labels != -100).sum() if num_items_in_batch is None else num_items_in_batch
        return {"loss": loss / number + 0.1 * logits.square().mean(), "logits": logits}


def ignores(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    return functional.cross_entropy(outputs["logits"].mT, labels)


def compares(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    loss = functional.cross_entropy(outputs["logits"].mT, labels)
    if num_items_in_batch is not None and num_items_in_batch > 5:
        logging.getLogger("test").debug("%s", float(num_items_in_batch))
    return loss


def weight_of(batch: Any) -> float:
    labels = batch["labels"]
    return float(CLASS_WEIGHTS[labels[labels != -100]].sum())


# (module, options, whether it must come out right in micro-batches of several samples)
CASES: dict[str, tuple[Any, dict[str, Any], bool]] = {
    "CTC, mean": (Ctc, {}, True),
    "CTC, sum": (CtcSum, {}, True),
    "ignore_index=255 in the module": (Ignores255, {}, True),
    "ignore_index=255 in the data": (Padded255, {"ignored": 255}, True),
    "ignore_index=77 in the data": (Padded77, {"ignored": 77}, True),
    "a mask of 77 in the data": (Masked77, {"ignored": 77}, True),
    "class weights": (ClassWeights, {}, False),
    "class weights, weighed by a function": (ClassWeights, {"loss_weight": weight_of}, True),
    "label smoothing in the module": (Smoothed, {}, True),
    "ignored places are counted": (CountsIgnored, {}, True),
    "two means": (TwoHeads, {}, False),
    "negatives of the batch": (Negatives, {}, False),
    "a head of zeros": (lambda: Head(zeros=True), {}, False),
    "the count is named": (NamesCount, {}, True),
    "a part is divided by the count": (PartlyScaled, {}, False),
    "compute_loss_func ignores the count": (Head, {"compute_loss_func": ignores}, True),
    "compute_loss_func compares the count": (Head, {"compute_loss_func": compares}, True),
    "declared wrongly": (Head, {"loss_weight": "samples"}, False),
}


@pytest.mark.parametrize("parts", PARTS, ids=lambda parts: f"{parts[0]} x {parts[1]}")
@pytest.mark.parametrize("name", CASES)
def test_right_or_warned(tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, parts: tuple[int, int]) -> None:
    make, options, must_be_right = CASES[name]
    ignored = options.get("ignored", -100)
    options = {key: value for key, value in options.items() if key != "ignored"}
    data = [{**s, "labels": s["labels"].masked_fill(s["labels"] == -100, ignored)} for s in DATA]
    whole = {key: torch.stack([sample[key] for sample in data]) for key in data[0]}
    model = make().double()
    loss = model(**whole)["loss"]
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
    trainer = make_trainer(
        tmp_path,
        model,
        data,
        cls=RecordGradient,
        eval_dataset=data,
        per_device_train_batch_size=parts[0],
        per_device_eval_batch_size=parts[0],
        gradient_accumulation_steps=parts[1],
        train_sampling_strategy="sequential",
        max_grad_norm=0,
        max_steps=1,
        learning_rate=0.0,
        **options,
    )

    def warnings() -> list[str]:
        said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        return [text for text in said if "loss_weight" in text]

    trainer.train()
    is_right = torch.allclose(trainer.gradients[0], gradient, rtol=1e-8, atol=1e-11)
    is_right = is_right and losses(trainer)[0] == pytest.approx(loss.item(), rel=1e-8)
    assert is_right or warnings()
    if must_be_right and parts[0] > 1:
        assert is_right, warnings()
        assert not warnings()
    assert len(set(warnings())) == len(warnings())
    caplog.clear()
    trainer = make_trainer(tmp_path, model, eval_dataset=data, per_device_eval_batch_size=parts[0], **options)
    evaluated = trainer.evaluate()["eval_loss"]
    assert evaluated == pytest.approx(loss.item(), rel=1e-8) or warnings()
    if must_be_right and parts[0] > 1:
        assert evaluated == pytest.approx(loss.item(), rel=1e-8)
        assert not warnings()


def test_an_update_alone_is_not_looked_at(tmp_path: Path) -> None:
    """A mean over all there is needs no weight: nothing runs twice."""

    class Counted(Tagger):
        calls = 0

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            type(self).calls += 1
            return super().forward(*args, **kwargs)

    make_trainer(tmp_path, Counted(), tagging(24)).train()
    assert Counted.calls == 6


def test_looks_change_nothing_in_a_run(tmp_path: Path) -> None:
    """The same dropout and weights as in a run whose loss is declared and needs no extra pass."""
    found = []
    for weight in (None, "tokens"):
        torch.manual_seed(0)
        trainer = make_trainer(
            tmp_path, Tagger(dropout=0.3), DATA, gradient_accumulation_steps=3, num_train_epochs=4, loss_weight=weight
        )
        trainer.train()
        found.append(losses(trainer))
    assert found[0] == found[1]


# ---- divisors with a floor


# micro-batches have fewer targets than most of the floors, and the update more; no batch reaches the last one
@pytest.mark.parametrize("floor", FLOORS)
@pytest.mark.parametrize("make", [Floored, FlooredCount])
@pytest.mark.parametrize("parts", [(3, 4), (1, 12)], ids=lambda parts: f"{parts[0]} x {parts[1]}")
def test_a_floor_is_never_crossed_in_silence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, floor: str, make: Any, parts: tuple[int, int]
) -> None:
    model = make(floor).double()
    whole = {key: torch.stack([sample[key] for sample in DATA]) for key in DATA[0]}
    loss = model(**whole)["loss"]
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
    trainer = make_trainer(
        tmp_path,
        model,
        DATA,
        cls=RecordGradient,
        per_device_train_batch_size=parts[0],
        gradient_accumulation_steps=parts[1],
        train_sampling_strategy="sequential",
        max_grad_norm=0,
        max_steps=1,
        learning_rate=0.0,
    )
    trainer.train()
    is_right = torch.allclose(trainer.gradients[0], gradient, rtol=1e-8, atol=1e-11)
    assert is_right or "loss_weight" in caplog.text
    if floor in ("epsilon", "clamp, beyond all"):
        assert is_right
        assert "loss_weight" not in caplog.text
    caplog.clear()
    trainer = make_trainer(tmp_path, model, eval_dataset=DATA, per_device_eval_batch_size=parts[0])
    assert trainer.evaluate()["eval_loss"] == pytest.approx(loss.item(), rel=1e-8) or "loss_weight" in caplog.text


def test_a_floor_between_the_micro_batches_is_seen(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Halves of the larger ones stay above it."""
    lengths = [24] * 6 + [4, 5, 3] + [24] * 3
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(1, 11, (24,), generator=generator) for _ in lengths]
    data = [
        {"input_ids": row, "labels": row.masked_fill(torch.arange(24) >= length, -100)}
        for row, length in zip(ids, lengths, strict=True)
    ]
    options = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 4, "max_steps": 1}
    make_trainer(tmp_path, Floored("clamp").double(), data, train_sampling_strategy="sequential", **options).train()
    assert "loss_weight" in caplog.text


def test_a_declared_sum_is_used_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Floored("clamp, beyond all").double()
    whole = {key: torch.stack([sample[key] for sample in DATA]) for key in DATA[0]}
    trainer = make_trainer(
        tmp_path, model, DATA, eval_dataset=DATA, loss_weight="sum", learning_rate=0.0,
        per_device_train_batch_size=3, gradient_accumulation_steps=4, per_device_eval_batch_size=5,
    )  # fmt: skip
    trainer.train()
    expected = pytest.approx(model(**whole)["loss"].item(), rel=1e-8)
    assert losses(trainer)[0] == expected
    assert trainer.evaluate()["eval_loss"] == expected
    assert "loss_weight" not in caplog.text


@pytest.mark.parametrize("make", [Padded77, Masked77, MaskedByTensor])
def test_an_ignored_value_that_comes_late(tmp_path: Path, make: type[Head]) -> None:
    """The batches of the first probes do not hold the value; the third step, which is probed for it alone, does."""
    early = [{**sample, "labels": sample["labels"].masked_fill(sample["labels"] == -100, 1)} for sample in DATA]
    late = [{**sample, "labels": sample["labels"].masked_fill(sample["labels"] == -100, 77)} for sample in DATA]
    model = make().double()
    whole = {key: torch.stack([sample[key] for sample in late]) for key in late[0]}
    loss = model(**whole)["loss"]
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
    trainer = make_trainer(
        tmp_path,
        model,
        [*early, *early, *late],
        cls=RecordGradient,
        per_device_train_batch_size=3,
        gradient_accumulation_steps=len(DATA) // 3,
        train_sampling_strategy="sequential",
        max_grad_norm=0,
        max_steps=3,
        learning_rate=0.0,
    )
    trainer.train()
    torch.testing.assert_close(trainer.gradients[2], gradient, rtol=1e-8, atol=1e-11)
