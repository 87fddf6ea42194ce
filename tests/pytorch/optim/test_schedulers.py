"""Schedulers against torch's own contract and, where it is installed, against transformers over whole runs."""

from __future__ import annotations

import copy
import io
import logging
import pickle
import random

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau, SequentialLR

from paceline.core.schedules import SCHEDULES
from paceline.pytorch.optim import schedulers
from paceline.pytorch.optim.greedy import GreedyLR
from paceline.pytorch.optim.schedulers import MultiplierLR, follows_metrics, get_scheduler


def make_optimizer(lr=5e-5, tensor=False):
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    rate = torch.tensor(lr) if tensor else lr
    groups = [{"params": [parameters[0]], "lr": 3 * lr}, {"params": [parameters[1]]}]
    if tensor:
        groups[0]["lr"] = torch.tensor(3 * lr)
    return torch.optim.SGD(groups, lr=rate)


def rates(optimizer):
    return [float(group["lr"]) for group in optimizer.param_groups]


def run(scheduler, optimizer, num_steps):
    seen = [rates(optimizer)]
    for _ in range(num_steps):
        optimizer.step()
        scheduler.step()
        assert scheduler.get_last_lr() == [group["lr"] for group in optimizer.param_groups]
        seen.append(rates(optimizer))
    return seen


CASES = [
    ("constant", 0, None),
    ("constant_with_warmup", 17, None),
    ("linear", 0, None),
    ("linear", 17, None),
    ("linear", 500, None),
    ("cosine", 17, None),
    ("cosine", 0, {"num_cycles": 1.75}),
    ("cosine_with_restarts", 17, {"num_cycles": 4}),
    ("cosine_with_restarts", 0, None),
    ("polynomial", 17, None),
    ("polynomial", 0, {"power": 2.5, "lr_end": 1e-6}),
    ("inverse_sqrt", 17, None),
    ("inverse_sqrt", 0, None),
    ("inverse_sqrt", 17, {"timescale": 40}),
    ("cosine_with_min_lr", 17, {"min_lr_rate": 0.1}),
    ("cosine_with_min_lr", 17, {"min_lr": 1e-6, "num_cycles": 1.25}),
    ("cosine_warmup_with_min_lr", 17, {"min_lr_rate": 0.1}),
    ("cosine_warmup_with_min_lr", 17, {"min_lr": 1e-6, "warmup_lr_rate": 0.2}),
    ("cosine_warmup_with_min_lr", 1, {"min_lr": 1e-6, "warmup_lr_rate": 0.2}),
    *[
        ("warmup_stable_decay", 17, {"num_decay_steps": 60, "warmup_type": w, "decay_type": d, "min_lr_ratio": m})
        for w in ("linear", "cosine", "1-sqrt")
        for d, m in (("linear", 0.1), ("cosine", 0.0), ("1-sqrt", 0.2))
    ],
]


def test_the_cases_cover_every_schedule():
    assert {name for name, _, _ in CASES} == set(SCHEDULES)


@pytest.mark.parametrize(("name", "warmup", "options"), CASES)
def test_rates_equal_the_reference_over_a_whole_run(name, warmup, options):
    reference = pytest.importorskip("transformers.optimization")
    total = 300
    ours, theirs = make_optimizer(), make_optimizer()
    scheduler = get_scheduler(name, ours, warmup, total, options)
    expected = run(reference.get_scheduler(name, theirs, warmup, total, options), theirs, total + 20)
    for mine, other in zip(run(scheduler, ours, total + 20), expected, strict=True):
        assert mine == pytest.approx(other, rel=1e-12, abs=1e-22)


@pytest.mark.parametrize(("name", "warmup", "options"), CASES[:19:2])
def test_saved_state_goes_both_ways_between_us_and_the_reference(name, warmup, options):
    reference = pytest.importorskip("transformers.optimization")

    def started(get):
        optimizer = make_optimizer()
        return optimizer, get(name, optimizer, warmup, 100, options)

    for first, second in (
        (get_scheduler, reference.get_scheduler),
        (reference.get_scheduler, get_scheduler),
        (get_scheduler, get_scheduler),
    ):
        optimizer, scheduler = started(first)
        run(scheduler, optimizer, 40)
        buffer = io.BytesIO()
        torch.save([scheduler.state_dict(), optimizer.state_dict()], buffer)
        saved = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
        expected = run(scheduler, optimizer, 80)
        optimizer, scheduler = started(second)
        scheduler.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        assert scheduler.last_epoch == 40
        for mine, other in zip(run(scheduler, optimizer, 80), expected, strict=True):
            assert mine == pytest.approx(other, rel=1e-12, abs=1e-22)


def named_factories():
    both = {"num_warmup_steps": 5, "num_training_steps": 50}
    return [
        ("get_constant_schedule", {}),
        ("get_constant_schedule_with_warmup", {"num_warmup_steps": 5}),
        ("get_linear_schedule_with_warmup", both),
        ("get_cosine_schedule_with_warmup", both),
        ("get_cosine_with_hard_restarts_schedule_with_warmup", {**both, "num_cycles": 2}),
        ("get_polynomial_decay_schedule_with_warmup", {**both, "power": 2.0}),
        ("get_inverse_sqrt_schedule", {"num_warmup_steps": 5}),
        ("get_cosine_with_min_lr_schedule_with_warmup", {**both, "min_lr": 1e-6}),
        ("get_cosine_with_min_lr_schedule_with_warmup_lr_rate", {**both, "min_lr_rate": 0.3}),
        ("get_wsd_schedule", {"num_warmup_steps": 5, "num_decay_steps": 9, "num_stable_steps": 20}),
    ]


@pytest.mark.parametrize(("function", "arguments"), named_factories())
def test_named_functions_have_the_reference_signature_and_values(function, arguments):
    import inspect

    reference = pytest.importorskip("transformers.optimization")
    mine, other = getattr(schedulers, function), getattr(reference, function)

    def shape(get):
        return [(p.name, p.default) for p in inspect.signature(get).parameters.values()]

    assert shape(mine) == shape(other)
    ours, theirs = make_optimizer(), make_optimizer()
    expected = run(other(theirs, **arguments), theirs, 60)
    for a, b in zip(run(mine(ours, **arguments), ours, 60), expected, strict=True):
        assert a == pytest.approx(b, rel=1e-12, abs=1e-22)


def test_is_a_torch_scheduler_that_leaves_the_optimizer_alone():
    optimizer = make_optimizer()
    scheduler = get_scheduler("linear", optimizer, 2, 10)
    assert isinstance(scheduler, LambdaLR)
    assert isinstance(scheduler, LRScheduler)
    assert "step" not in vars(optimizer)
    assert [group["initial_lr"] for group in optimizer.param_groups] == scheduler.base_lrs == [3 * 5e-5, 5e-5]
    scheduler.step()
    assert scheduler.last_epoch == 1
    assert scheduler.get_lr() == scheduler.get_last_lr()
    assert not follows_metrics(scheduler)


def test_state_is_plain_values():
    state = get_scheduler("cosine", make_optimizer(), 2, 10).state_dict()
    assert state["lr_lambdas"] == [None, None]
    assert set(state) == set(LambdaLR(make_optimizer(), lambda step: 1.0).state_dict())
    pickle.dumps(state)


def test_tensor_rates_keep_their_identity():
    optimizer = make_optimizer(tensor=True)
    before = [group["lr"] for group in optimizer.param_groups]
    scheduler = get_scheduler("linear", optimizer, 0, 10)
    for _ in range(5):
        optimizer.step()
        scheduler.step()
    assert all(group["lr"] is rate for group, rate in zip(optimizer.param_groups, before, strict=True))
    assert rates(optimizer) == pytest.approx([7.5e-5, 2.5e-5])
    scheduler.get_last_lr()[0].zero_()
    assert rates(optimizer)[0] == pytest.approx(7.5e-5)


def test_a_group_added_later_joins():
    optimizer = make_optimizer()
    scheduler = get_scheduler("linear", optimizer, 0, 10)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 1e-3})
    for _ in range(5):
        scheduler.step()
    assert rates(optimizer) == pytest.approx([7.5e-5, 2.5e-5, 5e-4])
    assert len(scheduler.get_last_lr()) == len(scheduler.state_dict()["lr_lambdas"]) == 3


def test_works_inside_torch_compositions_and_copies():
    optimizer = make_optimizer(lr=1.0)
    parts = [get_scheduler("constant_with_warmup", optimizer, 4), get_scheduler("linear", optimizer, 0, 8)]
    chain = SequentialLR(optimizer, parts, milestones=[4])
    seen = []
    for _ in range(8):
        seen.append(rates(optimizer)[1])
        optimizer.step()
        chain.step()
    assert seen == pytest.approx([0, 0.25, 0.5, 0.75, 1, 7 / 8, 6 / 8, 5 / 8])
    scheduler = get_scheduler("cosine", make_optimizer(), 0, 10)
    twin = copy.deepcopy(scheduler)
    twin.step()
    assert scheduler.last_epoch == 0


def test_continuing_needs_initial_rates():
    with pytest.raises(KeyError, match="initial_lr"):
        schedulers.get_linear_schedule_with_warmup(make_optimizer(), 0, 10, last_epoch=3)
    optimizer = make_optimizer()
    get_scheduler("linear", optimizer, 0, 10)
    assert schedulers.get_linear_schedule_with_warmup(optimizer, 0, 10, last_epoch=3).last_epoch == 4
    assert rates(optimizer)[1] == pytest.approx(3e-5)


def test_load_refuses_what_does_not_fit():
    scheduler = get_scheduler("linear", make_optimizer(), 0, 10)
    state = scheduler.state_dict()
    with pytest.raises(ValueError, match="1 parameter groups, this optimizer 2"):
        scheduler.load_state_dict({**state, "base_lrs": [1.0]})
    with pytest.raises(ValueError, match="no base_lrs"):
        scheduler.load_state_dict({"last_epoch": 3})
    with pytest.raises(TypeError, match=r"torch\.optim\.Optimizer"):
        MultiplierLR(object(), lambda step: 1.0)


def test_get_scheduler_errors_name_the_option():
    with pytest.raises(ValueError, match="did you mean 'reduce_lr_on_plateau'"):
        get_scheduler("reduce_on_plateau", make_optimizer())
    with pytest.raises(ValueError, match="needs num_warmup_steps"):
        get_scheduler("linear", make_optimizer(), None, 10)
    with pytest.raises(TypeError, match="did you mean 'patience'"):
        get_scheduler("greedy", make_optimizer(), scheduler_specific_kwargs={"patienc": 1})
    with pytest.raises(TypeError, match="no option 'factor'"):
        get_scheduler("constant", make_optimizer(), 0, 10, {"factor": 0.1})


def test_a_warmup_that_has_no_effect_is_told(caplog):
    with caplog.at_level(logging.WARNING):
        get_scheduler("constant", make_optimizer(), 5, 10)
    assert "constant_with_warmup" in caplog.text


def metrics(num, seed):
    generator = random.Random(seed)
    level = 3.0
    values = []
    for index in range(num):
        level += generator.uniform(-0.05, 0.02 if index < num // 2 else 0.08)
        values.append(level)
    return values


def test_plateau_equals_the_reference_and_resumes():
    reference = pytest.importorskip("transformers.optimization")
    options = {"factor": 0.5, "patience": 2, "cooldown": 1, "min_lr": 1e-7}
    ours, theirs = make_optimizer(), make_optimizer()
    scheduler = get_scheduler("reduce_lr_on_plateau", ours, 0, 100, options)
    other = reference.get_scheduler("reduce_lr_on_plateau", theirs, 0, 100, options)
    assert isinstance(scheduler, ReduceLROnPlateau)
    assert follows_metrics(scheduler)
    values = metrics(120, seed=0)
    for index, value in enumerate(values):
        if index == 60:
            state = scheduler.state_dict(), ours.state_dict()
            ours = make_optimizer()
            scheduler = get_scheduler("reduce_lr_on_plateau", ours, 0, 100, options)
            scheduler.load_state_dict(state[0])
            ours.load_state_dict(state[1])
        scheduler.step(value)
        other.step(value)
        assert rates(ours) == rates(theirs)
    assert rates(ours)[1] < 5e-6


GREEDY = [
    {},
    {"patience": 1, "min_lr": 1e-5, "max_lr": 1e-3, "factor": 0.7},
    {"patience": 1, "min_lr": 1e-5, "max_lr": [1e-3, 2e-4], "smooth": True, "window_size": 4},
    {"patience": 0, "min_lr": 4e-5, "factor": 0.5, "reset_start": 3, "cooldown": 1, "warmup": 2},
    {"patience": 1, "min_lr": 1e-6, "mode": "max", "threshold_mode": "rel", "threshold": 1e-3},
    {"patience": 1, "min_lr": 1e-6, "threshold_mode": "rel", "threshold": 1e-3, "smooth": True, "reset_start": 1},
]


@pytest.mark.parametrize("options", GREEDY)
def test_greedy_equals_the_reference_and_states_go_both_ways(options):
    reference = pytest.importorskip("transformers.optimization")
    ours, theirs = make_optimizer(), make_optimizer()
    scheduler = get_scheduler("greedy", ours, scheduler_specific_kwargs=options)
    other = reference.get_scheduler("greedy", theirs, scheduler_specific_kwargs=options)
    changes = 0
    for index, value in enumerate(metrics(400, seed=len(options))):
        if index in (130, 260):
            mine, yours = scheduler.state_dict(), other.state_dict()
            assert mine == yours
            buffer = io.BytesIO()
            torch.save([mine, yours], buffer)
            mine, yours = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
            ours, theirs = make_optimizer(), make_optimizer()
            scheduler = get_scheduler("greedy", ours, scheduler_specific_kwargs=options)
            other = reference.get_scheduler("greedy", theirs, scheduler_specific_kwargs=options)
            scheduler.load_state_dict(yours)
            other.load_state_dict(mine)
        before = rates(ours)
        scheduler.step(torch.tensor(value, dtype=torch.float64))
        other.step(value)
        changes += rates(ours) != before
        assert rates(ours) == pytest.approx(rates(theirs), rel=1e-12)
        assert scheduler.get_last_lr() == rates(ours)
    assert changes >= 3


def test_greedy_is_a_torch_scheduler_with_checked_options(caplog):
    optimizer = make_optimizer(tensor=True)
    before = [group["lr"] for group in optimizer.param_groups]
    scheduler = schedulers.get_greedy_schedule(optimizer, patience=0, min_lr=1e-6, verbose=True)
    assert isinstance(scheduler, LRScheduler)
    assert follows_metrics(scheduler)
    with caplog.at_level(logging.INFO):
        for value in (1.0, 2.0, 3.0):
            scheduler.step(value)
    assert "learning rate of group 0" in caplog.text
    assert all(group["lr"] is rate for group, rate in zip(optimizer.param_groups, before, strict=True))
    for wrong in (
        {"factor": 1.0},
        {"mode": "mean"},
        {"threshold_mode": "x"},
        {"min_lr": [1.0]},
        {"window_size": 0},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            GreedyLR(make_optimizer(), **wrong)
    with pytest.raises(ValueError, match="parameter groups"):
        scheduler.load_state_dict({"_last_lr": [1.0]})


def test_a_foreign_scheduler_that_takes_metrics_is_found():
    reference = pytest.importorskip("transformers.optimization")
    assert follows_metrics(reference.GreedyLR(make_optimizer()))
    assert not follows_metrics(torch.optim.lr_scheduler.StepLR(make_optimizer(), 3))
    assert not follows_metrics(object())
