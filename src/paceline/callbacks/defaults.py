"""Which callbacks a Trainer has: flow and reporters, the user's, and a display."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.callbacks.flow import DefaultFlowCallback
from paceline.callbacks.notebook import NotebookProgressCallback
from paceline.callbacks.printer import PrinterCallback
from paceline.callbacks.progress import ProgressCallback, is_notebook
from paceline.callbacks.reporters import find_reporters
from paceline.callbacks.xla_metrics import XlaMetricsCallback
from paceline.core.events import EVENTS

DISPLAYS = (ProgressCallback, PrinterCallback, NotebookProgressCallback)


def with_defaults(callbacks: Sequence[Any], args: Any) -> list[Any]:
    """The user's callbacks between the default ones; a display of the user's own takes the place of the default one.

    Args:
        callbacks: objects or classes.
        args: `report_to`, `disable_tqdm` and `debug` are read.

    Raises:
        TypeError: what was given is no list, or holds something that hears no event.
    """
    if not isinstance(callbacks, Sequence):
        raise TypeError(f"callbacks={callbacks!r}: give a list of callbacks, for instance callbacks=[{callbacks!r}].")
    for callback in callbacks:
        if not any(hasattr(callback, event) for event in EVENTS):
            raise TypeError(
                f"callbacks: {callback!r} has no method of an event, such as on_log or on_step_end; derive a class "
                "from paceline.TrainerCallback."
            )
    everyone = [DefaultFlowCallback, *find_reporters(args.report_to), *callbacks]
    if not any(isinstance(c, DISPLAYS) or (isinstance(c, type) and issubclass(c, DISPLAYS)) for c in callbacks):
        bar = NotebookProgressCallback if is_notebook() else ProgressCallback
        everyone.append(PrinterCallback if args.disable_tqdm else bar)
    if "tpu_metrics_debug" in args.debug:
        everyone.append(XlaMetricsCallback)
    return everyone
