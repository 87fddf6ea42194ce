"""Finds the columns that a model takes and the labels among them, and drops the others."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

logger = logging.getLogger(__name__)

LABEL_COLUMNS = ("label", "label_ids")  # names that collators change to `labels`
TARGET_NAMES = ("target", "targets")
SPAN_NAMES = ("start_positions", "end_positions")


def signature_columns(model: object, label_names: Sequence[str]) -> list[str] | None:
    """Returns the columns a model takes: the parameters of its `forward`, and the possible names of its labels.

    Returns:
        None if it may take any column: `forward` names no parameter, or cannot be read (a scripted module).
    """
    named = named_parameters(model)
    if not named:
        return None
    return list(dict.fromkeys([*named, *LABEL_COLUMNS, *label_names]))


def find_labels(model: object) -> list[str]:
    """Returns the parameters of a model's `forward` that take labels, in order.

    These are parameters with "label" in their name, `target` and `targets`, and `start_positions` together with
    `end_positions`. A parameter whose default is a number or a flag is an option, not a label.
    """
    named = named_parameters(model)
    has_span = all(name in named for name in SPAN_NAMES)
    found = []
    for name, parameter in named.items():
        takes_data = parameter.default is None or parameter.default is inspect.Parameter.empty
        is_label = "label" in name or name in TARGET_NAMES or (has_span and name in SPAN_NAMES)
        if is_label and takes_data:
            found.append(name)
    return found


def named_parameters(model: Any) -> dict[str, inspect.Parameter]:
    """Returns the parameters of `forward` that can be passed by name; empty if its signature cannot be read."""
    try:
        parameters = inspect.signature(model.forward).parameters
    except (TypeError, ValueError, AttributeError):
        return {}
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name: parameter for name, parameter in parameters.items() if parameter.kind in kinds}


def has_removable_columns(dataset: object) -> bool:
    """Returns True if columns can be dropped in the dataset itself.

    Returns False if the columns are unknown (some streams), or if a transform runs when samples are read, because it
    may need any column. `RemoveColumnsCollator` handles these datasets.
    """
    if not callable(getattr(dataset, "remove_columns", None)) or not getattr(dataset, "column_names", None):
        return False
    form = getattr(dataset, "format", None)
    return not (isinstance(form, Mapping) and form.get("type") == "custom")


def remove_unused_columns(dataset: Any, columns: Sequence[str] | None, description: str) -> Any:
    """Returns a `datasets` dataset without the columns that the model does not take; logs the dropped ones by name.

    Args:
        dataset: not modified; returned as is if its columns cannot be dropped (see `has_removable_columns`).
        columns: from `signature_columns`; None drops nothing.
        description: the use of the dataset, as in "the ... dataset".

    Raises:
        ValueError: no column would be left.
    """
    if columns is None or not has_removable_columns(dataset):
        return dataset
    unused = [name for name in dataset.column_names if name not in columns]
    if not unused:
        return dataset
    if len(unused) == len(dataset.column_names):
        raise nothing_left(unused, columns, description)
    report_dropped(unused, description)
    return dataset.remove_columns(unused)


class RemoveColumnsCollator:
    """A collator that drops entries of dict samples that the model does not take, and logs them once.

    Args:
        data_collator: collates the remaining entries.
        columns: from `signature_columns`.
        description: see `remove_unused_columns`.

    Raises:
        ValueError: (when called) the first sample would be empty.
    """

    def __init__(
        self,
        data_collator: Callable[[list[Any]], Any],
        columns: Sequence[str],
        description: str = "training",
    ) -> None:
        self.data_collator = data_collator
        self.columns = frozenset(columns)
        self.description = description
        self._dropped: frozenset[str] = frozenset()

    def __call__(self, features: list[Any]) -> Any:
        unused: set[str] = set()
        for row in features:
            if isinstance(row, Mapping):
                unused |= row.keys() - self.columns
        return self.data_collator(self._strip(features, unused) if unused else features)

    def _strip(self, features: list[Any], unused: set[str]) -> list[Any]:
        if not unused <= self._dropped:
            if isinstance(features[0], Mapping) and not features[0].keys() & self.columns:
                raise nothing_left(sorted(unused), sorted(self.columns), self.description)
            report_dropped(sorted(unused - self._dropped), self.description)
            self._dropped = self._dropped | unused
        return [
            {name: value for name, value in row.items() if name in self.columns} if isinstance(row, Mapping) else row
            for row in features
        ]


def report_dropped(names: Sequence[str], description: str) -> None:
    """Logs the columns that the model does not get."""
    logger.info(
        "The following columns in the %s set don't have a corresponding argument in the model's forward and have been "
        "ignored: %s. To keep them (for your own collator or compute_loss): remove_unused_columns=False.",
        description,
        ", ".join(names),
    )


def nothing_left(names: Sequence[str], columns: Sequence[str], description: str) -> ValueError:
    """Returns the error for a dataset of which the model takes no column."""
    return ValueError(
        f"No columns in the dataset match the model's forward method signature: ({', '.join(columns)}); the "
        f"{description} dataset has {', '.join(names)}. Rename the columns, or set remove_unused_columns=False and "
        "make the inputs in a data_collator."
    )
