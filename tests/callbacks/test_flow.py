from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.callbacks.flow import DefaultFlowCallback
from paceline.core.state import TrainerControl, TrainerState


def arguments(**changes):
    values = {
        "logging_strategy": "no",
        "logging_first_step": False,
        "eval_strategy": "no",
        "eval_delay": 0,
        "save_strategy": "no",
    }
    return SimpleNamespace(**{**values, **changes})


def flags(args, state, event="on_step_end"):
    control = TrainerControl()
    assert getattr(DefaultFlowCallback(), event)(args, state, control) is control
    return {name.removeprefix("should_") for name, value in vars(control).items() if value}


def steps_with(flag, args, state, total):
    found = []
    for state.global_step in range(1, total + 1):
        if flag in flags(args, state):
            found.append(state.global_step)
    return found


def state_of(**changes):
    return TrainerState(**{"max_steps": 10, "logging_steps": 4, "eval_steps": 4, "save_steps": 4, **changes})


def test_logs_by_steps():
    assert steps_with("log", arguments(logging_strategy="steps"), state_of(), 10) == [4, 8]
    first = arguments(logging_strategy="steps", logging_first_step=True)
    assert steps_with("log", first, state_of(), 10) == [1, 4, 8]
    assert steps_with("log", arguments(logging_first_step=True), state_of(), 10) == [1]


def test_evaluates_and_saves_at_the_last_step_too_and_once():
    args = arguments(eval_strategy="steps", save_strategy="steps")
    assert steps_with("evaluate", args, state_of(), 10) == [4, 8, 10]
    assert steps_with("save", args, state_of(), 10) == [4, 8, 10]
    assert steps_with("evaluate", args, state_of(max_steps=8), 8) == [4, 8]


def test_nothing_by_default_but_the_stop():
    assert steps_with("training_stop", arguments(), state_of(), 12) == [10, 11, 12]
    assert flags(arguments(), state_of(global_step=10)) == {"training_stop"}


def test_evaluation_may_be_delayed():
    args = arguments(eval_strategy="steps", eval_delay=5)
    assert steps_with("evaluate", args, state_of(), 10) == [8, 10]
    assert steps_with("evaluate", arguments(eval_strategy="steps", eval_delay=50), state_of(), 10) == []


def test_zero_means_never():
    args = arguments(logging_strategy="steps", eval_strategy="steps", save_strategy="steps")
    state = state_of(logging_steps=0, eval_steps=0, save_steps=0, global_step=4)
    assert flags(args, state) == set()


def test_the_state_is_read_live():
    args, state = arguments(logging_strategy="steps"), state_of(global_step=6)
    assert flags(args, state) == set()
    state.logging_steps, state.max_steps = 3, 6
    assert flags(args, state) == {"log", "training_stop"}


def test_epochs():
    args = arguments(logging_strategy="epoch", eval_strategy="epoch", save_strategy="epoch", eval_delay=1.5)
    assert flags(args, state_of(epoch=1.0), "on_epoch_end") == {"log", "save"}
    assert flags(args, state_of(epoch=2.0), "on_epoch_end") == {"log", "save", "evaluate"}
    assert flags(args, state_of(global_step=4)) == set()
    assert flags(arguments(save_strategy="best"), state_of(), "on_epoch_end") == set()


strategies = st.sampled_from(["no", "steps", "epoch"])


@given(
    st.builds(
        arguments,
        logging_strategy=strategies,
        eval_strategy=strategies,
        save_strategy=strategies,
        logging_first_step=st.booleans(),
        eval_delay=st.integers(0, 12),
    ),
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(1, 12),
)
def test_the_same_flags_as_transformers(args, logging_steps, eval_steps, save_steps, max_steps):
    theirs = pytest.importorskip("transformers.trainer_callback")
    state = TrainerState(max_steps=max_steps, logging_steps=logging_steps, eval_steps=eval_steps, save_steps=save_steps)
    for step in range(1, max_steps + 1):
        state.global_step, state.epoch = step, step / 3
        for event in ("on_step_end", "on_epoch_end"):
            ours, their = TrainerControl(), theirs.TrainerControl()
            getattr(DefaultFlowCallback(), event)(args, state, ours)
            getattr(theirs.DefaultFlowCallback(), event)(args, state, their)
            assert vars(ours) == vars(their)
