"""The line logged when Ctrl-C ends a run: the last step and the checkpoint to resume from."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from paceline.core import dropped_interrupts
from paceline.core.lineage import RunMark, is_part, mark_of
from paceline.core.signals import SECOND_INTERRUPT

logger = logging.getLogger(__name__)

_PREFIX = "checkpoint-"
_IS_DESCRIBED = "_paceline_is_described"  # an attribute of errors, and of the hook that prints none of these


@contextmanager
def interrupts_described(describe: Callable[[], str | None]) -> Iterator[None]:
    """Returns a context that logs a line before a KeyboardInterrupt is passed on.

    A program that does not catch it ends with this line, without a traceback. The second Ctrl-C keeps its traceback,
    which shows where a step hangs.

    Args:
        describe: returns the line, or None if this process logs none.
    """
    try:
        with dropped_interrupts.raised_again():
            yield
    except KeyboardInterrupt as error:
        line = describe()
        if line is not None:
            logger.warning(line)
        if logger.isEnabledFor(logging.WARNING) and SECOND_INTERRUPT not in error.args:
            _hide_traceback(error)
        raise


def _hide_traceback(error: BaseException) -> None:
    """Keeps Python and IPython from printing the traceback of an error that ends a program or a cell."""
    setattr(error, _IS_DESCRIBED, True)
    setattr(error, "_render_traceback_", partial(_render, str(error)))  # noqa: B010  # an interface of IPython
    if not hasattr(sys.excepthook, _IS_DESCRIBED):
        hook = partial(_print_others, sys.excepthook)
        setattr(hook, _IS_DESCRIBED, True)
        sys.excepthook = hook


def _print_others(hook: Callable[..., Any], kind: type[BaseException], error: BaseException, traceback: Any) -> None:
    if not hasattr(error, _IS_DESCRIBED):
        hook(kind, error, traceback)


def _render(text: str) -> list[str]:
    return [f"KeyboardInterrupt: {text}" if text else "KeyboardInterrupt"]


def describe_stop(folder: Path, run: RunMark | None, step: int) -> str:
    """Returns the last step of a stopped run, its newest checkpoint, and how to resume from it.

    Args:
        folder: the output folder.
        run: the mark of the run; None if it was stopped before it began.
        step: optimizer steps so far.
    """
    if run is None:
        return "Stopped before the first step: nothing was written."
    places = [path for path in folder.glob(f"{_PREFIX}*") if path.name.removeprefix(_PREFIX).isdecimal()]
    own = [path for path in places if is_part(run, path.name, mark_of(path))]
    if not own:
        return f"Stopped at step {step:,}. This run has no checkpoint in {folder}: the next start begins from scratch."
    newest = max(own, key=lambda path: int(path.name.removeprefix(_PREFIX)))
    return f"Stopped at step {step:,}. {newest} is complete: train(resume_from_checkpoint=True) resumes from there."
