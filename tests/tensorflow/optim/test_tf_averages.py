"""Averages of weights in TensorFlow: the formula, evaluation, checkpoints, resume, and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tf_models import make_data, make_model, make_trainer

from paceline import TFTrainingArguments, TrainerCallback, UnsupportedOption
from paceline.args.plan import resolve
from paceline.tensorflow.checkpoint.variables import CheckpointError
from paceline.tensorflow.framework import keras, tf
from paceline.tensorflow.optim.averages import make_averages

pytestmark = pytest.mark.slow

OPTIONS: dict[str, Any] = {
    "max_steps": 6, "save_strategy": "steps", "save_steps": 1, "logging_steps": 2, "learning_rate": 0.05,
    "eval_strategy": "steps", "eval_steps": 3,
}  # fmt: skip


class Watch(TrainerCallback):
    """Keeps the weights after each step, and the losses of the evaluations."""

    def __init__(self) -> None:
        self.weights: list[list[Any]] = []
        self.losses: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.weights.append(model.get_weights())

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        self.losses.append(metrics["eval_loss"])


def run(folder: Path, resume: Any = False, model: Any = None, **given: Any) -> tuple[Any, Watch]:
    watch = Watch()
    options = {**OPTIONS, "eval_dataset": make_data(20, 1), **given}
    trainer = make_trainer(folder, model or make_model(), make_data(60), callbacks=[watch], **options)
    trainer.train(resume_from_checkpoint=resume)
    return trainer, watch


def assert_same(left: list[Any], right: list[Any], tolerance: float = 0.0) -> None:
    for one, other in zip(left, right, strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


def test_the_average_is_evaluated_saved_and_kept_and_training_goes_on_without_it(tmp_path: Path) -> None:
    _, seen = run(tmp_path / "plain")
    for name, options in (
        ("ema", {"ema_decay": 0.5, "ema_warmup": False}),
        ("swa", {"swa_start": 3, "average_steps": 1}),
    ):
        trainer, watch = run(tmp_path / name, **options)
        for one, other in zip(seen.weights, watch.weights, strict=True):
            assert_same(one, other)  # training is as without it, to the bit
        expected = make_model().get_weights()
        for number, weights in enumerate(watch.weights, start=1):
            if name == "ema":
                expected = [(one + other) / 2 for one, other in zip(expected, weights, strict=True)]
            elif number >= 3:
                taken = watch.weights[2:number]
                expected = [np.mean(values, axis=0) for values in zip(*taken, strict=True)]
        assert_same(trainer.model.get_weights(), expected, 1e-6)
        assert trainer.evaluate()["eval_loss"] == pytest.approx(watch.losses[1], rel=1e-6)
        loaded = make_trainer(tmp_path / "loaded", make_model(seed=3), make_data(60))
        loaded._load_from_checkpoint(str(tmp_path / name / "checkpoint-6"))
        assert_same(loaded.model.get_weights(), trainer.model.get_weights())


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"ema_decay": 0.9}, {"swa_start": 3, "average_steps": 1}], ids=str)
def test_a_resume_is_exact(tmp_path: Path, options: dict[str, Any]) -> None:
    whole, _ = run(tmp_path / "whole", **options)
    for step in (2, 5):
        shutil.copytree(tmp_path / "whole" / f"checkpoint-{step}", tmp_path / str(step) / f"checkpoint-{step}")
        again, _ = run(tmp_path / str(step), resume=True, **options)
        assert_same(again.model.get_weights(), whole.model.get_weights())


def test_the_best_model_is_that_of_the_average(tmp_path: Path) -> None:
    trainer, watch = run(
        tmp_path, ema_decay=0.5, load_best_model_at_end=True, metric_for_best_model="loss", save_steps=3
    )
    assert trainer.state.best_metric == pytest.approx(min(watch.losses[:2]))
    assert trainer.evaluate()["eval_loss"] == pytest.approx(min(watch.losses[:2]), rel=1e-6)


def test_statistics_of_batch_norm_are_averaged_and_skipped_steps_are_not(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((8,)), keras.layers.BatchNormalization(), keras.layers.Dense(3)])
    first = model.get_weights()
    trainer, watch = run(tmp_path / "norm", model=model, ema_decay=0.5, ema_warmup=False, max_steps=1)
    assert_same(
        trainer.model.get_weights(),
        [(one + other) / 2 for one, other in zip(first, watch.weights[0], strict=True)],
        1e-6,
    )
    x, y = make_data(60)
    x[:] = np.nan
    skipped = make_trainer(
        tmp_path / "skipped", make_model(), (x, y), ema_decay=0.5, nonfinite_policy="skip", max_steps=2
    )
    skipped.train(resume_from_checkpoint=False)
    assert skipped.averages.num_updates == 0
    assert_same(skipped.model.get_weights(), make_model().get_weights())


def test_what_contradicts_an_average_is_refused_and_a_damaged_file_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    norm = keras.Sequential([keras.Input((8,)), keras.layers.BatchNormalization(), keras.layers.Dense(3)])
    with pytest.raises(UnsupportedOption, match=r"swa_start .*batch norm"):
        run(tmp_path, model=norm, swa_start=0.5)
    with pytest.raises(UnsupportedOption, match=r"ema_decay .*rollback"):
        run(tmp_path, ema_decay=0.5, nonfinite_policy="rollback")
    with pytest.raises(UnsupportedOption, match="averages the weights itself"):
        run(tmp_path, ema_decay=0.5, optimizers=(keras.optimizers.SGD(0.1, use_ema=True), None))
    for options in ({"swa_start": 2, "swa_lr": 1e-3}, {"ema_decay": 0.5, "average_device": "cpu"}):
        with pytest.raises(UnsupportedOption, match="not supported with TensorFlow"):
            TFTrainingArguments(str(tmp_path), **options)
    run(tmp_path / "run", ema_decay=0.5, max_steps=2)
    run(tmp_path / "run", resume=True, max_steps=3)
    assert "resumes from the average" in caplog.text
    (tmp_path / "run" / "checkpoint-2" / "manifest.json").unlink()
    (tmp_path / "run" / "checkpoint-2" / "averages.npz").write_bytes(b"PK\3\4" + b"\0" * 50)
    with pytest.raises(CheckpointError, match=r"averages.npz"):
        run(tmp_path / "run", resume=str(tmp_path / "run" / "checkpoint-2"), ema_decay=0.5)


@pytest.mark.slow
def test_replicas_have_one_average(tmp_path: Path, mirrored: Any) -> None:
    def make_mirrored() -> Any:
        keras.utils.set_random_seed(0)
        with mirrored.scope():
            return keras.Sequential([keras.Input((8,)), keras.layers.BatchNormalization(), keras.layers.Dense(3)])

    def run_mirrored(folder: Path, **options: Any) -> tuple[Any, Watch]:
        return run(folder, model=make_mirrored(), per_device_train_batch_size=2, **options)

    options = {"ema_decay": 0.5, "ema_warmup": False}
    _, seen = run_mirrored(tmp_path / "plain")
    trainer, watch = run_mirrored(tmp_path / "ema", **options)
    for one, other in zip(seen.weights, watch.weights, strict=True):
        assert_same(one, other)  # training is as without it, to the bit
    expected = make_mirrored().get_weights()
    for weights in watch.weights:
        expected = [(one + other) / 2 for one, other in zip(expected, weights, strict=True)]
    assert_same(trainer.model.get_weights(), expected, 1e-6)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(watch.losses[1], rel=1e-6)
    for variable in trainer.model.weights:
        one, other = mirrored.experimental_local_results(variable.value)
        assert_same([one.numpy()], [other.numpy()])
    for step in (2, 5):
        shutil.copytree(tmp_path / "ema" / f"checkpoint-{step}", tmp_path / str(step) / f"checkpoint-{step}")
        again, _ = run_mirrored(tmp_path / str(step), resume=True, **options)
        assert_same(again.model.get_weights(), trainer.model.get_weights())


def test_workers_and_statistics_of_each_replica_are_refused(mirrored: Any) -> None:
    with mirrored.scope():
        own = {"synchronization": tf.VariableSynchronization.ON_READ, "aggregation": tf.VariableAggregation.MEAN}
        moving = tf.Variable(1.0, trainable=False, name="moving_mean", **own)
    model = SimpleNamespace(trainable_variables=[tf.Variable(1.0)], non_trainable_variables=[moving])
    args = TFTrainingArguments("unused", ema_decay=0.5, max_steps=5)
    plan = resolve(args, micro_batches_per_epoch=5)
    for workers, message in ((2, "2 workers: train on one machine"), (1, "ON_READ")):
        with pytest.raises(UnsupportedOption, match=message):
            make_averages(args, plan, model, keras.optimizers.SGD(0.1), workers)
