"""Ensembles: the combined predictions, fitted weights, and members that do not fit together."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from small_models import Classifier, classification

from paceline import Trainer, TrainingArguments
from paceline.predictions.ensemble import ensemble_predict
from paceline.predictions.weights import log_softmax, logit_weights, mixture_weights

DATA = classification(30)
HELD_OUT = classification(200, seed=5)


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    args = TrainingArguments(str(tmp_path / "run"), report_to="none", disable_tqdm=True, use_cpu=True)
    return Trainer(Classifier(seed=9), args, compute_metrics=accuracy)


def probabilities(*seeds: int) -> torch.Tensor:
    rows = torch.stack([sample["x"] for sample in DATA])
    with torch.no_grad():
        return torch.stack([Classifier(seed=seed).logits(rows).softmax(-1) for seed in seeds])


def saved(trainer: Trainer, folder: Path, seed: int) -> str:
    own = Trainer(Classifier(seed=seed), trainer.args)
    own.save_model(str(folder))
    return str(folder)


def test_members_of_each_form(tmp_path: Path, trainer: Trainer) -> None:
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    model = trainer.model
    members = [Classifier(seed=1), lambda: Classifier(seed=2), saved(trainer, tmp_path / "three", 3)]
    output = ensemble_predict(members, DATA, trainer)
    expected = probabilities(1, 2, 3)
    np.testing.assert_allclose(output.predictions, expected.mean(0).log(), atol=1e-5)
    others = (expected.argmax(-1) != expected.mean(0).argmax(-1)).float().mean(0)
    np.testing.assert_allclose(output.disagreement, others, atol=1e-5)
    assert output.metrics["test_disagreement"] == pytest.approx(float(others.mean()), abs=1e-5)
    assert len(output.members) == 3
    assert trainer.model is model
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())


def test_a_teacher_is_put_back(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), max_steps=1, save_strategy="no", disable_tqdm=True, use_cpu=True)
    trainer = Trainer(Classifier(seed=9), args, train_dataset=DATA, teacher=Classifier(seed=8))
    ensemble_predict([Classifier(seed=1), Classifier(seed=2)], DATA, trainer)
    trainer.train()
    assert trainer.state.global_step == 1


def test_logits_and_votes(trainer: Trainer) -> None:
    members = [Classifier(seed=seed) for seed in (1, 2, 3)]
    expected = probabilities(1, 2, 3)
    output = ensemble_predict(members, DATA, trainer, combine="logits", weights=[1, 1, 2])
    mean = (expected.log() * torch.tensor([0.25, 0.25, 0.5])[:, None, None]).sum(0).log_softmax(-1)
    np.testing.assert_allclose(output.predictions, mean, atol=1e-5)
    votes = ensemble_predict(members, DATA, trainer, combine="vote").predictions
    np.testing.assert_allclose(votes.sum(-1), 1, atol=1e-6)


@pytest.mark.parametrize("combine", ["probabilities", "logits"])
def test_fitted_weights_prefer_the_better_member(trainer: Trainer, combine: str) -> None:
    good = Classifier(seed=1)
    fit = Trainer(good, trainer.args, train_dataset=HELD_OUT)
    fit.args.max_steps, fit.args.learning_rate, fit.args.save_strategy = 60, 0.05, "no"
    fit.train()
    members = [good, Classifier(seed=2)]
    output = ensemble_predict(members, DATA, trainer, combine=combine, weights="fit", held_out=HELD_OUT)
    assert output.weights[0] > 0.8
    assert sum(output.weights) == pytest.approx(1)


@pytest.mark.parametrize("seed", range(4))
def test_no_weights_of_the_simplex_are_better(seed: int) -> None:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 3, 80)
    logits = [rng.normal(size=(80, 3)) + scale * np.eye(3)[labels] for scale in (0.0, 1.0, 2.0)]
    logs = [log_softmax(each) for each in logits]
    rows = np.arange(80)

    def mixture_loss(weights: Any) -> float:
        return float(-np.log(sum(w * np.exp(each)[rows, labels] for w, each in zip(weights, logs, strict=True))).mean())

    def logit_loss(weights: Any) -> float:
        joint = log_softmax(sum(w * each for w, each in zip(weights, logs, strict=True)))
        return float(-joint[rows, labels].mean())

    mixed = mixture_weights(np.exp(np.stack([each[rows, labels] for each in logs], 1)))
    joined = logit_weights(logits, labels)
    for other in [*rng.dirichlet(np.ones(3), 200), *np.eye(3)]:
        assert mixture_loss(mixed) <= mixture_loss(other) + 1e-5
        assert logit_loss(joined) <= logit_loss(other) + 1e-5


def test_other_label_spaces_are_named(tmp_path: Path, trainer: Trainer) -> None:
    with pytest.raises(ValueError, match=r"member 1 .*label space"):
        ensemble_predict([Classifier(classes=4), Classifier(classes=5)], DATA, trainer)
    one, other = Classifier(), Classifier()
    one.config, other.config = SimpleNamespace(id2label={0: "a", 1: "b"}), SimpleNamespace(id2label={0: "b", 1: "a"})
    with pytest.raises(ValueError, match="members 0 and 1 differ"):
        ensemble_predict([one, other], DATA, trainer)
    wider = Trainer(Classifier(classes=5), trainer.args)
    wider.save_model(str(tmp_path / "wider"))
    with pytest.raises(ValueError, match="wider"):
        ensemble_predict([str(tmp_path / "wider")], DATA, trainer)
    assert trainer.predict(DATA).predictions.shape == (30, 4)


@pytest.mark.parametrize(
    ("members", "options", "message"),
    [
        ([], {}, "members"),
        ("runs/a", {}, "members"),
        (["no such folder"], {}, "no folder"),
        ([Classifier()], {"combine": "sum"}, "combine"),
        ([Classifier()], {"weights": "best"}, "weights"),
        ([Classifier()], {"weights": "fit"}, "held_out"),
        ([Classifier()], {"weights": "fit", "combine": "vote", "held_out": DATA}, "weights"),
        ([Classifier()], {"held_out": DATA}, "held_out"),
        ([Classifier()], {"weights": [1.0, 2.0]}, "weights"),
    ],
)
def test_wrong_arguments_are_refused(trainer: Trainer, members: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ensemble_predict(members, DATA, trainer, **options)
