"""Errors of traced code, without TensorFlow's listing of generated code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.tensorflow.data.batches import IGNORE_INDEX
from paceline.tensorflow.framework import tf
from paceline.tensorflow.objective import NO_IGNORE_INDEX

# TensorFlow's message on a CPU for a label that is no class; a GPU gives NaN instead
OUTSIDE = re.compile(r"label value of (-?\d+) which is outside the valid range of \[0, (\d+)\)")


@contextmanager
def told_plainly() -> Iterator[None]:
    """Re-raises an error of traced code with its message and line, without TensorFlow's listing of generated code."""
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        found = OUTSIDE.search(str(error))
        if found is None:
            raise
        raise ValueError(
            NO_IGNORE_INDEX
            if found[1] == str(IGNORE_INDEX)
            else f"A label is {found[1]}, and the model tells {found[2]} classes apart: labels lie from 0 to "
            f"{int(found[2]) - 1}; -100 is left out of the loss."
        ) from error
    except (ValueError, TypeError, AttributeError, KeyError, NotImplementedError) as error:
        found = getattr(error, "ag_error_metadata", None)
        if found is None:
            raise
        frame = found.translated_stack[-1]
        name = Path(frame.filename).name
        raise type(error)(f"{found.cause_message} ({name}, line {frame.lineno}, in {frame.function_name})") from error
