"""Whatever is evaluated or predicted, before training or during it, the weights come out as without, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import Tagger, make_trainer, tagging, weights
from torch import Tensor

from paceline import Trainer, TrainerCallback

RAGGED = [row for row in tagging(40) if 0 < int((row["labels"] != -100).sum()) < 7]
FULL = [{**row, "labels": row["input_ids"]} for row in RAGGED]  # which tell nothing of what their loss is a mean over


class TwoLosses(Tagger):
    """In evaluation its loss is a mean over something else than in training."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.per_sample = not self.training
        return super().forward(input_ids, labels)


class Evaluates(TrainerCallback):
    """Calls the Trainer's methods from inside the run."""

    trainer: Trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step in (1, 3):
            self.trainer.evaluate()
            self.trainer.predict(RAGGED[:5])


MODELS = {"targets": Tagger, "samples": lambda: Tagger(per_sample=True), "two": TwoLosses}
EVALUATED = {"ragged": RAGGED[16:], "full": FULL[16:], "empty": [{**RAGGED[0], "labels": torch.full((7,), -100)}]}


def make(folder: Path, model: str, train: Any, **options: Any) -> Trainer:
    defaults = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "per_device_eval_batch_size": 3}
    return make_trainer(folder, MODELS[model](), train, **{**defaults, "learning_rate": 0.05, **options})


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("evaluated", EVALUATED)
@pytest.mark.parametrize("first", ["ragged", "full"])
def test_an_evaluation_changes_nothing_of_what_follows(tmp_path: Path, model: str, evaluated: str, first: str) -> None:
    """Of the first update the loss can be told, or not before the third."""
    train = RAGGED[:20] if first == "ragged" else FULL[:8] + RAGGED[8:20]
    options = {"train_sampling_strategy": "sequential"}
    alone = make(tmp_path / "alone", model, train, **options)
    alone.train()

    callback = Evaluates()
    data = EVALUATED[evaluated]
    during = {"eval_dataset": data, "eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True}
    watched = make(tmp_path / "watched", model, train, callbacks=[callback], **during, **options)
    callback.trainer = watched
    watched.evaluate()
    watched.predict(data)
    watched.train()
    assert torch.equal(weights(watched.model), weights(alone.model))


@pytest.mark.parametrize("model", ["targets", "samples"])
def test_an_evaluation_of_a_new_trainer_is_that_of_a_trained_one(tmp_path: Path, model: str) -> None:
    """The same weights have the same `eval_loss`, whether training has told what the loss is a mean over or not."""
    trained = make(tmp_path, model, RAGGED[:20], eval_dataset=RAGGED[20:])
    trained.train()
    fresh = make(tmp_path, model, None, eval_dataset=RAGGED[20:])
    fresh.model.load_state_dict(trained.model.state_dict())
    expected = trained.evaluate()["eval_loss"]
    assert fresh.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)
    assert trained.evaluate()["eval_loss"] == expected
