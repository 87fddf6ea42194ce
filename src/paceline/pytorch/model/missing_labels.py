"""The explanation added to the error of a batch without labels: the columns that were dropped, and the likely label."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from paceline.core.likely_label import find_likely_label
from paceline.pytorch.data.columns import LABEL_COLUMNS
from paceline.pytorch.model.outputs import IncompleteBatch

_MOST_NAMED = 12


def explain_missing_labels(
    error: BaseException,
    dataset: Any,
    batches: Iterable[Any],
    accepted: Sequence[str],
    label_names: Sequence[str],
    drops_columns: bool,
) -> None:
    """Adds the columns that did not reach the model to the message of an `IncompleteBatch`; ignores other errors.

    Args:
        error: the error that ended the training.
        dataset: the training set. If it does not list its columns, its first sample is read.
        batches: the batches of the failed optimizer step.
        accepted: the parameters of `forward`.
        label_names: the parameters of `forward` that take labels, or the names that the user gave.
        drops_columns: the value of `remove_unused_columns`.
    """
    if not isinstance(error, IncompleteBatch):
        return
    columns = columns_of(dataset)
    reached = next((list(map(str, batch)) for batch in batches if isinstance(batch, Mapping)), [])
    renamed = LABEL_COLUMNS if "labels" in reached else ()  # by the collator
    lost = [name for name in columns if name not in reached and name not in renamed]
    unread = [name for name in reached if name not in accepted]
    parts = [str(error)]
    if lost and drops_columns:
        parts.append(
            f"The training set has the columns {_listed(columns)}; remove_unused_columns=True dropped {_listed(lost)}, "
            f"because forward({', '.join(accepted)}) does not take them."
        )
    likely = find_likely_label(dataset, [*lost, *unread])
    if likely is not None:
        parts.append(_remedy(likely, [name for name in label_names if name in accepted]))
    elif columns and not any(name in reached for name in label_names):
        parts.append(f"No column looks like labels: the training set has {_listed(columns)}.")
    error.args = (" ".join(parts),)


def columns_of(dataset: Any) -> list[str]:
    """Returns the columns of a dataset; empty if they are unknown."""
    names = getattr(dataset, "column_names", None)
    if isinstance(names, list):
        return [str(name) for name in names]
    try:
        first = dataset[0]
    except Exception:  # user code, run to explain another error
        return []
    return [str(name) for name in first] if isinstance(first, Mapping) else []


def _remedy(column: str, parameters: Sequence[str]) -> str:
    """Returns the sentence about a column that looks like the labels.

    Args:
        column: its name.
        parameters: the parameters of `forward` that take labels.
    """
    keep = f"label_names=[{column!r}] keeps the column for a compute_loss_func"
    if not parameters:
        return (
            f"{column!r} looks like the labels, and forward has no parameter for labels: {keep}, which makes the loss "
            f"of the outputs; or add a parameter {column!r} to forward and return the loss."
        )
    return (
        f"{column!r} looks like the labels: rename it, dataset.rename_column({column!r}, {parameters[0]!r}); or "
        f"{keep}; or set remove_unused_columns=False and rename it in a data_collator."
    )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more
