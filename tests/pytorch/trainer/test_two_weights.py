"""Optimizers with two sets of weights: checkpoints hold those to evaluate, and training goes on with the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import Classifier, classification, make_trainer, weights

from paceline import Trainer, TrainerCallback
from paceline.pytorch.checkpoint.fqn_state import read_any_weights


class Averaging(torch.optim.SGD):
    """The weights to evaluate are an average; the switch rounds, as that of the real ones does."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        self.mode = "train"

    def step(self, closure: Any = None) -> Any:
        assert self.mode == "train", "an update of the weights to evaluate"
        result = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                entry = self.state[parameter]
                entry["mean"] = 0.7 * entry.get("mean", parameter.detach()) + 0.3 * parameter.detach()
        return result

    def _shift(self, sign: float) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if "mean" in self.state[parameter]:
                    # by a third, and back by a third: what comes back is not what was there
                    entry = self.state[parameter]
                    entry.setdefault("third", (entry["mean"] - parameter.detach()) / 3)
                    parameter.data.add_(entry["third"], alpha=3.0 * sign)
                    if sign < 0:
                        del entry["third"]

    def eval(self) -> None:
        if self.mode == "train":
            self.mode = "eval"
            self._shift(1.0)

    def train(self) -> None:
        if self.mode == "eval":
            self.mode = "train"
            self._shift(-1.0)


class Notes(TrainerCallback):
    """Records the two sets of weights after each optimizer step."""

    reads_checkpoint = False

    def __init__(self) -> None:
        self.trained: dict[int, torch.Tensor] = {}
        self.averaged: dict[int, torch.Tensor] = {}
        self.stop = 0

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, optimizer: Any, **kwargs: Any) -> None:
        self.trained[state.global_step] = weights(model)
        means = [optimizer.state[parameter]["mean"].flatten() for parameter in model.parameters()]
        self.averaged[state.global_step] = torch.cat(means)
        control.should_training_stop |= state.global_step == self.stop


def make(folder: Path, notes: Notes, **options: Any) -> Trainer:
    model = Classifier()
    defaults = {"save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant"}
    optimizers = (Averaging(model.parameters(), lr=0.1), None)
    data = classification(32)
    return make_trainer(folder, model, data, callbacks=[notes], optimizers=optimizers, **{**defaults, **options})


def saved_in(folder: Path) -> torch.Tensor:
    state = read_any_weights(folder, has_part=True)
    assert state is not None
    return torch.cat([state[name].flatten() for name, _ in Classifier().named_parameters()])


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Notes:
    """A run that saves and evaluates nothing."""
    notes = Notes()
    make(tmp_path_factory.mktemp("alone"), notes, save_strategy="no").train()
    return notes


FORMS: dict[str, dict[str, Any]] = {
    "in the background": {},
    "at once": {"save_in_background": False},
    "sharded": {"checkpoint_format": "sharded"},
    "evaluated too": {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": classification(9, seed=2)},
}


@pytest.mark.parametrize("form", FORMS)
def test_a_checkpoint_holds_the_weights_to_evaluate(tmp_path: Path, alone: Notes, form: str) -> None:
    notes = Notes()
    trainer = make(tmp_path, notes, **FORMS[form])
    trainer.train()
    for step in (2, 4, 6, 8):
        torch.testing.assert_close(saved_in(tmp_path / f"checkpoint-{step}"), alone.averaged[step])
        assert torch.equal(notes.trained[step], alone.trained[step])
        assert not torch.allclose(alone.averaged[step], alone.trained[step], atol=1e-4)
    torch.testing.assert_close(weights(trainer.model), alone.averaged[8])  # in the end the model has those
    trainer.save_model(str(tmp_path / "model"))
    torch.testing.assert_close(saved_in(tmp_path / "model"), alone.averaged[8])


@pytest.mark.parametrize("form", FORMS)
def test_a_resume_trains_the_other_weights_on_to_the_bit(tmp_path: Path, alone: Notes, form: str) -> None:
    first, second = Notes(), Notes()
    first.stop = 4
    make(tmp_path, first, **FORMS[form]).train()
    make(tmp_path, second, **FORMS[form]).train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert list(second.trained) == [5, 6, 7, 8]
    for step in second.trained:
        assert torch.equal(second.trained[step], alone.trained[step]), step
        assert torch.equal(second.averaged[step], alone.averaged[step]), step


def test_the_best_model_is_the_one_that_was_evaluated(tmp_path: Path, alone: Notes) -> None:
    scores = iter([0.1, 0.9, 0.3, 0.2])
    options = {"eval_strategy": "steps", "eval_steps": 2, "eval_dataset": classification(9, seed=2)}
    options |= {"metric_for_best_model": "score", "greater_is_better": True, "load_best_model_at_end": True}
    trainer = make(tmp_path, Notes(), compute_metrics=lambda _: {"score": next(scores)}, **options)
    trainer.train()
    torch.testing.assert_close(weights(trainer.model), alone.averaged[4])
