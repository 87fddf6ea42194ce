"""The loop without a framework: what is due when, stops, resumes, rewinds, and memory that runs out."""

from __future__ import annotations

import copy
import math
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.args.plan import resolve
from paceline.args.training import TrainingArguments
from paceline.callbacks.flow import DefaultFlowCallback
from paceline.core import loop
from paceline.core import loop as loops
from paceline.core.contracts import Hooks, StepOutput
from paceline.core.events import CallbackHandler, TrainerCallback
from paceline.core.journal import NOT_COMPUTED
from paceline.core.ledger import Ledger
from paceline.core.loop import Loop
from paceline.core.nonfinite import MAX_REWINDS, MAX_REWINDS_IN_A_ROW, NonFiniteError
from paceline.core.signals import Interrupted, StopSignals
from paceline.core.state import TrainerControl, TrainerState
from paceline.core.summary import UpdateSummary

Act = Callable[..., Any]


class Feed:
    """Epochs of `length` micro-batches of four samples; a micro-batch is the list of its samples' numbers."""

    def __init__(self, length: int, accumulation: int) -> None:
        self.length, self.accumulation_steps = length, accumulation
        self.epoch = self.consumed = self.batches = 0
        self.is_restored = False

    def start_epoch(self, epoch: int) -> None:
        if not self.is_restored:
            self.epoch, self.consumed, self.batches = epoch, 0, 0
        self.is_restored = False

    def draw(self) -> tuple[list[Any], Any]:
        drawn = [list(range(4 * n, 4 * n + 4)) for n in range(self.batches, self.length)][: self.accumulation_steps]
        self.batches += len(drawn)
        self.consumed += 4 * len(drawn)
        return drawn, None

    def finish_epoch(self) -> None:
        self.epoch, self.consumed, self.batches = self.epoch + 1, 0, 0

    def close(self) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "consumed": self.consumed, "batches": self.batches}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        vars(self).update(state, is_restored=True)


class Engine:
    """The loss of an update is the number of updates tried so far; `bad` gives samples whose loss is NaN."""

    def __init__(self) -> None:
        self.keep_outputs = self.keep_batches = False
        self.fits = 1000  # samples of a micro-batch
        self.bad: set[int] = set()
        self.norm = 0.5
        self.sizes: list[list[int]] = []
        self.first: list[int] = []  # samples of the updates
        self.num_discarded = 0
        self.unread: list[tuple[float, float, float, bool]] = []

    def step(self, batches: Sequence[Any], num_items: Any, emit: Any) -> StepOutput:
        if max(map(len, batches)) > self.fits:
            raise MemoryError("not enough")
        self.sizes.append([len(batch) for batch in batches])
        self.first.append(batches[0][0])
        is_bad = bool(self.bad & {sample for batch in batches for sample in batch})
        self.unread.append((math.nan if is_bad else float(len(self.sizes)), self.norm, 0.1, True))
        return StepOutput([self.unread[-1][0]])

    def read(self) -> list[tuple[float, float, float, bool]]:
        unread, self.unread = self.unread, []
        return unread

    def is_out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, MemoryError)

    def discard(self) -> None:
        self.num_discarded += 1

    def split(self, batches: Sequence[Any], size: int) -> list[Any]:
        return [batch[at : at + size] for batch in batches for at in range(0, len(batch), size)]


class Saves:
    def __init__(self) -> None:
        self.is_due = False
        self.settled: list[int] = []

    def settle(self) -> None:
        self.is_due = False
        self.settled.append(1)


class Run:
    """A loop and what it did.

    Attributes:
        done: (what, optimizer steps before it), for logs, evaluations, checkpoints and rewinds.
    """

    def __init__(self, folder: Path, *callbacks: Any, length: int = 4, **options: Any) -> None:
        defaults = {"logging_strategy": "no", "save_strategy": "no", "report_to": "none"}
        self.args = TrainingArguments(str(folder), **{**defaults, **options})
        self.plan = resolve(self.args, world_size=1, micro_batches_per_epoch=length)
        self.state, self.control = TrainerState(max_steps=self.plan.max_steps), TrainerControl()
        self.state.compute_steps(self.args, self.plan.max_steps)
        self.engine, self.feed = Engine(), Feed(length, self.plan.accumulation_steps)
        self.saves, self.signals = Saves(), StopSignals()
        self.done: list[tuple[str, int]] = []
        self.logs: list[dict[str, float]] = []
        self.rows: list[Any] = []
        self.metrics = {"eval_loss": 1.0}
        self.act: Act = lambda: self.loop.log_evaluate_save()
        self.save: Act = lambda: True
        self.evaluate: Act = lambda: self.metrics
        self.loop = Loop(
            **{name: getattr(self, name) for name in ("args", "plan", "state", "control", "engine", "feed")},
            handler=CallbackHandler([DefaultFlowCallback(), *callbacks]),
            hooks=Hooks(
                log=self.log,
                act=lambda: self.act(),
                evaluate=lambda skip: self.note("evaluate", self.evaluate()),
                save=lambda: self.note("save", self.save()),
                record=self.rows.extend,
                snapshot=lambda: (copy.deepcopy(self.state), self.feed.state_dict()),
                rewind=self.rewind,
            ),
            signals=self.signals,
            saves=self.saves,
            ledger=Ledger(),
        )

    def log(self, logs: dict[str, float], start: float | None) -> None:
        self.logs.append(self.note("log", logs))

    def note(self, what: str, result: Any) -> Any:
        self.done.append((what, self.state.global_step))
        return result

    def rewind(self, snapshot: Any, bad: Any) -> None:
        self.note("rewind", None)
        self.state.take_back(snapshot[0])
        self.feed.load_state_dict(snapshot[1])


class At(TrainerCallback):
    """Sets flags, or calls a function, once at an event."""

    def __init__(self, event: str, step: int, *flags: str, call: Act | None = None) -> None:
        def do(args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
            if state.global_step == step and not self.is_done:
                self.is_done = True
                for flag in flags:
                    setattr(control, flag, True)
                if call is not None:
                    call()

        self.is_done = False
        setattr(self, event, do)


class Foreign:
    """A callback of another library, with none of the attributes of ours."""


def steps(*found: int, what: str) -> list[tuple[str, int]]:
    return [(what, step) for step in found]


# ---- when


@pytest.mark.parametrize(("accumulation", "epochs"), [(1, [0.25, 0.5, 0.75, 1.0]), (3, [0.75, 1.0])])
def test_steps_and_epochs_are_counted(tmp_path: Path, accumulation: int, epochs: list[float]) -> None:
    seen: list[float] = []

    class Listener(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(state.epoch)

    run = Run(tmp_path, Listener(), num_train_epochs=2, gradient_accumulation_steps=accumulation)
    run.loop.run()
    assert seen == [*epochs, *(1 + epoch for epoch in epochs)]
    assert run.state.global_step == len(seen) == len(run.engine.sizes)
    assert [(row.step, row.epoch, row.first, row.num_samples) for row in run.rows[:2]] == [
        (1, 0, 0, 4 * accumulation),
        (2, 0, 4 * accumulation, 4),
    ]


def test_what_is_due_is_done_once_and_in_order(tmp_path: Path) -> None:
    intervals = {"logging_strategy": "steps", "logging_steps": 3, "eval_strategy": "steps", "eval_steps": 2}
    run = Run(tmp_path, max_steps=6, save_strategy="steps", save_steps=3, **intervals)
    run.loop.run()
    assert run.done == [
        *[("evaluate", 2), ("log", 3), ("save", 3), ("evaluate", 4)],
        *[("log", 6), ("evaluate", 6), ("save", 6)],
    ]
    assert [row["loss"] for row in run.logs] == [2.0, 5.0]
    assert run.loop.mean_loss() == 3.5


def test_what_is_due_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    kinds = dict.fromkeys(("logging_strategy", "eval_strategy", "save_strategy"), "epoch")
    for kind, what in zip(kinds, ("log", "evaluate", "save"), strict=True):
        options = {"eval_strategy": "no", kind: "epoch"}
        run = Run(tmp_path, num_train_epochs=2, **options)
        run.loop.run()
        assert run.done == steps(4, 8, what=what)


@pytest.mark.parametrize("flag", ["should_log", "should_evaluate", "should_save"])
def test_a_flag_lasts_one_step_whoever_acts_on_it(tmp_path: Path, flag: str) -> None:
    run = Run(tmp_path, At("on_step_end", 2, flag), max_steps=8)
    acted: list[int] = []
    run.act = lambda: acted.append(run.state.global_step)  # lowers no flag
    run.loop.run()
    assert acted == [2]


def test_logs_of_a_run_that_is_not_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "MAX_UNREAD", 3)
    run = Run(tmp_path, max_steps=8)
    reads: list[int] = []
    record = run.rows.extend

    def note(rows: Sequence[Any]) -> None:
        reads.append(run.state.global_step)
        record(rows)

    run.loop.hooks = replace(run.loop.hooks, record=note)
    run.loop.run()
    assert (reads, run.done) == ([3, 6, 8], [])
    assert run.loop.mean_loss() == 4.5
    assert [row.loss for row in run.rows] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_log_holds_what_was_computed(tmp_path: Path) -> None:
    run = Run(tmp_path, At("on_step_end", 3, "should_log"), At("on_step_end", 4, "should_log"), max_steps=4)
    run.loop.run()
    assert run.logs == [
        {"loss": 2.0, "grad_norm": 0.5, "learning_rate": 0.1},
        {"loss": 4.0, "grad_norm": 0.5, "learning_rate": 0.1},
    ]
    without = Run(tmp_path, At("on_step_end", 1, "should_log"), max_steps=1)
    without.engine.norm = NOT_COMPUTED
    without.loop.run()
    assert without.logs == [{"loss": 1.0, "learning_rate": 0.1}]


def test_a_log_without_an_update_since_the_last_is_left_out(tmp_path: Path) -> None:
    run = Run(tmp_path, At("on_step_end", 4, "should_log"), At("on_epoch_end", 4, "should_log"), num_train_epochs=1)
    run.loop.run()
    assert run.done == steps(4, what="log")


@pytest.mark.parametrize(("has_work", "expected"), [(True, math.nan), (False, 0.0)])
def test_the_mean_loss_without_an_update(tmp_path: Path, has_work: bool, expected: float) -> None:
    run = Run(tmp_path, max_steps=4)
    run.feed.length = 0
    run.state.global_step = 0 if has_work else 4
    run.loop.run()
    assert run.loop.mean_loss() == pytest.approx(expected, nan_ok=True)
    assert run.engine.sizes == []


def test_data_without_a_batch_ends_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(tmp_path, max_steps=4)
    run.feed.length = 0
    run.loop.run()
    assert "There seems not to be a single sample" in caplog.text
    assert run.control.should_training_stop


def test_a_full_run_finds_data(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Run(tmp_path, max_steps=10).loop.run()
    assert "not to be a single sample" not in caplog.text


# ---- who stops it


@pytest.mark.parametrize("max_steps", [3, 4, 6])
def test_a_run_ends_at_its_last_step_though_no_callback_ends_it(tmp_path: Path, max_steps: int) -> None:
    run = Run(tmp_path, max_steps=max_steps)
    run.loop.handler = CallbackHandler([])
    run.loop.run()
    assert run.state.global_step == len(run.engine.sizes) == max_steps


def test_an_epoch_that_a_callback_ends(tmp_path: Path) -> None:
    run = Run(tmp_path, At("on_step_end", 2, "should_epoch_stop"), num_train_epochs=2)
    run.loop.run()
    assert run.engine.first == [0, 4, 0, 4, 8, 12]
    assert run.feed.epoch == 2


def test_a_run_that_a_callback_ends(tmp_path: Path) -> None:
    run = Run(tmp_path, At("on_step_end", 2, "should_training_stop"), num_train_epochs=2)
    run.loop.run()
    assert run.engine.first == [0, 4]
    assert (run.feed.epoch, run.feed.consumed) == (0, 8)


@pytest.mark.parametrize(("strategy", "asks", "saves"), [("steps", 0, True), ("no", 0, False), ("no", 1, True)])
def test_a_signal_is_obeyed_at_the_next_boundary(tmp_path: Path, strategy: str, asks: int, saves: bool) -> None:
    stop = At("on_step_end", 2, call=lambda: setattr(run.signals, "requested", signal.SIGTERM))
    stop.saves_on_signal = bool(asks)  # type: ignore[attr-defined]
    run = Run(tmp_path, stop, Foreign(), max_steps=8, save_strategy=strategy)
    run.loop.run()
    assert run.engine.first == [0, 4]
    assert run.done == (steps(2, what="save") if saves else [])
    assert run.loop.is_heeded


def test_a_checkpoint_holds_no_request_to_write_it(tmp_path: Path) -> None:
    """Nor one for the evaluation before it, which the resumed run would repeat."""

    def save() -> bool:
        assert not run.control.should_save
        assert not run.control.should_evaluate
        return False  # it is being written in the background

    run = Run(tmp_path, max_steps=4, save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2)
    run.save = save
    run.loop.run()
    assert run.done == [("evaluate", 2), ("save", 2), ("evaluate", 4), ("save", 4)]


def test_a_signal_during_an_evaluation(tmp_path: Path) -> None:
    def evaluate() -> Any:
        run.signals.requested = signal.SIGTERM
        raise Interrupted

    def save() -> bool:
        assert run.control.should_evaluate  # the resumed run finishes it
        return True

    run = Run(tmp_path, max_steps=8, eval_strategy="steps", eval_steps=2, save_strategy="steps")
    run.evaluate = evaluate
    run.save = save
    run.loop.run()
    assert run.done == steps(2, what="save")
    assert run.state.global_step == 2


def test_a_signal_during_a_save_makes_it_the_last(tmp_path: Path) -> None:
    def save() -> bool:
        run.signals.requested = signal.SIGTERM
        return True

    run = Run(tmp_path, max_steps=8, save_strategy="steps", save_steps=2)
    run.save = save
    run.loop.run()
    assert run.done == steps(2, what="save")
    assert run.state.global_step == 2
    assert run.loop.is_heeded


@pytest.mark.parametrize("what", ["log", "evaluate"])
def test_a_signal_during_what_is_due_is_obeyed_at_once(tmp_path: Path, what: str) -> None:
    kinds = {"logging_strategy": "steps", "logging_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    run = Run(tmp_path, max_steps=8, save_strategy="steps", save_steps=5, **kinds)
    note = run.note

    def hear(done: str, result: Any) -> Any:
        if done == what:
            run.signals.requested = signal.SIGTERM
        return note(done, result)

    run.note = hear  # type: ignore[method-assign]
    run.loop.run()
    assert run.done == [("log", 2), ("evaluate", 2), ("save", 2)]
    assert run.state.global_step == 2


def test_a_signal_during_an_event_of_the_epochs_end(tmp_path: Path) -> None:
    stop = At("on_epoch_end", 4, call=lambda: setattr(run.signals, "requested", signal.SIGTERM))
    run = Run(tmp_path, stop, num_train_epochs=3, save_strategy="steps")
    run.loop.run()
    assert run.done == steps(4, what="save")
    assert (run.feed.epoch, run.feed.consumed) == (1, 0)


def test_an_epoch_that_a_signal_left_at_its_last_step_is_ended_after_a_resume(tmp_path: Path) -> None:
    """As an evaluation at the end of the last epoch; once only, and not if `max_steps` ended it before."""
    options = {"num_train_epochs": 2, "eval_strategy": "epoch", "save_strategy": "epoch"}
    stop = At("on_step_begin", 7, call=lambda: setattr(run.signals, "requested", signal.SIGTERM))
    run = Run(tmp_path, stop, **options)
    run.loop.run()
    assert run.done == [("evaluate", 4), ("save", 4), ("save", 8)]
    assert run.loop.is_epoch_open
    again = Run(tmp_path, **options)
    again.state.global_step = 8
    again.feed.load_state_dict(run.feed.state_dict())
    again.loop.resume(UpdateSummary(), set(), None, run.loop.is_epoch_open)
    again.loop.run()
    assert again.done == [("evaluate", 8), ("save", 8)]
    assert not again.loop.is_epoch_open
    cut = Run(tmp_path, max_steps=6, eval_strategy="epoch", save_strategy="epoch")
    cut.loop.run()
    assert not cut.loop.is_epoch_open


@pytest.mark.parametrize(
    ("logging_steps", "done"), [(2, [("log", 2), ("rewind", 4), ("save", 2)]), (9, [("rewind", 4), ("save", 0)])]
)
def test_a_signal_and_a_rewind_at_one_step_leave_a_checkpoint(tmp_path: Path, logging_steps: int, done: Any) -> None:
    """It holds the step that the run was rewound to, whether an action or the end of the run finds the bad step."""
    stop = At("on_step_end", 4, call=lambda: setattr(run.signals, "requested", signal.SIGTERM))
    kinds = {"logging_strategy": "steps", "logging_steps": logging_steps, "save_strategy": "steps"}
    run = Run(tmp_path, stop, max_steps=8, nonfinite_policy="rollback", **kinds)
    run.engine.bad = {12}
    run.loop.run()
    assert run.done == done
    assert run.loop.is_heeded


@pytest.mark.parametrize("options", [{"num_train_epochs": 3}, {"max_steps": 12}])
def test_an_epoch_that_a_callback_skips(tmp_path: Path, caplog: pytest.LogCaptureFixture, options: Any) -> None:
    run = Run(tmp_path, At("on_epoch_begin", 4, "should_epoch_stop"), **options)
    run.loop.run()
    assert run.state.global_step == (8 if "num_train_epochs" in options else 12)
    assert not caplog.text


def test_callbacks_that_skip_every_epoch_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Skip(TrainerCallback):
        def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_epoch_stop = state.global_step == 4

    monkeypatch.setattr(loop, "MAX_SKIPPED", 3)
    run = Run(tmp_path, Skip(), max_steps=12)
    run.loop.run()
    assert run.state.global_step == 4
    assert "Callbacks ended 3 epochs in a row before a step" in caplog.text


def test_finished_background_work_is_settled_at_the_next_step(tmp_path: Path) -> None:
    run = Run(tmp_path, At("on_step_end", 2, call=lambda: setattr(run.saves, "is_due", True)), max_steps=4)
    run.loop.run()
    assert run.saves.settled == [1]


# ---- what a resume takes over


def test_a_resumed_run_goes_on_in_the_epoch(tmp_path: Path) -> None:
    run = Run(tmp_path, At("on_step_end", 4, "should_log"), num_train_epochs=2)
    run.feed.load_state_dict({"epoch": 0, "consumed": 8, "batches": 2})
    run.state.global_step = 2
    run.loop.resume(UpdateSummary(2, 2, 10.0, 2, 10.0), set())
    run.loop.run()
    assert run.engine.first == [8, 12, 0, 4, 8, 12]
    assert run.logs[0]["loss"] == (10 + 1 + 2) / 4


@pytest.mark.parametrize("consumed", [0, 1, 8])
def test_an_epoch_that_was_to_end_ends_after_a_resume(tmp_path: Path, consumed: int) -> None:
    """Within an epoch, the rest of it is left out; at the start of one, the flag was of the epoch before."""
    run = Run(tmp_path, num_train_epochs=2)
    run.feed.load_state_dict({"epoch": 0, "consumed": consumed, "batches": -(-consumed // 4)})
    run.control.should_epoch_stop = True
    run.loop.run()
    assert run.engine.first == ([0, 4, 8, 12] if consumed else [0, 4, 8, 12] * 2)


def test_a_position_behind_the_last_epoch_trains_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path, num_train_epochs=2)
    run.feed.load_state_dict({"epoch": 3, "consumed": 0, "batches": 0})
    run.state.global_step = 6  # of 8
    run.loop.run()
    assert run.engine.first == []


def test_a_flag_of_an_epoch_does_not_end_the_next(tmp_path: Path) -> None:
    run = Run(tmp_path, At("on_step_end", 4, "should_epoch_stop"), num_train_epochs=2)
    run.loop.run()
    assert run.engine.first == [0, 4, 8, 12] * 2


def test_an_evaluation_that_was_cut_short_is_made_first(tmp_path: Path) -> None:
    run = Run(tmp_path, max_steps=4)
    run.state.global_step = 2
    run.control.should_evaluate = True
    run.loop.run()
    assert run.done == steps(2, what="evaluate")


@pytest.mark.parametrize("step", [0, 1])
def test_an_evaluation_at_the_start_is_that_of_a_new_run(tmp_path: Path, step: int) -> None:
    options = {"metric_for_best_model": "loss", "eval_strategy": "steps", "eval_steps": 5}
    run = Run(tmp_path, max_steps=2, eval_on_start=True, **options)
    run.state.global_step = step
    run.loop.run()
    assert run.done == [*([] if step else [("evaluate", 0)]), ("evaluate", 2)]
    assert run.state.best_global_step == 2  # the first is not compared


# ---- the best model


def test_the_best_is_strictly_better(tmp_path: Path) -> None:
    best = {"metric_for_best_model": "loss", "save_strategy": "best", "eval_strategy": "steps", "eval_steps": 1}
    run = Run(tmp_path, max_steps=4, **best)
    values = iter([2.0, 2.0, 1.0, 3.0])
    run.evaluate = lambda: {"eval_loss": next(values)}
    run.loop.run()
    assert [each for each in run.done if each[0] == "save"] == steps(1, 3, what="save")
    assert (run.state.best_metric, run.state.best_global_step) == (1.0, 3)


def test_a_signal_during_an_evaluation_at_the_start(tmp_path: Path) -> None:
    def evaluate() -> Any:
        assert run.signals.stops_evaluation
        run.signals.requested = signal.SIGTERM
        raise Interrupted

    run = Run(tmp_path, max_steps=8, eval_strategy="steps", eval_on_start=True, save_strategy="steps")
    run.evaluate = evaluate
    run.loop.run()
    assert run.done == steps(0, what="save")
    assert not run.signals.stops_evaluation


def test_an_evaluation_at_the_start_is_no_best(tmp_path: Path) -> None:
    run = Run(tmp_path, max_steps=2, metric_for_best_model="loss", eval_strategy="steps")
    run.loop.evaluate(skip_scheduler=True)
    assert (run.state.best_metric, run.state.best_global_step) == (None, None)
    run.loop.evaluate()
    assert (run.state.best_metric, run.state.best_global_step) == (1.0, 0)


def test_without_a_metric_nothing_is_best(tmp_path: Path) -> None:
    run = Run(tmp_path, max_steps=2)
    assert not run.loop.note_best({"eval_loss": 1.0})
    assert run.state.best_metric is None


# ---- what is not finite


def test_a_log_counts_what_was_not_finite(tmp_path: Path) -> None:
    run = Run(tmp_path, At("on_step_end", 4, "should_log"), At("on_step_end", 8, "should_log"), max_steps=8)
    run.engine.bad = {5}  # in the first epoch only
    run.loop.handler.add_callback(At("on_step_end", 3, call=run.engine.bad.clear))
    run.loop.run()
    assert [row.get("nonfinite_steps") for row in run.logs] == [1, None]


@pytest.mark.parametrize("max_steps", [-1, 7])
def test_a_rewind_leaves_out_the_bad_window_only(tmp_path: Path, max_steps: int) -> None:
    options = {"nonfinite_policy": "rollback", "logging_strategy": "steps", "logging_steps": 2}
    run = Run(tmp_path, num_train_epochs=2, max_steps=max_steps, **options)
    run.engine.bad = {9}
    run.loop.run()
    finite = [0, 4, 12]  # each epoch has the bad sample
    assert {(0, 8), (1, 8)} == run.loop.skipped
    expected = [*finite, *finite] if max_steps < 0 else [*finite, *finite, 0]
    assert run.state.global_step == len(expected)
    assert [row.first for row in run.rows] == expected
    assert [row.step for row in run.rows] == list(range(1, len(expected) + 1))


@pytest.mark.parametrize(("max_steps", "left"), [(8, 6), (6, 4)])
def test_a_rewind_shortens_a_resumed_run_by_what_is_skipped_now(tmp_path: Path, max_steps: int, left: int) -> None:
    """The number of its steps may leave out the two windows that were skipped before, or not."""
    run = Run(tmp_path, num_train_epochs=2, nonfinite_policy="rollback")
    run.state.max_steps = max_steps
    run.loop.resume(UpdateSummary(), {(0, 0), (0, 4)})
    run.engine.bad = {13}  # of both epochs
    run.loop.run()
    assert len(run.loop.skipped) == 4
    assert run.state.max_steps == left


def test_a_rewind_to_where_a_callback_ended_an_epoch_ends_it_again(tmp_path: Path) -> None:
    ends = At("on_step_end", 2, "should_epoch_stop", "should_log", call=lambda: run.engine.bad.add(0))
    run = Run(tmp_path, ends, num_train_epochs=2, nonfinite_policy="rollback")
    run.loop.run()
    assert [row.first for row in run.rows] == [0, 4, 4, 8, 12]
    assert run.loop.skipped == {(1, 0)}


def test_a_rewind_without_a_log_begins_at_the_start(tmp_path: Path) -> None:
    run = Run(tmp_path, num_train_epochs=1, nonfinite_policy="rollback")
    run.engine.bad = {13}
    run.loop.run()
    assert [row.first for row in run.rows] == [0, 4, 8]
    assert run.done == steps(4, what="rewind")


def test_rewinds_come_to_an_end(tmp_path: Path) -> None:
    run = Run(tmp_path, num_train_epochs=1, nonfinite_policy="rollback", length=12)
    run.engine.bad = set(range(48))
    with pytest.raises(NonFiniteError, match=f"Rewound {MAX_REWINDS_IN_A_ROW} times with no good step.*step 1 "):
        run.loop.run()
    assert len(run.done) == MAX_REWINDS_IN_A_ROW


def test_rewinds_with_good_steps_between_come_to_an_end_later(tmp_path: Path) -> None:
    options = {"logging_strategy": "steps", "logging_steps": 1, "nonfinite_policy": "rollback"}
    run = Run(tmp_path, num_train_epochs=1, length=60, **options)
    run.engine.bad = set(range(4, 240, 8))  # every second window
    with pytest.raises(NonFiniteError, match=f"Rewound {MAX_REWINDS} times, and still not finite at step 22 "):
        run.loop.run()
    assert len([each for each in run.done if each[0] == "rewind"]) == MAX_REWINDS


@pytest.mark.parametrize(("policy", "ends"), [("raise", True), ("warn", False), ("skip", False)])
def test_the_other_policies(tmp_path: Path, policy: str, ends: bool) -> None:
    run = Run(tmp_path, max_steps=4, nonfinite_policy=policy)
    run.engine.bad = {5}
    if ends:
        with pytest.raises(NonFiniteError, match="Not finite at step 2 "):
            run.loop.run()
        return
    run.loop.run()
    assert run.state.global_step == 4
    assert run.done == []


# ---- memory that runs out


def test_smaller_micro_batches_from_then_on(tmp_path: Path) -> None:
    batches = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "auto_find_batch_size": True}
    run = Run(tmp_path, max_steps=3, **batches)
    run.loop.handler.add_callback(At("on_step_end", 1, call=lambda: setattr(run.engine, "fits", 1)))
    run.loop.run()
    assert run.engine.sizes == [[4, 4], [1] * 8, [1] * 8]
    assert run.engine.num_discarded == 2
    assert (run.state.train_batch_size, run.loop.plan.micro_batch_size, run.loop.plan.accumulation_steps) == (1, 1, 8)
    assert run.loop.plan.global_batch_size == run.plan.global_batch_size


def test_no_memory_for_one_sample_or_without_the_option(tmp_path: Path) -> None:
    run = Run(tmp_path, max_steps=3, per_device_train_batch_size=4, auto_find_batch_size=True)
    run.engine.fits = 0
    with pytest.raises(MemoryError, match="with one sample per micro-batch"):
        run.loop.run()
    plain = Run(tmp_path, max_steps=3, per_device_train_batch_size=4)
    plain.engine.fits = 2
    with pytest.raises(MemoryError, match="not enough"):
        plain.loop.run()
