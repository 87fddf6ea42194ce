"""Optimizers by their names, weight decay, schedules, and what the reference gave for loops of one's own."""

import inspect
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tf_models import Linear, make_data, make_model, make_trainer, values, weights

from paceline import AdamWeightDecay, GradientAccumulator, WarmUp, create_optimizer
from paceline.core.schedules import multiplier
from paceline.pytorch.optim.greedy import GreedyLR
from paceline.tensorflow.arguments import OPTIMIZERS
from paceline.tensorflow.framework import keras, tf
from paceline.tensorflow.optim.following import GreedySchedule, PlateauSchedule
from paceline.tensorflow.optim.optimizers import undecayed_variables
from paceline.tensorflow.optim.schedules import StepSchedule

DATA = make_data(8)
SCHEDULES: list[tuple[str, dict[str, Any]]] = [
    ("linear", {}),
    ("cosine", {"num_cycles": 1.5}),
    ("cosine_with_restarts", {"num_cycles": 2}),
    ("polynomial", {"power": 2.0}),
    ("constant", {}),
    ("constant_with_warmup", {}),
    ("inverse_sqrt", {}),
    ("cosine_with_min_lr", {"min_lr_rate": 0.1}),
    ("cosine_warmup_with_min_lr", {"min_lr": 1e-4}),
    ("warmup_stable_decay", {"num_decay_steps": 3}),
]


@pytest.mark.parametrize(("name", "options"), SCHEDULES)
def test_schedules_are_those_of_the_torch_side(name: str, options: dict[str, Any]) -> None:
    rate, steps, warmup = 0.02, 20, 4
    schedule = StepSchedule(name, rate, steps, warmup, options)
    factor = multiplier(name, num_warmup_steps=warmup, num_training_steps=steps, lr_init=rate, **options)
    found = [float(schedule(tf.constant(step, tf.int64))) for step in range(steps + 1)]
    assert np.allclose(found, [rate * factor(step) for step in range(steps + 1)], rtol=1e-6)
    again = StepSchedule.from_config(schedule.get_config())
    assert np.array_equal(again.rates, schedule.rates)
    assert float(schedule(10**6)) == found[-1]


@settings(max_examples=20)
@given(warmup=st.integers(0, 5), steps=st.integers(6, 30), power=st.sampled_from([0.5, 1.0, 2.0]))
def test_warm_up_and_decay(warmup: int, steps: int, power: float) -> None:
    """`create_optimizer`: a line up to the peak, a polynomial down to the share of it."""
    _, schedule = create_optimizer(0.1, steps, warmup, min_lr_ratio=0.1, power=power)
    found = [float(schedule(tf.constant(step))) for step in range(steps + 1)]
    expected = [
        0.1 * step / warmup if step < warmup else 0.01 + 0.09 * (1 - (step - warmup) / (steps - warmup)) ** power
        for step in range(steps + 1)
    ]
    assert np.allclose(found, expected, rtol=1e-5)


def test_create_optimizer_has_the_defaults_of_the_reference() -> None:
    defaults = {name: p.default for name, p in inspect.signature(create_optimizer).parameters.items()}
    assert list(defaults)[:3] == ["init_lr", "num_train_steps", "num_warmup_steps"]
    assert {name: value for name, value in defaults.items() if value is not inspect.Parameter.empty} == {
        "min_lr_ratio": 0.0, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-08, "adam_clipnorm": None,
        "adam_global_clipnorm": None, "weight_decay_rate": 0.0, "power": 1.0, "include_in_weight_decay": None,
    }  # fmt: skip
    assert type(create_optimizer(0.1, 10, 2)[0]) is keras.optimizers.Adam
    assert type(create_optimizer(0.1, 10, 2, weight_decay_rate=0.1)[0]) is AdamWeightDecay


def with_norm() -> Any:
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(4), keras.layers.LayerNormalization(), keras.layers.Dense(3)]
    )


def decayed_by(optimizer: Any) -> list[str]:
    """The variables that zero gradients shrink."""
    model = with_norm()
    for variable in model.trainable_variables:
        variable.assign(tf.ones_like(variable))
    before = [np.array(v.value.numpy()) for v in model.trainable_variables]
    optimizer.build(model.trainable_variables)
    optimizer.apply_gradients([(tf.zeros_like(v), v) for v in model.trainable_variables])
    after = [v.value.numpy() for v in model.trainable_variables]
    names = [re.sub(r"_\w+/|_\d+/", "/", "/".join(v.path.split("/")[-2:])) for v in model.trainable_variables]
    return [name for name, a, b in zip(names, before, after, strict=True) if not np.array_equal(a, b)]


def test_what_weight_decay_leaves_alone() -> None:
    model = with_norm()
    kept = [v.path.split("/")[-1] for v in undecayed_variables(model)]
    assert kept == ["bias", "gamma", "beta", "bias"]
    assert [v.name for v in undecayed_variables(Linear())] == ["bias:0"]


EVERYTHING = ["dense/kernel", "dense/bias", "layer/gamma", "layer/beta", "dense/kernel", "dense/bias"]
KERNELS = ["dense/kernel", "dense/kernel"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, EVERYTHING),  # as the reference: without lists everything is
        ({"include_in_weight_decay": ["bias"]}, EVERYTHING),
        ({"exclude_from_weight_decay": ["dense"]}, ["layer/gamma", "layer/beta"]),
        ({"exclude_from_weight_decay": ["layer_norm", "bias"]}, KERNELS),
        (
            {"exclude_from_weight_decay": ["layer_norm", "bias"], "include_in_weight_decay": ["gamma"]},
            ["dense/kernel", "layer/gamma", "dense/kernel"],
        ),
    ],
)
def test_adam_weight_decay_goes_by_its_lists(options: dict[str, Any], expected: list[str]) -> None:
    optimizer = AdamWeightDecay(0.1, weight_decay_rate=0.1, **options)
    assert decayed_by(optimizer) == expected
    assert decayed_by(AdamWeightDecay.from_config(optimizer.get_config())) == expected


def test_create_optimizer_leaves_out_norms_and_biases() -> None:
    assert decayed_by(create_optimizer(0.1, 10, 0, weight_decay_rate=0.1)[0]) == KERNELS
    including, _ = create_optimizer(0.1, 10, 0, weight_decay_rate=0.1, include_in_weight_decay=["beta"])
    assert decayed_by(including) == [KERNELS[0], "layer/beta", KERNELS[1]]
    spared = AdamWeightDecay(0.1, weight_decay_rate=0.1)
    spared.exclude_from_weight_decay(var_names=["kernel"])  # Keras' own way
    assert decayed_by(spared) == [name for name in EVERYTHING if "kernel" not in name]


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_name_trains(tmp_path: Path, name: str) -> None:
    trainer = make_trainer(tmp_path, make_model(), DATA, optim=name, weight_decay=0.01, num_train_epochs=4)
    before = weights(trainer.model)
    trainer.train()
    assert np.isfinite(weights(trainer.model)).all()
    assert not np.array_equal(weights(trainer.model), before)


@pytest.mark.slow
def test_options_of_optimizers(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, make_model(), DATA, optim="sgd", optim_args="momentum=0.9,nesterov=true")
    trainer.create_optimizer_and_scheduler(10)
    assert (trainer.optimizer.momentum, trainer.optimizer.nesterov) == (0.9, True)
    wrong = make_trainer(tmp_path, make_model(), DATA, optim="sgd", optim_args="momentun=0.9")
    with pytest.raises(TypeError, match="has no option 'momentun'"):
        wrong.create_optimizer_and_scheduler(10)
    mine = keras.optimizers.SGD(WarmUp(0.1, keras.optimizers.schedules.CosineDecay(0.1, 8), 2))
    given_one = make_trainer(tmp_path, make_model(), DATA, optimizers=(mine, None))
    given_one.train()
    assert given_one.optimizer is mine
    assert [row["learning_rate"] for row in given_one.state.log_history[:-1]] == pytest.approx([0.0, 0.05])
    poly = make_trainer(tmp_path, make_model(), DATA, poly_power=2.0, learning_rate=1.0)
    poly.create_optimizer_and_scheduler(4)
    assert np.allclose(poly.lr_scheduler.rates, [1, 0.75**2, 0.5**2, 0.25**2, 0])


def test_gradients_add_up_until_the_reset() -> None:
    accumulator = GradientAccumulator()
    with pytest.raises(ValueError, match="nothing was added"):
        _ = accumulator.gradients
    add = tf.function(lambda value: accumulator([value, None]))
    add(tf.constant([1.0, 2.0]))
    add(tf.constant([3.0, 4.0]))
    assert int(accumulator.step) == 2
    assert accumulator.gradients[0].numpy().tolist() == [4.0, 6.0]
    assert accumulator.gradients[1] is None
    with pytest.raises(ValueError, match="2 gradients before, 1 now"):
        accumulator([tf.constant([1.0])])
    accumulator.reset()
    assert (int(accumulator.step), accumulator.gradients[0].numpy().tolist()) == (0, [0.0, 0.0])


@given(
    observed=st.lists(st.floats(-5, 5), min_size=1, max_size=40),
    mode=st.sampled_from(["min", "max"]),
    threshold_mode=st.sampled_from(["rel", "abs"]),
    patience=st.integers(0, 3),
    cooldown=st.integers(0, 2),
    min_lr=st.sampled_from([0.0, 0.2]),
)
def test_the_plateau_is_that_of_torch(observed: list[float], **options: Any) -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    theirs = torch.optim.SGD([parameter], lr=1.0)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(theirs, factor=0.5, **options)
    ours = PlateauSchedule(1.0, factor=0.5, **options)
    optimizer = SimpleNamespace(learning_rate=1.0)
    for value in observed:
        scheduler.step(value)
        ours.step(value, optimizer)
        again = PlateauSchedule(1.0, factor=0.5, **options)  # as after a resume
        again.load_state_dict(json.loads(json.dumps(ours.state_dict())))
        ours = again
        assert optimizer.learning_rate == theirs.param_groups[0]["lr"] == ours.learning_rate


@given(
    observed=st.lists(st.floats(-5, 5), min_size=1, max_size=60),
    mode=st.sampled_from(["min", "max"]),
    patience=st.integers(0, 2),
    cooldown=st.integers(0, 2),
    warmup=st.integers(0, 2),
    smooth=st.booleans(),
    reset_start=st.integers(1, 3),
)
def test_greedy_is_that_of_torch(observed: list[float], **options: Any) -> None:
    options |= {"factor": 0.5, "min_lr": 0.1, "max_lr": 4.0, "window_size": 3}
    theirs = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = GreedyLR(theirs, **options)
    ours, optimizer = GreedySchedule(1.0, **options), SimpleNamespace(learning_rate=1.0)
    for value in observed:
        scheduler.step(value)
        ours.step(value, optimizer)
        again = GreedySchedule(1.0, **options)  # as after a resume
        again.load_state_dict(json.loads(json.dumps(ours.state_dict())))
        ours = again
        assert optimizer.learning_rate == theirs.param_groups[0]["lr"] == ours.learning_rate


@pytest.mark.slow
def test_a_rate_that_rises_while_the_evaluations_get_better(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "lr_scheduler_type": "greedy",
        "lr_scheduler_kwargs": {"patience": 0, "factor": 0.5, "max_lr": 0.15},
        "eval_strategy": "steps",
        "eval_steps": 2,
        "eval_dataset": make_data(32),
        "save_strategy": "steps",
        "save_steps": 4,
    }
    whole = make_trainer(tmp_path / "whole", make_model(), make_data(32), **options)
    whole.train()
    rates = [row["learning_rate"] for row in whole.state.log_history if "learning_rate" in row]
    assert rates[:5] == pytest.approx([0.05, 0.05, 0.1, 0.1, 0.15])
    shutil.copytree(tmp_path / "whole" / "checkpoint-4", tmp_path / "rest" / "checkpoint-4")
    rest = make_trainer(tmp_path / "rest", make_model(seed=1), make_data(32), **options)
    rest.train()
    assert values(rest.state.log_history)[:-1] == values(whole.state.log_history)[:-1]
    options["lr_scheduler_kwargs"] = {"patient": 1}
    with pytest.raises(TypeError, match=r"greedy has no option 'patient'.*patience"):
        make_trainer(tmp_path / "wrong", make_model(), make_data(8), **options).train()


@pytest.mark.slow
def test_a_rate_that_follows_the_evaluations(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": {"patience": 0, "factor": 0.5, "threshold": 100.0, "threshold_mode": "abs"},
        "eval_strategy": "steps",
        "eval_steps": 2,
        "eval_dataset": make_data(6, seed=1),
        "save_strategy": "steps",
        "save_steps": 4,
    }
    whole = make_trainer(tmp_path / "whole", make_model(), make_data(32), **options)
    whole.train()
    rates = [row["learning_rate"] for row in whole.state.log_history if "learning_rate" in row]
    # the first evaluation is the best so far, and no other is better by so much
    assert rates == pytest.approx([0.05] * 4 + [0.025] * 2 + [0.0125] * 2)
    shutil.copytree(tmp_path / "whole" / "checkpoint-4", tmp_path / "rest" / "checkpoint-4")
    rest = make_trainer(tmp_path / "rest", make_model(seed=1), make_data(32), **options)
    rest.train()
    assert values(rest.state.log_history)[:-1] == values(whole.state.log_history)[:-1]
    options["lr_scheduler_kwargs"] = {"patient": 1}
    with pytest.raises(TypeError, match="has no option 'patient'"):
        make_trainer(tmp_path / "wrong", make_model(), make_data(8), **options).train()
    options |= {"lr_scheduler_kwargs": {}, "warmup_steps": 3}
    with pytest.raises(ValueError, match="has no warm-up"):
        make_trainer(tmp_path / "wrong", make_model(), make_data(8), **options).train()


def test_an_optimizer_beside_model_init_is_refused(tmp_path: Path) -> None:
    """It would hold the variables of another model; a schedule holds none."""
    options: dict[str, Any] = {"model_init": make_model, "optimizers": (keras.optimizers.SGD(0.5), None)}
    with pytest.raises(RuntimeError, match=r"^Passing a `model_init` is incompatible with providing the `optimizers`"):
        make_trainer(tmp_path, None, DATA, **options)


@pytest.mark.parametrize("has_init", [False, True])
def test_a_schedule_of_ones_own_is_that_of_every_run(tmp_path: Path, has_init: bool) -> None:
    """Of two runs of a Trainer, which makes the optimizer anew."""
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([0], [0.5, 0.25])
    model, init = (None, make_model) if has_init else (make_model(), None)
    trainer = make_trainer(tmp_path, model, DATA, model_init=init, optimizers=(None, schedule), optim="sgd")
    optimizers = []
    for _ in range(2):
        trainer.train(resume_from_checkpoint=False)
        assert trainer.lr_scheduler is schedule
        assert [row["learning_rate"] for row in trainer.state.log_history if "loss" in row] == [0.5, 0.25]
        optimizers.append(trainer.optimizer)
    assert optimizers[0] is not optimizers[1]


def test_a_schedule_that_the_trainer_made_has_the_length_of_its_run(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, make_model(), DATA, learning_rate=1.0)
    for num_epochs, expected in ((1, [1.0, 0.5]), (2, [1.0, 0.75, 0.5, 0.25])):
        trainer.args.num_train_epochs = num_epochs
        trainer.train(resume_from_checkpoint=False)
        rates = [row["learning_rate"] for row in trainer.state.log_history if "loss" in row]
        assert rates == pytest.approx(expected)
