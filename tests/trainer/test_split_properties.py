"""Random splits of the same samples: equal first gradients, logged losses and weights after 20 updates."""

import itertools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import Tagger, losses, make_trainer, tagging, weights
from torch import Tensor, nn
from torch.nn import functional

from paceline import Trainer

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


class Given(Trainer):
    """Trains on batches as they are given."""

    batches: list[dict[str, Tensor]]
    gradient: Tensor | None = None

    def get_train_dataloader(self) -> Any:
        return self.batches

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        optimizer = super().create_optimizer(model)
        optimizer.register_step_pre_hook(self.keep)
        return optimizer

    def keep(self, *_: Any) -> None:
        if self.gradient is None:
            self.gradient = torch.cat([p.grad.flatten() for p in self.model.parameters() if p.grad is not None])


class GivenLoss(Given):
    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs, labels=labels)
        loss = functional.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten())
        return (loss, outputs) if return_outputs else loss


def summed(outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
    loss = functional.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten(), reduction="sum")
    return loss / num_items_in_batch


PROTOCOLS: dict[str, dict[str, Any]] = {
    "a mean over targets": {},
    "shifted targets": {"model": {"shifted": True}},
    "compute_loss_func": {"compute_loss_func": summed},
    "overridden compute_loss": {"cls": GivenLoss},
    "label smoothing": {"label_smoothing_factor": 0.2},
}


def run(splits: list[Split], protocol: str, dtype: torch.dtype) -> tuple[Tensor, list[float], Tensor]:
    """(first gradient, logged losses, final weights)."""
    options = dict(PROTOCOLS[protocol])
    model = Tagger(**options.pop("model", {})).to(dtype)
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
    assert trainer.gradient is not None
    return trainer.gradient, losses(trainer), weights(trainer.model)


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
@settings(max_examples=8, deadline=None)
@given(split=splits(1))
def test_the_first_gradient_in_double_precision(protocol: str, split: list[Split]) -> None:
    whole = run([[SAMPLES_PER_UPDATE]], protocol, torch.float64)
    found = run(split, protocol, torch.float64)
    torch.testing.assert_close(found[0], whole[0], rtol=1e-10, atol=1e-13)
    assert found[1] == pytest.approx(whole[1], rel=1e-10)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@settings(max_examples=4, deadline=None)
@given(split=splits(NUM_UPDATES))
def test_twenty_updates_in_single_precision(protocol: str, split: list[Split]) -> None:
    whole = run([[SAMPLES_PER_UPDATE]] * NUM_UPDATES, protocol, torch.float32)
    found = run(split, protocol, torch.float32)
    scale = float(whole[0].abs().max())
    torch.testing.assert_close(found[0], whole[0], rtol=1e-5, atol=1e-5 * scale)
    torch.testing.assert_close(found[2], whole[2], rtol=1e-4, atol=1e-5)
    assert found[1] == pytest.approx(whole[1], rel=1e-4)
