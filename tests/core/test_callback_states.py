import logging

import pytest

from paceline.callbacks.early_stopping import EarlyStoppingCallback
from paceline.core.callback_states import callback_states, restore_callback_states
from paceline.core.events import CallbackHandler, TrainerCallback
from paceline.core.state import ExportableState, TrainerControl, TrainerState


class Silent(TrainerCallback):
    pass


class Counter(TrainerCallback):
    def __init__(self, count=0):
        self.count = count

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class Exportable(TrainerCallback, ExportableState):
    def __init__(self, patience=1):
        self.patience = patience
        self.seen = 0

    def state(self):
        return {"args": {"patience": self.patience}, "attributes": {"seen": self.seen}}


class Named(Counter):
    state_key = "mine"


def test_states_by_name():
    handler = CallbackHandler([Silent(), Counter(1), Counter(2), Named(3), Exportable(4)])
    assert callback_states(handler, TrainerControl(should_save=True)) == {
        "Counter": {"count": 1},
        "Counter#2": {"count": 2},
        "mine": {"count": 3},
        "Exportable": {"args": {"patience": 4}, "attributes": {"seen": 0}},
        "TrainerControl": TrainerControl(should_save=True).state(),
    }


def test_states_come_back_into_the_same_objects(caplog):
    first, second, exportable = Counter(1), Counter(2), Exportable(4)
    exportable.seen = 9
    states = callback_states(CallbackHandler([first, second, exportable]), TrainerControl())
    restored = [Counter(), Counter(), Exportable()]
    handler = CallbackHandler(restored)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        restore_callback_states(handler, states)
    assert [restored[0].count, restored[1].count, restored[2].patience, restored[2].seen] == [1, 2, 4, 9]
    assert handler.callbacks == restored
    assert [record.getMessage() for record in caplog.records] == [
        "Callback Exportable: patience=4, as in the checkpoint."
    ]


def test_callbacks_added_or_removed_since(caplog):
    states = callback_states(CallbackHandler([Counter(1), Exportable(2)]))
    handler = CallbackHandler([Counter(), EarlyStoppingCallback(5)])
    restore_callback_states(handler, states)
    assert handler.callbacks[0].count == 1
    assert handler.callbacks[1].early_stopping_patience == 5
    assert "not included in current configuration, left out: Exportable." in caplog.text
    assert set(callback_states(handler)) == {"Counter", "EarlyStoppingCallback"}


@pytest.mark.parametrize(("with_arguments", "patience"), [(False, 5), (True, 2)])
def test_what_this_run_was_given_wins_unless_asked_otherwise(with_arguments, patience):
    saved = EarlyStoppingCallback(2)
    saved.early_stopping_patience_counter = 1
    present = EarlyStoppingCallback(5)
    restore_callback_states(CallbackHandler([present]), callback_states(CallbackHandler([saved])), with_arguments)
    assert (present.early_stopping_patience, present.early_stopping_patience_counter) == (patience, 1)


def test_lists_as_transformers_writes_them():
    state = TrainerState(stateful_callbacks=[Exportable(3), Exportable(4), TrainerControl()])
    handler = CallbackHandler([Exportable(), Exportable()])
    restore_callback_states(handler, state.stateful_callbacks)
    assert [callback.patience for callback in handler.callbacks] == [3, 4]


@pytest.mark.parametrize("states", [{"Counter": {}}, {"Counter": 3}, {"Exportable": {"args": {"unknown": 1}}}])
def test_a_state_that_does_not_fit_names_the_callback(states):
    with pytest.raises(ValueError, match=f"Callback {next(iter(states))} could not load its state"):
        restore_callback_states(CallbackHandler([Counter(), Exportable()]), states)
