"""Bars on a pseudo-terminal: they stay whole whatever the program prints and however wide the terminal is."""

import logging
import os
import sys
from types import SimpleNamespace

import pytest
from small_models import Classifier, classification
from terminals import on_terminal
from tqdm.std import tqdm

from paceline import Trainer, TrainerCallback, TrainingArguments
from paceline.callbacks.printer import readable_row
from paceline.callbacks.progress import ProgressCallback
from paceline.callbacks.terminal_bar import AlignedRows, wrap
from paceline.core.events import CallbackHandler
from paceline.core.state import TrainerControl, TrainerState


@pytest.fixture(autouse=True)
def no_other_bars():
    """Bars that a failed test left would stand above those of the next one."""
    for bar in list(tqdm._instances):
        bar.close()


ARGS = SimpleNamespace(
    per_device_train_batch_size=4, gradient_accumulation_steps=2, world_size=1, eval_strategy="no", save_strategy="no"
)


class Run:
    """A training of some steps, of which only the display is real."""

    def __init__(self, max_steps: int = 10) -> None:
        self.callback, self.control = ProgressCallback(), TrainerControl()
        self.state = TrainerState(max_steps=max_steps)
        self.optimizer = SimpleNamespace(param_groups=[{"lr": 1e-3}])
        self.handler = CallbackHandler([self.callback], optimizer=self.optimizer)

    def begin(self) -> None:
        self.handler.on_train_begin(ARGS, self.state, self.control)

    def step(self, loss: float | None = None) -> None:
        self.callback._next_refresh = 0.0  # as if half a second had passed
        self.state.global_step += 1
        self.state.epoch = self.state.global_step / 5
        self.handler.fire("on_step_end", ARGS, self.state, self.control)
        if loss is not None:
            self.handler.on_log(ARGS, self.state, self.control, {"loss": loss, "epoch": self.state.epoch})

    def end(self) -> None:
        self.handler.on_train_end(ARGS, self.state, self.control)


@pytest.mark.parametrize("columns", [20, 40, 80, 200])
def test_what_a_program_prints_stands_above_the_bar(columns):
    with on_terminal(columns) as terminal:
        handler = logging.StreamHandler()  # keeps a reference to the stream
        run = Run()
        run.begin()
        run.step()
        print("printed")
        print("in ", end="")
        run.step(loss=2.5)
        print("parts")
        sys.stderr.write("one\ntwo\n")
        handler.emit(logging.makeLogRecord({"msg": "logged"}))
        sys.stderr.writelines(["a\n", "b\n"])
        shown = terminal.look()
        assert shown[-1].startswith("  loss 2.5")
        assert shown[-2].startswith("train: 2/10")
        assert [line for line in shown[:-2] if not line.startswith((" ", "step"))] == [
            "printed", "in parts", "one", "two", "logged", "a", "b",
        ]  # fmt: skip
        while run.state.global_step < 10:
            run.step(loss=1.5)
        run.end()
        print("after")
        shown = terminal.look()
        assert shown[-1] == "after"
        assert shown[-3].startswith("train: 10/10")
        assert sum(line.startswith("train:") for line in shown) == 1
        assert vars(terminal.stream).keys() <= {"mode"}


def test_a_resized_terminal_keeps_nothing_of_older_frames():
    with on_terminal(120) as terminal:
        run = Run()
        run.begin()
        for loss in (3.0, 2.0):
            run.step(loss)
        for columns in (50, 30, 100, 45):
            terminal.resize(columns)
            run.step()
            shown = terminal.look()
            assert shown[-2].startswith(f"train: {run.state.global_step}/10")
            assert shown[-1].startswith("  loss 2")
            assert sum("train:" in line for line in shown) == 1
            assert sum("loss 2" in line and "step" not in line for line in shown) == 1
            assert len(shown) <= 10
        run.end()


def test_an_evaluation_has_a_bar_below_that_leaves_nothing():
    with on_terminal(80) as terminal:
        run = Run()
        run.handler.eval_dataloader = range(4)
        run.begin()
        run.step()
        for _ in range(4):
            run.callback._next_refresh = 0.0
            run.handler.fire("on_prediction_step", ARGS, run.state, run.control)
        print("in an evaluation")
        shown = terminal.look()
        assert shown[0] == "in an evaluation"
        assert shown[1].startswith("train: 1/10")
        assert shown[3].startswith("evaluate: 4/4")
        run.handler.on_evaluate(ARGS, run.state, run.control, {})
        run.step()
        assert [line.split()[0] for line in terminal.look()] == ["in", "train:", "lr"]
        run.end()


def test_the_last_frame_shows_the_rate_of_the_last_step():
    with on_terminal(80) as terminal:
        run = Run(max_steps=5)
        run.begin()
        for step in range(1, 6):
            run.optimizer.param_groups[0]["lr"] = 0.5 / (5 - step) if step < 5 else 0.0  # of the step after it
            run.step()
        run.handler.on_log(ARGS, run.state, run.control, {"loss": 0.5, "learning_rate": 0.5})
        run.end()
        assert "lr 0.5," in terminal.look()[-1]
        assert "5/5" in terminal.look()[-2]


def test_an_error_restores_the_streams_and_keeps_the_bar(tmp_path):
    class Broken(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3:
                raise RuntimeError("broken")

    args = TrainingArguments(str(tmp_path), max_steps=5, report_to="none", use_cpu=True, save_strategy="no")
    trainer = Trainer(Classifier(), args, train_dataset=classification(16), callbacks=[Broken()])
    with on_terminal(150) as terminal:
        with pytest.raises(RuntimeError, match="broken"):
            trainer.train()
        assert "write" not in vars(terminal.stream)
        print("after")
        shown = terminal.look()
        assert shown[-1] == "after"
        assert sum(line.startswith("train:") for line in shown) == 1


def test_a_short_run_prints_a_loss(tmp_path):
    args = TrainingArguments(str(tmp_path), max_steps=2, report_to="none", use_cpu=True, save_strategy="no")
    assert args.logging_steps > 2
    trainer = Trainer(Classifier(), args, train_dataset=classification(16))
    with on_terminal(150) as terminal:
        trainer.train()
        shown = terminal.look()
    assert any(line.startswith("step     2") and " loss " in line for line in shown)
    assert "loss" in shown[-1]


def test_a_forked_process_writes_lines_without_the_bar():
    with on_terminal(60) as terminal:
        run = Run()
        run.begin()
        run.step()
        owner = terminal.stream.write.args[0]
        owner._process = os.getpid() + 1  # as in a fork
        print("from a worker")
        assert terminal.look() == ["from a worker"]
        owner._process = os.getpid()
        run.step()
        assert [line.split()[0] for line in terminal.look()] == ["from", "train:", "lr"]
        run.end()


def test_a_stream_that_other_code_wrapped_meanwhile_stays_wrapped():
    with on_terminal(60) as terminal:
        run = Run()
        run.begin()
        inner, seen = terminal.stream.write, []
        terminal.stream.write = lambda text: (seen.append(text), inner(text))[1]
        run.end()
        print("still written")
        assert seen
        assert terminal.look()[-1] == "still written"


def test_an_error_of_the_writer_is_that_of_the_stream():
    with on_terminal(60) as terminal:
        run = Run()
        run.begin()
        with pytest.raises(TypeError):
            terminal.stream.write(3)
        run.end()


def test_rows_are_aligned():
    rows = AlignedRows()
    lines = [
        rows.format(readable_row({"loss": loss, "text": "a\nb", "epoch": epoch}, step), 80)
        for step, loss, epoch in ((9, 1.5, 0.5), (100000, 0.12345, 1.25), (100001, 1.0, 2.0))
    ]
    assert lines[1].index("loss") - lines[1].index("epoch") == lines[2].index("loss") - lines[2].index("epoch")
    assert lines[0] == "step     9  epoch 0.5    loss 1.5    text a b"


def test_a_row_wraps_between_its_numbers():
    assert wrap(["step 1", "loss 2", "x" * 30, "y"], 20) == ["step 1  loss 2", "x" * 30, "      y"]
    assert wrap([], 20) == [""]


@pytest.mark.parametrize("fails", [False, True])
def test_an_evaluation_alone(tmp_path, fails):
    def compute_metrics(prediction):
        print("computing")
        if fails:
            raise ValueError("no metric")
        return {"one": 1.0}

    args = TrainingArguments(str(tmp_path), report_to="none", use_cpu=True)
    trainer = Trainer(Classifier(), args, eval_dataset=classification(16), compute_metrics=compute_metrics)
    with on_terminal(150) as terminal:
        if fails:
            with pytest.raises(ValueError, match="no metric"):
                trainer.evaluate()
        else:
            trainer.evaluate()
        assert "write" not in vars(terminal.stream)
        print("after")
        assert [line.split()[0] for line in terminal.look()] == ["computing", "evaluate:", "after"]
