"""Registry of reporters: the built-in ones and those of other packages.

A package adds a reporter by an entry point in the group `paceline.reporters`: its name is the value for `report_to`,
its object a callback class that can be instantiated without arguments.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from paceline.args.errors import did_you_mean
from paceline.callbacks.reporters.base import Reporter
from paceline.callbacks.reporters.csv import CSVReporter
from paceline.callbacks.reporters.jsonl import JSONLReporter
from paceline.callbacks.reporters.mlflow import MLflowCallback
from paceline.callbacks.reporters.tensorboard import TensorBoardCallback
from paceline.callbacks.reporters.wandb import WandbCallback
from paceline.core.optional import is_installed, load

__all__ = [
    "REPORTERS",
    "CSVReporter",
    "JSONLReporter",
    "MLflowCallback",
    "Reporter",
    "TensorBoardCallback",
    "WandbCallback",
    "find_reporters",
]

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "paceline.reporters"

# name: the class, or the location of one that is imported on first use
REPORTERS: dict[str, type[Reporter] | str] = {
    "tensorboard": TensorBoardCallback,
    "wandb": WandbCallback,
    "mlflow": MLflowCallback,
    "jsonl": JSONLReporter,
    "csv": CSVReporter,
    "azure_ml": "paceline.callbacks.reporters.azure_ml:AzureMLCallback",
    "clearml": "paceline.callbacks.reporters.clearml:ClearMLCallback",
    "codecarbon": "paceline.callbacks.reporters.codecarbon:CodeCarbonCallback",
    "comet_ml": "paceline.callbacks.reporters.comet:CometCallback",
    "dagshub": "paceline.callbacks.reporters.dagshub:DagsHubCallback",
    "dvclive": "paceline.callbacks.reporters.dvclive:DVCLiveCallback",
    "flyte": "paceline.callbacks.reporters.flyte:FlyteCallback",
    "kubeflow": "paceline.callbacks.reporters.kubeflow:KubeflowCallback",
    "neptune": "paceline.callbacks.reporters.neptune:NeptuneCallback",
    "swanlab": "paceline.callbacks.reporters.swanlab:SwanLabCallback",
    "trackio": "paceline.callbacks.reporters.trackio:TrackioCallback",
}


def find_reporters(report_to: str | Iterable[str] | None) -> list[type[Any]]:
    """Returns the callback classes that `report_to` names, in its order and without duplicates.

    Args:
        report_to: a name, several names (also in one string, with commas), "all" for every reporter that can run here,
            or "none" or None for no reporter.

    Raises:
        ValueError: an unknown reporter; the message names the closest one, and how to add one.
    """
    names = _names(report_to)
    if "all" in names:
        kinds = [kind for kind in map(_built_in, REPORTERS) if _can_run(kind)]
        return [*_without_bases(kinds), *_load_all()]
    return _without_bases([_find(name) for name in names if name != "none"])


def _without_bases(kinds: list[type[Any]]) -> list[type[Any]]:
    """Leaves out each class that another one is derived from: that one logs the same rows, to the same place."""
    return [kind for kind in kinds if not any(issubclass(other, kind) for other in kinds if other is not kind)]


def _names(report_to: str | Iterable[str] | None) -> list[str]:
    if report_to is None:
        return []
    listed = report_to.split(",") if isinstance(report_to, str) else report_to
    return list(dict.fromkeys(str(getattr(name, "value", name)).strip() for name in listed))


def _built_in(name: str) -> type[Reporter]:
    kind = REPORTERS[name]
    return load(kind) if isinstance(kind, str) else kind


def _find(name: str) -> type[Any]:
    if name in REPORTERS:
        return _built_in(name)
    installed = _entry_points()
    if name in installed:
        return _load(installed[name])
    known = [*REPORTERS, *installed, "all", "none"]
    raise ValueError(f"report_to={name!r}: expected one of {', '.join(known)}{did_you_mean(name, known) or '.'}")


def _can_run(kind: type[Reporter]) -> bool:
    has_package = not kind.requires or any(is_installed(module) for module in kind.requires)
    return has_package and kind.is_ready()


def _entry_points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP) if point.name not in REPORTERS}


def _load_all() -> list[type[Any]]:
    """Loads the reporters of all entry points. A failure is only logged, because no reporter was requested by name."""
    kinds = []
    for point in _entry_points().values():
        try:
            kinds.append(_load(point))
        except Exception as error:
            logger.warning('report_to="all": left out %s, which cannot be loaded: %s.', point.name, error)
    return kinds


def _load(point: EntryPoint) -> type[Any]:
    """Loads the class of an entry point and sets `may_fail`: its exceptions must not stop a run."""
    kind = point.load()
    if not isinstance(kind, type):
        raise TypeError(f"Entry point {ENTRY_POINT_GROUP}:{point.name} must name a callback class, not {kind!r}.")
    if getattr(kind, "may_fail", False) is True:
        return kind
    return type(kind.__name__, (kind,), {"may_fail": True, "__module__": kind.__module__, "__doc__": kind.__doc__})
