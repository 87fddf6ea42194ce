"""`profile`: its forms, and the errors of wrong ones."""

from __future__ import annotations

from typing import Any

import pytest

from paceline import TrainingArguments
from paceline.args.profiling import Profiling, read_profiling


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (True, Profiling(steps=((10, 12),))),
        ("true", Profiling(steps=((10, 12),))),
        ("steps=10-15", Profiling(steps=((10, 15),))),
        ("steps=7, memory, stacks=true, shapes=no", Profiling(steps=((7, 7),), memory=True, stacks=True)),
        ("steps=2-3+8-9", Profiling(steps=((2, 3), (8, 9)))),
        ("memory", Profiling(steps=((10, 12),), memory=True)),
        ('{"steps": [4, 6]}', Profiling(steps=((4, 6),))),
        ({"steps": "4-6", "warmup": 2}, Profiling(steps=((4, 6),), warmup=2)),
        ({"schedule": {"wait": 5, "active": 2, "repeat": 3}}, Profiling(wait=5, active=2, repeat=3)),
        ("wait=5,active=2", Profiling(wait=5, active=2)),
    ],
)
def test_forms(given: Any, expected: Profiling) -> None:
    args = TrainingArguments(output_dir="out", profile=given)
    assert isinstance(args.profile, dict)
    assert read_profiling(args.profile) == expected
    again = TrainingArguments(output_dir="out", profile=args.to_dict()["profile"])
    assert again.profile == args.profile


@pytest.mark.parametrize("given", [None, False, "false", ""])
def test_off(given: Any) -> None:
    assert TrainingArguments(output_dir="out", profile=given).profile is None


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("step=3", r"there is no setting 'step'.*did you mean 'steps'"),
        ("steps=5-3", "the first and the last optimizer step"),
        ("steps=0-3", "the first and the last optimizer step"),
        ("steps=3-5+4-9", "the first and the last optimizer step"),
        ("steps=a", "the first and the last optimizer step"),
        ("steps=3,wait=2", "leave one of them out"),
        ("active=0", "active is a whole number of at least 1"),
        ("memory=maybe", "memory is True or False"),
        ("{", "not valid JSON"),
        (3, "expected True, 'steps=10-15', or a dict"),
    ],
)
def test_errors_name_the_option_and_the_remedy(given: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        TrainingArguments(output_dir="out", profile=given)
    assert str(caught.value).startswith("profile=")


def test_the_steps_of_a_schedule_follow_the_start_of_the_run() -> None:
    assert Profiling(wait=2, warmup=1, active=2, repeat=2).ranges(0) == ((4, 5), (9, 10))
    assert Profiling(wait=2, warmup=1, active=2).ranges(100) == ((104, 105),)
    assert Profiling(steps=((4, 6),)).ranges(100) == ((4, 6),)
