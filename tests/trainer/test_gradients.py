"""What an update is made of: the gradients of its own samples, of every parameter that trains, and no others."""

from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import Classifier, classification, make_trainer, weights
from torch import Tensor, nn

DATA = classification(32)
OPTIONS: dict[str, Any] = {"lr_scheduler_type": "constant", "train_sampling_strategy": "sequential"}


class FailsOnce(Classifier):
    """Raises in the second micro-batch of its first update."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        self.num_calls += 1
        if self.num_calls == 2:
            raise RuntimeError("boom")
        return super().forward(x, labels)


def test_gradients_from_before_do_not_enter_the_first_update(tmp_path: Path) -> None:
    results = []
    for has_gradients in (False, True):
        model = Classifier()
        if has_gradients:
            (100 * weights_with_graph(model)).sum().backward()
        make_trainer(tmp_path, model, DATA, **OPTIONS).train()
        results.append(weights(model))
    assert torch.equal(*results)


def weights_with_graph(model: nn.Module) -> Tensor:
    return torch.cat([parameter.flatten() for parameter in model.parameters()])


def test_an_update_that_an_error_cut_short_leaves_no_gradient(tmp_path: Path) -> None:
    model, clean = FailsOnce(), Classifier()
    options = {**OPTIONS, "gradient_accumulation_steps": 2}
    trainer = make_trainer(tmp_path, model, DATA, **options)
    with pytest.raises(RuntimeError, match="boom"):
        trainer.train()
    assert all(parameter.grad is None for parameter in model.parameters())
    trainer.train()
    make_trainer(tmp_path, clean, DATA, **options).train()
    assert torch.equal(weights(model), weights(clean))
