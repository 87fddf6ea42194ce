import io
import os
import sys
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest

from paceline.callbacks import progress
from paceline.callbacks.flow import DefaultFlowCallback
from paceline.callbacks.printer import PrinterCallback
from paceline.callbacks.progress import LineBar, ProgressCallback
from paceline.callbacks.speed import pauses_left
from paceline.cli.display import EvaluationLines
from paceline.core.events import CallbackHandler
from paceline.core.state import TrainerControl, TrainerState

ARGS = SimpleNamespace(
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    world_size=1,
    logging_strategy="no",
    logging_first_step=False,
    eval_strategy="no",
    eval_delay=0,
    save_strategy="no",
)


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(time=100.0)
    monkeypatch.setattr(time, "perf_counter", lambda: now.time)
    return now


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setattr(progress, "is_interactive", lambda stream: True)


def handler_with(callback):
    optimizer = SimpleNamespace(param_groups=[{"lr": 1e-3}])
    return CallbackHandler([DefaultFlowCallback(), callback], optimizer=optimizer)


def train(callback, state, steps, clock=None, seconds=1.0, tokens=0, loss=None):
    handler, control = handler_with(callback), TrainerControl()
    handler.on_train_begin(ARGS, state, control)
    for _ in range(steps):
        if clock is not None:
            clock.time += seconds
        state.global_step += 1
        state.num_input_tokens_seen += tokens
        handler.fire("on_step_end", ARGS, state, control)
        if loss is not None:
            handler.on_log(ARGS, state, control, {"loss": loss, "total_flos": 1.0})
    return handler, control


def test_a_bar_on_a_terminal(terminal, capsys):
    callback, state = ProgressCallback(), TrainerState(max_steps=4)
    handler, control = train(callback, state, 4, tokens=100, loss=1.23456)
    bar = callback.training_bar
    assert type(bar).__module__ == "tqdm.std"
    assert (bar.n, bar.total) == (4, 4)
    for part in ("loss 1.235", "lr 0.001", "tok/s", "RAM"):
        assert part in bar.postfix
    handler.on_train_end(ARGS, state, control)
    assert callback.training_bar is None
    shown = capsys.readouterr()
    assert "4/4" in shown.err
    assert [line.split() for line in shown.out.splitlines()] == [["step", f"{i}", "loss", "1.235"] for i in range(1, 5)]


def test_a_resumed_run_starts_where_it_was(terminal):
    callback, state = ProgressCallback(), TrainerState(max_steps=10, global_step=6)
    handler, control = train(callback, state, 1)
    assert (callback.training_bar.n, callback.training_bar.initial) == (7, 6)
    handler.on_train_end(ARGS, state, control)


def test_lines_where_there_is_no_terminal(clock, capsys):
    callback, state = ProgressCallback(seconds_between_lines=10), TrainerState(max_steps=100)
    handler, control = train(callback, state, 25, clock, loss=None)
    assert isinstance(callback.training_bar, LineBar)
    handler.on_log(ARGS, state, control, {"loss": 2.0})
    handler.on_train_end(ARGS, state, control)
    shown = capsys.readouterr()
    lines = shown.err.splitlines()
    assert [line.split(" RAM")[0] for line in lines] == [
        "train: step 10/100 [00:10<01:30] lr 0.001, 8 samples/s,",
        "train: step 20/100 [00:20<01:20] lr 0.001, 8 samples/s,",
        "train: step 25/100 [00:25<00:00] loss 2, lr 0.001, 8 samples/s,",  # it ends here: nothing is left
    ]
    assert shown.out == "{'loss': 2.0, 'step': 25}\n"


def test_output_that_cannot_be_written_ends_no_training(clock, monkeypatch):
    """A full disk behind the log file of a job, a reader that has closed the pipe, an encoding without the letters."""
    with open("/dev/full", "w", encoding="ascii") as full, monkeypatch.context() as patch:
        patch.setattr("sys.stdout", full)
        patch.setattr("sys.stderr", full)
        callback, state = ProgressCallback(seconds_between_lines=10), TrainerState(max_steps=100)
        handler, control = train(callback, state, 25, clock, loss=None)
        handler.on_log(ARGS, state, control, {"justesse_équilibrée": 2.0})
        handler.on_train_end(ARGS, state, control)
        PrinterCallback().on_log(ARGS, state, control, {"justesse_équilibrée": 2.0})
        with suppress(OSError):
            full.flush()  # what stayed in its buffer is lost
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())
    assert callback.training_bar is None


def test_a_reader_that_leaves_while_the_bar_is_on_a_terminal_ends_no_training(terminal, clock, monkeypatch):
    """`python train.py | head`: the rows go to the pipe, the bar to the terminal."""
    reader, writer = os.pipe()
    os.close(reader)
    state = TrainerState(max_steps=100)
    pipe = io.TextIOWrapper(io.FileIO(writer, "w"), encoding="utf-8", write_through=True)  # no buffer to fill first
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", pipe)
        callback = ProgressCallback()
        handler, control = train(callback, state, 25, clock, loss=2.0)
        EvaluationLines({"eval_loss": "held out"}, callback).on_evaluate(ARGS, state, control, {"eval_loss": 1.0})
        handler.on_train_end(ARGS, state, control)
    with suppress(OSError):
        pipe.close()
    assert callback.training_bar is None


def test_the_speed_leaves_evaluations_out(clock):
    callback, state = ProgressCallback(), TrainerState(max_steps=100)
    handler, control = train(callback, state, 5, clock)
    clock.time += 1000
    handler.on_evaluate(ARGS, state, control, {})
    for _ in range(3):
        clock.time += 1
        state.global_step += 1
        handler.fire("on_step_end", ARGS, state, control)
    assert callback._speed.steps_per_second == 1.0


def test_the_last_line_has_the_numbers_of_the_last_update(clock, capsys):
    callback, state = ProgressCallback(), TrainerState(max_steps=3)
    handler, control = train(callback, state, 3, clock)
    handler.on_evaluate(ARGS, state, control, {})
    handler.optimizer.param_groups[0]["lr"] = 0.0
    handler.on_train_end(ARGS, state, control)
    assert "lr 0.001, 8 samples/s" in capsys.readouterr().err


def test_a_changed_max_steps_is_shown(clock):
    callback, state = ProgressCallback(), TrainerState(max_steps=100)
    handler, control = train(callback, state, 1, clock)
    state.max_steps = 50
    clock.time += 1
    handler.fire("on_step_end", ARGS, state, control)
    assert callback.training_bar.total == 50


def test_a_learning_rate_on_the_device_is_not_read(clock):
    class Tensor:
        def __format__(self, spec):
            raise AssertionError("waited for the device")

    assert progress._learning_rate(SimpleNamespace(param_groups=[{"lr": Tensor()}])) == ""
    assert progress._learning_rate(None) == ""


@pytest.mark.parametrize("loader", [[1, 2], iter([1, 2])])
def test_evaluation_has_a_bar_of_its_own(terminal, loader):
    callback = ProgressCallback()
    handler, state, control = handler_with(callback), TrainerState(), TrainerControl()
    handler.eval_dataloader = loader
    for _ in range(2):
        handler.fire("on_prediction_step", ARGS, state, control)
    assert callback.prediction_bar.n == 2
    assert callback.prediction_bar.total == (2 if isinstance(loader, list) else None)
    handler.on_evaluate(ARGS, state, control, {})
    assert callback.prediction_bar is None
    handler.fire("on_prediction_step", ARGS, state, control)
    handler.on_predict(ARGS, state, control, {})
    assert callback.prediction_bar is None


def test_only_the_first_process_shows_anything(capsys):
    callback, state = ProgressCallback(), TrainerState(max_steps=2, is_world_process_zero=False)
    handler, control = train(callback, state, 2, loss=1.0)
    handler.fire("on_prediction_step", ARGS, state, control)
    handler.on_evaluate(ARGS, state, control, {})
    handler.on_train_end(ARGS, state, control)
    assert capsys.readouterr() == ("", "")


def test_a_run_that_was_broken_off_leaves_no_bar(terminal):
    callback, state = ProgressCallback(), TrainerState(max_steps=4)
    train(callback, state, 2)
    first = callback.training_bar
    handler, control = train(callback, state, 1)
    assert first.disable  # closed
    handler.on_train_end(ARGS, state, control)


def test_rows_may_be_left_away(capsys):
    callback, state = ProgressCallback(write_logs=False), TrainerState(max_steps=4)
    train(callback, state, 2, loss=1.0)
    assert capsys.readouterr().out == ""


def test_long_strings_are_cut(capsys):
    callback, state = ProgressCallback(max_str_len=5), TrainerState(max_steps=4)
    handler, control = train(callback, state, 1)
    handler.on_log(ARGS, state, control, {"text": "x" * 6})
    assert "6 characters" in capsys.readouterr().out


def test_a_bar_that_is_not_to_stay_says_nothing_at_its_end(capsys):
    bar = LineBar(3, "evaluate", "batch", leave=False)
    bar.update(3)
    bar.close()
    assert capsys.readouterr().err == ""


def test_a_line_without_a_total(capsys):
    bar = LineBar(None, "evaluate", "batch")
    bar.update(3)
    bar.set_postfix_str("x")
    assert capsys.readouterr().err == "evaluate: batch 3 [00:00] x\n"


def test_what_can_show_a_bar(monkeypatch):
    size = [80, 24]
    monkeypatch.setattr(os, "get_terminal_size", lambda descriptor: size)
    terminal = SimpleNamespace(isatty=lambda: True, fileno=lambda: 2)
    assert progress.is_interactive(terminal)
    assert not progress.is_interactive(SimpleNamespace(isatty=lambda: False))
    assert not progress.is_interactive(None)
    size[0] = 0
    assert not progress.is_interactive(terminal)
    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert progress.is_interactive(None)
    del shell.kernel
    assert not progress.is_notebook()


@pytest.mark.parametrize("columns", [40, 60, 80, 200])
def test_a_bar_fits_the_terminal(terminal, clock, monkeypatch, columns):
    monkeypatch.setattr("tqdm.std._screen_shape_wrapper", lambda: lambda stream: (columns, 24))
    monkeypatch.setattr(progress, "describe_memory", lambda: "RAM 328 MiB")
    callback, state = ProgressCallback(write_logs=False), TrainerState(max_steps=1000, epoch=0.125)
    handler, control = train(callback, state, 120, clock, tokens=3)
    for loss in range(20, 0, -1):
        handler.on_log(ARGS, state, control, {"loss": loss / 10})
    lines = [str(callback.training_bar), str(callback._details._line)]
    assert max(map(len, lines)) < columns
    assert lines[0].startswith("train: 120/1000")
    for part, least in (("<14:40", 40), ("epoch 0.125", 60), ("1 step/s", 40), ("|", 80)):
        assert (part in lines[0]) == (columns >= least), (part, lines)
    for part, least in (("loss 0.1", 40), ("lr 0.001", 40), ("3 tok/s", 40), ("RAM", 60), ("loss 0.1 \u2588", 40)):
        assert (part in lines[1]) == (columns >= least), (part, lines)
    assert ", , " not in "".join(lines)
    handler.on_train_end(ARGS, state, control)


def test_braces_in_the_name_of_a_phase(terminal, clock):
    callback, state = ProgressCallback(write_logs=False), TrainerState(max_steps=10)
    state.phase = "{all} \u52a0"
    handler, control = train(callback, state, 2, clock)
    assert "<00:08, {all} \u52a0, " in str(callback.training_bar)
    handler.on_train_end(ARGS, state, control)


@pytest.mark.parametrize("seconds_of_first", [1.0, 100.0])
@pytest.mark.parametrize("intervals", [(10, 20), (30, 90), (150, 100), (0, 0)])
def test_the_time_left_is_right_from_a_tenth_of_the_run_on(clock, seconds_of_first, intervals):
    """Whatever the first step, evaluations and saves take, and before the first of them."""
    args = SimpleNamespace(**{**vars(ARGS), "eval_strategy": "steps", "save_strategy": "steps"})
    state = TrainerState(max_steps=200, eval_steps=intervals[0], save_steps=intervals[1])
    state.num_eval_samples = 88 * 3  # 8 samples take a second in a training step
    callback, control = ProgressCallback(write_logs=False), TrainerControl()
    handler = CallbackHandler([callback], optimizer=None)
    handler.on_train_begin(args, state, control)
    expected = []

    def note():
        expected.append((state.global_step, clock.time, callback._time.left(args, state, 8, clock.time)))

    for step in range(1, 201):
        clock.time += seconds_of_first if step == 1 else 1.0
        state.global_step = step
        handler.fire("on_step_end", args, state, control)
        note()
        if is_due(step, intervals[0]):
            for _ in range(2):
                clock.time += 5.5
                note()  # during the evaluation, and when its numbers are logged
            handler.on_evaluate(args, state, control, {})
            note()
        if is_due(step, intervals[1]):
            clock.time += 3 if intervals[1] else 0.5
            handler.on_save(args, state, control)
            note()
    end = clock.time
    handler.on_train_end(args, state, control)
    for step, now, left in expected:
        assert step < 20 or left == pytest.approx(end - now, rel=0.1, abs=1.0), step


@pytest.mark.parametrize(
    ("row", "seconds"),
    [
        ({}, 10.0),  # unmeasured: a third of a step for the samples of one
        ({"time/data": 6.0, "time/forward": 1.5, "time/backward": 2.5}, 22.5),  # waiting for data
        ({"time/forward": 1.0, "time/backward": 2.0, "time/optimizer": 7.0}, 3.0),  # a large optimizer
        ({"time/compute": 9.0, "time/optimizer": 1.0, "time/setup": 50.0, "time/evaluate": 9.0}, 9.0),
        ({"time/setup": 5.0}, 10.0),
    ],
)
def test_the_first_evaluation_is_estimated_from_the_times_of_a_row(clock, row, seconds):
    args = SimpleNamespace(**{**vars(ARGS), "eval_strategy": "steps"})
    state = TrainerState(max_steps=10, eval_steps=10)
    state.num_eval_samples = 8 * 30
    callback, control = ProgressCallback(write_logs=False), TrainerControl()
    handler = CallbackHandler([callback], optimizer=None)
    handler.on_train_begin(args, state, control)
    for state.global_step in range(1, 6):
        clock.time += 1.0
        handler.fire("on_step_end", args, state, control)
    handler.on_log(args, state, control, {"loss": 1.0, **row})
    assert callback._time.left(args, state, 8, clock.time) == pytest.approx(5 + seconds)
    handler.on_train_end(args, state, control)


def is_due(step, interval):
    return step == 200 or (interval and step % interval == 0)


@pytest.mark.parametrize(("steps", "num_epochs"), [(100, 3), (50, 2)])
def test_the_evaluations_left_of_epochs(steps, num_epochs):
    """Of epochs of a length that is no whole number of steps, and of a run that ends within one."""
    args = SimpleNamespace(eval_strategy="epoch", eval_delay=1.5, save_strategy="epoch")
    state = TrainerState(max_steps=steps, num_train_epochs=num_epochs)
    for state.epoch, is_over, evaluations, saves in (
        (0.0, False, num_epochs - 1, num_epochs),
        (1 / 3, False, num_epochs - 1, num_epochs),
        (1.0, False, num_epochs - 1, num_epochs),
        (1.0, True, num_epochs - 1, num_epochs - 1),
        (2.0 - 1e-9, False, num_epochs - 1, num_epochs - 1),
        (2.0 - 1e-9, True, num_epochs - 2, num_epochs - 2),
    ):
        assert pauses_left("eval", args, state, is_over) == evaluations
        assert pauses_left("save", args, state, is_over) == saves
    state.global_step, state.epoch = steps, num_epochs - 1 / 3  # the run ends within an epoch
    assert (pauses_left("eval", args, state, False), pauses_left("eval", args, state, True)) == (1, 0)
    assert pauses_left("eval", SimpleNamespace(eval_strategy="no"), state, False) == 0
