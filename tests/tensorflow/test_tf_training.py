"""TFTrainer on one device: kinds of models and data, events, records, evaluation, prediction."""

import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recorded_events import EVENTS_OF_TWO_STEPS, TWO_STEPS, Recorder
from tf_models import CLASSES, FEATURES, Linear, losses, make_data, make_model, make_trainer, values, weights

from paceline import EvalPrediction, TFTrainer, TFTrainingArguments, TrainerCallback, UnsupportedOption
from paceline.core.journal import JOURNAL_FILE, read_rows
from paceline.core.streaming import Accuracy
from paceline.tensorflow.data.sources import make_source
from paceline.tensorflow.data.transformations import is_batched
from paceline.tensorflow.framework import keras, tf

DATA = make_data(18)


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def test_a_run_with_everything(tmp_path: Path) -> None:
    """Events in the order of the torch side's test, records, state, metrics, and no tracing from step to step."""
    recorder = Recorder()
    trainer = make_trainer(
        tmp_path,
        make_model(),
        make_data(16),
        **TWO_STEPS,
        eval_dataset=make_data(4, seed=1),
        compute_metrics=accuracy,
        callbacks=[recorder],
        report_to="jsonl",
        load_best_model_at_end=True,
    )
    output = trainer.train()
    assert recorder.events == EVENTS_OF_TWO_STEPS
    assert output.global_step == 2
    assert set(trainer.state.log_history[0]) == {"loss", "grad_norm", "learning_rate", "epoch", "step"}
    assert set(values(trainer.state.log_history)[2]) == {"eval_accuracy", "eval_loss", "epoch", "step"}
    state = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["best_metric"] == trainer.state.log_history[2]["eval_loss"]
    assert [row.num_samples for row in read_rows(tmp_path / JOURNAL_FILE)] == [8, 8]
    assert json.loads((tmp_path / "run.json").read_text())["extra"]["strategy"] == "_DefaultDistributionStrategy"
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 4
    assert trainer.engine is not None
    assert (trainer.engine.num_traces, trainer.predictor.num_traces) == (3, 1)  # accumulate, clip, apply


def test_a_run_whose_process_changes_its_directory_stays_in_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Move(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                monkeypatch.chdir(tmp_path / "after")

    for name in ("before", "after"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "before")
    options = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "max_steps": 3}
    trainer = make_trainer(
        Path("out"), make_model(), make_data(12), eval_dataset=make_data(4, seed=1), callbacks=[Move()],
        load_best_model_at_end=True, report_to="jsonl", **options,
    )  # fmt: skip
    trainer.train()
    trainer.save_model()
    out = tmp_path / "before" / "out"
    assert list((tmp_path / "after").iterdir()) == []
    assert [(out / f"checkpoint-{step}").is_dir() for step in (1, 2, 3)] == [True, True, True]
    assert len(read_rows(out / JOURNAL_FILE)) == 3
    assert trainer.state.best_model_checkpoint == f"out/checkpoint-{trainer.state.best_global_step}"


def dataset_of_columns() -> Any:
    return pytest.importorskip("datasets").Dataset.from_dict({"x": DATA[0], "label": DATA[1], "text": ["?"] * 18})


class Batches(keras.utils.PyDataset):  # type: ignore[misc]
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return DATA[0][4 * index : 4 * index + 4], DATA[1][4 * index : 4 * index + 4]


class Shuffled(Batches):
    """Changes its order at the end of each epoch, as the documentation of Keras shows."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.order = np.random.default_rng(3), np.arange(18)

    def __getitem__(self, index: int) -> Any:
        return self.order[4 * index : 4 * index + 4]

    def on_epoch_end(self) -> None:
        self.generator.shuffle(self.order)


@pytest.mark.parametrize("seed", [None, 5])
def test_batches_that_change_their_order_are_resumed_in_it(seed: int | None, caplog: pytest.LogCaptureFixture) -> None:
    def source() -> Any:
        return make_source(Shuffled(), batch_size=4, seed=seed)

    whole = source()
    epochs = [[batch.tolist() for batch in whole.read(epoch)] for epoch in range(3)]
    assert epochs[1] != epochs[2]
    resumed = source()
    next(resumed.read(0))  # looked at before, as for the shapes of a batch
    assert [batch.tolist() for batch in resumed.read(2, 8, 2)] == epochs[2][2:]
    resumed.warn_of_order()
    assert "Shuffled has on_epoch_end" in caplog.text
    caplog.clear()
    make_source(Batches(), batch_size=4, seed=seed).warn_of_order()
    assert not caplog.text


def samples() -> Iterator[Any]:
    return iter([{"x": x, "label": int(y)} for x, y in zip(*DATA, strict=True)])


SOURCES: dict[str, Callable[[], Any]] = {
    "arrays": lambda: DATA,
    "dict": lambda: {"x": DATA[0], "labels": DATA[1]},
    "list": lambda: list(samples()),
    "tensors": lambda: tf.data.Dataset.from_tensor_slices(DATA),
    "tensor dicts": lambda: tf.data.Dataset.from_tensor_slices({"x": DATA[0], "labels": DATA[1]}),
    "table": dataset_of_columns,
    "table as tensors": lambda: dataset_of_columns().to_tf_dataset(columns="x", label_cols="label"),
    "batches": lambda: Batches(),
    "generator": lambda: samples,
}


@pytest.mark.slow
def test_every_kind_of_data_gives_the_same_run(tmp_path: Path) -> None:
    """In the order in which it lies; the last batch has 2 of 4 samples, and evaluation sees each sample once."""
    found: dict[str, Any] = {}
    for number, (name, make) in enumerate(SOURCES.items()):
        trainer = make_trainer(
            tmp_path / str(number),
            Linear(),
            make(),
            max_steps=7,
            train_sampling_strategy="sequential",
            per_device_eval_batch_size=4,
        )
        trainer.train()
        predicted = trainer.predict(make())
        assert predicted.predictions.shape == (18, CLASSES)
        assert np.array_equal(predicted.label_ids, DATA[1])
        found[name] = (losses(trainer), trainer.evaluate(make())["eval_loss"], weights(trainer.model))
    for name, (run_losses, eval_loss, final) in found.items():
        assert run_losses == found["arrays"][0], name
        assert eval_loss == found["arrays"][1], name
        assert np.array_equal(final, found["arrays"][2]), name


@pytest.mark.slow
def test_batches_are_found_whatever_was_done_to_them(tmp_path: Path) -> None:
    """Made into batches once more, each would count as one sample."""
    samples = tf.data.Dataset.from_tensor_slices(make_data(16))
    batches, table = samples.batch(4), dataset_of_columns()
    batched = [
        batches.map(lambda x, y: (x, y)),
        batches.shuffle(4).repeat(2).cache().prefetch(1),
        samples.padded_batch(4).filter(lambda x, y: True).take(2).shard(2, 0),
        samples.batch(4, num_parallel_calls=2).map(lambda x, y: (x, y), num_parallel_calls=2),
        tf.data.Dataset.zip((samples.map(lambda x, y: x).batch(4), samples.map(lambda x, y: y).batch(4))),
        tf.data.Dataset.sample_from_datasets([batches, batches], seed=0),
        samples.batch(2).batch(2).skip(1),
        samples.bucket_by_sequence_length(lambda x, y: tf.shape(x)[0], [3], [2, 2]),
        table.to_tf_dataset(batch_size=4, columns="x", label_cols="label"),
        table.to_tf_dataset(batch_size=4, columns="x", label_cols="label", shuffle=True),
    ]
    assert [is_batched(data) for data in batched] == [True] * len(batched)
    with pytest.raises(ValueError, match="holds batches"):
        make_trainer(tmp_path, Linear(), batched[1]).train()
    with pytest.raises(ValueError, match="holds batches"):
        make_trainer(tmp_path, Linear(), None).evaluate(batched[0])
    tokens = tf.data.Dataset.from_tensor_slices(np.arange(60) % 7)
    single = [
        batches.map(lambda x, y: (x, y)).unbatch().shuffle(4),
        batches.flat_map(lambda x, y: tf.data.Dataset.from_tensor_slices((x, y))),
        tf.data.Dataset.sample_from_datasets([samples, samples], seed=0),
        table.to_tf_dataset(columns="x", label_cols="label", shuffle=True),
        tokens.batch(9, drop_remainder=True).map(lambda row: (row[:-1], row[1:])).shuffle(4),  # sequences
    ]
    assert [is_batched(data) for data in single] == [False] * len(single)


def test_a_collator_is_called_on_the_rows_of_arrays_or_refused(tmp_path: Path) -> None:
    """As on a list of the same samples."""

    def shift(samples: list[Any]) -> Any:
        return np.stack([x + 1 for x, _ in samples]), np.array([y for _, y in samples])

    def shift_x(samples: list[Any]) -> Any:
        x, y = ([each[name] for each in samples] for name in ("x", "labels"))
        return {"x": np.stack(x) + 1, "labels": np.array(y)}

    def train(number: int, data: Any, collator: Any, **options: Any) -> list[float]:
        trainer = make_trainer(tmp_path / str(number), Linear(), data, data_collator=collator, **options)
        trainer.train()
        return losses(trainer)

    columns = {"x": DATA[0], "labels": DATA[1]}
    listed = train(0, list(zip(*DATA, strict=True)), shift)
    assert train(1, DATA, shift) == listed
    assert train(2, columns, shift_x) == listed
    assert train(3, (DATA[0] + 1, DATA[1]), None) == listed
    for data in (tf.data.Dataset.from_tensor_slices(DATA), Batches()):
        with pytest.raises(UnsupportedOption, match="data_collator=shift is not supported with a"):
            train(4, data, shift)
        with pytest.raises(UnsupportedOption, match="data_collator=shift is not supported with a"):
            train(4, DATA, shift, eval_dataset={"one": DATA, "other": data}, eval_strategy="epoch")
    with pytest.raises(UnsupportedOption, match="dataloader_drop_last=True is not supported with a Batches"):
        train(4, Batches(), None, dataloader_drop_last=True)


def test_the_loss_of_an_evaluation_is_the_mean_over_samples(tmp_path: Path) -> None:
    model = make_model()
    metric = Accuracy(confidence=None)
    trainer = make_trainer(tmp_path, model, None, per_device_eval_batch_size=4, compute_metrics=metric)
    expected = keras.losses.sparse_categorical_crossentropy(DATA[1], model(DATA[0]), from_logits=True)
    metrics = trainer.evaluate(DATA)
    assert metrics["eval_loss"] == pytest.approx(float(np.mean(expected)), rel=1e-6)
    assert metrics["eval_accuracy"] == (np.argmax(model(DATA[0]), -1) == DATA[1]).mean()
    both = trainer.evaluate({"a": DATA, "b": make_data(6)})
    assert both["eval_a_loss"] == metrics["eval_loss"]
    assert "eval_b_loss" in both
    assert trainer.predict(DATA[0]).label_ids is None


class TakesLabels(tf.Module):  # type: ignore[misc]
    """A module that makes its own loss, a mean over its targets, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = tf.Variable(tf.random.stateless_normal([FEATURES, CLASSES], [1, 2]))

    def __call__(self, inputs: Any, labels: Any = None, training: bool = False) -> Any:
        logits = tf.matmul(inputs, self.weight)
        if labels is None:
            return {"logits": logits}
        per_target = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.maximum(labels, 0), logits)
        counted = tf.cast(labels != -100, tf.float32)
        return {"loss": tf.reduce_sum(per_target * counted) / tf.reduce_sum(counted), "logits": logits}


@pytest.mark.slow
def test_any_split_of_targets_gives_one_gradient(tmp_path: Path) -> None:
    """Some labels are -100: with a mean over the targets, and with the default loss, accumulation changes nothing."""
    x = np.random.default_rng(0).normal(size=(8, 5, FEATURES)).astype(np.float32)
    y = np.random.default_rng(1).integers(0, CLASSES, (8, 5))
    y[0, 1:] = y[3, 2:] = -100
    final = {}
    for kind, make in {"own": TakesLabels, "default": Linear}.items():
        for accumulation in (1, 4):
            trainer = make_trainer(
                tmp_path / f"{kind}{accumulation}",
                make(),
                (x, y),
                optim="sgd",
                gradient_accumulation_steps=accumulation,
                per_device_train_batch_size=8 // accumulation,
                num_train_epochs=2,
            )
            trainer.train()
            final[kind, accumulation] = (weights(trainer.model), losses(trainer), trainer.evaluate((x, y))["eval_loss"])
    for kind in ("own", "default"):
        for one, four in zip(final[kind, 1], final[kind, 4], strict=True):
            assert np.allclose(one, four, atol=1e-6)


@pytest.mark.slow
def test_losses_of_ones_own(tmp_path: Path) -> None:
    """By compile, by a function, by an override: all the same."""
    found = []
    for number in range(4):
        model, options = make_model(), {}
        if number == 1:
            model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        if number == 2:
            options["compute_loss_func"] = lambda outputs, labels: tf.reduce_mean(
                keras.losses.sparse_categorical_crossentropy(labels, outputs, from_logits=True)
            )
        if number == 3:
            options["kind"] = OwnLoss
        trainer = make_trainer(tmp_path / str(number), model, DATA, **options)
        trainer.train()
        found.append(losses(trainer))
    assert np.allclose(found[1:], found[0], rtol=1e-5)


@pytest.mark.parametrize("end", ["name", "function", "layer", "activation"])
def test_probabilities_are_no_logits(tmp_path: Path, end: str) -> None:
    """However a model says that its outputs are probabilities, its loss is that of the logits under them."""
    model = make_model()
    expected = make_trainer(tmp_path, model, None).evaluate(DATA)["eval_loss"]
    if end in ("name", "function"):
        model.layers[-1].activation = keras.activations.get("softmax") if end == "name" else tf.nn.softmax
        model = keras.Sequential([keras.Input((FEATURES,)), *model.layers])
    else:
        model.add(keras.layers.Softmax() if end == "layer" else keras.layers.Activation(tf.nn.softmax))
    assert np.allclose(model(DATA[0]).numpy().sum(-1), 1)
    assert make_trainer(tmp_path, model, None).evaluate(DATA)["eval_loss"] == pytest.approx(expected, abs=1e-6)


class OwnLoss(TFTrainer):
    def run_model(self, features: Any, labels: Any, training: bool) -> tuple[Any, Any]:
        logits = self.model(features, training=training)
        return keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True), logits


def test_an_own_training_step_is_what_runs(tmp_path: Path) -> None:
    """As scripts for the reference write it: the sum of the losses over the number of labels."""

    class Own(TFTrainer):
        def training_step(self, features: Any, labels: Any, nb_instances_in_global_batch: Any) -> Any:
            with tf.GradientTape() as tape:
                loss, _ = self.run_model(features, labels, True)
                scaled = tf.reduce_sum(loss) / tf.cast(nb_instances_in_global_batch, loss.dtype)
            return tape.gradient(scaled, [v.value for v in self.model.trainable_variables])

    first = make_trainer(tmp_path / "a", make_model(), DATA, optim="sgd")
    second = make_trainer(tmp_path / "b", make_model(), DATA, optim="sgd", kind=Own)
    first.train()
    second.train()
    assert np.allclose(weights(first.model), weights(second.model), atol=1e-6)


class OwnUpdate(TFTrainer):
    num_calls = 0

    def apply_gradients(self, features: Any, labels: Any, nb_instances_in_global_batch: Any) -> Any:
        self.num_calls += 1
        return super().apply_gradients(features, labels, nb_instances_in_global_batch)


def test_an_own_update_is_called_or_refused(tmp_path: Path) -> None:
    """A method that computes the whole optimizer step is refused when the step is computed in parts."""
    whole = make_trainer(tmp_path, make_model(), DATA, kind=OwnUpdate, max_steps=2)
    whole.train()
    assert isinstance(whole, OwnUpdate)
    assert whole.num_calls == 1
    for options, reason in (
        ({"gradient_accumulation_steps": 2}, "2 micro-batches"),
        ({"callbacks": [Recorder()]}, "a callback on on_substep_end"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True"),
    ):
        trainer = make_trainer(tmp_path, make_model(), DATA, kind=OwnUpdate, **options)
        with pytest.raises(UnsupportedOption, match=rf"^apply_gradients of this Trainer .*{reason}.*training_step"):
            trainer.train()
    patched = make_trainer(tmp_path, make_model(), DATA, gradient_accumulation_steps=2)

    def distributed_training_steps(batch: Any) -> Any:
        raise AssertionError

    patched.distributed_training_steps = distributed_training_steps  # type: ignore[method-assign]
    with pytest.raises(UnsupportedOption, match=r"^distributed_training_steps of this Trainer"):
        patched.train()


def test_an_update_without_a_target_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    x, y = make_data(8)
    trainer = make_trainer(tmp_path, make_model(), (x, np.full_like(y, -100)))
    before = weights(trainer.model)
    trainer.train()
    assert np.array_equal(weights(trainer.model), before)
    assert "Every target of this optimizer step is ignored" in caplog.text
    assert losses(trainer) == []


def test_non_finite_updates(tmp_path: Path) -> None:
    x, y = make_data(12)
    x[5] = np.inf
    options: dict[str, Any] = {"train_sampling_strategy": "sequential"}
    trainer = make_trainer(tmp_path / "skip", make_model(), (x, y), nonfinite_policy="skip", **options)
    trainer.train()
    assert np.isfinite(weights(trainer.model)).all()
    trainer = make_trainer(tmp_path / "raise", make_model(), (x, y), nonfinite_policy="raise", **options)
    with pytest.raises(ArithmeticError, match="Not finite at step 2"):
        trainer.train()


def test_a_skipped_step_is_one_of_the_schedule(tmp_path: Path) -> None:
    """Also if the run is resumed after it."""
    x, y = make_data(24)
    x[5] = np.inf
    options: dict[str, Any] = {"train_sampling_strategy": "sequential", "nonfinite_policy": "skip"}
    options |= {"learning_rate": 0.6, "save_strategy": "steps", "save_steps": 3}
    for resume in (False, str(tmp_path / "checkpoint-3")):
        trainer = make_trainer(tmp_path, Linear(), (x, y), **options)
        trainer.train(resume_from_checkpoint=resume)
        rates = [row.learning_rate for row in read_rows(tmp_path / JOURNAL_FILE)]
        assert rates == pytest.approx([0.6, 0.5, 0.4, 0.3, 0.2, 0.1])
        assert int(np.asarray(trainer.optimizer.iterations)) == 5


def test_a_run_rewinds_before_what_is_not_finite(tmp_path: Path) -> None:
    """As if the bad samples had never been there: the same weights, and the samples on record."""
    x, y = make_data(24)
    good = np.r_[:8, 12:24]
    x[9] = np.inf
    options: dict[str, Any] = {
        "train_sampling_strategy": "sequential",
        "nonfinite_policy": "rollback",
        "lr_scheduler_type": "constant",
        "logging_steps": 2,
    }
    trainer = make_trainer(tmp_path / "bad", make_model(dropout=0.3), (x, y), **options)
    trainer.train()
    other = make_trainer(tmp_path / "good", make_model(dropout=0.3), (x[good], y[good]), **options)
    other.train()
    assert np.array_equal(weights(trainer.model), weights(other.model))
    assert trainer.state.global_step == other.state.global_step == 5
    skipped = json.loads((tmp_path / "bad" / "skipped_samples.jsonl").read_text())
    assert skipped["sample_ids"] == [8, 9, 10, 11]


def test_metrics_batch_by_batch(tmp_path: Path) -> None:
    seen: list[tuple[int, bool]] = []

    def metrics(prediction: Any, compute_result: bool) -> dict[str, float]:
        seen.append((len(prediction.label_ids), compute_result))
        return {"samples": float(sum(size for size, _ in seen))} if compute_result else {}

    options: dict[str, Any] = {"batch_eval_metrics": True, "per_device_eval_batch_size": 4}
    trainer = make_trainer(tmp_path, make_model(), DATA, compute_metrics=metrics, **options)
    found = trainer.evaluate(make_data(10))
    assert seen == [(4, False), (4, False), (2, True)]
    assert found["eval_samples"] == 10
    with pytest.raises(ValueError, match="give it a parameter `compute_result`"):
        make_trainer(tmp_path, make_model(), DATA, compute_metrics=lambda prediction: {}, **options)


@pytest.mark.slow
def test_tokens_are_counted(tmp_path: Path) -> None:
    tokens = np.arange(24, dtype=np.int64).reshape(6, 4) % 5
    columns = {"input_ids": tokens, "attention_mask": (tokens > 0).astype(np.int64), "labels": tokens}

    class Bigrams(tf.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.table = tf.Variable(tf.zeros([5, 5]))

        def __call__(self, input_ids: Any, attention_mask: Any) -> Any:
            return tf.gather(self.table, input_ids)

    for how, expected in (("all", 24), ("non_padding", int((tokens > 0).sum()))):
        trainer = make_trainer(tmp_path / how, Bigrams(), columns, include_num_input_tokens_seen=how)
        trainer.train()
        assert trainer.state.num_input_tokens_seen == expected
        assert trainer.state.log_history[-1]["num_input_tokens_seen"] == expected
        assert trainer.state.log_history[0]["train_tokens_per_second"] > 0
    with pytest.raises(ValueError, match="the features hold no 'input_ids'"):
        make_trainer(tmp_path / "none", make_model(), DATA, include_num_input_tokens_seen="all").train()


class Crowded(TFTrainer):
    """Has memory for two samples at a time."""

    def run_model(self, features: Any, labels: Any, training: bool) -> Any:
        def check(size: Any) -> Any:
            if training and int(size) > 2:
                raise MemoryError("no room")  # TensorFlow makes a ResourceExhaustedError of it
            return size

        size = tf.py_function(check, [tf.shape(features)[0]], tf.int32)
        with tf.control_dependencies([size]):
            return super().run_model(tf.identity(features), labels, training)


def test_a_step_that_may_be_partly_applied_is_not_retried(tmp_path: Path) -> None:
    class HalfWay(keras.optimizers.SGD):
        def apply_gradients(self, pairs: Any, **options: Any) -> Any:
            with tf.control_dependencies([tf.py_function(self.fail, [], [])]):
                return super().apply_gradients(pairs, **options)

        def fail(self) -> None:
            raise MemoryError("no room")

    trainer = make_trainer(
        tmp_path, make_model(), make_data(16), auto_find_batch_size=True, optimizers=(HalfWay(0.1), None)
    )
    with pytest.raises(tf.errors.ResourceExhaustedError) as caught:
        trainer.train()
    assert any("some of them may be updated already" in note for note in caught.value.__notes__)


def test_the_norm_of_gradients_is_logged_without_clipping_too(tmp_path: Path) -> None:
    norms = []
    for largest in (0.0, 1e9):
        trainer = make_trainer(tmp_path, make_model(), make_data(8), max_grad_norm=largest, max_steps=2)
        trainer.train(resume_from_checkpoint=False)
        norms.append([row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row])
    assert len(norms[0]) == 2
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


@pytest.mark.slow
def test_smaller_micro_batches_where_memory_runs_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, Any] = {"per_device_train_batch_size": 8, "optim": "sgd", "max_grad_norm": 0.0}
    plain = make_trainer(tmp_path / "plain", make_model(), make_data(20), **options)
    plain.train()
    options["auto_find_batch_size"] = True
    crowded = make_trainer(tmp_path / "crowded", make_model(), make_data(20), kind=Crowded, **options)
    crowded.train()
    assert caplog.text.count("Out of memory: continuing with") == 2
    assert crowded.state.train_batch_size == 2
    assert losses(crowded) == pytest.approx(losses(plain), abs=1e-5)
    assert np.allclose(weights(crowded.model), weights(plain.model), atol=1e-5)


def mean_over_some(outputs: Any, labels: Any) -> Any:
    each = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, outputs)
    kept = tf.cast(labels > 0, each.dtype)
    return tf.reduce_sum(each * kept) / tf.reduce_sum(kept)


def test_a_loss_that_couples_samples_is_told_when_memory_runs_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first optimizer step is whole, and cannot be made of parts."""
    options: dict[str, Any] = {"per_device_train_batch_size": 8, "optim": "sgd", "compute_loss_func": mean_over_some}
    trainer = make_trainer(
        tmp_path, make_model(), make_data(20), kind=Crowded, auto_find_batch_size=True, max_steps=1, **options
    )
    trainer.train()
    assert caplog.text.count("mean_over_some couples the samples of a batch") == 1


@pytest.mark.parametrize("seed", [None, 0])
def test_a_position_within_tf_data_is_one_of_samples(seed: int | None) -> None:
    """Also with another batch size than the samples before it were read with."""
    data = tf.data.Dataset.from_tensor_slices(np.arange(18))
    whole = [int(row) for batch in make_source(data, batch_size=5, seed=seed).read(1) for row in batch]
    source = make_source(data, batch_size=4, seed=seed)
    rest = [batch.numpy().tolist() for batch in source.read(1, 10, source.place(10, 2))]
    assert [row for batch in rest for row in batch] == whole[10:]
    assert [len(batch) for batch in rest] == [4, 4]


@pytest.mark.slow
def test_samples_of_similar_length_together(tmp_path: Path) -> None:
    """Less padding, each sample once, also where a run was stopped in the middle of an epoch."""
    choice = np.random.default_rng(0)
    rows = [choice.integers(1, 9, int(length)) for length in choice.integers(1, 40, 32)]
    data = [({"input_ids": row}, int(row[0] > 4)) for row in rows]
    widths: list[int] = []

    def pad(samples: list[Any]) -> Any:
        width = max(len(features["input_ids"]) for features, _ in samples)
        widths.append(width * len(samples))
        filled = [np.pad(features["input_ids"], (0, width - len(features["input_ids"]))) for features, _ in samples]
        return {"input_ids": np.stack(filled)}, np.array([label for _, label in samples])

    def make() -> Any:
        keras.utils.set_random_seed(0)
        inputs = keras.Input((None,), dtype="int32", name="input_ids")
        hidden = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(10, 4)(inputs))
        return keras.Model({"input_ids": inputs}, keras.layers.Dense(2)(hidden))

    padded = {}
    for strategy in ("random", "group_by_length"):
        widths.clear()
        options: dict[str, Any] = {"train_sampling_strategy": strategy, "data_collator": pad, "num_train_epochs": 2}
        options |= {"save_strategy": "steps", "save_steps": 5}
        whole = make_trainer(tmp_path / strategy, make(), data, **options)
        whole.train()
        padded[strategy] = sum(widths)
    assert padded["group_by_length"] < 0.9 * padded["random"]
    order = whole._source(data, 4, seed=42, by_length=True).sample_ids(1, 0, 32)
    assert sorted(order) == list(range(32))
    assert len(rows[order[0]]) == max(map(len, rows))
    shutil.copytree(tmp_path / strategy / "checkpoint-5", tmp_path / "rest" / "checkpoint-5")
    rest = make_trainer(tmp_path / "rest", make(), data, **options)
    rest.train()
    assert losses(rest) == pytest.approx(losses(whole), abs=1e-6)
    # not to the bit: which width is compiled as a number, and which as an open one, depends on the run's first batch
    assert np.allclose(weights(rest.model), weights(whole.model), atol=1e-6)
    with pytest.raises(ValueError, match="'group_by_length' needs samples of their own lengths"):
        make_trainer(tmp_path, make_model(), DATA, train_sampling_strategy="group_by_length").train()


@pytest.mark.slow
def test_labels_in_a_column_and_in_small_types(tmp_path: Path) -> None:
    """As image datasets and Keras' losses have them; 156 is -100 of a type that has no sign."""
    x, y = DATA[0], DATA[1]
    found = []
    for labels in (y, y[:, None], y.astype(np.uint8), y.astype(np.int8)):
        trainer = make_trainer(tmp_path, make_model(), (x, labels), eval_dataset=(x, labels))
        trainer.train()
        found.append([*losses(trainer), trainer.evaluate()["eval_loss"]])
    assert found == [found[0]] * 4
    model = Linear(outputs=200)
    trainer = make_trainer(tmp_path, model, (x[:4], np.full(4, 156, np.uint8)))
    trainer.train()
    assert losses(trainer) == pytest.approx([math.log(200)])


@pytest.mark.slow
def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    args = TFTrainingArguments(str(tmp_path))
    with pytest.raises(ValueError, match="`model` or `model_init`"):
        TFTrainer(args=args)
    with pytest.raises(TypeError, match="a TFTrainingArguments is needed"):
        TFTrainer(make_model(), object())  # type: ignore[arg-type]
    batched = tf.data.Dataset.from_tensor_slices(DATA).batch(4).prefetch(1)
    with pytest.raises(ValueError, match="holds batches"):
        make_trainer(tmp_path, make_model(), batched).train()
    with pytest.raises(ValueError, match=r"no labels"):
        make_trainer(tmp_path, make_model(), DATA[0]).train()
    with pytest.raises(ValueError, match="differ in their number of rows"):
        make_trainer(tmp_path, make_model(), (DATA[0], DATA[1][:3])).train()
    with pytest.raises(ValueError, match=r"No default loss for outputs of shape .*line \d+"):
        make_trainer(tmp_path, make_model(), (DATA[0], DATA[0])).train()
    with pytest.raises(ValueError, match="No default loss"):  # one column and seven would be stretched to each other
        make_trainer(tmp_path, Linear(outputs=1), (DATA[0], DATA[0][:, :7])).train()
    with pytest.raises(ValueError, match="A label is 7, and the model tells 3 classes apart: labels lie from 0 to 2"):
        make_trainer(tmp_path, make_model(), (DATA[0], DATA[1] + 7 * (DATA[1] == 0))).train()
    with pytest.raises(TypeError, match=r"`model` is function.*paceline\.Trainer"):
        TFTrainer(accuracy, args)
    with pytest.raises(ValueError, match="max_steps has to be specified"):
        make_trainer(tmp_path, make_model(), samples).train()
    with pytest.raises(ValueError, match=r"tpu_name='no-such-tpu': this TPU cannot be reached.*leave tpu_name out"):
        _ = TFTrainingArguments(str(tmp_path), tpu_name="no-such-tpu").strategy


def test_a_strategy_and_an_optimizer_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"strategy='mirrored' is a str; expected an object such as tf\.distribute"):
        make_trainer(tmp_path, Linear(), DATA, strategy="mirrored")
    with pytest.raises(ValueError, match=r"optim='lomo' is not supported with TensorFlow: choose one of auto, .*"):
        TFTrainingArguments(str(tmp_path), optim="lomo")
    args = TFTrainingArguments(str(tmp_path))
    args.optim = "lomo"
    with pytest.raises(UnsupportedOption, match="optim='lomo'"):
        TFTrainer(Linear(), args)


def test_data_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    x, y = DATA
    lists = {"x": x.tolist(), "labels": y.tolist()}
    trainer = make_trainer(tmp_path, Linear(), lists, eval_dataset=lists)
    for call in (trainer.train, trainer.evaluate, lambda: trainer.predict({"x": x, "labels": y.tolist()})):
        with pytest.raises(TypeError, match=r"A dict with Python lists \(.*'labels'\) .*np\.asarray.*from_dict"):
            call()
    with pytest.raises(TypeError, match="A dict cannot be read as data"):
        trainer.predict({"a": object()})
    samples = [dict(zip(("x", "labels"), row, strict=True)) for row in zip(x, y, strict=True)]
    several = make_trainer(tmp_path, Linear(), DATA, eval_dataset={"a": samples, "b": (x[:6], y[:6])})
    assert several.evaluate("b")["eval_loss"] == several.evaluate()["eval_b_loss"]
    with pytest.raises(ValueError, match=r"eval_dataset='c': the TFTrainer has no .* name, but those of 'a', 'b'"):
        several.evaluate("c")
    for alone in (DATA, {"x": x, "labels": y}, None):
        with pytest.raises(ValueError, match=r"eval_dataset='x': .* but no dict of them\."):
            make_trainer(tmp_path, Linear(), DATA, eval_dataset=alone).evaluate("x")


def leaves_out(labels: Any, outputs: Any) -> Any:
    """A loss of one's own."""
    chosen = labels != -100
    return tf.where(chosen, keras.losses.sparse_categorical_crossentropy(tf.where(chosen, labels, 0), outputs, True), 0)


@pytest.mark.slow
def test_labels_that_a_compiled_loss_counts(tmp_path: Path) -> None:
    """-100 is left out by the default loss, and by one that was told to."""
    x, y = DATA[0], DATA[1].copy()
    y[::3] = -100
    counting = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    for loss in (counting, "sparse_categorical_crossentropy"):
        model = make_model()
        model.compile(loss=loss)
        trainer = make_trainer(tmp_path, model, (x, y))
        for call in (trainer.train, lambda trainer=trainer: trainer.evaluate((x, y))):
            with pytest.raises(ValueError, match=r"A label is -100, and the loss counts it: .*ignore_class=-100"):
                call()
    model = make_model()
    model.compile(loss=leaves_out)
    make_trainer(tmp_path, model, (x, y)).train()
    model = make_model()
    model.compile(loss="mse")  # which asks nothing of labels, and would give some number
    with pytest.raises(ValueError, match="A label is -100"):
        make_trainer(tmp_path, model, (x, np.repeat(y[:, None], CLASSES, 1))).train()
    model, plain = make_model(), make_model()
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-100))
    runs = [make_trainer(tmp_path, each, (x, y)) for each in (model, plain)]
    for run in runs:
        run.train()
    assert losses(runs[0]) == pytest.approx(losses(runs[1]), abs=1e-6)


def test_a_tpu_that_is_not_there_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that is named is an error; a machine that only looks like one with a TPU computes on what else it has."""
    monkeypatch.setenv("TPU_NAME", "no-such-tpu")
    with pytest.raises(ValueError, match=r"TPU_NAME='no-such-tpu': this TPU cannot be reached.*unset the variable"):
        _ = TFTrainingArguments(str(tmp_path)).strategy
    assert TFTrainingArguments(str(tmp_path), use_cpu=True).strategy.num_replicas_in_sync == 1
    monkeypatch.delenv("TPU_NAME")
    monkeypatch.setenv("TPU_WORKER_ID", "0")
    assert type(TFTrainingArguments(str(tmp_path)).strategy).__name__ == "OneDeviceStrategy"
    assert "TPU_WORKER_ID announces a TPU, which does not start" in caplog.text
