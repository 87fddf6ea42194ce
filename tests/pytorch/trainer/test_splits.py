"""Any split of the same samples over batch size x accumulation gives the same gradient, logged loss and eval_loss."""

from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import Classifier, RecordGradient, Tagger, classification, losses, make_trainer, tagging, weights
from torch import Tensor, nn
from torch.nn import functional

DATA = tagging(24)
SPLITS = [(24, 1), (12, 2), (4, 6), (1, 24), (5, 5), (7, 4)]


def first_gradient(
    folder: Path, model: nn.Module, data: Any, split: tuple[int, int], **options: Any
) -> tuple[Tensor, float]:
    batch, accumulation = split
    trainer = make_trainer(
        folder,
        model,
        data,
        cls=options.pop("cls", RecordGradient),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        max_grad_norm=0,
        max_steps=1,
        **options,
    )
    trainer.train()
    return trainer.gradients[0], losses(trainer)[0]


@pytest.mark.parametrize("per_sample", [False, True], ids=["mean over targets", "mean over samples"])
@pytest.mark.parametrize("shifted", [False, True], ids=["aligned", "shifted"])
def test_a_module_that_returns_a_mean(tmp_path: Path, shifted: bool, per_sample: bool) -> None:
    data, expected = DATA, None
    assert any(bool((sample["labels"][1:] == -100).all()) for sample in data)
    for batch, accumulation in SPLITS:
        model = Tagger(shifted=shifted, per_sample=per_sample).double()
        # in micro-batches of one sample the two means are one and the same number: only then it must be said
        weight = "samples" if per_sample and batch == 1 else None
        found = first_gradient(
            tmp_path, model, data, (batch, accumulation), train_sampling_strategy="sequential", loss_weight=weight
        )
        if batch * accumulation < len(data):
            continue
        expected = expected or found
        torch.testing.assert_close(found[0], expected[0], rtol=1e-10, atol=1e-12)
        assert found[1] == pytest.approx(expected[1], rel=1e-10)


class Masked(Tagger):
    """Its loss and gradient are NaN for a micro-batch without a target."""

    def finish(self, hidden: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(hidden)
        kept = labels[:, 1:] != -100
        own = logits[:, :-1].log_softmax(-1).gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0]
        return {"loss": -(own * kept).sum() / kept.sum(), "logits": logits}


@pytest.mark.parametrize("model", [Masked, Tagger])
def test_a_micro_batch_whose_targets_are_seen_not_to_count(tmp_path: Path, model: type[Tagger]) -> None:
    """The first micro-batch has a target until the first probe shows that targets are shifted."""
    data = [sample for sample in DATA if bool((sample["labels"][1:] != -100).any())][:8]
    only_first = torch.full((7,), -100).index_fill(0, torch.tensor([0]), 3)
    data[:2] = [{**sample, "labels": only_first} for sample in data[:2]]
    found = [
        first_gradient(
            tmp_path, model(shifted=True).double(), data, split, train_sampling_strategy="sequential",
            nonfinite_policy="raise", data_map=split == (2, 4),
        )
        for split in ((8, 1), (2, 4))
    ]  # fmt: skip
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-10, atol=1e-12)
    assert found[1][1] == pytest.approx(found[0][1], rel=1e-10)


def token_loss(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | None = None) -> Tensor:
    logits = outputs["logits"]
    if num_items_in_batch is None:
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / num_items_in_batch


class TakesCount(Tagger):
    """Divides by num_items_in_batch, as models of transformers do."""

    def forward(self, input_ids: Tensor, labels: Tensor, num_items_in_batch: Tensor | None = None) -> Any:
        logits = super().forward(input_ids, labels)["logits"]
        return {"loss": token_loss({"logits": logits}, labels, num_items_in_batch), "logits": logits}


class IgnoresCount(Tagger):
    """Says that it takes the count, and does not use it: what several models of transformers do."""

    accepts_loss_kwargs = True

    def forward(self, input_ids: Tensor, labels: Tensor, **kwargs: Any) -> Any:
        return super().forward(input_ids, labels)


class Overridden(RecordGradient):
    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs, labels=labels)
        loss = functional.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten())
        return (loss, outputs) if return_outputs else loss


PROTOCOLS: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "compute_loss_func": (Tagger, {"compute_loss_func": token_loss}),
    "num_items_in_batch": (TakesCount, {}),
    "num_items_in_batch ignored": (IgnoresCount, {}),
    "overridden compute_loss": (Tagger, {"cls": Overridden}),
    "label smoothing": (Tagger, {"label_smoothing_factor": 0.1}),
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_protocol_of_a_loss(tmp_path: Path, protocol: str) -> None:
    kind, options = PROTOCOLS[protocol]
    expected = first_gradient(tmp_path, kind().double(), DATA, (24, 1), **options)
    for split in SPLITS[1:4]:
        found = first_gradient(tmp_path, kind().double(), DATA, split, **options)
        torch.testing.assert_close(found[0], expected[0], rtol=1e-10, atol=1e-12)
        assert found[1] == pytest.approx(expected[1], rel=1e-10)


def test_the_last_partial_window_weighs_right(tmp_path: Path) -> None:
    """14 samples in micro-batches of 4 with accumulation 2: the last update has 4 + 2 samples."""
    data = classification(14)
    model, plain = Classifier().double(), Classifier().double()
    data = [{"x": s["x"].double(), "labels": s["labels"]} for s in data]
    options = {"max_grad_norm": 0, "optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant"}
    make_trainer(
        tmp_path, model, data, gradient_accumulation_steps=2, train_sampling_strategy="sequential", **options
    ).train()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for window in (data[:8], data[8:]):
        loss, _ = plain(torch.stack([s["x"] for s in window]), torch.stack([s["labels"] for s in window]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(weights(model), weights(plain), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("protocol", [*PROTOCOLS, "module"])
def test_eval_loss_does_not_depend_on_the_batch_size(tmp_path: Path, protocol: str) -> None:
    kind, options = PROTOCOLS.get(protocol, (Tagger, {}))
    found = []
    for batch in (1, 4, 16, 37):
        trainer = make_trainer(
            tmp_path, kind().double(), eval_dataset=DATA, per_device_eval_batch_size=batch, **options
        )
        found.append(trainer.evaluate()["eval_loss"])
    assert found == pytest.approx([found[0]] * 4, rel=1e-10)


def test_an_update_without_a_target_changes_nothing(tmp_path: Path) -> None:
    empty = [{"input_ids": s["input_ids"], "labels": torch.full_like(s["labels"], -100)} for s in DATA[:4]]
    model = Tagger()
    before = weights(model).clone()
    trainer = make_trainer(tmp_path, model, empty)
    trainer.train()
    assert torch.equal(weights(model), before)
    assert losses(trainer) == []


def test_a_batch_without_a_target_inside_an_update_adds_nothing(tmp_path: Path) -> None:
    empty = [{"input_ids": s["input_ids"], "labels": torch.full_like(s["labels"], -100)} for s in DATA[:4]]
    options: dict[str, Any] = {"train_sampling_strategy": "sequential"}
    alone = first_gradient(tmp_path, Tagger().double(), DATA[:4], (4, 1), **options)
    both = first_gradient(tmp_path, Tagger().double(), DATA[:4] + empty, (4, 2), **options)
    torch.testing.assert_close(both[0], alone[0], rtol=1e-10, atol=1e-12)
    assert both[1] == pytest.approx(alone[1])


def test_a_declared_weight_is_used(tmp_path: Path) -> None:
    model = Tagger(per_sample=True).double()
    whole = first_gradient(tmp_path, model, DATA, (24, 1), loss_weight="samples")
    for split in SPLITS[1:4]:
        parts = first_gradient(tmp_path, Tagger(per_sample=True).double(), DATA, split, loss_weight="samples")
        torch.testing.assert_close(whole[0], parts[0], rtol=1e-10, atol=1e-12)


class IgnoresOther(Tagger):
    """A mean over the targets that are not `index`, as who pads targets with the padding token has it."""

    index = 0

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(torch.tanh(self.embedding(input_ids)))
        return {"loss": functional.cross_entropy(logits.mT, labels, ignore_index=self.index), "logits": logits}


class IgnoresOne(IgnoresOther):
    index = 1


def padded(index: int) -> list[dict[str, Tensor]]:
    """Eight samples without padding, then ragged ones, filled up with `index`."""
    full = [{"input_ids": s["input_ids"], "labels": s["input_ids"].clamp(min=2)} for s in DATA[:8]]
    ragged = [s for s in DATA if bool((s["labels"] != -100).any())]
    return full + [
        {"input_ids": s["input_ids"], "labels": s["labels"].masked_fill(s["labels"] == -100, index)} for s in ragged
    ]


def test_another_ignored_value_that_comes_late(tmp_path: Path) -> None:
    logged = []
    for batch, accumulation in ((8, 1), (4, 2), (2, 4)):
        trainer = make_trainer(
            tmp_path,
            IgnoresOther().double(),
            padded(0)[:24],
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulation,
            train_sampling_strategy="sequential",
        )
        trainer.train()
        logged.append(losses(trainer))
    for found in logged[1:]:
        assert found == pytest.approx(logged[0], rel=1e-10)


@pytest.mark.parametrize("kind", [IgnoresOther, IgnoresOne])
def test_eval_loss_with_another_ignored_value(tmp_path: Path, kind: Any) -> None:
    found = [
        make_trainer(
            tmp_path, kind().double(), eval_dataset=padded(kind.index), per_device_eval_batch_size=size
        ).evaluate()["eval_loss"]
        for size in (2, 4, 8)
    ]
    assert found == pytest.approx([found[0]] * 3, rel=1e-10)


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
def test_a_second_look_in_one_update_corrects_the_first(tmp_path: Path, order: tuple[int, ...]) -> None:
    """The first micro-batch has zeros, which count; the second one has ones, which do not; the third neither."""
    ids = [s["input_ids"] for s in DATA[:6]]
    labels = [i.clamp(min=2) for i in ids]
    for row in (0, 1):
        labels[row][:2] = 0
    for row in (2, 3):
        labels[row][:3] = 1
    pairs = [[{"input_ids": ids[row], "labels": labels[row]} for row in (2 * k, 2 * k + 1)] for k in order]
    data = [sample for pair in pairs for sample in pair]
    options: dict[str, Any] = {"train_sampling_strategy": "sequential"}
    whole = first_gradient(tmp_path, IgnoresOne().double(), data, (6, 1), **options)
    parts = first_gradient(tmp_path, IgnoresOne().double(), data, (2, 3), **options)
    torch.testing.assert_close(parts[0], whole[0], rtol=1e-10, atol=1e-12)
    assert parts[1] == pytest.approx(whole[1], rel=1e-10)


class Regression(nn.Module):
    """The mean squared error over the targets that are not NaN."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        found, kept = self.linear(x), ~labels.isnan()
        return {"loss": functional.mse_loss(found[kept], labels[kept]), "logits": found}


def values(share: float) -> list[dict[str, Tensor]]:
    """24 samples of three values, a share of them unknown."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(24, size, generator=generator, dtype=torch.float64) for size in (4, 3))
    y[torch.rand(24, 3, generator=generator) < share] = torch.nan
    return [{"x": x[index], "labels": y[index]} for index in range(24)]


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_regression(tmp_path: Path, share: float, caplog: pytest.LogCaptureFixture) -> None:
    data, options = values(share), {"train_sampling_strategy": "sequential"}
    expected = first_gradient(tmp_path, Regression().double(), data, (24, 1), **options)
    for split in SPLITS[1:4]:
        found = first_gradient(tmp_path, Regression().double(), data, split, **options)
        torch.testing.assert_close(found[0], expected[0], rtol=1e-10, atol=1e-12)
        assert found[1] == pytest.approx(expected[1], rel=1e-10)
    evaluated = [
        make_trainer(tmp_path, Regression().double(), eval_dataset=data, per_device_eval_batch_size=size).evaluate()[
            "eval_loss"
        ]
        for size in (4, 5, 24)
    ]
    assert evaluated == pytest.approx([evaluated[0]] * 3, rel=1e-10)
    assert not [record for record in caplog.records if "identified" in record.message and record.levelname != "INFO"]


class MeanOverAll(Tagger):
    """The mean over all samples of each one's mean over its targets, 0 for those that have none."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = super().forward(input_ids, labels)["logits"]
        sums = functional.cross_entropy(logits.movedim(-1, 1), labels, reduction="none").sum(1)
        return {"loss": (sums / (labels != -100).sum(1).clamp(min=1)).mean(), "logits": logits}


@pytest.mark.parametrize("weight", [None, "samples"])
def test_a_mean_over_all_samples_counts_those_without_a_target(tmp_path: Path, weight: str | None) -> None:
    options: dict[str, Any] = {"train_sampling_strategy": "sequential", "loss_weight": weight}
    expected = first_gradient(tmp_path, MeanOverAll().double(), DATA, (24, 1), **options)
    for split in [(12, 2), (6, 4), (4, 6)]:
        found = first_gradient(tmp_path, MeanOverAll().double(), DATA, split, **options)
        torch.testing.assert_close(found[0], expected[0], rtol=1e-10, atol=1e-12)
        assert found[1] == pytest.approx(expected[1], rel=1e-10)


@pytest.mark.parametrize("kind", [MeanOverAll, lambda: Tagger(per_sample=True)], ids=["all", "with targets"])
def test_eval_loss_of_a_mean_over_samples(tmp_path: Path, kind: Any) -> None:
    data = DATA[12:] + DATA[:12]
    found = [
        make_trainer(tmp_path, kind().double(), eval_dataset=data, per_device_eval_batch_size=batch).evaluate()
        for batch in (4, 8, 24)
    ]
    assert [row["eval_loss"] for row in found] == pytest.approx([found[0]["eval_loss"]] * 3, rel=1e-10)


def test_an_update_without_a_target_changes_nothing_where_all_samples_count(tmp_path: Path) -> None:
    empty = [{"input_ids": s["input_ids"], "labels": torch.full_like(s["labels"], -100)} for s in DATA[:8]]
    model = MeanOverAll()
    options = {"gradient_accumulation_steps": 2, "lr_scheduler_type": "constant", "weight_decay": 0.1}
    first = make_trainer(tmp_path, MeanOverAll(), DATA[:8], **options, train_sampling_strategy="sequential")
    first.train()
    trainer = make_trainer(tmp_path, model, DATA[:8] + empty, **options, train_sampling_strategy="sequential")
    trainer.train()
    assert trainer.loss_normalizer.reduction.unit == "all_samples"
    assert len(losses(trainer)) == 1
    assert torch.equal(weights(model), weights(first.model))


@pytest.mark.parametrize("scaled", [True, False])
def test_loss_is_scaled_for_ga_is_believed(tmp_path: Path, scaled: bool) -> None:
    class Declared(RecordGradient):
        loss_is_scaled_for_ga = scaled

        def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            outputs = model(**inputs)
            loss = outputs[0] / 2 if scaled else outputs[0]  # two micro-batches of equal size
            return (loss, outputs) if return_outputs else loss

    data = classification(8)
    expected, _ = first_gradient(tmp_path, Classifier(), data, (8, 1))
    found, _ = first_gradient(tmp_path, Classifier(), data, (4, 2), cls=Declared)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
