"""Closed-form schedules: shapes, bounds, refusals."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.schedules import SCHEDULES, multiplier

OPTIONS = {
    "polynomial": {"lr_init": 5e-5},
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "cosine_warmup_with_min_lr": {"min_lr_rate": 0.1},
    "warmup_stable_decay": {"num_decay_steps": 20},
}


def make(name, warmup=10, total=100, **extra):
    options = {**OPTIONS.get(name, {}), **extra}
    return multiplier(name, num_warmup_steps=warmup, num_training_steps=total, **options)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_pickles_and_compares_by_value(name):
    schedule = make(name)
    again = pickle.loads(pickle.dumps(schedule))
    assert again == schedule
    assert [again(step) for step in range(120)] == [schedule(step) for step in range(120)]


@pytest.mark.parametrize("name", sorted(set(SCHEDULES) - {"constant"}))
def test_warmup_rises_to_one(name):
    schedule = make(name)
    rise = [schedule(step) for step in range(10)]
    assert rise == sorted(rise)
    assert schedule(10) == pytest.approx(1.0, abs=1e-2)


@given(
    name=st.sampled_from(sorted(SCHEDULES)),
    warmup=st.integers(0, 50),
    rest=st.integers(20, 200),
    step=st.integers(0, 400),
)
@settings(max_examples=300, deadline=None)
def test_factors_are_floats_between_zero_and_one(name, warmup, rest, step):
    factor = make(name, warmup, warmup + rest)(step)
    assert type(factor) is float
    assert 0.0 <= factor <= 1.0 + 1e-12


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_training_left_after_the_warmup(name):
    schedule = make(name, warmup=30, total=30, **({"num_decay_steps": 0} if name == "warmup_stable_decay" else {}))
    assert all(0.0 <= schedule(step) <= 1.0 for step in range(40))


def test_ends():
    assert make("linear")(100) == 0.0
    assert make("linear")(55) == 0.5
    assert make("cosine")(100) == pytest.approx(0.0, abs=1e-15)
    assert make("cosine")(55) == pytest.approx(0.5)
    assert make("cosine_with_restarts", num_cycles=3)(40) == pytest.approx(1.0)
    assert make("cosine_with_restarts")(100) == 0.0
    assert make("polynomial", lr_end=1e-5)(100) == pytest.approx(0.2)
    assert make("polynomial", lr_end=1e-5)(1000) == pytest.approx(0.2)
    assert make("inverse_sqrt", timescale=10)(40) == 0.5
    assert make("cosine_with_min_lr")(100) == pytest.approx(0.1)
    assert make("cosine_warmup_with_min_lr")(99) == pytest.approx(0.1)
    assert make("cosine_warmup_with_min_lr", warmup_lr_rate=0.3)(0) == pytest.approx(0.3)
    wsd = make("warmup_stable_decay", min_lr_ratio=0.25)
    assert [wsd(0), wsd(10), wsd(79), wsd(80), wsd(100)] == [0.25, 1.0, 1.0, 1.0, 0.25]


def test_an_absolute_minimum_becomes_a_rate():
    schedule = make("cosine_with_min_lr", min_lr_rate=None, min_lr=1e-6, lr_init=4e-6)
    assert schedule == make("cosine_with_min_lr", min_lr_rate=0.25)


def test_enum_members_stand_for_their_value():
    import enum

    member = enum.Enum("Kind", {"LINEAR": "linear"}).LINEAR
    assert multiplier(member, num_warmup_steps=0, num_training_steps=10)(5) == 0.5


@pytest.mark.parametrize(
    ("name", "options", "kind", "words"),
    [
        ("cosin", {}, ValueError, "did you mean 'cosine'"),
        ("linear", {"num_cycles": 2}, TypeError, "no option 'num_cycles'"),
        ("cosine", {"num_cycle": 2}, TypeError, "did you mean 'num_cycles'"),
        ("cosine_with_min_lr", {"min_lr_rate": None}, ValueError, "exactly one of min_lr and min_lr_rate"),
        ("cosine_with_min_lr", {"min_lr": 1e-6}, ValueError, "exactly one of min_lr and min_lr_rate"),
        ("cosine_with_min_lr", {"min_lr": 1e-6, "min_lr_rate": None}, ValueError, "give lr_init"),
        ("polynomial", {"lr_end": 1.0}, ValueError, "lr_end=1.0 must be below the learning rate"),
        ("inverse_sqrt", {"timescale": 0}, ValueError, "timescale=0"),
        ("warmup_stable_decay", {"decay_type": "sqrt"}, ValueError, "decay_type='sqrt'"),
        ("warmup_stable_decay", {"num_decay_steps": 95}, ValueError, "shorten one of them"),
    ],
)
def test_refusals_name_the_option_and_the_remedy(name, options, kind, words):
    with pytest.raises(kind, match=words):
        make(name, **options)


def test_missing_numbers_of_steps_are_named():
    with pytest.raises(ValueError, match="the linear schedule needs num_training_steps"):
        multiplier("linear", num_warmup_steps=0)
    with pytest.raises(ValueError, match="needs num_decay_steps"):
        multiplier("warmup_stable_decay", num_warmup_steps=0, num_training_steps=10)
    with pytest.raises(ValueError, match="num_stable_steps, or num_training_steps"):
        multiplier("warmup_stable_decay", num_warmup_steps=0, num_decay_steps=10)


def test_needs_no_torch():
    code = "import sys, paceline.core.schedules; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
