"""An optimizer step uses the gradients of its own samples and of every trainable parameter, and no others."""

from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import Classifier, WithHead, classification, make_trainer, weights
from torch import Tensor, nn

from paceline import TrainerCallback

DATA = classification(32)
OPTIONS: dict[str, Any] = {"lr_scheduler_type": "constant", "train_sampling_strategy": "sequential"}


class FailsOnce(Classifier):
    """Raises in the second micro-batch of its first update."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        self.num_calls += torch.is_grad_enabled()  # not while it is looked at what the loss is a mean over
        if torch.is_grad_enabled() and self.num_calls == 2:
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


def new_head() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(8, 4)


class AddsHead(TrainerCallback):
    """Gives the model a head after `at` updates, and the optimizer its parameters `later` updates after that."""

    def __init__(self, at: int, later: int = 0) -> None:
        self.at, self.later = at, later
        self.gradients: list[Tensor] = []
        self.norms: list[Tensor] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == self.at:
            model.extra = new_head()
        if state.global_step == self.at + self.later:
            kwargs["optimizer"].add_param_group({"params": list(model.extra.parameters())})

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        gradients = [parameter.grad.detach() for parameter in model.parameters()]
        self.norms.append(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))))
        if state.global_step >= self.at + self.later:
            # of the two biases of the logits: equal, as they are only ever added
            self.gradients.append(torch.stack([model.second.bias.grad, model.extra.bias.grad]).clone())


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("later", [0, 2])
def test_parameters_added_in_training_are_cleared_and_clipped(tmp_path: Path, accumulation: int, later: int) -> None:
    added = AddsHead(1, later)
    trainer = make_trainer(
        tmp_path,
        WithHead(),
        DATA,
        callbacks=[added],
        max_grad_norm=0.1,
        max_steps=8,
        gradient_accumulation_steps=accumulation,
        **OPTIONS,
    )
    trainer.train()
    assert len(added.gradients) == 7 - later
    for main, extra in added.gradients:
        torch.testing.assert_close(main, extra)
    assert all(norm <= 0.1001 for norm in added.norms[1 + later :])


def test_parameters_beside_the_model_are_cleared(tmp_path: Path) -> None:
    """Of a loss that learns, say: the optimizer holds them, the model does not."""
    model, temperature = Classifier(), nn.Parameter(torch.ones(()))
    seen: list[float] = []

    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        seen.append(0.0 if temperature.grad is None else float(temperature.grad))
        return nn.functional.cross_entropy(outputs * temperature, labels)

    optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.1)
    options = {"compute_loss_func": loss, "optimizers": (optimizer, None)}
    make_trainer(tmp_path, model, DATA, **options, **OPTIONS).train()
    assert seen == [0.0] * 8
    assert temperature != 1
