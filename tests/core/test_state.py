import json
import logging
from dataclasses import dataclass, fields
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.callbacks.early_stopping import EarlyStoppingCallback
from paceline.core.state import ExportableState, TrainerControl, TrainerState


def arguments(**changes):
    values = {"logging_steps": 500, "eval_steps": None, "save_steps": 500, "eval_strategy": "no"}
    return SimpleNamespace(**{**values, **changes})


def some_state() -> TrainerState:
    return TrainerState(
        epoch=1.25,
        global_step=10,
        max_steps=40,
        logging_steps=5,
        train_batch_size=4,
        num_train_epochs=5,
        num_input_tokens_seen=1234,
        total_flos=1.5e20,
        log_history=[{"loss": 2.5, "step": 5}, {"eval_loss": 2.25, "step": 10}],
        best_metric=2.25,
        best_global_step=10,
        best_model_checkpoint="out/checkpoint-10",
        trial_params={"learning_rate": 1e-3},
        stateful_callbacks=[EarlyStoppingCallback(3), TrainerControl(should_log=True)],
    )


def test_json_round_trip(tmp_path):
    state = some_state()
    state.save_to_json(tmp_path / "trainer_state.json")
    assert TrainerState.load_from_json(tmp_path / "trainer_state.json") == state
    assert [path.name for path in tmp_path.iterdir()] == ["trainer_state.json"]


@given(st.lists(st.dictionaries(st.text(), st.floats(allow_nan=False) | st.integers() | st.text(), max_size=3)))
def test_any_history_survives(tmp_path_factory, history):
    path = tmp_path_factory.mktemp("state") / "state.json"
    TrainerState(log_history=history).save_to_json(path)
    assert TrainerState.load_from_json(path).log_history == history


def test_the_best_checkpoint_is_found_whatever_its_folder_is_called(tmp_path):
    state = some_state()
    state.best_model_checkpoint = "/runs/token=abc,api_key=3/checkpoint-10"
    state.save_to_json(tmp_path / "state.json")
    assert TrainerState.load_from_json(tmp_path / "state.json").best_model_checkpoint == state.best_model_checkpoint


def test_numpy_numbers_are_written_as_numbers(tmp_path):
    state = TrainerState(best_metric=np.float32(0.5), log_history=[{"f1": np.float64(0.25), "per_class": np.ones(2)}])
    state.save_to_json(tmp_path / "s.json")
    loaded = TrainerState.load_from_json(tmp_path / "s.json")
    assert loaded.best_metric == 0.5
    assert loaded.log_history == [{"f1": 0.25, "per_class": [1.0, 1.0]}]


def test_interchange_with_transformers(tmp_path):
    theirs = pytest.importorskip("transformers.trainer_callback")
    some_state().save_to_json(tmp_path / "ours.json")
    read = theirs.TrainerState.load_from_json(str(tmp_path / "ours.json"))
    assert vars(read) == vars(some_state())
    assert [field.name for field in fields(read)] == [field.name for field in fields(TrainerState)]
    assert vars(theirs.TrainerState()) == vars(TrainerState())

    stopping = theirs.EarlyStoppingCallback(early_stopping_patience=7)
    written = theirs.TrainerState(global_step=3, stateful_callbacks=[stopping, stopping, theirs.TrainerControl()])
    written.save_to_json(str(tmp_path / "theirs.json"))
    assert vars(TrainerState.load_from_json(tmp_path / "theirs.json")) == vars(written)
    assert (tmp_path / "ours.json").read_text() == _written_by(theirs, read, tmp_path)


def _written_by(theirs, state, folder):
    state.save_to_json(str(folder / "again.json"))
    return (folder / "again.json").read_text()


def test_unknown_keys_are_left_out_with_a_line(tmp_path, caplog):
    path = tmp_path / "state.json"
    path.write_text(json.dumps({"global_step": 3, "from_the_future": 1}))
    with caplog.at_level(logging.INFO):
        assert TrainerState.load_from_json(path) == TrainerState(global_step=3)
    assert "from_the_future" in caplog.text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[1]",
        '{"global_step": "3"}',
        '{"global_step": null}',
        '{"log_history": {"a": 1}}',
        '{"best_metric": [1]}',
        "[" * 100_000,
        "\x00",
    ],
)
def test_a_broken_file_is_named(tmp_path, text):
    path = tmp_path / "state.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"state\.json"):
        TrainerState.load_from_json(path)


def test_bytes_that_are_no_text_are_named(tmp_path):
    path = tmp_path / "state.json"
    path.write_bytes(b"\xff\xfe{}")
    with pytest.raises(ValueError, match=r"state\.json"):
        TrainerState.load_from_json(path)


def test_a_subclass_loads_its_own_fields(tmp_path):
    @dataclass
    class MyState(TrainerState):
        episode: int = 0

    MyState(episode=4).save_to_json(tmp_path / "s.json")
    assert MyState.load_from_json(tmp_path / "s.json").episode == 4


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (500, 500, 500)),
        ({"logging_steps": 0.1, "save_steps": 0.25}, (7, 500, 17)),
        ({"logging_steps": 0.001}, (1, 500, 500)),
        ({"eval_strategy": "steps", "logging_steps": 20}, (20, 20, 500)),
        ({"eval_strategy": "steps", "eval_steps": 0.5}, (500, 33, 500)),
        ({"save_steps": 0}, (500, 500, 0)),
        ({"logging_steps": 10.0}, (10, 500, 500)),
    ],
)
def test_compute_steps(changes, expected):
    state = TrainerState()
    state.compute_steps(arguments(**changes), max_steps=66)
    assert (state.logging_steps, state.eval_steps, state.save_steps) == expected
    assert all(type(steps) is int for steps in expected)


def test_init_training_references():
    trainer = SimpleNamespace(
        hp_name=lambda trial: f"trial-{trial.number}",
        _trial=SimpleNamespace(number=3),
        is_local_process_zero=lambda: True,
        is_world_process_zero=lambda: False,
    )
    state = TrainerState()
    state.init_training_references(trainer, 30, 2, SimpleNamespace(params={"seed": 1}))
    assert (state.max_steps, state.num_train_epochs) == (30, 2)
    assert (state.trial_name, state.trial_params) == ("trial-3", {"seed": 1})
    assert (state.is_local_process_zero, state.is_world_process_zero) == (True, False)
    state.init_training_references(trainer, 30, 2, {"seed": 2})
    assert state.trial_params == {"seed": 2}


def test_repeated_callbacks_become_a_list():
    state = TrainerState(stateful_callbacks=[EarlyStoppingCallback(1), EarlyStoppingCallback(2)])
    first, second = state.stateful_callbacks["EarlyStoppingCallback"]
    assert (first["args"]["early_stopping_patience"], second["args"]["early_stopping_patience"]) == (1, 2)
    with pytest.raises(TypeError, match="ExportableState"):
        TrainerState(stateful_callbacks=[object()])


def test_control_lowers_what_each_stage_must_not_see():
    control = TrainerControl(True, True, True, True, True)
    control.begin_step()
    assert control == TrainerControl(should_training_stop=True, should_epoch_stop=True)
    control._new_epoch()
    assert control == TrainerControl(should_training_stop=True)
    control._new_training()
    assert control == TrainerControl()


def test_control_round_trip():
    control = TrainerControl(should_save=True, should_training_stop=True)
    assert TrainerControl.from_state(json.loads(json.dumps(control.state()))) == control


def test_exportable_state_must_be_defined():
    with pytest.raises(NotImplementedError, match="Bare must define state"):
        type("Bare", (ExportableState,), {})().state()
