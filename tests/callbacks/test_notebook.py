from types import SimpleNamespace

import pytest

from paceline.callbacks import notebook
from paceline.callbacks.flow import DefaultFlowCallback
from paceline.callbacks.notebook import (
    NotebookProgressBar,
    NotebookProgressCallback,
    NotebookTrainingTracker,
    html_table,
)
from paceline.callbacks.notebook_curve import LossCurve
from paceline.core.events import CallbackHandler
from paceline.core.state import TrainerControl, TrainerState


class Page:
    """Stands in for IPython.display."""

    def __init__(self):
        self.shown = []

    def HTML(self, code):
        return code

    def display(self, code, display_id):
        assert display_id
        self.shown.append(code)
        index = len(self.shown) - 1
        return SimpleNamespace(update=lambda code: self.shown.__setitem__(index, code))


@pytest.fixture
def page(monkeypatch):
    page = Page()
    monkeypatch.setattr(notebook, "is_installed", lambda module: True)
    monkeypatch.setattr(notebook, "require", lambda module, extra: page)
    return page


def arguments(eval_strategy="steps"):
    return SimpleNamespace(
        eval_strategy=eval_strategy, logging_strategy="no", logging_first_step=False, save_strategy="no", eval_delay=0
    )


def run(callback, args, evaluate=True):
    state, control = TrainerState(max_steps=4, num_train_epochs=2), TrainerControl()
    handler = CallbackHandler([DefaultFlowCallback(), callback])
    handler.eval_dataloader = [1, 2]
    handler.on_train_begin(args, state, control)
    for step in range(1, 5):
        state.global_step, state.epoch = step, step / 2
        handler.fire("on_step_end", args, state, control)
        logs = {"loss": 1 / step}
        state.log_history.append(logs)
        handler.on_log(args, state, control, logs)
        if evaluate and step % 2 == 0:
            for _ in handler.eval_dataloader:
                handler.fire("on_prediction_step", args, state, control)
            metrics = {"eval_loss": 2 / step, "eval_exact_match": 0.5, "eval_runtime": 1.0, "epoch": 1.0}
            handler.on_evaluate(args, state, control, metrics)
            assert len(metrics) == 4
    tracker = callback.training_tracker
    handler.on_train_end(args, state, control)
    return tracker


def test_a_row_per_evaluation(page):
    tracker = run(NotebookProgressCallback(), arguments())
    assert tracker.inner_table == [
        ["Step", "Training Loss", "Validation Loss", "Exact Match"],
        [2, 0.5, 1.0, 0.5],
        [4, 0.25, 0.5, 0.5],
    ]
    assert len(page.shown) == 1
    assert "<td>0.250000</td>" in page.shown[0]
    assert "max='4'" in page.shown[0]
    assert page.shown[0].count("<progress") == 1


def test_a_row_per_log_where_nothing_is_evaluated(page):
    tracker = run(NotebookProgressCallback(), arguments("no"), evaluate=False)
    assert tracker.inner_table == [["Step", "Training Loss"], [1, 1.0], [2, 0.5], [3, 1 / 3], [4, 0.25]]


def test_epochs_in_the_first_column(page):
    tracker = run(NotebookProgressCallback(), arguments("epoch"))
    assert [row[0] for row in tracker.inner_table] == ["Epoch", 1.0, 2.0]


def test_several_evaluation_sets_share_a_row():
    tracker = NotebookTrainingTracker(10, ["Step"])
    tracker.write_line({"Step": 1, "A Loss": 1.0})
    tracker.write_line({"Step": 1, "B Loss": 2.0})
    tracker.write_line({"Step": 2, "A Loss": 3.0})
    assert tracker.inner_table == [["Step", "A Loss", "B Loss"], [1, 1.0, 2.0], [2, 3.0, "No log"]]


def test_evaluation_without_training(page):
    callback, state, control = NotebookProgressCallback(), TrainerState(), TrainerControl()
    handler = CallbackHandler([callback])
    handler.eval_dataloader = iter([])
    handler.fire("on_prediction_step", arguments(), state, control)
    assert "<progress style" in page.shown[0]  # moves without an end
    handler.on_evaluate(arguments(), state, control, {"eval_loss": 1.5})
    assert page.shown[0] == ""
    assert "1.500000" in page.shown[1]
    handler.fire("on_prediction_step", arguments(), state, control)
    handler.on_predict(arguments(), state, control, {})
    assert callback.prediction_bar is None


def test_only_the_first_process_shows_anything(page):
    callback, state, control = NotebookProgressCallback(), TrainerState(is_world_process_zero=False), TrainerControl()
    handler = CallbackHandler([callback])
    handler.on_train_begin(arguments(), state, control)
    for event in ("on_step_end", "on_prediction_step"):
        handler.fire(event, arguments(), state, control)
    handler.on_log(arguments("no"), state, control, {"loss": 1.0})
    handler.on_evaluate(arguments(), state, control, {})
    handler.on_train_end(arguments(), state, control)
    assert page.shown == []


def test_rows_are_printed_without_ipython(monkeypatch, capsys):
    monkeypatch.setattr(notebook, "is_installed", lambda module: False)
    run(NotebookProgressCallback(), arguments())
    assert capsys.readouterr().out.splitlines() == [
        "Step: 2, Training Loss: 0.500000, Validation Loss: 1.000000, Exact Match: 0.500000",
        "Step: 4, Training Loss: 0.250000, Validation Loss: 0.500000, Exact Match: 0.500000",
    ]


def test_a_bar_draws_now_and_then(page, monkeypatch):
    now = SimpleNamespace(time=0.0)
    monkeypatch.setattr("time.perf_counter", lambda: now.time)
    bar, drawn = NotebookProgressBar(100, prefix="a<b", leave=False), []
    monkeypatch.setattr(bar, "display", lambda: drawn.append(bar.render()))
    for value in range(100):
        bar.update(value)
        now.time += 0.125
    assert len(drawn) == 25  # every half second
    assert drawn[10].startswith("<div>a&lt;b <progress value='40' max='100'")
    assert "[40/100 00:05 < 00:08, 8.00 it/s]" in drawn[10]
    bar.update(100)
    assert len(drawn) == 26


def test_the_time_left_counts_neither_the_first_step_nor_evaluations_as_pace(page, monkeypatch):
    now = SimpleNamespace(time=0.0)
    monkeypatch.setattr("time.perf_counter", lambda: now.time)
    callback, args = NotebookProgressCallback(), arguments("steps")
    state, control = TrainerState(max_steps=100, num_train_epochs=1, eval_steps=20, epoch=0.0), TrainerControl()
    handler = CallbackHandler([callback])
    handler.on_train_begin(args, state, control)
    for step in range(1, 41):
        now.time += 100 if step == 1 else 1
        state.global_step = step
        handler.fire("on_step_end", args, state, control)
        if step % 20 == 0:
            now.time += 10
            handler.on_evaluate(args, state, control, {"eval_loss": 1.0})
    assert "[40/100 02:39 < 01:30," in callback.training_tracker.render()  # 60 steps and three evaluations
    handler.on_train_end(args, state, control)
    assert "[40/100 02:39 < 00:00," in page.shown[0]  # ended by a callback


def test_the_curve_grows_with_each_log(page):
    callback, args = NotebookProgressCallback(), arguments()
    state, control = TrainerState(max_steps=4, num_train_epochs=2), TrainerControl()
    handler = CallbackHandler([DefaultFlowCallback(), callback])
    handler.on_train_begin(args, state, control)
    for step, loss in ((1, 4.0), (2, float("nan")), (3, 2.0)):
        state.global_step, state.epoch = step, step / 2
        handler.on_log(args, state, control, {"loss": loss})
    drawn = callback.training_tracker.render()
    assert "aria-label='Steps 1 to 3: training loss 2, least 2'" in drawn
    assert "<polyline points='4.0,4.0 356.0,86.0'/>" in drawn
    handler.on_evaluate(args, state, control, {"eval_loss": 3.0})
    assert "validation loss (dashed) 3, least 3" in page.shown[0]
    assert page.shown[0].count("<polyline") == 2


def test_a_curve_has_a_bounded_number_of_points():
    curve = LossCurve()
    for step in range(5000):
        curve.add(step, 5000.0 - step)
    assert len(curve.training) <= 512
    assert (curve.training[0][0], curve.training[-1][0]) == (0, 4999)
    assert len(curve.render()) < 10_000


def test_a_run_that_ends_by_an_error_draws_no_more(page):
    callback, args, state, control = (
        NotebookProgressCallback(),
        arguments(),
        TrainerState(max_steps=4),
        TrainerControl(),
    )
    handler = CallbackHandler([callback])
    handler.eval_dataloader = [1, 2]
    handler.on_train_begin(args, state, control)
    handler.fire("on_prediction_step", args, state, control)
    callback.on_run_closed(args, state, control)
    before = page.shown[0]
    handler.on_evaluate(args, state, control, {"eval_loss": 1.0})
    assert page.shown[0] == before
    assert "1.000000" in page.shown[1]


def test_cells_are_escaped():
    assert "<td>&lt;b&gt;</td>" in html_table([["x"], ["<b>"]])
