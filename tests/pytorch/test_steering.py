"""Changes of settings during a run: every schedule, resume, replay, rewind, several processes, and what is refused."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import control_job
import processes
import pytest
import torch
from small_models import Classifier, classification, make_trainer, weights
from torch.optim import SGD, AdamW, lr_scheduler

from paceline import TrainerCallback, TrainerControl, UnsupportedOption
from paceline.core.commands import COMMAND_FILE
from paceline.core.journal import CHANGES_FILE, JOURNAL_FILE, read_changes, read_rows
from paceline.pytorch.optim.adafactor import Adafactor, AdafactorSchedule
from paceline.pytorch.optim.greedy import GreedyLR
from paceline.pytorch.optim.schedulers import get_scheduler
from paceline.pytorch.optim.steered import TorchSettings, obstacle_of
from paceline.pytorch.replay.step import replay

DATA = classification(400)


class Change(TrainerCallback):
    """Calls functions of the control at the end of steps."""

    def __init__(self, changes: dict[int, Callable[[Any], None]], event: str = "on_step_end") -> None:
        self.changes = changes
        setattr(self, event, self.make)

    def make(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.changes.get(state.global_step, lambda control: None)(control)


def setting(name: str, value: float) -> Callable[[Any], None]:
    return lambda control: setattr(control, name, value)


def scaling(name: str, factor: float) -> Callable[[Any], None]:
    return lambda control: getattr(control, f"scale_{name}")(factor)


def rates(folder: Path) -> list[float]:
    return [row.learning_rate for row in read_rows(folder / JOURNAL_FILE)]


# ---- schedules


def two_groups() -> SGD:
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    return SGD([{"params": parameters[:1], "lr": 0.1}, {"params": parameters[1:], "lr": 0.02}], lr=0.1)


def settings_of(optimizer: Any, scheduler: Any) -> TorchSettings:
    norm = SimpleNamespace(value=1.0)
    return TorchSettings(
        optimizer,
        scheduler,
        read_norm=lambda: norm.value,
        limit_norm=lambda value: setattr(norm, "value", value),
        clips_itself=False,
    )


SCHEDULES: dict[str, Callable[[SGD], Any]] = {
    "linear": lambda each: get_scheduler("linear", each, 2, 20),
    "cosine_with_min_lr": lambda each: get_scheduler("cosine_with_min_lr", each, 2, 20, {"min_lr": 1e-3}),
    "LambdaLR": lambda each: lr_scheduler.LambdaLR(each, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda each: lr_scheduler.MultiplicativeLR(each, lambda step: 0.9),
    "StepLR": lambda each: lr_scheduler.StepLR(each, 3, 0.5),
    "MultiStepLR": lambda each: lr_scheduler.MultiStepLR(each, [3, 8], 0.5),
    "ConstantLR": lambda each: lr_scheduler.ConstantLR(each, 0.5, 7),
    "LinearLR": lambda each: lr_scheduler.LinearLR(each, 0.2, 1.0, 10),
    "ExponentialLR": lambda each: lr_scheduler.ExponentialLR(each, 0.9),
    "PolynomialLR": lambda each: lr_scheduler.PolynomialLR(each, 15, 2.0),
    "CosineAnnealingLR": lambda each: lr_scheduler.CosineAnnealingLR(each, 6, eta_min=0.01),
    "CosineAnnealingWarmRestarts": lambda each: lr_scheduler.CosineAnnealingWarmRestarts(each, 4, eta_min=0.01),
    "OneCycleLR": lambda each: lr_scheduler.OneCycleLR(each, [0.1, 0.02], total_steps=20),
    "CyclicLR": lambda each: lr_scheduler.CyclicLR(each, [0.1, 0.02], [0.3, 0.1], 3, cycle_momentum=False),
    "SequentialLR": lambda each: lr_scheduler.SequentialLR(
        each, [lr_scheduler.LinearLR(each, 0.2, 1.0, 4), lr_scheduler.CosineAnnealingLR(each, 6, 0.01)], [7]
    ),
    "ChainedScheduler": lambda each: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ExponentialLR(each, 0.9), lr_scheduler.ConstantLR(each, 0.5, 7)]
    ),
}


@pytest.mark.filterwarnings("ignore:Detected call of", "ignore:The epoch parameter")
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_rest_of_a_schedule_is_scaled(name: str) -> None:
    """In all groups; a state saved afterwards goes on alike."""
    plain, scaled = two_groups(), two_groups()
    schedules = [SCHEDULES[name](each) for each in (plain, scaled)]
    for step in range(16):
        if step == 5:
            settings = settings_of(scaled, schedules[1])
            assert settings.obstacle("learning_rate") is None
            settings.change("learning_rate", "scale", 0.3)
            restored = two_groups()
            again = SCHEDULES[name](restored)
            restored.load_state_dict(copy.deepcopy(scaled.state_dict()))
            again.load_state_dict(copy.deepcopy(schedules[1].state_dict()))
        factor = 0.3 if step >= 5 else 1.0
        expected = [group["lr"] * factor for group in plain.param_groups]
        assert [group["lr"] for group in scaled.param_groups] == pytest.approx(expected, rel=1e-9)
        assert schedules[1].get_last_lr() == pytest.approx(expected, rel=1e-9)
        if step >= 5:
            assert [group["lr"] for group in restored.param_groups] == [group["lr"] for group in scaled.param_groups]
            again.step()
        for schedule in schedules:
            schedule.step()


@pytest.mark.parametrize("kind", [lr_scheduler.ReduceLROnPlateau, GreedyLR])
def test_a_schedule_that_follows_a_metric_goes_on_from_the_rate(kind: Any) -> None:
    optimizer = two_groups()
    schedule = kind(optimizer, factor=0.5, patience=0, min_lr=0.001)
    settings_of(optimizer, schedule).change("learning_rate", "set", 0.04)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.04, 0.008])
    for metric in (1.0, 2.0):
        schedule.step(metric)
    expected = 0.02 if kind is lr_scheduler.ReduceLROnPlateau else 0.04  # raised once, lowered once
    assert optimizer.param_groups[0]["lr"] == pytest.approx(expected)


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_tensor_rates_are_filled_in_place() -> None:
    rate = torch.tensor(0.1)
    optimizer = AdamW([torch.nn.Parameter(torch.ones(2))], lr=rate, weight_decay=0.5, capturable=False, foreach=False)
    schedule = lr_scheduler.ExponentialLR(optimizer, 0.5)
    settings_of(optimizer, schedule).change("learning_rate", "scale", 0.5)
    assert optimizer.param_groups[0]["lr"] is rate
    schedule.step()
    assert float(rate) == pytest.approx(0.025)


class OwnStep(lr_scheduler.StepLR):
    def get_lr(self) -> Any:
        return [0.1 for _ in self.base_lrs]


class Scalable(OwnStep):
    factor = 1.0

    def scale_rates(self, factor: float) -> None:
        self.factor *= factor


def test_schedules_of_unknown_computation_are_refused_by_name() -> None:
    optimizer = two_groups()
    assert "OwnStep" in str(obstacle_of(OwnStep(optimizer, 3)))
    inside = lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(optimizer), OwnStep(optimizer, 3)])
    assert "scale_rates" in str(obstacle_of(inside))
    own = Scalable(optimizer, 3)
    settings_of(optimizer, own).change("learning_rate", "scale", 0.5)
    assert own.factor == 0.5


def test_what_cannot_be_changed_is_refused_with_the_reason() -> None:
    parameters = [torch.nn.Parameter(torch.ones(2, 2))]
    relative = Adafactor(parameters)
    settings = settings_of(relative, AdafactorSchedule(relative))
    assert "relative_step=False" in str(settings.obstacle("learning_rate"))
    assert "weight_decay above 0" in str(settings.obstacle("weight_decay"))
    external = Adafactor(parameters, lr=1e-3, relative_step=False, weight_decay=0.1)
    settings = settings_of(external, get_scheduler("linear", external, 0, 10))
    assert settings.obstacle("learning_rate") is settings.obstacle("weight_decay") is None
    in_backward = SGD(parameters, lr=0.1, weight_decay=0.1)
    in_backward.fused_backward = lambda loss, lr: None  # type: ignore[attr-defined]
    assert "SGD" in str(settings_of(in_backward, None).obstacle("weight_decay"))
    assert "inside the backward pass" in str(settings_of(in_backward, None).obstacle("max_grad_norm"))


def test_weight_decay_keeps_the_ratios_and_returns_from_zero() -> None:
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "weight_decay": decay} for decay in (0.1, 0.2, 0.0)]
    optimizer = AdamW(groups)
    settings = settings_of(optimizer, None)
    for value in (0.4, 0.0, 0.6):
        settings.change("weight_decay", "set", value)
        assert settings.read("weight_decay") == pytest.approx(value)
    settings.change("weight_decay", "scale", 2.0)
    assert [group["weight_decay"] for group in optimizer.param_groups] == pytest.approx([0.6, 1.2, 0.0])


# ---- runs

CHANGES = {
    3: lambda control: [scaling("learning_rate", 0.5)(control), setting("max_grad_norm", 0.05)(control)],
    6: setting("weight_decay", 0.3),
    8: setting("learning_rate", 2e-3),
}


@pytest.mark.slow
def test_a_resume_and_a_replay_are_exact(tmp_path: Path) -> None:
    """From a checkpoint between the changes, and from one with a request that is not made yet."""
    whole = control_job.make(tmp_path, Change(CHANGES))
    whole.train()
    found = rates(tmp_path)
    assert found[3] == pytest.approx(5e-5 * 0.5 * 9 / 12)
    assert found[8] == 2e-3
    assert found[9] == pytest.approx(2e-3 * 3 / 4)
    assert whole.state.log_history[8]["learning_rate"] == 2e-3
    assert [group["weight_decay"] for group in whole.optimizer.param_groups] == [0.3, 0.0]
    recorded = (tmp_path / CHANGES_FILE).read_text()
    for step in (3, 4, 7, 9, 12):
        assert replay(control_job.make(tmp_path, Change(CHANGES)), step).is_exact
        assert replay(control_job.make(tmp_path), step).is_exact
    assert (tmp_path / CHANGES_FILE).read_text() == recorded
    rows = read_rows(tmp_path / JOURNAL_FILE)
    again = control_job.make(tmp_path, Change(CHANGES))
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert torch.equal(weights(again.model), weights(whole.model))
    assert read_rows(tmp_path / JOURNAL_FILE) == rows
    steps = [(change["step"], change["name"]) for change in read_changes(tmp_path / CHANGES_FILE)]
    assert steps == [(3, "learning_rate"), (3, "max_grad_norm"), (6, "weight_decay"), (8, "learning_rate")]


@pytest.mark.parametrize("event", ["on_log", "on_save", "on_epoch_begin", "on_step_begin"])
def test_requests_of_other_events_are_made_before_the_next_step(tmp_path: Path, event: str) -> None:
    options = {"save_steps": 1, "save_in_background": False, "num_train_epochs": 6, "max_steps": -1}
    step = 2 if event != "on_epoch_begin" else 4
    trainer = make_trainer(
        tmp_path, Classifier(), classification(16), callbacks=[Change({step: scaling("learning_rate", 0.5)}, event)],
        **{**control_job.OPTIONS, **options, "lr_scheduler_type": "constant"},
    )  # fmt: skip
    trainer.train()
    later = step + 1 if event == "on_step_begin" else step  # within a step: from the step after it on
    assert rates(tmp_path) == [5e-5] * later + [2.5e-5] * (24 - later)


def test_the_control_tells_the_values_with_what_is_requested(tmp_path: Path) -> None:
    told: list[float] = []

    def change(control: Any) -> None:
        control.learning_rate *= 0.5
        control.learning_rate *= 0.5
        control.max_grad_norm = 0
        told.extend([control.learning_rate, control.weight_decay, control.max_grad_norm])

    trainer = control_job.make(tmp_path, Change({2: change}), lr_scheduler_type="constant", max_steps=4)
    trainer.train()
    assert told == [1.25e-5, 0.1, 0.0]
    assert rates(tmp_path)[2:] == [1.25e-5] * 2


@pytest.mark.parametrize("value", [-1e-3, 0.0, math.nan, math.inf, "1e-3", None, True])
def test_values_out_of_range_are_errors(tmp_path: Path, value: Any) -> None:
    trainer = control_job.make(tmp_path, Change({2: setting("learning_rate", value)}))
    with pytest.raises(ValueError, match="learning_rate"):
        trainer.train()


def test_a_rate_of_zero_cannot_be_set(tmp_path: Path) -> None:
    trainer = control_job.make(tmp_path, Change({0: setting("learning_rate", 1e-3)}, "on_train_begin"), warmup_steps=4)
    with pytest.raises(ValueError, match="scale_learning_rate"):
        trainer.train()


def test_a_product_that_is_not_finite_is_an_error(tmp_path: Path) -> None:
    trainer = control_job.make(tmp_path, Change({2: scaling("learning_rate", 1e308)}), learning_rate=1e3)
    with pytest.raises(ValueError, match=r"learning_rate: .* times 1e\+308 is not finite"):
        trainer.train()


def test_outside_of_a_run_there_is_nothing_to_change(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="in progress"):
        TrainerControl().learning_rate = 1e-3
    kept: list[Any] = []
    trainer = control_job.make(tmp_path, Change({2: kept.append}), max_steps=2)
    trainer.train()
    with pytest.raises(RuntimeError, match="in progress"):
        kept[0].scale_learning_rate(0.5)


def test_the_next_training_starts_with_the_arguments(tmp_path: Path) -> None:
    trainer = control_job.make(tmp_path, Change(CHANGES))
    trainer.train()
    assert "SettingChanges" not in trainer.callback_handler.callback_list
    trainer.pop_callback(Change)
    trainer.train()
    assert rates(tmp_path)[0] == 5e-5
    assert [group["weight_decay"] for group in trainer.optimizer.param_groups] == [0.1, 0.0]
    assert not (tmp_path / CHANGES_FILE).exists()
    assert len(read_changes(tmp_path / "control.1.jsonl")) == 4


def test_an_optimizer_that_computes_its_rate_is_refused(tmp_path: Path) -> None:
    trainer = control_job.make(tmp_path, Change({2: scaling("learning_rate", 0.5)}))
    optimizer = Adafactor(trainer.model.parameters())
    trainer.optimizer, trainer.lr_scheduler = optimizer, AdafactorSchedule(optimizer)
    with pytest.raises(UnsupportedOption, match="Adafactor"):
        trainer.train()


class Break(TrainerCallback):
    """Makes one weight NaN once, so that the loss of the next step is not finite."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.step = -1
            with torch.no_grad():
                model.first.weight[0, 0] = math.nan


def test_a_rewind_undoes_what_callbacks_request_again(tmp_path: Path) -> None:
    """The run goes back from step 8 to step 6: a change of step 7 is undone with it, and made again once."""
    changes = {7: lambda control: [scaling("learning_rate", 0.5)(control), setting("max_grad_norm", 0.05)(control)]}
    trainer = control_job.make(
        tmp_path, Change(changes), Break(7), nonfinite_policy="rollback", logging_steps=3, lr_scheduler_type="constant"
    )
    trainer.train()
    assert rates(tmp_path) == [5e-5] * 7 + [2.5e-5] * 5
    found = read_changes(tmp_path / CHANGES_FILE)
    assert [(change["step"], change["name"], change["before"]) for change in found] == [
        (7, "learning_rate", 5e-5),
        (7, "max_grad_norm", 1.0),
    ]


def test_a_rewind_keeps_what_commands_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made at step 7; the run goes back to step 6 and makes it there, before it is sent once more."""
    command = json.dumps({"id": "0" * 32, "command": "max-grad-norm", "value": 0.05})

    def send(control: Any) -> None:
        path = tmp_path / COMMAND_FILE
        path.touch(0o600)
        path.write_text(command)
        control.requests.notice()

    trainer = control_job.make(tmp_path, Change({7: send}), Break(8), nonfinite_policy="rollback", logging_steps=3)
    trainer.train()
    found = read_changes(tmp_path / CHANGES_FILE)
    assert [(change["step"], change["before"]) for change in found] == [(6, 1.0), (7, 0.05)]
    assert trainer.state.global_step == 12


def test_a_damaged_line_of_the_record_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / CHANGES_FILE
    path.write_text(json.dumps({"step": 3, "name": "learning_rate"}) + '\n[1]\n{"step": -1}\n{"step')
    assert [change["step"] for change in read_changes(path)] == [3]


# ---- several processes


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_a_request_of_one_process_is_made_by_all(tmp_path: Path, parallel: str) -> None:
    processes.run("control_job.py", 2, "share", str(tmp_path), parallel)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for each in found:
        assert torch.equal(each["weights"], each["resumed"])
        assert each["decay"] == pytest.approx([0.1 * 3.0, 0.0])
    assert rates(tmp_path / "out")[3] == pytest.approx(5e-5 * 0.5 * 9 / 12)
    assert rates(tmp_path / "out")[8] == 2e-3
    if parallel == "ddp":
        assert torch.equal(found[0]["weights"], found[1]["weights"])
