"""The annotations of the Trainer resolve at run time, as `typing.get_type_hints` and tools over it need."""

from __future__ import annotations

import inspect
import typing

import pytest

from paceline import EarlyStoppingCallback, Seq2SeqTrainer, Trainer, TrainerCallback, TrainerControl, TrainerState

CLASSES = [Trainer, Seq2SeqTrainer, TrainerCallback, TrainerControl, TrainerState, EarlyStoppingCallback]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_annotations_resolve(kind: type) -> None:
    for name, member in vars(kind).items():
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if inspect.isfunction(function) and function.__module__ == kind.__module__:
            assert typing.get_type_hints(function) is not None, name
