from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _types_of_options() -> Iterator[None]:
    """The reference's parser writes its own idea of a type into the fields that it reads."""
    from paceline import Seq2SeqTrainingArguments

    before = {item: item.type for item in dataclasses.fields(Seq2SeqTrainingArguments)}
    yield
    for item, kind in before.items():
        item.type = kind
