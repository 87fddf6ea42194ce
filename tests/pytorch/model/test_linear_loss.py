"""Losses by chunks of the head's inputs, without logits: the numbers of the model's own loss, or that loss."""

import copy
import gc
import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from paceline import Trainer, TrainingArguments
from paceline.pytorch.model import lazy_logits, linear_loss, linear_loss_check
from paceline.pytorch.model.lazy_logits import LazyLogits
from paceline.pytorch.model.linear_loss import LinearLoss
from paceline.pytorch.step_parts import flops
from paceline.pytorch.step_parts.flops import FlopMeter

CLASSES, FEATURES, LENGTH = 23, 8, 6


class LanguageModel(nn.Module):
    """A causal model with the forward of those of transformers.

    Args:
        after: what follows the head.
        loss: of the logits and labels, shifted by one.
        tied: the head has the weights of the embedding.
    """

    def __init__(self, after: Callable[[Tensor], Tensor] = Tensor.float, loss: Any = None, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(CLASSES, FEATURES)
        self.body = nn.Linear(FEATURES, FEATURES)
        self.head = nn.Linear(FEATURES, CLASSES, bias=not tied)
        if tied:
            self.head.weight = self.embedding.weight
        self.after, self.loss = after, loss or functional.cross_entropy

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.after(self.head(torch.tanh(self.body(self.embedding(input_ids)))))
        found = {"logits": logits}
        if labels is not None:
            logits = logits[..., :-1, :].contiguous()
            found = {"loss": self.loss(logits.view(-1, CLASSES), labels[..., 1:].reshape(-1)), **found}
        return found


def make_batch() -> dict[str, Tensor]:
    ids = torch.randint(0, CLASSES, (4, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :4] = -100
    return {"input_ids": ids, "labels": labels}


def gradients(model: nn.Module, part: LinearLoss | None, batch: dict[str, Tensor]) -> tuple[dict[str, Any], Tensor]:
    model.zero_grad()
    if part is None:
        outputs = model(**batch)
    else:
        with part.applied(model):
            outputs = model(**batch)
    outputs["loss"].backward()
    return outputs, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def z_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits, labels) + 1e-4 * torch.logsumexp(logits, -1).square().mean()


def probabilities(labels: Tensor) -> Tensor:
    return functional.one_hot(labels % 5, CLASSES).float()


def in_place(logits: Tensor) -> Tensor:
    logits[..., 3] = -5.0
    return logits


def on_a_copy(logits: Tensor) -> Tensor:
    copy = logits * 2.0
    logits[..., 3] = -5.0
    return copy


class Halved(torch.autograd.Function):
    """Halves the gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:  # type: ignore[override]
        return logits.view_as(logits)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:  # type: ignore[override]
        return slope / 2


def partly_reentrant(logits: Tensor) -> Tensor:
    before = logits * 2.0
    after: Tensor = checkpoint(lambda x: x * 3.0, logits, use_reentrant=True).clone()
    return after + before.sin()


def with_metric(logits: Tensor) -> Tensor:
    with torch.no_grad():
        logits.softmax(-1).max()  # read before the loss, without gradients
    return logits


OFFSET = torch.linspace(-1, 1, CLASSES)
BY_CHUNKS: dict[str, dict[str, Any]] = {
    "as it is": {"after": lambda logits: logits},
    "single precision": {},
    "scaled": {"after": lambda logits: logits * 0.25},
    "divided": {"after": lambda logits: logits.float() / 8.0},
    "soft-capped": {"after": lambda logits: torch.tanh(logits / 3.0) * 3.0},
    "a constant for each class": {"after": lambda logits: logits + OFFSET},
    "tied": {"tied": True},
    "a module": {"loss": nn.CrossEntropyLoss()},
    "a sum by a count": {"loss": lambda x, y: functional.cross_entropy(x, y, reduction="sum") / 7},
    "smoothed": {"loss": lambda x, y: functional.cross_entropy(x, y, label_smoothing=0.1)},
    "class weights": {"loss": lambda x, y: functional.cross_entropy(x, y, weight=torch.linspace(0.5, 2, CLASSES))},
    "no reduction": {"loss": lambda x, y: functional.cross_entropy(x, y, reduction="none").square().mean()},
    "best class beside": {"loss": lambda x, y: functional.cross_entropy(x, y) * (1 + 0 * x.argmax(-1).float().mean())},
}
BY_LOGITS: dict[str, tuple[dict[str, Any], str]] = {
    "z-loss": ({"loss": z_loss}, "logsumexp"),
    "written to": ({"after": in_place}, "__setitem__"),
    "a copy before a write": ({"after": on_a_copy}, "__setitem__"),
    "a checkpoint": ({"after": lambda x: checkpoint(torch.sigmoid, x, use_reentrant=False)}, "sigmoid"),
    "a reentrant checkpoint": ({"after": partly_reentrant}, "clone"),
    "a loss in a checkpoint": (
        {"loss": lambda x, y: checkpoint(functional.cross_entropy, x, y, use_reentrant=False)},
        "cross_entropy",
    ),
    "a metric": ({"after": with_metric}, "softmax"),
    "log-softmax": ({"loss": lambda x, y: functional.nll_loss(functional.log_softmax(x, -1), y)}, "log_softmax"),
    "a trained scale": ({"after": lambda logits: logits * torch.nn.Parameter(torch.tensor(2.0))}, "mul"),
    "probabilities": ({"loss": lambda x, y: functional.cross_entropy(x, probabilities(y))}, "cross_entropy"),
}  # fmt: skip


@pytest.mark.parametrize("options", BY_CHUNKS.values(), ids=BY_CHUNKS)
def test_loss_and_gradient_are_those_of_the_model(options: dict[str, Any]) -> None:
    model, part, batch = LanguageModel(**options), LinearLoss(True), make_batch()
    outputs, plain = gradients(model, None, batch)
    lazy, found = gradients(model, part, batch)
    assert isinstance(lazy["logits"], LazyLogits)
    assert part.is_right
    torch.testing.assert_close(lazy["loss"], outputs["loss"], rtol=1e-6, atol=1e-6)
    assert (found - plain).norm() <= 1e-6 * plain.norm()
    torch.testing.assert_close(lazy["logits"] + 0, outputs["logits"], rtol=1e-6, atol=1e-6)
    assert "forward" not in vars(model.head)


@pytest.mark.parametrize(("options", "reader"), BY_LOGITS.values(), ids=BY_LOGITS)
def test_a_model_that_reads_its_logits_is_left_as_it_is(
    options: dict[str, Any], reader: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, part, batch = LanguageModel(**options), LinearLoss("auto"), make_batch()
    monkeypatch.setattr(linear_loss, "is_small", lambda head, rows: False)
    outputs, plain = gradients(model, None, batch)
    with caplog.at_level(logging.INFO, logger="paceline"):
        for _ in range(2):
            lazy, found = gradients(model, part, batch)
            torch.testing.assert_close(lazy["loss"] + 0, outputs["loss"], rtol=1e-6, atol=1e-6)
            assert (found - plain).norm() <= 1e-6 * plain.norm()
    assert part.is_right is False
    assert type(lazy["logits"]) is Tensor
    told = [record.getMessage() for record in caplog.records if "the model's own loss is used" in record.getMessage()]
    assert len(told) == 1
    assert reader in told[0]
    with pytest.raises(
        ValueError, match=r"linear_cross_entropy=True is not possible: .*Set linear_cross_entropy='auto'"
    ):
        gradients(model, LinearLoss(True), batch)


def test_a_chunked_loss_that_differs_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = linear_loss_check.linear_cross_entropy

    def wrong(*values: Any, **options: Any) -> Tensor:
        return 1.001 * right(*values, **options)

    monkeypatch.setattr(linear_loss_check, "linear_cross_entropy", wrong)
    monkeypatch.setattr(lazy_logits, "linear_cross_entropy", wrong)
    monkeypatch.setattr(linear_loss, "is_small", lambda head, rows: False)
    model, part, batch = LanguageModel(), LinearLoss("auto"), make_batch()
    outputs, plain = gradients(model, None, batch)
    lazy, found = gradients(model, part, batch)
    assert torch.equal(lazy["loss"], outputs["loss"])
    assert torch.equal(found, plain)
    assert any(record.levelno == logging.WARNING and "differs" in record.getMessage() for record in caplog.records)
    with pytest.raises(ValueError, match="is not possible"):
        gradients(model, LinearLoss(True), batch)


def test_small_logits_are_made_by_the_head() -> None:
    model = LanguageModel()
    outputs, _ = gradients(model, LinearLoss("auto"), make_batch())
    assert type(outputs["logits"]) is Tensor


def test_autocast_is_that_of_the_head() -> None:
    model, part, batch = LanguageModel(), LinearLoss(True), make_batch()
    with torch.autocast("cpu", torch.bfloat16):
        outputs, plain = gradients(model, None, batch)
        lazy, found = gradients(model, part, batch)
    assert lazy["loss"].dtype == outputs["loss"].dtype
    torch.testing.assert_close(lazy["loss"], outputs["loss"], rtol=1e-5, atol=1e-6)
    assert (found - plain).norm() <= 2e-2 * plain.norm()


@pytest.mark.parametrize("number", [1, 3, 5, 11])
@pytest.mark.parametrize("loss", [None, BY_CHUNKS["class weights"]["loss"]], ids=["plain", "weighted"])
def test_rounding_of_few_targets_in_16_bits_is_no_difference(number: int, loss: Any) -> None:
    batch = make_batch()
    batch["labels"] = torch.full_like(batch["labels"], -100)
    batch["labels"][:, 1:][torch.arange(4 * (LENGTH - 1)).view(4, -1) < number] = 3
    part = LinearLoss(True)
    with torch.autocast("cpu", torch.bfloat16):
        gradients(LanguageModel(loss=loss), part, batch)
    assert part.is_right


def test_logits_that_are_kept_past_the_step_are_not_those_of_other_weights() -> None:
    model, part, batch = LanguageModel(), LinearLoss(True), make_batch()
    lazy, _ = gradients(model, part, batch)
    with torch.no_grad():
        model.head.weight.mul_(2)
    labels = torch.zeros(4 * LENGTH, dtype=torch.long)
    uses: list[Callable[[Tensor], Tensor]] = [
        lambda logits: logits.argmax(-1),
        lambda logits: logits.view(-1, CLASSES).argmax(-1),
        lambda logits: functional.cross_entropy(logits.view(-1, CLASSES), labels),
        torch.sum,
    ]
    for use in uses:
        with pytest.raises(RuntimeError, match="read after the weights have changed"):
            use(lazy["logits"])


def test_gradients_by_the_logits_reach_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of code that torch does not show to Python: a function of autograd."""

    class Turned(torch.autograd.Function):
        """Its gradient is not that of its value."""

        @staticmethod
        def forward(ctx: Any, values: Tensor) -> Tensor:
            return values * 2

        @staticmethod
        def backward(ctx: Any, slope: Tensor) -> Tensor:
            return slope * -3

    model, batch = LanguageModel(lambda logits: Turned.apply(logits)), make_batch()  # type: ignore[no-untyped-call]
    outputs, plain = gradients(model, None, batch)
    with pytest.raises(ValueError, match="is not possible"):
        gradients(model, LinearLoss(True), batch)
    monkeypatch.setattr(linear_loss, "is_small", lambda head, rows: False)
    lazy, found = gradients(model, LinearLoss("auto"), batch)
    torch.testing.assert_close(lazy["loss"], outputs["loss"])
    assert (found - plain).norm() <= 1e-6 * plain.norm()


def test_a_head_in_a_checkpoint_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_loss, "is_small", lambda head, rows: False)

    class Checkpointed(LanguageModel):
        def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            found: dict[str, Tensor] = checkpoint(super().forward, input_ids, labels, use_reentrant=False)
            return found

    model, batch = Checkpointed(), make_batch()
    _, plain = gradients(model, None, batch)
    _, found = gradients(model, LinearLoss("auto"), batch)
    assert torch.equal(found, plain)


def test_gradients_that_would_miss_a_change_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_loss, "is_small", lambda head, rows: False)
    batch = make_batch()
    model = LanguageModel(after=lambda logits: Halved.apply(in_place(logits)))  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match=r"were written to, .* Set linear_cross_entropy=False"):
        gradients(model, LinearLoss("auto"), batch)
    model, part = LanguageModel(), LinearLoss(True)
    with part.applied(model):
        logits = model(**batch)["logits"]
        with pytest.raises(RuntimeError, match="register_hook is called on logits after their loss"):
            logits.register_hook(torch.zeros_like)


class WithPenalty(LanguageModel):
    """Adds the squared norm of a gradient to its loss."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        found = super().forward(input_ids, labels)
        (slope,) = torch.autograd.grad(found["loss"], self.body.weight, create_graph=True)
        return {**found, "loss": found["loss"] + slope.square().sum()}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["as it is", "soft-capped", "class weights", "no reduction", "a function"])
def test_second_derivatives_are_those_of_the_model(name: str, tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_loss, "is_small", lambda head, rows: False)
    options = {"after": Halved.apply} if name == "a function" else BY_CHUNKS[name]
    model, batch = WithPenalty(**options, tied=tied), make_batch()
    outputs, plain = gradients(model, None, batch)
    lazy, found = gradients(model, LinearLoss("auto"), batch)
    torch.testing.assert_close(lazy["loss"], outputs["loss"], rtol=1e-6, atol=1e-6)
    assert (found - plain).norm() <= 1e-6 * plain.norm()


def test_what_was_made_without_gradients_has_none() -> None:
    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            same, scaled = logits.float(), logits * 2  # the first is the same tensor, with its gradient
        return sum(functional.cross_entropy(each, labels) ** 2 for each in (logits, same, scaled))

    model, batch = LanguageModel(loss=loss), make_batch()
    _, plain = gradients(model, None, batch)
    _, found = gradients(model, LinearLoss(True), batch)
    assert (found - plain).norm() <= 1e-6 * plain.norm()


def test_a_head_that_is_no_plain_layer_is_refused_or_passed_by() -> None:
    batch = make_batch()
    hooked = LanguageModel()
    hooked.head.register_forward_hook(lambda module, inputs, output: None)
    parametrized = LanguageModel()
    nn.utils.parametrizations.weight_norm(parametrized.head)
    compiled = LanguageModel()
    compiled.compile(backend="eager")
    for model in (hooked, parametrized, compiled):
        with (
            pytest.raises(ValueError, match="linear_cross_entropy=True is not possible"),
            LinearLoss(True).applied(model),
        ):
            pass
        with LinearLoss("auto").applied(model):
            assert "forward" not in vars(model.head)
    gradients(hooked, LinearLoss("auto"), batch)


def test_a_named_head_is_used_and_another_name_is_refused() -> None:
    class Unnamed(LanguageModel):
        get_output_embeddings = None  # type: ignore[assignment]

    lazy, _ = gradients(Unnamed(), LinearLoss("head"), make_batch())
    assert isinstance(lazy["logits"], LazyLogits)
    for option in ("heads", "embedding", True):
        with pytest.raises(ValueError, match="is not possible"):
            gradients(Unnamed(), LinearLoss(option), make_batch())


def test_copies_and_models_are_not_held() -> None:
    model, part = LanguageModel(), LinearLoss(True)
    outputs, _ = gradients(model, part, make_batch())
    twin = copy.deepcopy(model)
    assert twin.head.forward.__self__ is twin.head  # type: ignore[attr-defined]
    assert copy.deepcopy(part).is_right is None
    gone = weakref.ref(model)
    del model, outputs
    gc.collect()
    assert gone() is None


# ---- with a Trainer


class Texts(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(0, CLASSES, (LENGTH,), generator=torch.Generator().manual_seed(index))
        labels = ids.clone()
        labels[: index % 4] = -100
        return {"input_ids": ids, "labels": labels}


def train(folder: Path, option: bool | str, trainer: dict[str, Any] | None = None, **options: Any) -> Trainer:
    args = TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no", max_steps=4,
        per_device_train_batch_size=2, gradient_accumulation_steps=2, logging_steps=1, per_device_eval_batch_size=3,
        linear_cross_entropy=option, **options,
    )  # fmt: skip
    made = Trainer(LanguageModel(tied=True), args, train_dataset=Texts(), eval_dataset=Texts(), **(trainer or {}))
    made.train()
    return made


@pytest.mark.parametrize("options", [{}, {"label_smoothing_factor": 0.1}, {"max_grad_norm": 0.1}], ids=str)
def test_a_run_by_chunks_is_the_run_by_logits(tmp_path: Path, options: dict[str, Any]) -> None:
    one, other = (train(tmp_path, option, **options) for option in (False, True))
    assert other.objective.linear_loss is not None
    assert other.objective.linear_loss.is_right
    for row, beside in zip(one.state.log_history[:-1], other.state.log_history[:-1], strict=True):
        assert row["loss"] == pytest.approx(beside["loss"], rel=1e-5)
        assert row["grad_norm"] == pytest.approx(beside["grad_norm"], rel=1e-5)
    assert one.evaluate()["eval_loss"] == pytest.approx(other.evaluate()["eval_loss"], rel=1e-5)


@pytest.mark.parametrize("option", [True, "auto"])
def test_counting_operations_changes_no_bit_of_the_chunks(
    tmp_path: Path, option: bool | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_loss, "is_small", lambda head, rows: False)
    meters = []
    monkeypatch.setattr(flops, "FlopMeter", lambda *args, **kw: meters.append(FlopMeter(*args, **kw)) or meters[-1])
    logits, found = (train(tmp_path, each, log_flops=True) for each in (False, option))
    assert found.objective.linear_loss is not None
    assert found.objective.linear_loss.is_right
    assert meters[0].operations > meters[1].operations > 0, "ignored targets have no logits"
    plain = train(tmp_path, option)
    assert [row.get("loss") for row in plain.state.log_history] == [row.get("loss") for row in found.state.log_history]
    for row, beside in zip(logits.state.log_history[:-1], found.state.log_history[:-1], strict=True):
        assert row["loss"] == pytest.approx(beside["loss"], rel=1e-5)


def test_logits_are_given_to_those_who_ask(tmp_path: Path) -> None:
    one, other = (train(tmp_path, option) for option in (False, True))
    plain, found = one.predict(Texts()), other.predict(Texts())
    torch.testing.assert_close(torch.tensor(found.predictions), torch.tensor(plain.predictions), rtol=1e-4, atol=1e-5)
    batch = make_batch()
    (_, outputs), (_, beside) = (each.compute_loss(each.model, batch, return_outputs=True) for each in (one, other))
    assert isinstance(beside["logits"], LazyLogits)
    torch.testing.assert_close(beside["logits"].detach(), outputs["logits"].detach(), rtol=1e-4, atol=1e-5)


def test_an_option_that_is_no_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="linear_cross_entropy='a b' is invalid"):
        TrainingArguments(output_dir=str(tmp_path), linear_cross_entropy="a b")
    with pytest.raises(ValueError, match="linear_cross_entropy=True is not possible"):
        trainer_of_a_module_without_head(tmp_path)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_loss_that_reads_the_logits_is_refused_also_after_a_probe_of_the_loss(
    tmp_path: Path, accumulation: int
) -> None:
    """The passes that find out how the loss is reduced take an error for a loss that cannot be tried."""

    class Dense(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(FEATURES, CLASSES)

        def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": functional.cross_entropy(self.head(inputs).permute(0, 2, 1), labels)}

    data = [{"inputs": torch.randn(5, FEATURES), "labels": torch.randint(0, CLASSES, (5,))} for _ in range(16)]
    args = TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to="none", linear_cross_entropy="head",
        per_device_train_batch_size=4, gradient_accumulation_steps=accumulation,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"linear_cross_entropy='head' is not possible: .*permute reads them"):
        Trainer(Dense(), args, train_dataset=data).train()  # type: ignore[arg-type]


def test_the_result_of_another_option_is_not_that_of_required_chunks() -> None:
    """A checkpoint of a run whose loss read its logits holds that they are used."""
    model, verdict = LanguageModel(), SimpleNamespace(by_chunks=False)
    outputs, _ = gradients(model, LinearLoss(True, verdict), make_batch())
    assert isinstance(outputs["logits"], LazyLogits)
    assert verdict.by_chunks


def trainer_of_a_module_without_head(folder: Path) -> None:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(FEATURES, 2)

        def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": functional.cross_entropy(self.layer(inputs), labels)}

    data = [{"inputs": torch.randn(FEATURES), "labels": torch.tensor(1)}]
    args = TrainingArguments(output_dir=str(folder), use_cpu=True, report_to="none", linear_cross_entropy=True)
    Trainer(Classifier(), args, train_dataset=data).train()  # type: ignore[arg-type]
