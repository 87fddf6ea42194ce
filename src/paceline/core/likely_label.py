"""Finds the column of a dataset that most likely holds the labels, for error messages."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

# fmt: off
LABEL_WORDS = frozenset({
    "annotation", "answer", "category", "class", "gold", "grade", "intent", "label", "labels", "outcome", "rating",
    "score", "sentiment", "tag", "tags", "target", "targets", "tgt", "y",
})
# fmt: on


def find_likely_label(dataset: Any, names: Sequence[str]) -> str | None:
    """Returns the column that most likely holds labels: of the type ClassLabel, else with a label's usual name."""
    features = getattr(dataset, "features", None)
    kinds = features if isinstance(features, Mapping) else {}
    typed = (name for name in names if type(kinds.get(name)).__name__ == "ClassLabel")
    named = (name for name in names if LABEL_WORDS.intersection(re.split(r"[\W_\d]+", name.lower())))
    return next(typed, None) or next(named, None)
