"""Training phases with TensorFlow: what is trained and with which numbers, exact resume, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tf_models import make_data, make_trainer, values

from paceline import EarlyStoppingCallback, Phase, TFTrainer, TFTrainingArguments, TrainerCallback, UnsupportedOption
from paceline.tensorflow.framework import keras, plain, tf
from paceline.tensorflow.optim.phased import PhasedSchedule
from paceline.tensorflow.optim.schedules import StepSchedule, count_skipped

HEAD = {"freeze": ["first"]}


def make_model(dropout: float = 0.0) -> Any:
    keras.utils.set_random_seed(0)
    layers = [keras.Input((8,)), keras.layers.Dense(16, "relu", name="first"), keras.layers.Dense(3, name="second")]
    if dropout:
        layers.insert(2, keras.layers.Dropout(dropout))
    return keras.Sequential(layers)


def double(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    return 2 * keras.losses.sparse_categorical_crossentropy(labels, outputs, from_logits=True)


def collate(samples: list[Any]) -> Any:
    return np.stack([-x for x, _ in samples]), np.array([y for _, y in samples])


def make(folder: Path, phases: Any, callbacks: Any = (), model: Any = None, **options: Any) -> TFTrainer:
    defaults = {"max_steps": 10, "eval_dataset": make_data(12, 3), "weight_decay": 0.1}
    return make_trainer(
        folder, model or make_model(0.1), make_data(32), callbacks=list(callbacks), phases=phases, **defaults | options
    )


class Watch(TrainerCallback):
    """Keeps the weights, the optimizer's variables and the events; stops after a step."""

    def __init__(self, stop: int | None = None) -> None:
        self.stop = stop
        self.weights: list[list[Any]] = []
        self.slots: dict[str, Any] = {}
        self.events: list[tuple[str, int]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append(("begin", state.global_step))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append(("end", state.global_step))

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        self.weights.append(model.get_weights())
        self.slots = {each.path.partition("/")[2]: np.array(each) for each in optimizer.variables}
        control.should_training_stop |= state.global_step == self.stop


def is_same(first: list[Any], second: list[Any]) -> bool:
    return all(np.array_equal(one, other) for one, other in zip(first, second, strict=True))


def log_of(trainer: Any) -> list[Any]:
    return [row for row in values(trainer.state.log_history) if "loss" in row or "eval_loss" in row]


def reference(model: Any, rates: list[tuple[float, bool]], decay: float = 0.1) -> None:
    """AdamW, whose moments of a weight are as old as the steps that trained it: (rate, first layer is trained)."""
    x, y = make_data(32)
    state: dict[str, Any] = {}
    for step, (rate, is_whole) in enumerate(rates):
        batch = slice(4 * (step % 3), 4 * (step % 3) + 4)  # each phase starts a new epoch
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(double(model(x[batch]), y[batch])) / 2
        trained = model.trainable_variables[0 if is_whole else 2 :]
        gradients = tape.gradient(loss, [plain(each) for each in trained])
        for variable, gradient in zip(trained, gradients, strict=True):
            m, v, count = state.get(variable.path, (0.0, 0.0, 0))
            m, v, count = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2, count + 1
            state[variable.path] = m, v, count
            if "bias" not in variable.path:
                variable.assign(variable * (1 - rate * decay))
            variable.assign(variable - rate * (m / (1 - 0.9**count)) / (np.sqrt(v / (1 - 0.999**count)) + 1e-8))


def rates_of(base: float, is_whole: bool) -> list[tuple[float, bool]]:
    return [(base * (1 - step / 3), is_whole) for step in range(3)]


@pytest.mark.slow
def test_the_numbers_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    watch, model, by_hand = Watch(), make_model(), make_model()
    phases = [
        Phase("head", until="3 steps", **HEAD),
        Phase("all", until="3 steps", learning_rate=0.01),
        Phase("again", until="3 steps", freeze=["first/*"]),
    ]
    options = {"max_steps": -1, "train_sampling_strategy": "sequential", "num_train_epochs": 3, "max_grad_norm": 0}
    trainer = make(tmp_path, phases, [watch], model, **options)
    before = model.get_weights()
    trainer.train()
    reference(by_hand, [*rates_of(0.05, False), *rates_of(0.01, True), *rates_of(0.05, False)])
    for one, other in zip(model.get_weights(), by_hand.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=5e-5)
    assert is_same(before[:2], watch.weights[2][:2])
    assert is_same(watch.weights[5][:2], watch.weights[8][:2])
    assert [row["phase"] for row in log_of(trainer)] == ["head"] * 3 + ["all"] * 3 + ["again"] * 3
    assert trainer.state.phase is None
    assert "update_step" not in vars(trainer.optimizer)


def test_skipped_steps_are_counted_in_each_phase() -> None:
    schedule = PhasedSchedule(StepSchedule("linear", 0.6, 6))
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(schedule))
    count_skipped(optimizer, 2)
    assert float(schedule(1)) == pytest.approx(0.3)
    again = PhasedSchedule(StepSchedule("linear", 0.6, 6))
    again.load_state_dict(schedule.state_dict())
    assert float(again(1)) == pytest.approx(0.3)
    again.load_state_dict({"scale": 1.0})  # of an earlier version
    assert float(again(1)) == pytest.approx(0.5)
    schedule.begin(StepSchedule("linear", 0.4, 4), 3)
    assert float(schedule(4)) == pytest.approx(0.3)
    count_skipped(keras.optimizers.SGD(0.1), 1)  # has no schedule


def refused() -> Iterator[tuple[list[Phase], dict[str, Any], str]]:
    yield [Phase("a", layer_decay=0.5)], {}, r"phases\['a'\].layer_decay=0.5.*one learning rate"
    yield [Phase("a", learning_rate={"first": 1.0})], {}, "one learning rate"
    yield [Phase("a", freeze=["frist"])], {}, "'frist' matches no variable or layer of Sequential"
    yield [Phase("a", freeze=["*"])], {}, "freezes every variable"
    yield [Phase("a", until=5, **HEAD), Phase("b")], {"optim": "nadam"}, "Nadam, which has one state"
    yield [Phase("a")], {"optim": "schedule_free_adamw"}, "two sets of weights"
    yield [Phase("a", warmup_steps=2)], {"optimizers": (keras.optimizers.SGD(0.1), None)}, "warmup_steps=2.*your own"
    yield [Phase("a")], {"optimizers": (None, keras.optimizers.schedules.ExponentialDecay(1.0, 1, 1.0))}, "schedule of"
    yield [Phase("a", lr_scheduler_type="polynomial", lr_scheduler_kwargs={"powers": 2})], {}, r"'a'\]: the schedule"
    yield [Phase("a", until=12), Phase("b")], {}, "until=12 and max_steps=10"
    yield [Phase("a")], {"nonfinite_policy": "rollback"}, "rollback"


@pytest.mark.parametrize(("phases", "options", "message"), list(refused()))
def test_what_is_not_possible_is_refused_before_the_first_step(
    tmp_path: Path, phases: list[Phase], options: dict[str, Any], message: str
) -> None:
    watch = Watch()
    with pytest.raises(ValueError, match=message):
        make(tmp_path, phases, [watch], **options).train()
    assert not watch.weights


def test_a_schedule_of_ones_own_is_refused_beside_model_init_too(tmp_path: Path) -> None:
    pair = (None, keras.optimizers.schedules.ExponentialDecay(1.0, 1, 1.0))
    options: dict[str, Any] = {"phases": [Phase("a")], "model_init": make_model, "optimizers": pair, "max_steps": 2}
    with pytest.raises(UnsupportedOption, match="phases with a learning-rate schedule of your own"):
        make_trainer(tmp_path, None, make_data(8), **options).train()


def test_overridden_methods_that_would_decide_are_refused(tmp_path: Path) -> None:
    class Own(TFTrainer):
        def run_model(self, features: Any, labels: Any, training: bool) -> Any:
            return super().run_model(features, labels, training)

        def apply_gradients(self, features: Any, labels: Any, nb_instances_in_global_batch: Any) -> Any:
            return super().apply_gradients(features, labels, nb_instances_in_global_batch)

        def get_train_tfdataset(self) -> Any:
            return super().get_train_tfdataset()

    cases = {"run_model": {"loss": double}, "apply_gradients": HEAD, "get_train_tfdataset": {"data_collator": collate}}
    for name, settings in cases.items():
        with pytest.raises(UnsupportedOption, match=f"{name} is overridden"):
            make(tmp_path, [Phase("a", **settings)], kind=Own).train()


OTHER = list(zip(*make_data(20, 2), strict=True))
RICH = [
    Phase("head", until=3, **HEAD, warmup_steps=1, callbacks=[Watch]),
    Phase(
        "other",
        until="4 steps",
        learning_rate=0.01,
        lr_scheduler_type="cosine",
        weight_decay=0.3,
        train_dataset=OTHER,
        per_device_train_batch_size=3,
        gradient_accumulation_steps=2,
        loss=double,
        data_collator=collate,
    ),
    Phase("rest", freeze=["*"], train=["first/kernel", "*second/bias"]),
]


@pytest.mark.slow
def test_a_run_resumes_from_every_step_to_the_bit(tmp_path: Path) -> None:
    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "logging_steps": 2, "ema_decay": 0.5}
    whole = make(tmp_path / "whole", RICH, save_strategy="steps", save_steps=1, **options)
    whole.train()
    assert [row["phase"] for row in log_of(whole)] == ["head"] * 2 + ["other"] * 4 + ["rest"] * 4
    for step in (2, 3, 5, 7, 9):
        again = make(tmp_path / f"again-{step}", RICH, **options)
        again.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
        assert is_same(whole.model.get_weights(), again.model.get_weights()), step
        assert log_of(again) == log_of(whole), step
    states = [json.loads((tmp_path / f"whole/checkpoint-{step}/trainer_state.json").read_text()) for step in (3, 4, 8)]
    names = [each["stateful_callbacks"]["PhaseProgress"]["attributes"]["name"] for each in states]
    assert names == ["head", "other", "rest"]


@pytest.mark.slow
def test_epochs_the_best_model_and_another_run(tmp_path: Path) -> None:
    phases = [{"name": "head", "until": "1 epoch", **HEAD}, {"name": "all", "until": "plateau of eval_loss",
              "patience": 1, "max_steps": 8}, {"name": "more", "until": "0.5 epochs"}]  # fmt: skip
    options: dict[str, Any] = {"max_steps": -1, "num_train_epochs": 3, "eval_strategy": "steps", "eval_steps": 1}
    options |= {"save_strategy": "steps", "save_steps": 1, "load_best_model_at_end": True, "save_total_limit": 1}
    watch = Watch()
    stop = EarlyStoppingCallback(early_stopping_patience=100)
    trainer = make(tmp_path, phases, [watch, stop], **options)
    trainer.train(resume_from_checkpoint=False)
    best = trainer.state.best_global_step
    last = trainer.state.global_step
    assert {each.name for each in tmp_path.glob("checkpoint-*")} == {f"checkpoint-{best}", f"checkpoint-{last}"}
    assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.best_metric)
    with pytest.raises(UnsupportedOption, match="per_device_train_batch_size=4, and now it is 2"):
        make(tmp_path, phases, **options, per_device_train_batch_size=2).train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match="written in phase 3, 'more'"):
        make(tmp_path, [Phase("head", until=30)], max_steps=30).train(resume_from_checkpoint=True)
    trainer.args.phases = [Phase("one", until=2, **HEAD, loss=double, callbacks=[watch]), Phase("two", until=4)]
    trainer.train(resume_from_checkpoint=False)
    assert watch.events[-3:] == [("begin", 0), ("end", 2), ("end", 4)]  # of the phase, and of the run
    assert trainer.compute_loss_func is None


@pytest.mark.slow
def test_the_optimizer_of_compile_has_the_weight_decay_of_a_phase(tmp_path: Path) -> None:
    model = make_model()
    model.compile(keras.optimizers.SGD(0.0001), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    seen = []

    class Look(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
            seen.append(optimizer.weight_decay)

    phases = [Phase("one", until=2, **HEAD), Phase("two", weight_decay=0.2)]
    make(tmp_path, phases, [Look()], model, max_steps=3, weight_decay=0.0, learning_rate=5e-5).train()
    assert (seen, model.optimizer.weight_decay) == ([None, None, 0.2], None)


@pytest.mark.slow
def test_replicas_share_the_phases(tmp_path: Path, mirrored: Any) -> None:
    losses = []
    for name, strategy, size in (("one", None, 8), ("two", mirrored, 4)):
        with (strategy or tf.distribute.get_strategy()).scope():
            model = make_model()
        phases = [Phase("head", until=3, **HEAD), Phase("all", learning_rate=0.01)]
        options = {"strategy": strategy, "per_device_train_batch_size": size, "max_steps": 6}
        trainer = make(tmp_path / name, phases, [], model, **options)
        trainer.train()
        losses.append([row["loss"] for row in log_of(trainer)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_phases_are_read_from_a_file(tmp_path: Path) -> None:
    args = TFTrainingArguments(str(tmp_path), max_steps=5, phases='[{"name": "head", "until": 2, "freeze": ["first"]}, '
                               '{"name": "all"}]')  # fmt: skip
    assert args.phases == [Phase("head", until=2, freeze=["first"]), Phase("all")]
