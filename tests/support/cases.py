"""Parameters of a large matrix of tests: a few are run by default, all of them in the slow suite."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(fast: Iterable[Any], values: Iterable[Any], mark: pytest.MarkDecorator = pytest.mark.slow) -> list[Any]:
    """Returns `values` as parameters, tuples as several of them; all but those in `fast` have the mark.

    Raises:
        ValueError: a value of `fast` is none of `values`, as after a renaming.
    """
    fast, values = list(fast), list(values)
    unknown = [value for value in fast if value not in values]
    if unknown:
        raise ValueError(f"no such case: {unknown}")
    marks = [() if value in fast else mark for value in values]
    rows = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*row, marks=mark) for row, mark in zip(rows, marks, strict=True)]
