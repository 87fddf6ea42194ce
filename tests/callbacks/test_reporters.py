import errno
import json
import math
import re
import socket
import sys
import threading
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.callbacks import reporters
from paceline.callbacks.reporters import CSVReporter, JSONLReporter, Reporter, TensorBoardCallback, find_reporters
from paceline.callbacks.reporters import csv as csv_log
from paceline.callbacks.reporters import mlflow as mlflow_log
from paceline.callbacks.reporters import tensorboard as board
from paceline.callbacks.reporters import wandb as wandb_log
from paceline.callbacks.reporters.base import settings_of
from paceline.core.events import CallbackHandler, TrainerCallback
from paceline.core.state import TrainerControl, TrainerState


def arguments(folder, **changes):
    return SimpleNamespace(output_dir=str(folder), to_json_string=lambda: '{"seed": 1}', **changes)


def run(reporter, folder, rows, start=0, end=True, **changes):
    """A run that logs `rows`, one per step after `start`."""
    state, control = TrainerState(global_step=start), TrainerControl()
    handler, args = CallbackHandler([reporter]), arguments(folder, **changes)
    handler.on_train_begin(args, state, control)
    for row in rows:
        state.global_step += 1
        state.epoch = state.global_step / 4
        handler.on_log(args, state, control, row)
    if end:
        handler.on_train_end(args, state, control)
    return handler


def losses(*values):
    return [{"loss": value} for value in values]


# ---- JSONL


def read_jsonl(folder, name="log.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def test_jsonl_rows(tmp_path):
    run(JSONLReporter(), tmp_path / "new", [{"loss": np.float32(0.5)}, {"eval_loss": math.inf, "note": "ü\n"}])
    first, second = read_jsonl(tmp_path / "new")
    assert first.pop("time") > 1e9
    assert first == {"step": 1, "epoch": 0.25, "loss": 0.5}
    assert (second["eval_loss"], second["note"]) == (math.inf, "ü\n")


def test_jsonl_is_there_while_the_run_goes_on(tmp_path):
    reporter = JSONLReporter()
    handler = run(reporter, tmp_path, losses(1, 2), end=False)
    assert [row["loss"] for row in read_jsonl(tmp_path)] == [1, 2]
    handler.on_train_end(arguments(tmp_path), TrainerState(), TrainerControl())
    handler.on_log(arguments(tmp_path), TrainerState(global_step=2), TrainerControl(), {"eval_loss": 3})
    assert [row["step"] for row in read_jsonl(tmp_path)] == [1, 2, 2]


def test_jsonl_of_a_resumed_run_has_each_step_once(tmp_path):
    run(JSONLReporter(), tmp_path, losses(1, 2, 3, 4))
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')  # died here
    run(JSONLReporter(), tmp_path, losses(30, 40, 50), start=2)
    rows = read_jsonl(tmp_path)
    assert [(row["step"], row["loss"]) for row in rows] == [(1, 1), (2, 2), (3, 30), (4, 40), (5, 50)]
    assert [path.name for path in tmp_path.iterdir()] == ["log.jsonl"]


@pytest.mark.parametrize(("kind", "suffix"), [(JSONLReporter, "jsonl"), (CSVReporter, "csv")])
def test_a_new_run_sets_the_old_log_aside(tmp_path, kind, suffix):
    for number in range(3):
        run(kind(), tmp_path, losses(number))
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"log.1.{suffix}", f"log.2.{suffix}", f"log.{suffix}"]
    assert "2" in (tmp_path / f"log.{suffix}").read_text()


@pytest.mark.parametrize("kind", [JSONLReporter, CSVReporter])
def test_one_process_of_the_run_writes(tmp_path, kind):
    state, handler = TrainerState(is_world_process_zero=False), CallbackHandler([kind()])
    args = arguments(tmp_path)
    handler.on_train_begin(args, state, TrainerControl())
    handler.on_log(args, state, TrainerControl(), {"loss": 1.0})
    handler.on_train_end(args, state, TrainerControl())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full")
def test_a_full_disk_does_not_stop_the_run(tmp_path, caplog):
    (tmp_path / "log.jsonl").symlink_to("/dev/full")
    run(JSONLReporter(), tmp_path, losses(1, 2))
    assert caplog.text.count("log.jsonl could not be written") == 1
    assert "No space left" in caplog.text


@pytest.mark.parametrize(("kind", "suffix"), [(JSONLReporter, "jsonl"), (CSVReporter, "csv")])
@pytest.mark.parametrize("start", [0, 2])
def test_no_row_is_lost_when_the_disk_refuses_for_a_while(tmp_path, monkeypatch, kind, suffix, start):
    """Whichever open or rename of the file fails, at a start anew and at a resume: all rows are there, in order."""
    undisturbed = tmp_path / "undisturbed"
    run(kind(), undisturbed, losses(1, 2))
    run(kind(), undisturbed, losses(3, 4, 5), start=start)
    expected = re.sub(r'"time": [0-9.]+', "", (undisturbed / f"log.{suffix}").read_text())
    for failing in range(12):
        folder, calls = tmp_path / str(failing), iter(range(100))
        run(kind(), folder, losses(1, 2))
        with monkeypatch.context() as patched:

            def refuse(original, calls=calls, failing=failing):
                def call(path, *args, **kwargs):
                    if "log" in Path(path).name and next(calls) == failing:
                        raise OSError(errno.EIO, "Input/output error")
                    return original(path, *args, **kwargs)

                return call

            for name in ("open", "rename", "replace"):
                patched.setattr(Path, name, refuse(getattr(Path, name)))
            run(kind(), folder, losses(3, 4, 5), start=start)
        assert re.sub(r'"time": [0-9.]+', "", (folder / f"log.{suffix}").read_text()) == expected
        assert sorted(p.name for p in folder.iterdir()) == sorted(p.name for p in undisturbed.iterdir())


def test_a_line_that_was_cut_off_does_not_spoil_the_next(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"step": 1, "lo')
    JSONLReporter().on_log(arguments(tmp_path), TrainerState(global_step=2), TrainerControl(), logs={"loss": 2})
    assert json.loads((tmp_path / "log.jsonl").read_text().splitlines()[1])["loss"] == 2


# ---- CSV


def test_csv_grows_columns(tmp_path):
    run(CSVReporter(), tmp_path, [{"loss": 1.5}, {"loss": 1.25}, {"eval_loss": 2.0, "note": 'a,"b"'}, {"loss": 1.0}])
    assert (tmp_path / "log.csv").read_text().splitlines() == [
        "step,epoch,loss,eval_loss,note",
        "1,0.25,1.5,,",
        "2,0.5,1.25,,",
        '3,0.75,,2.0,"a,""b"""',
        "4,1.0,1.0,,",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["log.csv"]


def test_csv_of_a_resumed_run_has_each_step_once(tmp_path):
    run(CSVReporter(), tmp_path, losses(1, 2, 3, 4))
    with (tmp_path / "log.csv").open("a") as file:
        file.write("2,0.5")  # died here
    run(CSVReporter(), tmp_path, [{"loss": 30, "f1": 0.5}], start=2)
    columns, rows = csv_log.read(tmp_path / "log.csv")
    assert columns == ["step", "epoch", "loss", "f1"]
    assert [(row["step"], row["loss"], row["f1"]) for row in rows] == [
        ("1", "1", ""),
        ("2", "2", ""),
        ("3", "30", "0.5"),
    ]


@pytest.mark.parametrize("space", ["\x0b", "\x0c", "\x1d", "\x85", "\u2028"])
def test_csv_keeps_texts_with_unusual_breaks(tmp_path, space):
    """Python splits lines at these characters, and csv writes them without quotes."""
    run(CSVReporter(), tmp_path, [{"note": f"a{space}b"}, {"loss": 1.0}])
    assert [(row["step"], row["note"]) for row in csv_log.read(tmp_path / "log.csv")[1]] == [
        ("1", f"a{space}b"),
        ("2", ""),
    ]


def test_csv_after_the_run(tmp_path):
    run(CSVReporter(), tmp_path, losses(1))
    CSVReporter().on_log(arguments(tmp_path), TrainerState(global_step=1), TrainerControl(), logs={"loss": 2})
    assert [row["loss"] for row in csv_log.read(tmp_path / "log.csv")[1]] == ["1", "2"]


def test_csv_of_an_evaluation_in_another_folder(tmp_path):
    """A file has its own columns, in its own order."""
    reporter = CSVReporter()
    run(reporter, tmp_path / "a", [{"loss": 1, "eval_loss": 2, "f1": 3}])
    for folder, row in (("b", {"eval_loss": 4}), ("b", {"f1": 5, "eval_loss": 6}), ("a", {"eval_loss": 7})):
        reporter.on_log(arguments(tmp_path / folder), TrainerState(global_step=1), TrainerControl(), logs=row)
    assert (tmp_path / "b" / "log.csv").read_text().splitlines() == ["step,epoch,eval_loss,f1", "1,0,4,", "1,0,6,5"]
    assert (tmp_path / "a" / "log.csv").read_text().splitlines()[1:] == ["1,0.25,1,2,3", "1,0,,7,"]


names = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1).filter(lambda n: n not in ("step", "epoch"))


@pytest.mark.slow
@given(
    st.lists(st.dictionaries(names, st.floats(allow_nan=False) | st.integers(), min_size=1, max_size=3), max_size=6),
    st.integers(0, 6),
)
def test_csv_is_the_same_with_and_without_a_break(tmp_path_factory, rows, start):
    start = min(start, len(rows))
    whole, broken = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("broken")
    run(CSVReporter(), whole, rows)
    run(CSVReporter(), broken, rows)
    run(CSVReporter(), broken, rows[start:], start=start)
    if start and rows:
        assert (whole / "log.csv").read_text() == (broken / "log.csv").read_text()


# ---- TensorBoard


class Writer:
    def __init__(self, **options):
        self.options, self.scalars, self.texts, self.is_open = options, [], [], True

    def add_scalar(self, *values):
        self.scalars.append(values)

    def add_text(self, *values):
        self.texts.append(values)

    def flush(self):
        pass

    def close(self):
        self.is_open = False


@pytest.fixture
def writers(monkeypatch):
    made = []
    monkeypatch.delenv("TENSORBOARD_LOGGING_DIR", raising=False)
    monkeypatch.setattr(board, "is_installed", lambda module: True)
    monkeypatch.setattr(board, "_writer_class", lambda: lambda **options: made.append(Writer(**options)) or made[-1])
    return made


def test_tensorboard_rows(tmp_path, writers):
    rows = [{"loss": 1.0, "eval_f1": np.float32(0.5), "test_loss": 2, "evaluation": 3.0, "note": "x"}]
    run(TensorBoardCallback(), tmp_path, rows)
    (writer,) = writers
    assert writer.scalars == [
        ("train/loss", 1.0, 1),
        ("eval/f1", 0.5, 1),
        ("test/loss", 2, 1),
        ("train/evaluation", 3.0, 1),
    ]
    assert writer.texts == [("args", '{"seed": 1}'), ("train/note", "x", 1)]
    assert writer.options["log_dir"].startswith(str(tmp_path / "runs"))
    assert writer.options["purge_step"] is None
    assert not writer.is_open


def test_tensorboard_hides_what_a_resumed_run_makes_anew(tmp_path, writers):
    run(TensorBoardCallback(), tmp_path, losses(1), start=7, logging_dir=str(tmp_path / "tb"))
    assert writers[0].options == {"log_dir": str(tmp_path / "tb"), "purge_step": 8}


def test_tensorboard_folder_from_the_environment(tmp_path, writers, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", "~/tb")
    monkeypatch.setenv("HOME", str(tmp_path))
    run(TensorBoardCallback(), tmp_path, losses(1))
    assert writers[0].options["log_dir"] == str(tmp_path / "tb")


def test_tensorboard_folder_of_a_trial(tmp_path):
    state = TrainerState(is_hyper_param_search=True, trial_name="trial-3")
    assert board.logging_folder(arguments(tmp_path, logging_dir="elsewhere"), state).endswith("/trial-3")


def test_tensorboard_folder_after_a_trial_that_broke_off(tmp_path, writers):
    reporter, control = TensorBoardCallback(), TrainerControl()
    for trial in ("run-0", "run-1", None):  # run-0 has no on_train_end; None is the training after the search
        state = TrainerState(is_hyper_param_search=trial is not None, trial_name=trial)
        reporter.on_train_begin(arguments(tmp_path), state, control)
        if trial != "run-0":
            reporter.on_train_end(arguments(tmp_path), state, control)
    assert [writer.options["log_dir"].rpartition("/")[2] for writer in writers[:2]] == ["run-0", "run-1"]
    assert "run-" not in writers[2].options["log_dir"].removeprefix(str(tmp_path))
    assert not any(writer.is_open for writer in writers)


def test_tensorboard_model_card(tmp_path, writers):
    state, control = TrainerState(global_step=3), TrainerControl()
    reporter = TensorBoardCallback()
    reporter.on_model_card(arguments(tmp_path), state, control, make_card=lambda: "# The card")
    assert writers[0].texts == [("model_card", "# The card", 3)]
    state = TrainerState(is_world_process_zero=False)
    TensorBoardCallback().on_model_card(arguments(tmp_path), state, control, make_card=lambda: 1 / 0)


def test_tensorboard_takes_a_writer(tmp_path):
    writer = Writer()
    run(TensorBoardCallback(writer), tmp_path, losses(1))
    assert len(writer.scalars) == 1


def test_tensorboard_missing(monkeypatch):
    monkeypatch.setattr(board, "is_installed", lambda module: False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ImportError, match=r"paceline\[tensorboard\]"):
        TensorBoardCallback()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_for_real(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(TensorBoardCallback(), tmp_path, losses(1.0, 0.5), logging_dir=str(tmp_path / "tb"))
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 1.0), (2, 0.5)]


# ---- the registry


@pytest.mark.parametrize(
    ("report_to", "expected"),
    [
        (None, []),
        ("none", []),
        ([], []),
        (["none"], []),
        ("csv", [CSVReporter]),
        (["jsonl", "tensorboard", "jsonl"], [JSONLReporter, TensorBoardCallback]),
        ("jsonl, csv", [JSONLReporter, CSVReporter]),
    ],
)
def test_by_name(report_to, expected):
    assert find_reporters(report_to) == expected


def test_all_that_can_run(monkeypatch):
    monkeypatch.setattr(reporters, "is_installed", lambda module: module == "tensorboardX")
    assert find_reporters("all") == [TensorBoardCallback, JSONLReporter, CSVReporter]
    monkeypatch.setattr(reporters, "is_installed", lambda module: False)
    assert find_reporters(["all"]) == [JSONLReporter, CSVReporter]


def test_an_unknown_name():
    with pytest.raises(ValueError, match=r"report_to='tensorbord'.*did you mean 'tensorboard'\?"):
        find_reporters("tensorbord")


class Plain(TrainerCallback):
    def on_log(self, args, state, control, **kwargs):
        raise OSError


class Safe(Reporter):
    pass


def _entry_points(monkeypatch, **values):
    points = [EntryPoint(name, value, reporters.ENTRY_POINT_GROUP) for name, value in values.items()]
    monkeypatch.setattr(reporters, "entry_points", lambda group: points)


def test_entry_points(monkeypatch, caplog):
    _entry_points(monkeypatch, plain=f"{__name__}:Plain", safe=f"{__name__}:Safe", broken="no_such_module:X", csv="x:y")
    monkeypatch.setitem(sys.modules, __name__, SimpleNamespace(Plain=Plain, Safe=Safe, number=3))
    plain, safe = find_reporters(["plain", "safe"])
    assert safe is Safe
    assert issubclass(plain, Plain)
    assert plain.__name__ == "Plain"
    run(plain(), ".", losses(1, 2))
    assert "Plain failed in on_log" in caplog.text
    everything = find_reporters("all")
    assert everything[-1] is Safe
    assert "left out broken" in caplog.text
    with pytest.raises(ModuleNotFoundError):
        find_reporters("broken")
    assert find_reporters("csv") == [CSVReporter]


def test_an_entry_point_must_be_a_class(monkeypatch):
    _entry_points(monkeypatch, number=f"{__name__}:number")
    monkeypatch.setitem(sys.modules, __name__, SimpleNamespace(number=3))
    with pytest.raises(TypeError, match=r"paceline\.reporters:number must name a callback class"):
        find_reporters("number")


# ---- trackers; tests/callbacks/test_trackers.py runs them for real


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_tracker_without_its_package_says_what_to_install(monkeypatch, name):
    (kind,) = find_reporters(name)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=rf'{name} is required: pip install "paceline\[{name}\]"'):
        kind()


class Config:
    def to_dict(self):
        return {"width": 8, "nested": {"depth": 2}, "seed": 7}


def test_settings_hold_no_secrets():
    values = {"seed": 1, "hub_token": "abc", "url": "https://me:hidden@host/", "note": "hf_" + "a" * 20}
    args = SimpleNamespace(to_dict=lambda: values)
    told = settings_of(args, SimpleNamespace(config=Config(), peft_config={"default": Config()}))
    assert told["seed"] == 1  # the arguments win over the model
    assert told["peft_config"]["default"]["width"] == told["width"] == 8
    assert not any(secret in str(told) for secret in ("abc", "hidden", "hf_a"))
    assert dict(mlflow_log.flat({"a": {"b": 1, "c": {"d": 2}}, "e": {}})) == {"a.b": 1, "a.c.d": 2, "e": {}}


def test_the_sender_keeps_what_could_not_be_sent():
    sent, is_down, tried = [], [True], threading.Event()

    def send(items):
        tried.set()
        if is_down[0]:
            raise ConnectionError("down")
        sent.extend(items)

    sender = mlflow_log.Sender(send)
    sender.put([1, 2])
    assert not sender.drain(5)
    with pytest.raises(ConnectionError):
        sender.check()
    sender.put([3])
    assert not sender.drain(5)
    sender.check()  # the same outage
    is_down[0] = False
    sender.put(list(range(4, 4000)))
    assert sender.drain(5)
    assert (sent, sender.num_waiting) == (list(range(1, 4000)), 0)
    is_down[0] = True
    sender.put([4000])
    sender.drain(5)
    with pytest.raises(ConnectionError):  # another one
        sender.check()
    sender.close()


def test_a_server_that_is_not_there_is_told_at_once():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    with pytest.raises(ConnectionError, match=rf"127.0.0.1:{port} cannot be reached.*MLFLOW_TRACKING_URI"):
        mlflow_log.check_server(f"http://127.0.0.1:{port}")
    for elsewhere in ("sqlite:///mlflow.db", "databricks", "/some/folder"):
        mlflow_log.check_server(elsewhere)
    with socket.socket() as listener:  # takes connections, and answers none
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with pytest.raises(ConnectionError, match=r"cannot be reached \(timed out\)"):
            mlflow_log.check_server(f"http://127.0.0.1:{listener.getsockname()[1]}", 0.1)


@pytest.mark.parametrize(("value", "expected"), [("end", "end"), ("CHECKPOINT", "checkpoint"), ("", "false")])
def test_what_wandb_uploads(monkeypatch, value, expected):
    monkeypatch.setenv("WANDB_LOG_MODEL", value)
    assert wandb_log.log_model_choice() == expected
    monkeypatch.setenv("WANDB_LOG_MODEL", "yes")
    with pytest.raises(ValueError, match=r"WANDB_LOG_MODEL='yes'.*end, checkpoint, false"):
        wandb_log.log_model_choice()
