"""The intervals of logs, evaluations and saves, and the end of training; the checkpoints that are kept and loaded."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_models import Classifier, classification, losses, make_trainer, weights

from paceline import TrainerCallback

DATA = classification(24)


def run(folder: Path, train: Any = DATA, resume: Any = None, **options: Any) -> Any:
    defaults: dict[str, Any] = {"eval_dataset": DATA[:8], "num_train_epochs": 2, "learning_rate": 1e-2}
    trainer = make_trainer(folder, Classifier(), train, **{**defaults, **options})
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def steps(trainer: Any, key: str) -> list[int]:
    return [row["step"] for row in trainer.state.log_history if key in row]


def saved(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("checkpoint-")) for path in folder.glob("checkpoint-*"))


# 24 samples in batches of 4: 6 updates an epoch, 12 in all
EVAL: list[tuple[dict[str, Any], list[int]]] = [
    ({"eval_strategy": "no"}, []),
    ({"eval_strategy": "epoch"}, [6, 12]),
    ({"eval_strategy": "steps", "eval_steps": 5}, [5, 10, 12]),
    ({"eval_strategy": "steps", "eval_steps": 4}, [4, 8, 12]),
    ({"eval_strategy": "steps", "eval_steps": 0.25}, [3, 6, 9, 12]),
    ({"eval_strategy": "steps", "eval_steps": 0.3}, [4, 8, 12]),
    ({"eval_strategy": "steps", "logging_steps": 7}, [7, 12]),  # eval_steps follows logging_steps
    ({"eval_strategy": "steps", "eval_steps": 4, "eval_delay": 6}, [8, 12]),
    ({"eval_strategy": "epoch", "eval_delay": 2}, [12]),
    ({"eval_strategy": "epoch", "eval_on_start": True}, [0, 6, 12]),
    ({"eval_strategy": "steps", "eval_steps": 6, "eval_on_start": True}, [0, 6, 12]),
    ({"eval_strategy": "epoch", "num_train_epochs": 1.5}, [6, 9]),
    ({"eval_strategy": "epoch", "num_train_epochs": 0.5}, [3]),
    ({"eval_strategy": "epoch", "max_steps": 8}, [6, 8]),
    ({"eval_strategy": "epoch", "max_steps": 15}, [6, 12, 15]),
    ({"eval_strategy": "steps", "eval_steps": 0.5, "max_steps": 20}, [10, 20]),
]


@pytest.mark.parametrize(("options", "expected"), EVAL, ids=str)
def test_when_it_evaluates(tmp_path: Path, options: dict[str, Any], expected: list[int]) -> None:
    trainer = run(tmp_path, **{"logging_strategy": "no", **options})
    assert steps(trainer, "eval_loss") == expected


SAVE: list[tuple[dict[str, Any], list[int]]] = [
    ({"save_strategy": "no"}, []),
    ({"save_strategy": "epoch"}, [6, 12]),
    ({"save_strategy": "steps", "save_steps": 5}, [5, 10, 12]),
    ({"save_strategy": "steps", "save_steps": 0.25}, [3, 6, 9, 12]),
    ({"save_strategy": "steps", "save_steps": 500}, [12]),
    ({"save_strategy": "steps", "save_steps": 5, "max_steps": 7}, [5, 7]),
    ({"save_strategy": "epoch", "num_train_epochs": 1.5}, [6, 9]),
]


@pytest.mark.parametrize(("options", "expected"), SAVE, ids=str)
def test_when_it_saves(tmp_path: Path, options: dict[str, Any], expected: list[int]) -> None:
    run(tmp_path, **options)
    assert saved(tmp_path) == expected


LOG: list[tuple[dict[str, Any], list[int]]] = [
    ({"logging_strategy": "no"}, []),
    ({"logging_strategy": "epoch"}, [6, 12]),
    ({"logging_steps": 5}, [5, 10]),
    ({"logging_steps": 0.5}, [6, 12]),
    ({"logging_steps": 5, "logging_first_step": True}, [1, 5, 10]),
]


@pytest.mark.parametrize(("options", "expected"), LOG, ids=str)
def test_when_it_logs(tmp_path: Path, options: dict[str, Any], expected: list[int]) -> None:
    assert steps(run(tmp_path, **options), "learning_rate") == expected


@pytest.mark.parametrize(
    ("options", "num_steps", "epoch"),
    [
        ({"num_train_epochs": 1.5}, 9, 1.5),
        ({"num_train_epochs": 0.1}, 1, 1 / 6),
        ({"num_train_epochs": 2, "gradient_accumulation_steps": 4}, 4, 2.0),
        ({"num_train_epochs": 1.5, "gradient_accumulation_steps": 4}, 3, 1 + 4 / 6),
        ({"max_steps": 15}, 15, 2.5),
        ({"max_steps": 3, "num_train_epochs": 50}, 3, 0.5),
        ({"num_train_epochs": 1, "per_device_train_batch_size": 100}, 1, 1.0),
        ({"num_train_epochs": 1, "per_device_train_batch_size": 7, "dataloader_drop_last": True}, 3, 1.0),
    ],
    ids=str,
)
def test_how_long_it_trains(tmp_path: Path, options: dict[str, Any], num_steps: int, epoch: float) -> None:
    trainer = run(tmp_path, **options)
    assert trainer.state.global_step == trainer.state.max_steps == num_steps
    assert trainer.state.epoch == pytest.approx(epoch)
    assert len(losses(trainer)) == num_steps
    assert trainer.lr_scheduler.last_epoch == num_steps
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0)


def metric_of(values: list[float]) -> Any:
    left = iter(values)
    return lambda prediction: {"score": next(left)}


BEST: list[tuple[list[float], bool | None, list[int], int]] = [
    ([0.5, 0.9, 0.7, 0.8], None, [3, 6], 6),  # higher is better, as for every name that does not end in "loss"
    ([0.5, 0.9, 0.7, 0.8], False, [3], 3),
    ([0.5, 0.5, 0.5, 0.6], True, [3, 12], 12),  # strictly
    ([0.9, 0.8, 0.7, 0.6], True, [3], 3),
]


@pytest.mark.parametrize(("values", "greater", "expected", "best"), BEST)
@pytest.mark.parametrize("load", [False, True])
def test_save_strategy_best(
    tmp_path: Path, values: list[float], greater: bool | None, expected: list[int], best: int, load: bool
) -> None:
    trainer = run(
        tmp_path,
        save_strategy="best",
        eval_strategy="steps",
        eval_steps=3,
        metric_for_best_model="score",
        greater_is_better=greater,
        load_best_model_at_end=load,
        compute_metrics=metric_of(values),
    )
    assert saved(tmp_path) == expected
    assert trainer.state.best_metric == values[best // 3 - 1]
    assert trainer.state.best_global_step == best
    assert trainer.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{best}")
    stored = load_file(tmp_path / f"checkpoint-{best}" / "model.safetensors")
    is_loaded = all(torch.equal(value, stored[name]) for name, value in trainer.model.state_dict().items())
    assert is_loaded == (load or best == 12)


@pytest.mark.parametrize(("limit", "expected"), [(1, [6, 12]), (2, [6, 12]), (3, [6, 9, 12]), (None, [3, 6, 9, 12])])
def test_best_and_newest_stay(tmp_path: Path, limit: int | None, expected: list[int]) -> None:
    trainer = run(
        tmp_path,
        save_strategy="steps",
        save_steps=3,
        eval_strategy="steps",
        eval_steps=3,
        save_total_limit=limit,
        load_best_model_at_end=True,
        metric_for_best_model="score",
        compute_metrics=metric_of([0.5, 0.9, 0.7, 0.8]),
    )
    found = saved(tmp_path)
    assert {6, 12} - {12 if limit == 1 else 0} <= set(found)
    if limit != 1:
        assert found == expected
    stored = load_file(tmp_path / "checkpoint-6" / "model.safetensors")
    assert all(torch.equal(value, stored[name]) for name, value in trainer.model.state_dict().items())


def test_the_oldest_go(tmp_path: Path) -> None:
    run(tmp_path, save_strategy="steps", save_steps=2, save_total_limit=2)
    assert saved(tmp_path) == [10, 12]


def test_an_evaluation_of_several_sets_decides_by_one(tmp_path: Path) -> None:
    trainer = run(
        tmp_path,
        eval_dataset={"near": DATA[:8], "far": DATA[8:]},
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="far_loss",
    )
    rows = [row["eval_far_loss"] for row in trainer.state.log_history if "eval_far_loss" in row]
    assert trainer.state.best_metric == min(rows)
    assert len([row for row in trainer.state.log_history if "eval_near_loss" in row]) == 2


def test_several_sets_without_a_metric_are_warned_of_before_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(KeyError):
        run(
            tmp_path,
            eval_dataset={"near": DATA[:8], "far": DATA[8:]},
            eval_strategy="epoch",
            save_strategy="epoch",
            load_best_model_at_end=True,
        )
    assert "metric_for_best_model='near_loss'" in caplog.text


def test_a_metric_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises((KeyError, ValueError), match=r"(?s)eval_accuracy.*eval_loss"):
        run(tmp_path, eval_strategy="epoch", save_strategy="epoch", metric_for_best_model="accuracy")


def test_only_the_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path, save_strategy="epoch", save_only_model=True)
    names = {path.name for path in (tmp_path / "checkpoint-6").iterdir()}
    assert {"model.safetensors", "trainer_state.json", "training_args.bin"} <= names
    assert not names & {"optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state.pth"}
    resumed = run(tmp_path, save_strategy="no", resume=str(tmp_path / "checkpoint-6"))
    assert resumed.state.global_step == 12
    assert "optimizer.pt" in caplog.text
    assert "random state" in caplog.text


def test_the_files_of_a_checkpoint(tmp_path: Path) -> None:
    run(tmp_path, save_strategy="epoch")
    names = {path.name for path in (tmp_path / "checkpoint-6").iterdir()}
    assert {
        "model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "training_args.bin",
    } <= names  # fmt: skip


def test_training_goes_on_with_a_longer_plan(tmp_path: Path) -> None:
    run(tmp_path, save_strategy="epoch", num_train_epochs=1, lr_scheduler_type="constant")
    longer = run(tmp_path, save_strategy="epoch", num_train_epochs=2, lr_scheduler_type="constant", resume=True)
    whole = run(tmp_path / "whole", num_train_epochs=2, lr_scheduler_type="constant")
    assert longer.state.global_step == 12
    assert torch.equal(weights(longer.model), weights(whole.model))


def test_a_callback_changes_the_pace(tmp_path: Path) -> None:
    """The counts in the state are live, and 0 means never."""

    class Faster(TrainerCallback):
        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            state.logging_steps, state.eval_steps, state.save_steps = 1, 2, 0

    trainer = run(
        tmp_path,
        callbacks=[Faster()],
        logging_steps=4,
        eval_strategy="steps",
        eval_steps=5,
        save_strategy="steps",
        save_steps=2,
    )
    assert steps(trainer, "learning_rate") == [4, 7, 8, 9, 10, 11, 12]
    assert steps(trainer, "eval_loss") == [5, 8, 10, 12]
    assert saved(tmp_path) == [2, 4, 6, 12]


def test_a_callback_makes_the_run_longer(tmp_path: Path) -> None:
    class Longer(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                state.max_steps = 20

    trainer = make_trainer(tmp_path, Classifier(), DATA, max_steps=4, callbacks=[Longer()])
    trainer.train()
    assert trainer.state.global_step == 20


def test_train_again_starts_anew_from_the_weights_there_are(tmp_path: Path) -> None:
    trainer = run(tmp_path, num_train_epochs=1)
    middle = weights(trainer.model).clone()
    trainer.train()
    assert trainer.state.global_step == 6
    assert len(losses(trainer)) == 6
    assert not torch.equal(middle, weights(trainer.model))
    assert trainer.state.log_history[0]["learning_rate"] == 1e-2
