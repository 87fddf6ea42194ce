"""Data that changes its own order: each epoch is resumed in its order, also if evaluations read the same data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tf_models import make_data, make_model, make_trainer

from paceline import TFTrainer, TrainerCallback, UnsupportedOption
from paceline.tensorflow.data.sources import Source, make_source
from paceline.tensorflow.framework import keras, tf

SIZE = 24
X, Y = make_data(SIZE)
X[:, 0] = np.arange(SIZE)  # tells which sample a row is


class Seen(TrainerCallback):
    """Keeps the numbers of the samples of each step; saves and stops at one."""

    wants = frozenset({"inputs"})

    def __init__(self, stop: int | None = None) -> None:
        self.stop = stop
        self.steps: dict[int, list[int]] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, inputs: Any = None, **kwargs: Any) -> None:
        self.steps[state.global_step] = numbers_of([features for features, _ in inputs])
        if state.global_step == self.stop:
            control.should_save = control.should_training_stop = True

    def epoch(self, number: int) -> list[int]:
        return [sample for step in range(6 * number + 1, 6 * number + 7) for sample in self.steps[step]]


class Own(keras.utils.PyDataset):  # type: ignore[misc]
    """Changes its order at the end of each epoch, as the documentation of Keras shows."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.order = np.random.default_rng(3), np.arange(SIZE)

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        rows = self.order[4 * index : 4 * index + 4]
        return X[rows], Y[rows]

    def on_epoch_end(self) -> None:
        self.generator.shuffle(self.order)


def numbers_of(batches: list[Any]) -> list[int]:
    return [int(number) for features in batches for number in np.asarray(features)[:, 0]]


def shuffled(**options: Any) -> Any:
    return tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(SIZE, seed=7, **options)


def make(folder: Path, data: Any, seen: Seen, **options: Any) -> TFTrainer:
    options = {"num_train_epochs": 2, "learning_rate": 1e-6, "per_device_eval_batch_size": 4, **options}
    return make_trainer(folder, make_model(), data, callbacks=[seen], **options)


@pytest.mark.parametrize("kind", [shuffled, Own])
def test_evaluations_on_the_training_data_leave_its_order(tmp_path: Path, kind: Callable[[], Any]) -> None:
    """Of a run that is resumed in another process, as of one that is not."""

    def run(name: str, stop: int | None = None) -> Seen:
        tf.random.set_seed(0)  # a part of the seed of a shuffle
        data, seen = kind(), Seen(stop)
        options = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 100}
        make(tmp_path / name, data, seen, eval_dataset=data, **options).train()
        return seen

    whole = run("whole")
    first, second = whole.epoch(0), whole.epoch(1)
    assert sorted(first) == sorted(second) == list(range(SIZE))
    assert first != second
    assert run("parts", stop=8).steps == {step: whole.steps[step] for step in range(1, 9)}
    assert run("parts").steps == {step: whole.steps[step] for step in range(9, 13)}


def test_a_second_run_in_one_process(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As by Ctrl-C in a notebook: what can be gone on with is, and what cannot is said."""
    whole = Seen()
    make(tmp_path / "whole", Own(), whole).train()
    data, rest = Own(), Seen()
    make(tmp_path / "parts", data, Seen(8)).train()
    make(tmp_path / "parts", data, rest).train()
    assert rest.steps == {step: whole.steps[step] for step in range(9, 13)}
    assert "called more often" not in caplog.text
    tensors = shuffled()
    make(tmp_path / "tensors", tensors, Seen(6)).train()
    make(tmp_path / "tensors", tensors, Seen(8)).train()
    assert "cannot go back" not in caplog.text  # the epoch was complete
    make(tmp_path / "tensors", tensors, Seen()).train()
    assert caplog.text.count("cannot go back to that of the epoch") == 1
    caplog.clear()
    make(tmp_path / "fresh", shuffled(), Seen(8)).train()
    make(tmp_path / "fresh", shuffled(), Seen()).train()
    assert "cannot go back" not in caplog.text


def read(source: Source, epoch: int) -> list[int]:
    return numbers_of([features for features, _ in source.read(epoch)])


CHAINS: dict[str, Callable[[], Any]] = {
    "alone": shuffled,
    "twice": lambda: shuffled().map(lambda x, y: (x, y)).shuffle(5, seed=2),
    "cached": lambda: shuffled().cache(),
    "fixed": lambda: shuffled(reshuffle_each_iteration=False),
}


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("name", CHAINS)
def test_shuffles_are_moved_on_to_the_order_of_an_epoch(name: str, seed: int | None) -> None:
    """Before the Trainer's own shuffle too."""
    data, again = CHAINS[name](), CHAINS[name]()
    whole, evaluation = (make_source(data, batch_size=4, seed=each) for each in (seed, None))
    resumed, later_evaluation = (make_source(again, batch_size=4, seed=each) for each in (seed, None))
    epochs, states = [], []
    for epoch in range(3):
        epochs.append(read(whole, epoch))
        states.append(whole.own_orders.state_dict(is_within=True))
        read(evaluation, 0)
    resumed.own_orders.load_state_dict(states[1], is_within=True)
    assert not resumed.own_orders.is_lost()
    assert read(resumed, 1) == epochs[1]
    read(later_evaluation, 0)
    assert read(resumed, 2) == epochs[2]
    assert (states[1] == {}) == (name in ("cached", "fixed"))


def test_a_shuffle_that_is_repeated_is_said_to_be_unknown(caplog: pytest.LogCaptureFixture) -> None:
    source = make_source(shuffled().repeat(2), batch_size=4, seed=None)
    source.own_orders.load_state_dict({"begun": [0], "read": [1]}, is_within=True)
    source.warn_of_order()
    assert not caplog.text
    source.own_orders.load_state_dict({"begun": [1], "read": [2]}, is_within=True)
    source.warn_of_order()
    assert "is repeated or concatenated after the shuffle" in caplog.text
    with pytest.raises(ValueError, match="not whole numbers"):
        source.own_orders.load_state_dict({"begun": [-1], "read": [1]}, is_within=True)


def test_a_rollback_refuses_data_that_cannot_go_back(tmp_path: Path) -> None:
    """It would skip other samples, and repeat some."""
    x = X.copy()
    x[9, 1] = np.inf
    bad = tf.data.Dataset.from_tensor_slices((x, Y))
    options: dict[str, Any] = {"nonfinite_policy": "rollback", "num_train_epochs": 1}
    cases = {
        "a tf.data.Dataset that has another order": shuffled(),
        "on_epoch_end of Own": Own(),
        "an iterator": iter(list(zip(X, Y, strict=True))),
    }
    for message, data in cases.items():
        with pytest.raises(UnsupportedOption, match=f"nonfinite_policy='rollback' is not supported with {message}"):
            make(tmp_path, data, Seen(), **options).train()
    seen = Seen()
    make(tmp_path, bad.shuffle(SIZE, seed=7, reshuffle_each_iteration=False), seen, **options).train()
    found = [sample for step in range(1, 6) for sample in seen.steps[step]]
    assert len(set(found)) == SIZE - 4
    assert 9 not in found
