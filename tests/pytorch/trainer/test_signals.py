"""SIGTERM, SIGUSR1 and Ctrl-C: saved at the next boundary, resumed to the same bits. In processes of their own."""

import csv
import json
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from small_models import Classifier, classification, losses, make_trainer, weights

from paceline import EarlyStoppingCallback, JITCheckpointCallback, TrainerCallback
from paceline.core.signals import StopSignals

DATA = classification(24)
pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="needs POSIX signals")

SCRIPT = """
import json, os, signal, sys
sys.path.insert(0, sys.argv[1])
import torch
torch.set_num_threads(1)
from small_models import Classifier, classification, make_trainer
from paceline import TrainerCallback

DATA = classification(24)


class Kill(TrainerCallback):
    num = 0

    def __init__(self, plan):
        self.plan = plan

    def at(self, event, state):
        if event == self.plan.get("event") and state.global_step == self.plan["step"]:
            self.num += 1
            for name in self.plan["signals"] if self.num == 1 else ():
                os.kill(os.getpid(), getattr(signal, name))
                for _ in range(100): pass

    def on_train_begin(self, args, state, control, **kwargs): self.at("train_begin", state)
    def on_step_begin(self, args, state, control, **kwargs): self.at("step_begin", state)
    def on_substep_end(self, args, state, control, **kwargs): self.at("substep_end", state)
    def on_step_end(self, args, state, control, **kwargs): self.at("step_end", state)
    def on_prediction_step(self, args, state, control, **kwargs): self.at("prediction_step", state)
    def on_epoch_begin(self, args, state, control, **kwargs): self.at("epoch_begin", state)
    def on_log(self, args, state, control, **kwargs): self.at("log", state)
    def on_evaluate(self, args, state, control, **kwargs): self.at("evaluate", state)
    def on_save(self, args, state, control, **kwargs): self.at("save", state)
    def on_epoch_end(self, args, state, control, **kwargs): self.at("epoch_end", state)


def run(folder, plan):
    options = {"save_strategy": "steps", "save_steps": 100, "eval_strategy": "steps", "eval_steps": 2}
    options.update(plan.get("options", {}))
    trainer = make_trainer(
        folder, Classifier(dropout=0.2), DATA, eval_dataset=DATA[:12], num_train_epochs=2,
        gradient_accumulation_steps=2, per_device_eval_batch_size=4, callbacks=[Kill(plan)], **options
    )
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    before, end = [signal.getsignal(n) for n in numbers], "normal"
    try:
        trainer.train(resume_from_checkpoint=plan.get("resume"))
    except KeyboardInterrupt as error:
        end = f"KeyboardInterrupt {error}"
    restored = [signal.getsignal(n) for n in numbers] == before
    torch.save(trainer.model.state_dict(), os.path.join(folder, "end.pt"))
    rows = trainer.state.log_history
    rows = [{k: v for k, v in row.items() if "runtime" not in k and "per_second" not in k} for row in rows]
    checkpoints = sorted(name for name in os.listdir(folder) if name.startswith("checkpoint-"))
    return {"end": end, "restored": restored, "step": trainer.state.global_step, "rows": rows, "saved": checkpoints}


results = [run(*job) for job in json.loads(sys.argv[2])]
print()
print(json.dumps(results))
"""


def process(*jobs: tuple[Path, dict[str, Any]]) -> list[dict[str, Any]]:
    """Do runs in a process of their own: each in a folder, under a plan of what to do to it."""
    support = str(Path(__file__).parents[2] / "support")
    text = json.dumps([(str(folder), plan) for folder, plan in jobs])
    done = subprocess.run([sys.executable, "-c", SCRIPT, support, text], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    results: list[dict[str, Any]] = json.loads(done.stdout.strip().splitlines()[-1])
    return results


def ended(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = torch.load(folder / "end.pt", weights_only=True)
    return result


def without_summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if "train_loss" not in row]


RESUME = {"resume": True}
STOPS: dict[str, dict[str, Any]] = {
    # in the middle of update 3, after which no evaluation is due
    "in an update": {"event": "substep_end", "step": 2, "signals": ["SIGTERM"], "saved at": 3},
    # before update 4, after which one is due: it is done after the resume
    "before an update": {"event": "step_begin", "step": 3, "signals": ["SIGUSR1"], "saved at": 4},
    "in an evaluation": {"event": "prediction_step", "step": 4, "signals": ["SIGTERM"], "saved at": 4},
    "in the last evaluation": {"event": "prediction_step", "step": 6, "signals": ["SIGUSR1"], "saved at": 6},
    "after an update": {"event": "step_end", "step": 3, "signals": ["SIGUSR1"], "saved at": 3},
    "at the start": {"event": "train_begin", "step": 0, "signals": ["SIGTERM"], "saved at": 1},
    "at the end of an epoch": {"event": "epoch_end", "step": 3, "signals": ["SIGTERM"], "saved at": 3},
    "at the start of an epoch": {"event": "epoch_begin", "step": 3, "signals": ["SIGTERM"], "saved at": 4},
    "in a log": {"event": "log", "step": 2, "signals": ["SIGTERM"], "saved at": 2},
    # the update that ends an epoch: the epoch must be neither trained again nor left out
    "in the log of an epoch's last update": {"event": "log", "step": 3, "signals": ["SIGTERM"], "saved at": 3},
    "in the last log": {"event": "log", "step": 6, "signals": ["SIGTERM"], "saved at": 6},
}
EPOCHS = {"eval_strategy": "epoch", "load_best_model_at_end": True, "save_strategy": "epoch"}
for name, plan in {
    "epochs: in an evaluation": {"event": "prediction_step", "step": 3, "signals": ["SIGTERM"], "saved at": 3},
    "epochs: in the last evaluation": {"event": "prediction_step", "step": 6, "signals": ["SIGTERM"], "saved at": 6},
    "epochs: in an update": {"event": "substep_end", "step": 4, "signals": ["SIGTERM"], "saved at": 5},
    # the epoch ends, and is evaluated, after the resume
    "epochs: in the last update": {"event": "substep_end", "step": 5, "signals": ["SIGTERM"], "saved at": 6},
}.items():
    STOPS[name] = {**plan, "options": EPOCHS, "whole": "epochs"}
START = {"eval_on_start": True}
plan = {"event": "prediction_step", "step": 0, "signals": ["SIGTERM"], "saved at": 0}
STOPS["in the evaluation at the start"] = {**plan, "options": START, "whole": "evaluated at the start"}
EVERY = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
for event in ("log", "evaluate", "save"):
    plan = {"event": event, "step": 3, "signals": ["SIGTERM"], "saved at": 3}
    STOPS[f"every step: in the {event} of an epoch's last update"] = {**plan, "options": EVERY, "whole": "every step"}
    STOPS[f"epochs: in the {event} of an epoch's last update"] = {**plan, "options": EPOCHS, "whole": "epochs"}
OTHERS: dict[str, dict[str, Any]] = {
    "undisturbed": {},
    "epochs": {"options": EPOCHS},
    "every step": {"options": EVERY},
    "evaluated at the start": {"options": START},
    "two kinds": {"event": "step_begin", "step": 2, "signals": ["SIGUSR1", "SIGTERM"]},
    "ctrl-c": {"event": "step_begin", "step": 2, "signals": ["SIGINT"]},
    "ctrl-c in an evaluation": {"event": "prediction_step", "step": 2, "signals": ["SIGINT"]},
    "ctrl-c twice": {"event": "step_begin", "step": 2, "signals": ["SIGINT", "SIGINT"]},
    "saving off": {"event": "step_begin", "step": 2, "signals": ["SIGTERM"], "options": {"save_strategy": "no"}},
    "saving off, but for this": {
        "event": "step_begin",
        "step": 2,
        "signals": ["SIGTERM"],
        "options": {"save_strategy": "no", "enable_jit_checkpoint": True},
    },
    "option off": {"event": "step_begin", "step": 2, "signals": ["SIGINT"], "options": {"stop_signals": False}},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All of them in one process: it takes longer to start than to train."""
    root = tmp_path_factory.mktemp("runs")
    jobs: list[tuple[str, Path, dict[str, Any]]] = [(name, root / name, plan) for name, plan in OTHERS.items()]
    for name, plan in STOPS.items():
        resume = {**RESUME, "options": plan.get("options", {})}
        jobs += [(name, root / name, plan), (f"{name}, resumed", root / name, resume)]
    results = process(*((folder, plan) for _, folder, plan in jobs))
    found: dict[str, Any] = {name: result for (name, _, _), result in zip(jobs, results, strict=True)}
    return {**found, "root": root}


@pytest.mark.slow
@pytest.mark.parametrize("name", STOPS)
def test_saved_at_the_next_boundary_and_resumed(runs: dict[str, Any], name: str) -> None:
    plan, stopped, resumed = STOPS[name], runs[name], runs[f"{name}, resumed"]
    folder, at = plan.get("whole", "undisturbed"), plan["saved at"]
    whole = runs[folder]
    assert (stopped["end"], stopped["restored"], stopped["step"]) == ("normal", True, at)
    assert stopped["saved"][-1] == f"checkpoint-{at}"
    if plan["event"] == "prediction_step":  # left in the middle, without a row
        assert [row["step"] for row in stopped["rows"] if "eval_loss" in row and row["step"] == at] == []
    assert resumed["step"] == whole["step"] == 6
    ends = [ended(runs["root"] / each) for each in (name, folder)]
    assert all(torch.equal(value, ends[1][key]) for key, value in ends[0].items())
    assert without_summary(resumed["rows"]) == without_summary(whole["rows"])


def test_two_kinds_in_a_row(runs: dict[str, Any]) -> None:
    """SIGUSR1 as a warning, and SIGTERM after it, as schedulers do."""
    stopped = runs["two kinds"]
    assert (stopped["end"], stopped["step"], stopped["saved"]) == ("normal", 3, ["checkpoint-3"])


@pytest.mark.parametrize(("name", "step"), [("ctrl-c", 3), ("ctrl-c in an evaluation", 2)])
def test_ctrl_c_saves_and_is_raised(runs: dict[str, Any], name: str, step: int) -> None:
    stopped = runs[name]
    assert stopped["end"].startswith(f"KeyboardInterrupt stopped at step {step}")
    assert stopped["restored"]
    assert stopped["saved"] == [f"checkpoint-{step}"]
    saved = load_file(runs["root"] / name / f"checkpoint-{step}" / "model.safetensors")
    assert all(torch.equal(value, saved[key]) for key, value in ended(runs["root"] / name).items())


@pytest.mark.parametrize("name", ["ctrl-c twice", "option off"])
def test_stopped_at_once(runs: dict[str, Any], name: str) -> None:
    """By a second Ctrl-C; by the first, where the run is not to handle signals."""
    stopped = runs[name]
    assert stopped["end"].startswith("KeyboardInterrupt")
    assert (stopped["step"], stopped["saved"], stopped["restored"]) == (2, [], True)


def test_nothing_is_saved_where_saving_is_off(runs: dict[str, Any]) -> None:
    stopped = runs["saving off"]
    assert (stopped["end"], stopped["step"], stopped["saved"]) == ("normal", 3, [])
    asked = runs["saving off, but for this"]
    assert (asked["end"], asked["step"], asked["saved"]) == ("normal", 3, ["checkpoint-3"])


class Terminate(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            signal.raise_signal(signal.SIGTERM)


def test_the_callback_of_the_reference_asks_for_a_checkpoint(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        make(tmp_path, save_strategy="no", callbacks=[JITCheckpointCallback, Terminate]).train()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    with pytest.raises(ValueError, match="stop_signals=True"):
        make(tmp_path, stop_signals=False, callbacks=[JITCheckpointCallback()]).train()


@pytest.mark.slow
def test_resumed_in_another_process(tmp_path: Path, runs: dict[str, Any]) -> None:
    process((tmp_path, STOPS["in an evaluation"]))
    process((tmp_path, RESUME))
    whole = ended(runs["root"] / "undisturbed")
    assert all(torch.equal(value, whole[key]) for key, value in ended(tmp_path).items())


def make(folder: Path, **options: Any) -> Any:
    return make_trainer(folder, Classifier(), DATA, **options)


def test_a_handler_that_stood_before_is_called_and_put_back(tmp_path: Path) -> None:
    from paceline import TrainerCallback

    class Kill(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                signal.raise_signal(signal.SIGUSR1)

    seen: list[int] = []

    def handler(number: int, frame: Any) -> None:
        seen.append(number)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        trainer = make(tmp_path, callbacks=[Kill()])
        trainer.train()
        assert signal.getsignal(signal.SIGUSR1) is handler
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == [signal.SIGUSR1]
    assert trainer.state.global_step == 2
    trainer.train()  # a new run is not stopped by the signal of the one before
    assert trainer.state.global_step == 2  # by its own


@pytest.mark.parametrize(("key", "state"), [("train_runtime", "finished"), ("loss", "interrupted")])
def test_a_signal_after_the_last_step(tmp_path: Path, key: str, state: str) -> None:
    """At its boundary the last evaluation and the best model are left to a resumed run; later nothing is left."""
    from paceline import TrainerCallback

    class Kill(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if state.global_step == 2 and key in logs:
                signal.raise_signal(signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    try:
        trainer = make(tmp_path, max_steps=2, logging_steps=1, callbacks=[Kill()], save_strategy="steps")
        trainer.train()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert trainer.was_stopped == (state == "interrupted")
    assert json.loads((tmp_path / "run.json").read_text())["end"]["state"] == state
    trainer = make(tmp_path, max_steps=2, save_strategy="steps")
    trainer.train(resume_from_checkpoint=True)
    assert not trainer.was_stopped


class Evaluate(TrainerCallback):
    """Evaluates at the end of the first epoch, where a signal comes."""

    trainer: Any = None

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.epoch == 1:
            self.metrics = self.trainer.evaluate(self.trainer.train_dataset)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        signal.raise_signal(signal.SIGTERM)


def test_an_evaluation_of_a_callback_is_finished_before_the_run_stops(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        callback = Evaluate()
        trainer = make(tmp_path, callbacks=[callback], save_strategy="steps", save_steps=100, num_train_epochs=2)
        callback.trainer = trainer
        trainer.train()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert callback.metrics["eval_loss"] > 0
    assert trainer.state.epoch == 1
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == [f"checkpoint-{trainer.state.global_step}"]


class Jittered(torch.utils.data.Dataset[Any]):
    """Samples with noise of the global generators."""

    def __init__(self, samples: list[dict[str, Any]]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = self.samples[index]
        return {**sample, "x": sample["x"] + random.random() + float(np.random.rand()) + torch.rand(8)}


class TerminateEvaluation(TrainerCallback):
    def __init__(self, step: int, batch: int) -> None:
        self.step, self.batch, self.num_batches = step, batch, 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.batch == 0 and state.global_step == self.step:
            signal.raise_signal(signal.SIGTERM)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.num_batches += state.global_step == self.step
        if self.num_batches == self.batch > 0:
            signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize(("step", "batch"), [(4, 0), (4, 2), (4, 3), (4, 4), (0, 4), (12, 4)])
def test_an_interrupted_evaluation_is_completed(tmp_path: Path, step: int, batch: int) -> None:
    """Before it, in the first of two datasets, after its last batch, and in the second; both draw random numbers."""

    def train(folder: Path, *callbacks: Any) -> Any:
        options = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
        best = {"metric_for_best_model": "eval_first_loss", "greater_is_better": False}
        trainer = make_trainer(
            folder, Classifier(dropout=0.2), DATA, num_train_epochs=4, learning_rate=1e-9, **options, **best,
            eval_dataset={"first": Jittered(DATA[:12]), "second": Jittered(DATA[12:])}, per_device_eval_batch_size=4,
            callbacks=[EarlyStoppingCallback(5, 9.0), *callbacks], report_to=["jsonl", "csv"], eval_on_start=True,
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=any(folder.glob("checkpoint-*")))
        return trainer

    whole = train(tmp_path / "whole")
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        assert train(tmp_path / "parts", TerminateEvaluation(step, batch)).was_stopped
    finally:
        signal.signal(signal.SIGTERM, before)
    resumed = train(tmp_path / "parts")
    assert resumed.state.global_step == whole.state.global_step == 12  # stopped early, by the sixth evaluation
    assert without_times(resumed.state.log_history) == without_times(whole.state.log_history)
    assert resumed.state.best_global_step == whole.state.best_global_step
    assert torch.equal(weights(resumed.model), weights(whole.model))
    logs = [evaluations_in(tmp_path / name) for name in ("parts", "whole")]
    assert logs[0] == logs[1]
    assert len(logs[0]["log.jsonl"]) == len(logs[0]["log.csv"]) == 14


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    timed = ("runtime", "per_second", "flos", "train_loss")
    return [{key: value for key, value in row.items() if not any(name in key for name in timed)} for row in rows]


def evaluations_in(folder: Path) -> dict[str, list[tuple[str, str]]]:
    """The step and the losses of each evaluation in the log files of a run."""
    with (folder / "log.csv").open(newline="") as file:
        files = {"log.csv": list(csv.DictReader(file))}
    files["log.jsonl"] = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return {
        name: [
            (str(row["step"]), str(row[key]))
            for row in rows
            for key in ("eval_first_loss", "eval_second_loss")
            if row.get(key)
        ]
        for name, rows in files.items()
    }


def test_handlers_are_put_back_after_an_error(tmp_path: Path) -> None:
    class Breaks(Classifier):
        def forward(self, x: Any, labels: Any = None) -> Any:
            raise ValueError("broken")

    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    with pytest.raises(ValueError, match="broken"):
        make_trainer(tmp_path, Breaks(), DATA).train()
    assert [signal.getsignal(number) for number in numbers] == before


def test_off(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals(enabled=False):
        assert signal.getsignal(signal.SIGTERM) == before


def test_another_thread_trains_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="paceline")
    found: list[Any] = []

    def work() -> None:
        trainer = make(tmp_path / "thread")
        trainer.train()
        found.append(trainer)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    main = make(tmp_path / "main")
    main.train()
    assert losses(found[0]) == losses(main)
    assert torch.equal(weights(found[0].model), weights(main.model))
    assert "outside the main thread" in caplog.text
