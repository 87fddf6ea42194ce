"""Random splits of the same samples: equal first gradients, logged losses and weights after 20 updates."""

import itertools
import tempfile
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import slow_but
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from small_models import RecordGradient, Tagger, losses, make_trainer, tagging, weights
from torch import Tensor, nn
from torch.nn import functional

SAMPLES_PER_UPDATE = 12
NUM_UPDATES = 20
DATA = tagging(SAMPLES_PER_UPDATE * NUM_UPDATES)  # 0 to 7 targets each: some samples have none
Split = list[int]


def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def cut(splits: list[Split]) -> list[dict[str, Tensor]]:
    """Every update's twelve samples in micro-batches of the given sizes, in order."""
    batches, start = [], 0
    for split in splits:
        for size in split:
            batches.append(collate(DATA[start : start + size]))
            start += size
    return batches


class Given(RecordGradient):
    """Trains on batches as they are given."""

    batches: list[dict[str, Tensor]]

    def get_train_dataloader(self) -> Any:
        return self.batches


def loss_of(model: nn.Module, inputs: Any) -> tuple[Tensor, Any]:
    """The mean over targets, made by whoever overrides; the labels are taken out, as users do."""
    labels = inputs.pop("labels")
    outputs = model(**inputs, labels=labels)
    return functional.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten()), outputs


class GivenLoss(Given):
    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss, outputs = loss_of(model, inputs)
        return (loss, outputs) if return_outputs else loss


class OlderLoss(Given):
    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False) -> Any:  # type: ignore[override]
        loss, outputs = loss_of(model, inputs)
        return (loss, outputs) if return_outputs else loss


class OldestLoss(Given):
    def compute_loss(self, model: nn.Module, inputs: Any) -> Any:  # type: ignore[override]
        return loss_of(model, inputs)[0]


class LossBySuper(Given):
    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(model, inputs, *args, **kwargs)


class CountedLoss(Given):
    """Divides by the update's number of targets, where it is given one."""

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs, labels=labels)
        loss = summed(outputs, labels, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


class StepBySuper(Given):
    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        return super().training_step(model, inputs, num_items_in_batch)


class OlderStep(Given):
    def training_step(self, model: nn.Module, inputs: Any) -> Tensor:  # type: ignore[override]
        return super().training_step(model, inputs)


class OwnStep(Given):
    """Does its own backward, and so answers for its scaling."""

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        model.train()
        loss = self.compute_loss(model, self._prepare_inputs(inputs), num_items_in_batch=num_items_in_batch)
        self.strategy.backward(loss)
        return loss.detach()


def summed(outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
    loss = functional.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten(), reduction="sum")
    return loss / num_items_in_batch


def averaged(outputs: Any, labels: Tensor) -> Tensor:
    return functional.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten())


class TakesCount(Tagger):
    """Divides by the update's number of targets, as models of transformers do."""

    def forward(self, input_ids: Tensor, labels: Tensor, num_items_in_batch: Tensor | None = None) -> Any:
        outputs = super().forward(input_ids, labels)
        return (
            outputs if num_items_in_batch is None else {**outputs, "loss": summed(outputs, labels, num_items_in_batch)}
        )


class IgnoresCount(Tagger):
    """Says that it takes the number and does not use it, as some models of transformers do."""

    accepts_loss_kwargs = True

    def forward(self, input_ids: Tensor, labels: Tensor, **kwargs: Any) -> Any:
        return super().forward(input_ids, labels)


class MeanOverAll(Tagger):
    """The mean over all samples, those without a target counting as 0."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        outputs = super().forward(input_ids, labels)
        sums = functional.cross_entropy(outputs["logits"].mT, labels, reduction="none").sum(1)
        return {**outputs, "loss": (sums / (labels != -100).sum(1).clamp(min=1)).mean()}


PROTOCOLS: dict[str, dict[str, Any]] = {
    "a mean over targets": {},
    "shifted targets": {"model": partial(Tagger, shifted=True)},
    "compute_loss_func": {"compute_loss_func": summed},
    "compute_loss_func without a number": {"compute_loss_func": averaged},
    "a model that divides by the number": {"model": TakesCount},
    "a model that ignores the number": {"model": IgnoresCount},
    "overridden compute_loss": {"cls": GivenLoss},
    "overridden compute_loss, older": {"cls": OlderLoss},
    "overridden compute_loss, oldest": {"cls": OldestLoss},
    "overridden compute_loss, by super": {"cls": LossBySuper},
    "overridden compute_loss, with the number": {"cls": CountedLoss, "model": TakesCount},
    "overridden training_step": {"cls": StepBySuper},
    "overridden training_step, older": {"cls": OlderStep},
    "overridden training_step, own backward": {"cls": OwnStep, "model": TakesCount},
    "label smoothing": {"label_smoothing_factor": 0.2},
}
# what tells them from a mean over targets are micro-batches of several samples
BY_SAMPLES: dict[str, dict[str, Any]] = {
    "a mean over samples that have targets": {"model": partial(Tagger, per_sample=True)},
    "a mean over shifted samples": {"model": partial(Tagger, per_sample=True, shifted=True)},
    "a mean over all samples": {"model": MeanOverAll},
}
LONG = ["a mean over targets", "shifted targets", "compute_loss_func", "overridden compute_loss", "label smoothing"]


def run(splits: list[Split], protocol: str, dtype: torch.dtype, **more: Any) -> tuple[Tensor, list[float], Tensor]:
    """(first gradient, logged losses, final weights)."""
    options = {**{**PROTOCOLS, **BY_SAMPLES}[protocol], **more}
    model = options.pop("model", Tagger)().to(dtype)
    cls = options.pop("cls", Given)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(
            Path(folder),
            model,
            DATA,
            cls=cls,
            gradient_accumulation_steps=len(splits[0]),
            learning_rate=1e-2,
            optim="sgd",
            **options,
        )
        trainer.batches = cut(splits)
        trainer.train()
    return trainer.gradients[0], losses(trainer), weights(trainer.model)


@cache
def run_whole(num_updates: int, protocol: str, dtype: torch.dtype, **more: Any) -> tuple[Tensor, list[float], Tensor]:
    """Without accumulation: what every split must come to."""
    return run([[SAMPLES_PER_UPDATE]] * num_updates, protocol, dtype, **more)


@st.composite
def splits(draw: Any, num_updates: int) -> list[Split]:
    """Every update's samples in the same number of micro-batches, of any sizes."""
    parts = draw(st.integers(1, 6))
    found = []
    for _ in range(num_updates):
        edges = draw(st.sets(st.integers(1, SAMPLES_PER_UPDATE - 1), min_size=parts - 1, max_size=parts - 1))
        bounds = [0, *sorted(edges), SAMPLES_PER_UPDATE]
        found.append([right - left for left, right in itertools.pairwise(bounds)])
    return found


@pytest.mark.parametrize("protocol", PROTOCOLS)
@settings(max_examples=3, deadline=None)
@given(split=splits(1))
def test_the_first_gradient_in_double_precision(protocol: str, split: list[Split]) -> None:
    whole = run_whole(1, protocol, torch.float64)
    found = run(split, protocol, torch.float64)
    torch.testing.assert_close(found[0], whole[0], rtol=1e-10, atol=1e-13)
    assert found[1] == pytest.approx(whole[1], rel=1e-10)


def shows_samples(split: Split, shift: int) -> bool:
    """True if a micro-batch has samples with different numbers of targets, and one samples with and without any."""
    numbers = [int((sample["labels"][shift:] != -100).sum()) for sample in DATA[:SAMPLES_PER_UPDATE]]
    edges = [0, *itertools.accumulate(split)]
    parts = [set(numbers[start:end]) for start, end in itertools.pairwise(edges)]
    return any(len(part - {0}) > 1 for part in parts) and any(0 in part and len(part) > 1 for part in parts)


@pytest.mark.slow
@pytest.mark.parametrize("protocol", BY_SAMPLES)
@settings(max_examples=5, deadline=None)
@given(split=splits(1))
def test_the_first_gradient_of_a_mean_over_samples(protocol: str, split: list[Split]) -> None:
    assume(shows_samples(split[0], int("shifted" in protocol)))
    whole = run_whole(1, protocol, torch.float64)
    found = run(split, protocol, torch.float64)
    torch.testing.assert_close(found[0], whole[0], rtol=1e-10, atol=1e-13)
    assert found[1] == pytest.approx(whole[1], rel=1e-10)


@pytest.mark.parametrize("protocol", slow_but(LONG, PROTOCOLS))
@settings(max_examples=2, deadline=None)
@given(split=splits(1))
def test_the_first_gradient_in_half_precision_with_a_scaler(protocol: str, split: list[Split]) -> None:
    """Up to the rounding of 16 bits, which has 11 for the digits."""
    whole = run_whole(1, protocol, torch.float32, fp16=True)
    found = run(split, protocol, torch.float32, fp16=True)
    scale = float(whole[0].abs().max())
    assert 0 < scale < 10  # not that of the scaled loss
    torch.testing.assert_close(found[0], whole[0], rtol=0, atol=5e-3 * scale)
    assert found[1] == pytest.approx(whole[1], rel=5e-3)


@settings(max_examples=2, deadline=None)
@given(split=splits(NUM_UPDATES))
def test_twenty_updates_in_half_precision_with_a_scaler(split: list[Split]) -> None:
    whole = run_whole(NUM_UPDATES, "a mean over targets", torch.float32, fp16=True)
    found = run(split, "a mean over targets", torch.float32, fp16=True)
    torch.testing.assert_close(found[2], whole[2], rtol=0, atol=1e-3)
    assert found[1] == pytest.approx(whole[1], rel=5e-3)


@pytest.mark.slow
@pytest.mark.parametrize("protocol", LONG)
@settings(max_examples=4, deadline=None)
@given(split=splits(NUM_UPDATES))
def test_twenty_updates_in_single_precision(protocol: str, split: list[Split]) -> None:
    whole = run_whole(NUM_UPDATES, protocol, torch.float32)
    found = run(split, protocol, torch.float32)
    scale = float(whole[0].abs().max())
    torch.testing.assert_close(found[0], whole[0], rtol=1e-5, atol=1e-5 * scale)
    torch.testing.assert_close(found[2], whole[2], rtol=1e-4, atol=1e-5)
    assert found[1] == pytest.approx(whole[1], rel=1e-4)
