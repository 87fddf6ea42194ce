"""The screen of a terminal while a training runs and after it, as an emulator shows it."""

import logging
import re
import signal
import sys
import tempfile
from pathlib import Path

import pytest
from small_models import Classifier, classification
from terminals import Emulator, Screen, TerminalProcess, on_terminal
from tqdm.std import tqdm

from paceline import Phase, Trainer, TrainerCallback, TrainingArguments
from paceline.callbacks import progress

MASKS = (
    (r"\|[█▏▎▍▌▋▊▉ ]+\|", "|bar|"),
    (r"\d\d:\d\d<(\d\d:\d\d|\?)", "T<T"),
    (r"[\d.,]+ (step|samples|tok)/s", r"N \1/s"),
    (r"RAM [\d.]+ [MG]iB", "RAM"),
    (r"(_runtime|_per_second) [\d.]+", r"\1 N"),
    (r"(loss|grad_norm) [\d.]+", r"\1 N"),
    (r" [▁▂▃▄▅▆▇█]+", " CURVE"),
)


@pytest.fixture(autouse=True)
def frame_at_each_step(monkeypatch):
    for bar in list(tqdm._instances):  # of a test that failed
        bar.close()
    monkeypatch.setattr(progress, "REFRESH_SECONDS", 0.0)


@pytest.fixture
def folder():
    """An output folder whose path fits into the line of the header, which that of tmp_path may not."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def masked(lines):
    """Lines without what differs from run to run; runs of spaces are one."""
    for pattern, replacement in MASKS:
        lines = [re.sub(pattern, replacement, line) for line in lines]
    return [re.sub(r"(?<=\S) +", " ", line) for line in lines]


class Talkative(TrainerCallback):
    """Does at some steps what users do, and takes the screen at others."""

    def __init__(self, terminal, widths=None):
        self.terminal, self.widths = terminal, widths or {}
        self.screens = {}
        self.handler = logging.StreamHandler()  # keeps a reference to the stream

    def on_step_end(self, args, state, control, **kwargs):
        getattr(self, f"at_{state.global_step}", lambda: None)()
        if state.global_step in self.widths:
            self.terminal.resize(self.widths[state.global_step])

    def at_1(self):
        print("printed")

    def at_2(self):
        self.handler.emit(logging.makeLogRecord({"msg": "logged"}))

    def at_5(self):
        print("in ", end="")
        sys.stderr.write("to stderr\n")

    def at_6(self):
        print("parts")
        for _ in tqdm(range(3), desc="own bar", leave=False, mininterval=0, file=sys.stderr):
            self.screens["own bar"] = masked(self.terminal.look())

    def on_step_begin(self, args, state, control, **kwargs):
        self.screens[state.global_step] = masked(self.terminal.look())

    def on_prediction_step(self, args, state, control, **kwargs):
        self.screens["evaluation", state.global_step] = masked(self.terminal.look())


def train(folder, terminal, widths=None, **options):
    options = {"num_train_epochs": 2, "logging_steps": 4, "eval_strategy": "steps", "eval_steps": 4, **options}
    args = TrainingArguments(
        str(folder), report_to="none", use_cpu=True, save_strategy="no", learning_rate=0.5, seed=1,
        per_device_train_batch_size=4, per_device_eval_batch_size=4, **options,
    )  # fmt: skip
    data = classification(16)
    talkative = Talkative(terminal, widths)
    trainer = Trainer(Classifier(), args, train_dataset=data, eval_dataset=data, callbacks=[talkative])
    trainer.train()
    assert trainer.state.num_eval_samples == 16  # for the time left before the first evaluation
    print("after")
    screens = talkative.screens
    screens["end"] = masked(terminal.look())
    for screen in screens.values():  # without the header
        del screen[: next(i for i, line in enumerate(screen) if line.startswith("  output")) + 1]
    return screens


LINES = {
    "row": "step {} epoch {} loss N grad_norm N learning_rate {}",
    "evaluation": "step {} epoch {} eval_loss N eval_runtime N",
    "speeds": "eval_samples_per_second N eval_steps_per_second N",
    "bar": "train: {}/8 |bar| [T<T, epoch {}, N step/s]",
    "values": "  loss N, lr {}, N samples/s, RAM",
    "values and curve": "  loss N CURVE, lr {}, N samples/s, RAM",
}


def line(name, *numbers):
    return LINES[name].format(*numbers)


def evaluation(step, epoch, is_wide):
    first, second = line("evaluation", step, epoch), line("speeds")
    return [f"{first} {second}"] if is_wide else [first, " " * 12 + second]


@pytest.mark.parametrize("columns", [80, 200])
def test_a_training_that_prints_logs_and_evaluates(folder, columns):
    """All numbers are shown at both widths, and every line of the program is whole."""
    with on_terminal(columns, Emulator) as terminal:
        screens = train(folder, terminal)
    is_wide = columns == 200
    assert screens[1] == ["printed", line("bar", 1, 0.25), "  lr 0.438, N samples/s, RAM"]
    above = ["printed", "logged", line("row", 4, 1, 0.3125)]
    bars = [line("bar", 4, 1), line("values", 0.25)]
    assert screens["evaluation", 4] == [*above, *bars, "evaluate: 3/4 |bar| [T<T]"]
    above += evaluation(4, 1, is_wide)
    assert screens[4] == [*above, *bars]
    above.append("in to stderr")
    assert screens[5] == [*above, line("bar", 5, 1.25), line("values", 0.188)]
    above.append("parts")
    assert screens["own bar"][:-1] == [*above, line("bar", 5, 1.25), line("values", 0.188)]
    assert screens["own bar"][-1].startswith("own bar: 67%|bar| 2/3")
    assert screens[6] == [*above, line("bar", 6, 1.5), line("values", 0.125)]
    above.append(line("row", 8, 2, 0.0625))
    bars = [line("bar", 8, 2), line("values and curve", 0.0625)]
    assert screens["evaluation", 8] == [*above, *bars, "evaluate: 3/4 |bar| [T<T]"]
    above += evaluation(8, 2, is_wide)
    summary = ["step 8 epoch 2 train_runtime N train_samples_per_second N", "train_steps_per_second N train_loss N"]
    above += [" ".join(summary)] if is_wide else [summary[0], " " * 12 + summary[1]]
    assert screens["end"] == [*above, *bars, "after"]


@pytest.mark.parametrize("kind", [Emulator, Screen])
@pytest.mark.parametrize("columns", [80, 200])
def test_a_terminal_that_is_resized(folder, columns, kind):
    """Terminals that cut their lines, and terminals that wrap them anew, while training and in an evaluation."""
    widths = {2: 60, 3: 200, 4: 80, 6: 150}
    with on_terminal(columns, kind) as terminal:
        screens = train(folder, terminal, widths)
    frames = {
        name: [text for text in screen if re.match("train:|evaluate:|  l", text)] for name, screen in screens.items()
    }
    for step in (3, 4, 5, 6, 7):
        assert len(frames[step]) == 2, screens[step]
        assert frames[step][0].startswith(f"train: {step}/8 |bar|")
    assert [text.split()[0] for text in frames["evaluation", 4]] == ["train:", "loss", "evaluate:"]
    assert [text.split()[0] for text in screens["end"][-3:]] == ["train:", "loss", "after"]
    assert len(frames["end"]) == 2


@pytest.mark.parametrize("columns", [80, 200])
def test_the_phase_of_a_training(folder, columns):
    phases = [Phase("head", until=4, freeze=["first.*"]), Phase("all")]
    with on_terminal(columns, Emulator) as terminal:
        screens = train(folder, terminal, phases=phases, eval_strategy="no", eval_steps=None)
    assert screens[2][-2] == "train: 2/8 |bar| [T<T, head, epoch 0.5, N step/s]"
    assert screens[6][-2] == "train: 6/8 |bar| [T<T, all, epoch 1.5, N step/s]"


SCRIPT = """
import sys, time, warnings
sys.path.insert(0, {support!r})
from small_models import Classifier, classification
from paceline import Trainer, TrainerCallback, TrainingArguments

class Slow(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        time.sleep(0.05)
        if state.global_step == 4:
            warnings.warn("warned")
        if state.global_step % 20 == 0:
            print("printed at", state.global_step)

args = TrainingArguments({folder!r}, max_steps=10000, save_steps=1000, logging_steps=20, report_to="none", use_cpu=True)
Trainer(Classifier(), args, train_dataset=classification(16), callbacks=[Slow()]).train()
"""


@pytest.mark.slow
@pytest.mark.parametrize("columns", [80, 200])
def test_a_script_whose_terminal_is_resized_and_that_ctrl_c_ends(tmp_path, columns):
    """Warnings of Python above the bar, no remains of frames of another width, and one line at the end."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(support=str(Path(__file__).parents[1] / "support"), folder=str(tmp_path / "run")))
    emulator = Emulator(columns)
    with TerminalProcess([sys.executable, str(script)], columns) as process:
        process.wait_for(lambda: "printed at 20" in process.text)
        process.resize(columns // 2)
        width_changed_at = len(process.text)
        process.wait_for(lambda: "printed at 60" in process.text)
        process.interrupt()
        assert process.wait() in (-signal.SIGINT, 1)  # 1 if torch has made an optimizer
    emulator.feed(process.text[:width_changed_at])
    assert "".join(emulator.shown).count("UserWarning: warned") == 1
    emulator.resize(columns // 2)
    emulator.feed(process.text[width_changed_at:])
    shown = emulator.shown
    assert sum("train:" in line for line in shown) == 1
    bar = next(index for index, line in enumerate(shown) if line.startswith("train: "))
    assert shown[bar + 1].startswith("  loss ")
    end = "".join(line.ljust(columns // 2) for line in shown[bar + 2 :])
    assert re.match(r"Stopped at step \d+\. .*checkpoint-\d+ is complete: train\(resume_from_checkpoint=True\)", end)
    assert "Traceback" not in process.text
    for step in (20, 40, 60):
        assert f"printed at {step}" in shown
