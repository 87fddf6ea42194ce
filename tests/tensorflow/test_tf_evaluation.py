"""Options of evaluations with TensorFlow: when results move to the host, in which precision, what memory they took."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tf_models import CLASSES, FEATURES, Linear, losses, make_data, make_model, make_trainer, weights

from paceline import (
    EarlyStoppingCallback,
    EvalPrediction,
    TFTrainer,
    TFTrainingArguments,
    TrainerCallback,
    UnsupportedOption,
)
from paceline.core.streaming import Accuracy
from paceline.tensorflow.framework import keras, tf
from paceline.tensorflow.parts import evaluation_samples

DATA = make_data(10)


def test_results_move_to_the_host_together(tmp_path: Path) -> None:
    """As many batches as eval_accumulation_steps, and the rest with the last; in their order."""
    found = []
    for steps, expected in ((None, "crcrcrcrcr"), (2, "ccrrccrrcr"), (8, "cccccrrrrr")):
        trainer = make_trainer(tmp_path, Linear(), DATA, eval_accumulation_steps=steps, per_device_eval_batch_size=2)
        calls: list[str] = []
        predictor = trainer.predictor

        class Heard:
            def __call__(self, *given: Any, calls: list[str] = calls, predictor: Any = predictor) -> Any:
                calls.append("c")
                return predictor(*given)

            def read(self, *given: Any, calls: list[str] = calls, predictor: Any = predictor) -> Any:
                calls.append("r")
                return predictor.read(*given)

            def __getattr__(self, name: str, predictor: Any = predictor) -> Any:
                return getattr(predictor, name)

        trainer.predictor = Heard()  # type: ignore[assignment]
        output = trainer.predict(DATA)
        assert "".join(calls) == expected
        assert np.array_equal(output.label_ids, DATA[1])
        found.append((output.predictions, output.metrics["test_loss"]))
    assert all(np.array_equal(rows, found[0][0]) and loss == found[0][1] for rows, loss in found)


def test_metrics_receive_the_loss_of_each_batch(tmp_path: Path) -> None:
    seen: list[EvalPrediction] = []

    def metric(prediction: EvalPrediction) -> dict[str, float]:
        seen.append(prediction)
        return {}

    model = make_model()
    options: dict[str, Any] = {"include_for_metrics": ["loss", "inputs"], "per_device_eval_batch_size": 4}
    trainer = make_trainer(tmp_path, model, None, compute_metrics=metric, **options)
    trainer.evaluate(DATA)
    expected = keras.losses.sparse_categorical_crossentropy(DATA[1], model(DATA[0]), from_logits=True).numpy()
    [found] = seen
    means = [expected[:4].mean()] * 4 + [expected[4:8].mean()] * 4 + [expected[8:].mean()] * 2
    assert found.losses == pytest.approx(np.array(means), rel=1e-5)
    assert np.array_equal(found.inputs, DATA[0])


@pytest.mark.parametrize("calls_each", [False, True])
def test_predict_returns_rows_whatever_the_metrics(tmp_path: Path, calls_each: bool) -> None:
    """Also if metrics are computed batch by batch, where an evaluation keeps none."""

    def metric(prediction: EvalPrediction, compute_result: bool) -> dict[str, float]:
        return {"last": float(compute_result)}

    options: dict[str, Any] = {
        "compute_metrics": metric if calls_each else Accuracy(),
        "batch_eval_metrics": calls_each,
    }
    trainer = make_trainer(tmp_path, Linear(), None, per_device_eval_batch_size=4, **options)
    output = trainer.predict(DATA)
    assert output.predictions.shape == (10, 3)
    assert np.array_equal(output.label_ids, DATA[1])
    assert ("test_last" if calls_each else "test_accuracy") in output.metrics
    assert trainer.predict(DATA[0]).predictions.shape == (10, 3)  # nothing to compare


class Seen(keras.layers.Layer):  # type: ignore[misc]
    """A layer with a metric of its own: the number of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = keras.metrics.Sum(name="seen")

    def call(self, x: Any) -> Any:
        self.seen.update_state(keras.ops.ones_like(x[:, 0]))
        return x


@pytest.mark.parametrize("has_two", [False, True])
def test_metrics_of_compile_are_left_out_without_labels(tmp_path: Path, has_two: bool) -> None:
    """They would be 0 once an evaluation with labels has created them. So would the losses of outputs."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    keras.utils.set_random_seed(0)
    inputs = keras.Input((FEATURES,))
    outputs = {name: keras.layers.Dense(CLASSES, name=name)(Seen()(inputs)) for name in ("a", "b")[: 1 + has_two]}
    model = keras.Model(inputs, outputs)
    model.compile(loss=dict.fromkeys(outputs, loss), metrics={"a": ["accuracy"]})
    data = DATA[0], dict.fromkeys(outputs, DATA[1])
    trainer = make_trainer(tmp_path, model, None, per_device_eval_batch_size=4)
    before = trainer.predict(DATA[0]).metrics
    with_labels = trainer.predict(data).metrics
    without = trainer.predict(DATA[0]).metrics
    names = {"test_a_accuracy", "test_a_loss", "test_b_loss"} if has_two else {"test_accuracy"}
    assert set(before) == set(without)
    assert names | {"test_loss"} == set(with_labels) - set(without)
    assert without["test_seen"] == len(DATA[0])
    assert trainer.predict(data).metrics["test_loss"] == with_labels["test_loss"]


class Differing(TFTrainer):
    """The mean over all entries while training, and the sum of each row in an evaluation."""

    def run_model(self, features: Any, labels: Any, training: bool) -> tuple[Any, Any]:
        outputs = self.model(features)
        labels = labels if labels.shape.rank == 2 else labels[:, None]
        losses = tf.where(labels == -100, 0.0, (tf.cast(labels, tf.float32) - outputs) ** 2)
        return (tf.reduce_mean(losses) if training else tf.reduce_sum(losses, 1)), outputs


def test_metrics_of_compile_without_a_loss(tmp_path: Path) -> None:
    """Beside the default loss they are computed; an own `run_model`, which computes none, leaves them out."""
    for name, kind in (("plain", TFTrainer), ("own", Differing)):
        model = make_model()
        model.compile(metrics=["accuracy"])
        found = make_trainer(tmp_path / name, model, None, kind=kind).evaluate(DATA)
        expected = float((np.asarray(model(DATA[0])).argmax(-1) == DATA[1]).mean())
        assert found.get("eval_accuracy") == (None if kind is Differing else pytest.approx(expected))


def test_the_unit_of_a_loss_is_that_of_the_evaluation(tmp_path: Path) -> None:
    """A training whose loss is a mean over targets leaves it as it was."""
    labels = np.array([[number % 3, 1, -100] for number in range(10)])
    trainer = make_trainer(tmp_path, Linear(), (DATA[0], labels), kind=Differing, learning_rate=0.0)
    before = trainer.evaluate((DATA[0], labels))["eval_loss"]
    assert before == pytest.approx((np.where(labels == -100, 0, labels) ** 2).sum() / 10)
    trainer.train()
    assert trainer.evaluate((DATA[0], labels))["eval_loss"] == before


def test_a_loss_among_the_metrics_goes_first(tmp_path: Path) -> None:
    """As with torch."""
    trainer = make_trainer(tmp_path, Linear(), None, compute_metrics=lambda prediction: {"loss": 7.0})
    assert trainer.evaluate(DATA)["eval_loss"] == 7.0


@pytest.mark.slow
def test_evaluations_in_16_bits(tmp_path: Path) -> None:
    """The training is as it was without; only the evaluation computes so."""
    runs = {}
    for name in ("full", "bf16_full_eval", "fp16_full_eval"):
        options = {} if name == "full" else {name: True}
        seen: list[Any] = []

        def accuracy(prediction: EvalPrediction, seen: list[Any] = seen) -> dict[str, float]:
            seen.append(prediction.predictions)
            return {}

        runs[name] = trainer = make_trainer(
            tmp_path, make_model(), DATA, eval_dataset=DATA, compute_metrics=accuracy, eval_strategy="epoch", **options
        )
        trainer.train()
        assert trainer.model.layers[0].dtype_policy.name == "float32"
        half = {"bf16_full_eval": tf.bfloat16, "fp16_full_eval": tf.float16}.get(name, tf.float32)
        rows = tf.constant(seen[0])
        assert np.array_equal(tf.cast(tf.cast(rows, half), rows.dtype), rows)
        assert trainer.evaluate()["eval_loss"] == pytest.approx(runs["full"].evaluate()["eval_loss"], abs=0.02)
        assert trainer.predictor.num_traces == runs["full"].predictor.num_traces
        assert losses(trainer) == losses(runs["full"])
        assert np.array_equal(weights(trainer.model), weights(runs["full"].model))
    with pytest.raises(ValueError, match=r"bf16_full_eval=True: a Linear computes in .* or leave bf16_full_eval out"):
        make_trainer(tmp_path, Linear(), DATA, bf16_full_eval=True).evaluate(DATA)
    with pytest.raises(ValueError, match="bf16_full_eval=True: a Linear computes in"):  # before the first update
        make_trainer(tmp_path, Linear(), DATA, eval_dataset=DATA, bf16_full_eval=True, eval_strategy="epoch").train()
    with pytest.raises(UnsupportedOption, match=r"bf16=True with fp16_full_eval=True.*leave fp16_full_eval out"):
        TFTrainingArguments(str(tmp_path), bf16=True, fp16_full_eval=True)
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        model = make_model()
    finally:
        keras.mixed_precision.set_global_policy("float32")
    with pytest.raises(ValueError, match="bf16_full_eval=True: the model was built under the policy 'mixed_float16'"):
        make_trainer(tmp_path, model, DATA, bf16_full_eval=True).evaluate(DATA)


def test_the_precision_of_an_evaluation_is_that_of_the_arguments_then(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, make_model(), DATA)
    full = trainer.predict(DATA).predictions
    trainer.args.bf16_full_eval = True
    short = trainer.predict(DATA).predictions
    traces = trainer.predictor.num_traces
    trainer.args.bf16_full_eval = False
    assert np.array_equal(trainer.predict(DATA).predictions, full)
    assert not np.array_equal(short, full)
    assert np.allclose(short, full, atol=0.05)
    assert trainer.predictor.num_traces == traces  # each is traced once


@pytest.mark.slow
def test_memory_of_each_stage(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, Linear(), DATA, eval_dataset=DATA, skip_memory_metrics=False)
    trained = trainer.train().metrics
    assert {"before_init_mem_cpu", "init_mem_cpu_alloc_delta", "train_mem_cpu_peaked_delta"} <= set(trained)
    assert set(trained) <= set(trainer.state.log_history[-1]) | {"step"}
    assert not any("gpu" in name for name in trained)
    assert trainer.evaluate()["eval_mem_cpu_peaked_delta"] >= 0
    assert "test_mem_cpu_alloc_delta" in trainer.predict(DATA).metrics
    plain = make_trainer(tmp_path, Linear(), DATA)
    assert not any("mem" in name for name in plain.train().metrics)


class Keeper(TrainerCallback):
    """The weights at each evaluation."""

    def __init__(self) -> None:
        self.weights: dict[int, Any] = {}

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.weights[state.global_step] = weights(kwargs["model"])


@pytest.mark.slow
@pytest.mark.parametrize("save_strategy", ["steps", "best"])
def test_early_stopping_ends_with_the_best_model(tmp_path: Path, save_strategy: str) -> None:
    """Two evaluations in a row that are no better than the second one end the run after the fourth."""
    scores, keeper = iter([0.5, 0.3, 0.4, 0.35, 0.1, 0.1]), Keeper()
    trainer = make_trainer(
        tmp_path,
        Linear(),
        DATA,
        eval_dataset=DATA,
        compute_metrics=lambda prediction: {"score": next(scores)},
        callbacks=[keeper, EarlyStoppingCallback(early_stopping_patience=2)],
        num_train_epochs=2,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy=save_strategy,
        save_steps=1,
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="score",
        greater_is_better=False,
    )
    output = trainer.train()
    assert output.global_step == trainer.state.global_step == max(keeper.weights) == 4
    assert trainer.state.max_steps == 6
    assert (trainer.state.best_metric, trainer.state.best_global_step) == (0.3, 2)
    assert Path(str(trainer.state.best_model_checkpoint)).name == "checkpoint-2"
    assert np.array_equal(weights(trainer.model), keeper.weights[2])
    assert not np.array_equal(keeper.weights[2], keeper.weights[4])
    with pytest.raises(ValueError, match="EarlyStoppingCallback needs evaluations on the way"):
        make_trainer(tmp_path / "none", Linear(), DATA, callbacks=[EarlyStoppingCallback()]).train()


@pytest.mark.slow
def test_the_first_evaluation_is_part_of_the_remaining_time(tmp_path: Path) -> None:
    """Its samples are counted, in all forms of data; `callbacks.speed` makes a time of them."""
    arrays, rows = make_data(10), [{"x": x, "labels": y} for x, y in zip(*make_data(6), strict=True)]
    forms: list[tuple[Any, int | None]] = [
        (arrays, 10),
        (tf.data.Dataset.from_tensor_slices(arrays), 10),
        (tf.data.Dataset.from_tensor_slices(arrays).filter(lambda x, y: True), None),
        ({"first": arrays, "second": rows}, 16),
    ]
    for data, expected in forms:
        assert evaluation_samples(data) == expected
    trainer = make_trainer(tmp_path, make_model(), DATA, eval_dataset=arrays, eval_strategy="epoch")
    trainer.train()
    assert trainer.state.num_eval_samples == 10
