"""The callbacks of a Trainer: default flow, reporters, the user's callbacks, and a display."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paceline.args.profiling import read_profiling
from paceline.args.redeclared import own_options
from paceline.args.registry import OPTION_CALLBACKS
from paceline.args.training import TrainingArguments
from paceline.callbacks.flow import DefaultFlowCallback
from paceline.callbacks.notebook import NotebookProgressCallback
from paceline.callbacks.printer import PrinterCallback
from paceline.callbacks.progress import ProgressCallback, is_notebook
from paceline.callbacks.report import ReportCallback
from paceline.callbacks.reporters import find_reporters
from paceline.core.events import EVENTS
from paceline.core.optional import LateModule, load

if TYPE_CHECKING:
    from paceline.callbacks import profile, xla_metrics
else:
    profile = LateModule("paceline.callbacks.profile")
    xla_metrics = LateModule("paceline.callbacks.xla_metrics")

TRACKIO_OPTIONS = ("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id")
DISPLAYS = (ProgressCallback, PrinterCallback, NotebookProgressCallback)


def with_defaults(callbacks: Sequence[Any], args: TrainingArguments) -> list[Any]:
    """Returns the default callbacks and the user's, in calling order.

    A user's display, or report, replaces the default one.

    Args:
        callbacks: the user's callbacks, instances or classes.
        args: the arguments, of which `report_to`, `disable_tqdm`, `debug`, `profile` and those that request a callback
            are read.

    Raises:
        TypeError: `callbacks` is not a list, or an element has no event method.
        ValueError: an option of Trackio without its reporter.
    """
    if not isinstance(callbacks, Sequence):
        raise TypeError(f"callbacks={callbacks!r}: give a list of callbacks, for instance callbacks=[{callbacks!r}].")
    for callback in callbacks:
        if not any(hasattr(callback, event) for event in EVENTS):
            raise TypeError(
                f"callbacks: {callback!r} has no method of an event, such as on_log or on_step_end; derive a class "
                "from paceline.TrainerCallback."
            )
    args = own_options(args)
    everyone = [DefaultFlowCallback, *find_reporters(args.report_to), *callbacks]
    check_trackio(args, everyone)
    if not has_one_of(callbacks, DISPLAYS):
        bar = NotebookProgressCallback if is_notebook() else ProgressCallback
        everyone.append(PrinterCallback if args.disable_tqdm else bar)
    if not has_one_of(callbacks, ReportCallback):
        everyone.append(ReportCallback)
    if "tpu_metrics_debug" in args.debug:
        everyone.append(xla_metrics.XlaMetricsCallback)
    if isinstance(args.profile, dict):
        everyone.append(profile.ProfileCallback(read_profiling(args.profile)))
    asked = {name: getattr(args, name, None) for name in OPTION_CALLBACKS}
    return [*everyone, *(callback_of(name, value, callbacks) for name, value in asked.items() if value)]


def has_one_of(callbacks: Sequence[Any], kinds: type | tuple[type, ...]) -> bool:
    """Returns True if one of the callbacks, instances or classes, is of a kind."""
    return any(isinstance(each, kinds) or (isinstance(each, type) and issubclass(each, kinds)) for each in callbacks)


def callback_of(name: str, value: object, callbacks: Sequence[Any]) -> Any:
    """Returns the callback that an option requests.

    Raises:
        ValueError: the option's value is invalid, or `callbacks` has one of this class too.
    """
    made = load(OPTION_CALLBACKS[name])(value)
    if any(type(made) in (callback, type(callback)) for callback in callbacks):
        raise ValueError(
            f"{name}={value!r} and a {type(made).__name__} in callbacks request the same: leave one of them out."
        )
    return made


def check_trackio(args: TrainingArguments, callbacks: Sequence[Any]) -> None:
    """Refuses options of Trackio that no callback would read. "trackio" is the Space that older versions set.

    Raises:
        ValueError: such an option is set.
    """
    values = {name: getattr(args, name, None) for name in TRACKIO_OPTIONS}
    chosen = {name: value for name, value in values.items() if value and value != "trackio"}
    kinds = [callback if isinstance(callback, type) else type(callback) for callback in callbacks]
    if chosen and not any("trackio" in base.__name__.lower() for kind in kinds for base in kind.__mro__):
        name, value = next(iter(chosen.items()))
        raise ValueError(
            f"{name}={value!r} is an option of Trackio: set report_to='trackio' too, pass a TrackioCallback in "
            "callbacks, or leave it out."
        )
