import time
from types import SimpleNamespace

import pytest

from paceline import TrainingArguments
from paceline.callbacks.speed import Speedometer, format_seconds, global_batch_size, length_of
from paceline.core.state import TrainerState


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(time=100.0)
    monkeypatch.setattr(time, "perf_counter", lambda: now.time)
    return now


def test_samples_then_tokens_per_second(clock):
    speed, state = Speedometer(samples_per_step=8), TrainerState()
    assert speed.describe() == ""
    speed.mark(state)
    assert speed.steps_per_second is None
    clock.time, state.global_step = 102.0, 10
    speed.mark(state)
    assert speed.steps_per_second == 5.0
    assert speed.describe() == "40 samples/s"
    clock.time, state.global_step, state.num_input_tokens_seen = 104.0, 20, 493_824
    speed.mark(state)
    assert speed.describe() == "123,456 tok/s"


def test_a_restart_counts_from_there(clock):
    speed, state = Speedometer(samples_per_step=1), TrainerState()
    for clock.time, state.global_step in [(0, 0), (1, 1)]:
        speed.mark(state)
    assert speed.describe() == "1 samples/s"
    clock.time = 1000
    speed.restart(state)
    speed.mark(state)
    assert speed.describe() == "1 samples/s"  # nothing newer is known
    clock.time, state.global_step = 1001, 3
    speed.mark(state)
    assert speed.describe() == "2 samples/s"


def test_only_the_window_counts(clock):
    speed, state = Speedometer(1, window=2), TrainerState()
    for clock.time, state.global_step in [(0, 0), (1000, 1), (1001, 4)]:
        speed.mark(state)
    assert speed.steps_per_second == 3.0


def test_global_batch_size():
    args = SimpleNamespace(per_device_train_batch_size=4, gradient_accumulation_steps=3, world_size=2)
    assert global_batch_size(args, TrainerState()) == 24
    assert global_batch_size(args, TrainerState(train_batch_size=2)) == 12
    assert global_batch_size(SimpleNamespace(), TrainerState()) == 1


def test_global_batch_size_after_an_out_of_memory():
    options = {"auto_find_batch_size": True, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
    assert global_batch_size(SimpleNamespace(**options), TrainerState(train_batch_size=2)) == 16


def test_global_batch_size_of_batches_that_are_split():
    args = TrainingArguments(
        "x", per_device_train_batch_size=10, gradient_accumulation_steps=2, accelerator_config={"split_batches": True}
    )
    state = TrainerState(train_batch_size=3)  # of the process that has most
    assert global_batch_size(SimpleNamespace(**{**vars(args), "world_size": 4}), state) == 20


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "00:00"), (59.6, "01:00"), (3723, "1:02:03"), (360000, "100:00:00")]
)
def test_format_seconds(seconds, text):
    assert format_seconds(seconds) == text


def test_length_of():
    assert length_of([1, 2]) == 2
    assert length_of(iter([])) is None
    assert length_of(None) is None
