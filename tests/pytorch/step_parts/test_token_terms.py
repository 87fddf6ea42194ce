"""Token accuracy, entropy and perplexity of the training targets, and the z-loss: by chunks as by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from linear_loss_job import CLASSES, METRICS, LanguageModel, rows_of, texts, train
from small_models import Classifier, Tagger, classification, losses, make_trainer, tagging
from torch import Tensor, nn
from torch.nn import functional

from paceline import Trainer, TrainerCallback, TrainingArguments, UnsupportedOption
from paceline.pytorch.model import linear_loss, token_sums
from paceline.pytorch.model.linear_cross_entropy import CrossEntropy, linear_cross_entropy
from paceline.pytorch.model.linear_head import Head, Scale, Squash
from paceline.pytorch.model.token_sums import TokenSums

BOTH = {"log_token_metrics": True, "z_loss_weight": 0.01}


@pytest.fixture(autouse=True)
def large_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_loss, "CHUNK_BYTES", 1)
    monkeypatch.setattr(token_sums, "CHUNK_BYTES", 3 * 4 * CLASSES)


class ByHand(LanguageModel):
    """Computes the loss with its z-loss, and keeps the sums of the pass, by formulas of its own."""

    def __init__(self, weight: float, softcap: float | None = None) -> None:
        super().__init__(dropout=0.1)
        self.weight, self.softcap, self.sums = weight, softcap, []
        self.keeps_evaluations = False

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        outputs = super().forward(input_ids)
        assert labels is not None
        logits, targets = outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        logits, targets = logits[targets != -100], targets[targets != -100]
        probabilities = torch.distributions.Categorical(logits=logits)
        normalizers = logits.logsumexp(-1)
        if self.training or self.keeps_evaluations:
            correct = (logits.argmax(-1) == targets).sum()
            sums = correct, probabilities.entropy().sum(), -probabilities.log_prob(targets).sum()
            self.sums.append(torch.stack([torch.tensor(len(targets)), *sums, normalizers.square().sum()]).detach())
        weight = self.weight if self.training else 0.0
        return {"loss": -probabilities.log_prob(targets).mean() + weight * normalizers.square().mean()}


class Capped(LanguageModel):
    """With soft-capped logits, whose gradient in chunks is autograd's."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = super().forward(input_ids)["logits"]
        logits = torch.tanh(logits / 2.0) * 2.0
        assert labels is not None
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


@pytest.mark.parametrize("softcap", [None, 2.0], ids=["plain", "soft-capped"])
@pytest.mark.parametrize("option", [False, "auto"], ids=["logits", "chunks"])
def test_the_rows_and_the_loss_are_those_by_hand(tmp_path: Path, option: bool | str, softcap: float | None) -> None:
    options: dict[str, Any] = {"gradient_accumulation_steps": 2, "logging_steps": 2, "max_steps": 6}
    by_hand = ByHand(BOTH["z_loss_weight"], softcap)
    expected = train(tmp_path / "hand", by_hand, linear_cross_entropy=False, loss_weight="shifted_tokens", **options)
    model = LanguageModel(dropout=0.1) if softcap is None else Capped(dropout=0.1)
    found = train(tmp_path / "found", model, linear_cross_entropy=option, **BOTH, **options)
    assert found.objective.linear_loss is None or found.objective.linear_loss.is_right
    assert losses(found) == pytest.approx(losses(expected), rel=1e-5)
    for one, other in zip(found.gradients, expected.gradients, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()
    windows = torch.stack(by_hand.sums).double().view(3, 4, 5).sum(1)
    evaluated, own = found.evaluate(), expected.evaluate()
    assert evaluated["eval_loss"] == pytest.approx(own["eval_loss"], rel=1e-5)
    by_hand.eval().sums, by_hand.keeps_evaluations = [], True
    with torch.no_grad():
        for text in texts(9):
            by_hand(**{name: value[None] for name, value in text.items()})
    _check(evaluated, torch.stack(by_hand.sums).double().sum(0), "eval_", METRICS[:3])
    rows = rows_of(found)
    assert len(rows) == len(windows)
    for row, sums in zip(rows, windows, strict=True):
        _check(row, sums, "", METRICS)


def _check(row: dict[str, float], sums: Tensor, prefix: str, names: Sequence[str]) -> None:
    """Compares metrics with those of sums over targets."""
    accuracy, entropy, loss, square = (sums[1:] / sums[0]).tolist()
    by_sums = dict(zip(METRICS, (accuracy, entropy, float(torch.tensor(loss).exp()), 0.01 * square), strict=True))
    assert {name: row[prefix + name] for name in names} == pytest.approx({name: by_sums[name] for name in names})
    assert all((prefix + name in row) == (name in names) for name in METRICS)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("steps", [(Scale(0.5),), (Squash(), Scale(3.0))], ids=["scaled", "soft-capped"])
def test_chunks_have_the_z_loss_of_the_logits(reduction: str, weighted: bool, steps: tuple[Any, ...]) -> None:
    torch.manual_seed(0)
    weight = torch.rand(17, dtype=torch.float64) if weighted else None
    loss = CrossEntropy(-100, reduction, 0.1, weight, 0.3)
    targets = torch.randint(0, 17, (13,))
    targets[::3] = -100
    leaves = [torch.randn(size, dtype=torch.float64, requires_grad=True) for size in ((13, 6), (17, 6), (17,))]
    head = Head(leaves[1], leaves[2], None, steps)
    sums, by_logits = TokenSums(), TokenSums()
    found = linear_cross_entropy(leaves[0], targets, head, loss, 4, sums)
    logits = head.logits(leaves[0])
    by_logits.add_logits(logits, targets, -100)
    factors = torch.arange(1.0, 1.0 + found.numel()).view(found.shape)
    slopes = [torch.autograd.grad((each * factors).sum(), leaves) for each in (found, loss(logits, targets))]
    torch.testing.assert_close(found, loss(logits, targets), rtol=1e-10, atol=1e-12)
    for one, other in zip(*slopes, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(sums.total, by_logits.total, rtol=1e-10, atol=1e-12)
    row = logits.detach()[targets != -100].logsumexp(-1).square()
    plain = CrossEntropy(-100, "sum", 0.1)
    added = CrossEntropy(-100, "sum", 0.1, None, 0.3)(logits, targets) - plain(logits, targets)
    torch.testing.assert_close(added.detach(), 0.3 * row.sum())


def test_a_class_of_no_probability_has_no_entropy() -> None:
    sums = TokenSums()
    logits = torch.tensor([[0.0, 0.0, -torch.inf], [1e4, 0.0, 0.0]])
    sums.add_logits(logits, torch.tensor([1, 0]), -100)
    assert sums.total is not None
    assert sums.total.tolist()[2] == pytest.approx(float(torch.tensor(2.0).log()))


class StopAt(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == 3


def test_a_resumed_run_has_the_same_rows(tmp_path: Path) -> None:
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "logging_steps": 2, "max_steps": 6, **BOTH}
    whole = train(tmp_path / "one", LanguageModel(dropout=0.1), **options)
    train(tmp_path / "two", LanguageModel(dropout=0.1), callbacks=[StopAt()], **options)
    last = str(tmp_path / "two" / "checkpoint-3")
    resumed = train(tmp_path / "two", LanguageModel(dropout=0.1), resume=last, **options)
    assert rows_of(resumed) == rows_of(whole)
    assert losses(resumed) == losses(whole)


def test_metrics_change_no_bit(tmp_path: Path) -> None:
    for option in (False, "auto"):
        plain = train(tmp_path, LanguageModel(dropout=0.1), linear_cross_entropy=option)
        found = train(tmp_path, LanguageModel(dropout=0.1), linear_cross_entropy=option, log_token_metrics=True)
        assert losses(found) == losses(plain)
        assert not rows_of(plain)
        for one, other in zip(found.gradients, plain.gradients, strict=True):
            assert torch.equal(one, other)
        assert not found.model.head._forward_hooks


def test_any_module_with_a_cross_entropy_has_the_rows(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, Classifier(), classification(), max_steps=3, logging_steps=1, **BOTH)
    trainer.train()
    assert [set(row) for row in rows_of(trainer)] == [set(METRICS)] * 3


class OwnLoss(Trainer):
    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        logits, targets = outputs["logits"], inputs["labels"].clamp(min=0)
        loss = functional.nll_loss(logits.log_softmax(-1).flatten(0, 1), targets.flatten())
        return (loss, outputs) if return_outputs else loss


class Probabilities(OwnLoss):
    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(input_ids=inputs["input_ids"])
        targets = functional.one_hot(inputs["labels"].clamp(min=0), CLASSES).float()
        return functional.cross_entropy(outputs["logits"].flatten(0, 1), targets.flatten(0, 1))


def test_smoothed_targets_are_counted_at_their_place_alone(tmp_path: Path) -> None:
    """In the first optimizer step too, in which the smoothed loss is compared with one of shifted targets."""
    options: dict[str, Any] = {"log_token_metrics": True, "z_loss_weight": 1e-3, "learning_rate": 0.0}
    rows = []
    for epsilon in (0.0, 0.1):
        trainer = make_trainer(tmp_path / str(epsilon), Tagger(), tagging(8), label_smoothing_factor=epsilon, **options)
        trainer.train()
        rows.append([row for row in trainer.state.log_history if "loss" in row])
    for plain, smoothed in zip(*rows, strict=True):
        for name in ("mean_token_accuracy", "entropy", "perplexity", "z_loss"):
            assert smoothed[name] == pytest.approx(plain[name], rel=1e-6), name


def test_what_cannot_be_honoured_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedOption, match=r"log_token_metrics=True: a cross-entropy has targets that are prob"):
        train(tmp_path, LanguageModel(), Probabilities, log_token_metrics=True)

    def own_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return functional.nll_loss(outputs["logits"].log_softmax(-1).flatten(0, 1), labels.clamp(min=0).flatten())

    class WithoutLoss(LanguageModel):
        def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            return super().forward(input_ids)

    with pytest.raises(UnsupportedOption, match=r"z_loss_weight=0.1: the loss was computed without torch"):
        train(tmp_path, WithoutLoss(), compute_loss_func=own_loss, z_loss_weight=0.1)
    with pytest.raises(UnsupportedOption, match=r"log_token_metrics=True is not supported with regularizers"):
        TrainingArguments(str(tmp_path), log_token_metrics=True, regularizers=["sam"])
    with pytest.raises(UnsupportedOption, match=r"z_loss_weight=0.1 is not supported with loss_by_source='source'"):
        TrainingArguments(str(tmp_path), z_loss_weight=0.1, loss_by_source="source")
    with pytest.raises(ValueError, match=r"z_loss_weight=-1.0: give a weight of 0 or more"):
        TrainingArguments(str(tmp_path), z_loss_weight=-1.0)
    compiled = make_trainer(
        tmp_path, LanguageModel(), texts(), max_steps=1, torch_compile=True, torch_compile_backend="eager",
        log_token_metrics=True,
    )  # fmt: skip
    with pytest.raises(UnsupportedOption, match="compiled as a whole"):
        compiled.train()


@pytest.mark.parametrize("options", [{"log_token_metrics": True}, {"z_loss_weight": 0.1}], ids=str)
def test_a_training_step_that_computes_its_own_loss_is_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    class Own(Trainer):
        def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
            loss: Tensor = self.compute_loss(model, self._prepare_inputs(inputs))
            loss.backward()  # type: ignore[no-untyped-call]
            return loss.detach()

    trainer = make_trainer(tmp_path, Classifier(), classification(8), cls=Own, **options)
    with pytest.raises(UnsupportedOption, match=rf"{next(iter(options))}=.* would have no effect"):
        trainer.train()
