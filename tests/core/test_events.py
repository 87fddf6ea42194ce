import copy
import inspect
import pickle
import threading
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from paceline.callbacks.flow import DefaultFlowCallback
from paceline.core import events
from paceline.core.events import EVENTS, CallbackHandler, TrainerCallback, ignores_keywords
from paceline.core.state import TrainerControl, TrainerState


class Recorder(TrainerCallback):
    """Hears every event."""

    def __init__(self):
        self.heard = []
        self.keywords = {}


def _record(event):
    def method(self, args, state, control, **kwargs):
        self.heard.append(event)
        self.keywords = kwargs

    return method


for _event in EVENTS:
    setattr(Recorder, _event, _record(_event))


class Silent(TrainerCallback):
    pass


class StepOnly(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        pass


def fire(handler, event, **extra):
    return handler.fire(event, None, TrainerState(), TrainerControl(), **extra)


# ---- dispatch


def test_the_sixteen_events():
    methods = {name for name, _ in inspect.getmembers(TrainerCallback, inspect.isfunction) if name.startswith("on_")}
    assert methods == set(EVENTS)
    assert len(EVENTS) == 16


def test_every_event_reaches_a_listener_through_fire_and_through_its_method():
    recorder = Recorder()
    handler = CallbackHandler([recorder], "model")
    for event in EVENTS:
        fire(handler, event)
        getattr(handler, event)(None, TrainerState(), TrainerControl())
    assert recorder.heard == [event for event in EVENTS for _ in range(2)]


def test_only_what_is_overridden_is_in_the_table():
    handler = CallbackHandler([Silent(), StepOnly()])
    assert [event for event in EVENTS if handler.heard(event)] == ["on_step_end"]
    assert set(handler.table) == set(EVENTS)


def test_callbacks_of_transformers_are_heard_where_they_do_something():
    theirs = pytest.importorskip("transformers.trainer_callback")

    class Mine(theirs.TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            control.should_log = True

    handler = CallbackHandler([Mine()])
    assert [event for event in EVENTS if handler.heard(event)] == ["on_save"]
    assert fire(handler, "on_save").should_log


def test_objects_that_are_no_callbacks_by_class():
    heard = []

    class Duck:
        def on_log(self, args, state, control, **kwargs):
            heard.append("log")

    mock = MagicMock()
    mock.on_save.return_value = None
    handler = CallbackHandler([Duck(), mock])
    fire(handler, "on_log", logs={})
    fire(handler, "on_save")
    assert heard == ["log"]
    mock.on_save.assert_called_once()


def test_keywords_follow_assignments():
    recorder = Recorder()
    handler = CallbackHandler([recorder], "model", "tokenizer", "optimizer", "scheduler")
    fire(handler, "on_save")
    assert recorder.keywords == {
        "model": "model",
        "processing_class": "tokenizer",
        "tokenizer": "tokenizer",
        "optimizer": "optimizer",
        "lr_scheduler": "scheduler",
        "train_dataloader": None,
        "eval_dataloader": None,
    }
    handler.model, handler.train_dataloader, handler.processing_class = "wrapped", "loader", None
    fire(handler, "on_step_end", loss=1.0)
    seen = recorder.keywords
    assert (seen["model"], seen["train_dataloader"], seen["tokenizer"], seen["loss"]) == (
        "wrapped",
        "loader",
        None,
        1.0,
    )
    fire(handler, "on_step_end")
    assert "loss" not in recorder.keywords


def test_keywords_are_left_away_only_where_nobody_uses_them():
    class Marked(TrainerCallback):
        @ignores_keywords
        def on_step_end(self, args, state, control, **kwargs):
            self.seen = kwargs

    class Derived(Marked):
        def on_step_end(self, args, state, control, **kwargs):
            super().on_step_end(args, state, control, **kwargs)

    marked, derived = Marked(), Derived()
    handler = CallbackHandler([marked], "model")
    fire(handler, "on_step_end")
    assert marked.seen == {}
    fire(handler, "on_step_end", loss=1.0)
    assert marked.seen["loss"] == 1.0
    handler.add_callback(derived)
    fire(handler, "on_step_end")
    assert derived.seen["model"] == "model"


def test_a_returned_control_replaces_the_flags_of_the_one_given():
    """There is one control in a run, so that no part of it looks at the flags of another."""

    class Replacing(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            return TrainerControl(should_save=True)

    class Seeing(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            assert (control.should_save, control.should_log) == (True, False)

    control = TrainerControl(should_log=True)
    handler = CallbackHandler([Replacing(), Seeing()])
    assert handler.fire("on_step_end", None, TrainerState(), control) is control
    assert control == TrainerControl(should_save=True)


def test_a_copy_of_a_control_has_flags_of_its_own_and_steers_the_same_run():
    control = TrainerControl(should_log=True)
    with control.accepting(is_shared=False) as requests:
        requests.writer = threading.Lock()  # what cannot be copied, as a thread that writes a checkpoint
        other = copy.deepcopy(control)
        assert other == control
        assert other.requests is requests
        other.should_log = False
    assert control.should_log


def test_each_listener_has_its_own_logs():
    class Greedy(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            logs.clear()

    recorder, logs = Recorder(), {"loss": 1.0}
    handler = CallbackHandler([Greedy(), recorder])
    handler.on_log(None, TrainerState(), TrainerControl(), logs)
    assert recorder.keywords["logs"] == logs == {"loss": 1.0}


def test_what_is_added_to_metrics_is_seen_by_the_caller():
    class Adding(TrainerCallback):
        def on_evaluate(self, args, state, control, metrics=None, **kwargs):
            metrics["eval_mine"] = 1.0

    metrics = {}
    CallbackHandler([Adding()]).on_evaluate(None, TrainerState(), TrainerControl(), metrics)
    assert metrics == {"eval_mine": 1.0}


@pytest.mark.parametrize(
    ("event", "lowered"),
    [
        ("on_train_begin", {"should_training_stop"}),
        ("on_epoch_begin", {"should_epoch_stop"}),
        ("on_step_begin", {"should_save", "should_evaluate", "should_log"}),
        ("on_evaluate", {"should_evaluate"}),
        ("on_save", {"should_save"}),
        ("on_log", {"should_log"}),
        ("on_step_end", set()),
    ],
)
def test_flags_that_an_event_lowers(event, lowered):
    control = TrainerControl(True, True, True, True, True)
    getattr(CallbackHandler([Silent]), event)(None, TrainerState(), control)
    assert {name for name, value in vars(control).items() if not value} == lowered


def test_an_event_of_ones_own():
    class Mine(TrainerCallback):
        def on_episode_end(self, args, state, control, reward=None, **kwargs):
            control.should_save = reward > 1

    handler = CallbackHandler([Mine(), Silent()])
    assert handler.call_event("on_episode_end", None, TrainerState(), TrainerControl(), reward=2).should_save
    handler.add_callback(StepOnly())
    assert handler.call_event("on_episode_end", None, TrainerState(), TrainerControl(), reward=2).should_save


# ---- the list


def test_add_pop_remove(caplog):
    first, second = StepOnly(), StepOnly()
    handler = CallbackHandler([first])
    assert not caplog.records
    handler.add_callback(second)
    assert "You are adding a StepOnly" in caplog.text
    assert handler.callback_list == "StepOnly\nStepOnly"
    assert handler.pop_callback(second) is second
    assert handler.pop_callback(second) is None
    assert handler.pop_callback(StepOnly) is first
    assert not handler.heard("on_step_end")
    handler.remove_callback(StepOnly)
    with pytest.raises(ValueError, match="not among the callbacks"):
        handler.remove_callback(first)


def test_whatever_changes_the_list_changes_the_table():
    handler = CallbackHandler([])
    callbacks = handler.callbacks

    def check(expected):
        assert len(handler.table["on_step_end"]) == expected == len(handler.callbacks)

    for change, expected in [
        (lambda: callbacks.append(StepOnly()), 1),
        (lambda: callbacks.insert(0, StepOnly()), 2),
        (lambda: callbacks.extend([StepOnly()]), 3),
        (lambda: callbacks.__iadd__([StepOnly()]), 4),
        (lambda: callbacks.pop(), 3),
        (lambda: callbacks.remove(callbacks[0]), 2),
        (lambda: callbacks.reverse(), 2),
        (lambda: callbacks.sort(key=id), 2),
        (lambda: callbacks.__setitem__(0, StepOnly()), 2),
        (lambda: callbacks.__delitem__(0), 1),
        (lambda: callbacks.clear(), 0),
        (lambda: setattr(handler, "callbacks", [StepOnly()]), 1),
    ]:
        change()
        check(expected)


def test_order_of_calls_is_order_of_the_list():
    calls = []

    class Named(TrainerCallback):
        def __init__(self, name):
            self.name = name

        def on_save(self, args, state, control, **kwargs):
            calls.append(self.name)

    handler = CallbackHandler([Named("a"), Named("b")])
    handler.callbacks.insert(0, Named("c"))
    fire(handler, "on_save")
    assert calls == ["c", "a", "b"]


def test_a_callback_may_remove_itself_while_it_is_called():
    class Once(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            handler.remove_callback(self)

    recorder = Recorder()
    handler = CallbackHandler([Once(), recorder])
    fire(handler, "on_step_end")
    fire(handler, "on_step_end")
    assert recorder.heard == ["on_step_end", "on_step_end"]
    assert handler.callbacks == [recorder]


def test_methods_replaced_on_the_object_are_found_when_training_starts():
    silent, calls = Silent(), []
    handler = CallbackHandler([DefaultFlowCallback, silent])
    silent.on_save = lambda args, state, control, **kwargs: calls.append(1)
    handler.on_train_begin(None, TrainerState(), TrainerControl())
    fire(handler, "on_save")
    assert calls == [1]


def test_without_the_default_flow_there_is_a_warning(caplog):
    CallbackHandler([DefaultFlowCallback]).on_train_begin(None, TrainerState(), TrainerControl())
    assert not caplog.records
    CallbackHandler([Silent]).on_train_begin(None, TrainerState(), TrainerControl())
    assert "DefaultFlowCallback" in caplog.text


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda handler: pickle.loads(pickle.dumps(handler))])
def test_a_copy_works_on_its_own(duplicate):
    handler = CallbackHandler([Silent(), StepOnly()], "model")
    copied = duplicate(handler)
    copied.callbacks.append(StepOnly())
    assert (len(handler.table["on_step_end"]), len(copied.table["on_step_end"])) == (1, 2)
    assert copied.kwargs["model"] == "model"
    copied.model = "other"
    assert handler.model == handler.kwargs["model"] == "model"


# ---- wants and may_fail


def test_wants_are_joined():
    class Loss(TrainerCallback):
        wants = frozenset({"loss"})

    class Inputs(TrainerCallback):
        wants = {"inputs"}

    handler = CallbackHandler([Loss, Inputs])
    assert handler.wanted == {"loss", "inputs"}
    handler.remove_callback(Loss)
    assert handler.wanted == {"inputs"}
    with pytest.raises(ValueError, match=r"wants=\['gradients'\].*inputs, loss, outputs"):
        CallbackHandler([type("Wrong", (TrainerCallback,), {"wants": frozenset({"gradients"})})])


def test_a_failing_reporter_is_told_of_once_and_given_up(caplog):
    class Failing(TrainerCallback):
        may_fail = True
        calls = 0

        def on_log(self, args, state, control, **kwargs):
            self.calls += 1
            raise OSError("no space left")

        on_save = on_log

    failing, recorder = Failing(), Recorder()
    handler = CallbackHandler([failing, recorder])
    for _ in range(4):
        fire(handler, "on_log", logs={})
        fire(handler, "on_save")
        handler.rebuild()
    assert recorder.heard == ["on_log", "on_save"] * 4
    assert failing.calls == 3
    assert len(caplog.records) == 2
    assert "Failing failed in on_log" in caplog.text
    assert "no space left" in caplog.text
    assert "Failing is not called again in this run: it failed 3 times in a row, last in on_log" in caplog.text
    handler.on_train_begin(None, TrainerState(), TrainerControl())
    fire(handler, "on_log", logs={})
    assert failing.calls == 4  # another run, another chance


@pytest.mark.parametrize(("seconds", "calls"), [(30.0, 3), (90.0, 1)])
def test_a_reporter_that_makes_training_wait_is_given_up_at_once(caplog, monkeypatch, seconds, calls):
    """As the client of a service that accepts connections and never answers."""
    clock = [0.0]
    monkeypatch.setattr(events, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    class Hanging(TrainerCallback):
        may_fail = True
        calls = 0

        def on_train_begin(self, args, state, control, **kwargs):
            self.calls += 1
            clock[0] += seconds
            raise TimeoutError("no answer")

        on_log = on_train_begin

    hanging = Hanging()
    handler = CallbackHandler([hanging])
    fire(handler, "on_train_begin")
    for _ in range(4):
        fire(handler, "on_log", logs={})
    assert hanging.calls == calls
    assert ("Hanging is not called again in this run: training waited 90 seconds" in caplog.text) is (calls == 1)


def test_a_server_that_is_not_there_is_told_in_one_line(caplog):
    class Failing(TrainerCallback):
        may_fail = True

        def on_log(self, args, state, control, **kwargs):
            raise ConnectionError("server:9 cannot be reached: start it")

    fire(CallbackHandler([Failing()]), "on_log", logs={})
    assert [record.getMessage() for record in caplog.records] == [
        "Failing failed in on_log; the run goes on. server:9 cannot be reached: start it"
    ]
    assert caplog.records[0].exc_info is None


def test_a_reporter_that_recovers_is_called_on():
    class Flaky(TrainerCallback):
        may_fail = True
        calls = 0

        def on_log(self, args, state, control, **kwargs):
            self.calls += 1
            if self.calls % 2:
                raise OSError

    flaky = Flaky()
    handler = CallbackHandler([flaky])
    for _ in range(20):
        fire(handler, "on_log", logs={})
    assert flaky.calls == 20


def test_other_failures_and_interrupts_go_through():
    class Broken(TrainerCallback):
        def on_log(self, args, state, control, **kwargs):
            raise self.error

    broken = Broken()
    broken.error = RuntimeError("mine")
    with pytest.raises(RuntimeError, match="mine"):
        fire(CallbackHandler([broken]), "on_log", logs={})
    broken.error, broken.may_fail = KeyboardInterrupt(), True
    with pytest.raises(KeyboardInterrupt):
        fire(CallbackHandler([broken]), "on_log", logs={})
