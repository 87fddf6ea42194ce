"""Writer of TensorBoard files that needs only the package `tensorboard`, for environments without torch."""

from __future__ import annotations

import time
from io import BytesIO
from typing import Any

import numpy as np

from paceline.core.optional import require


class EventWriter:
    """Writes scalars and texts; implements the part of torch's `SummaryWriter` that the reporter uses.

    Args:
        log_dir: folder of the file.
        purge_step: hides entries of earlier files of the folder from this step on; None hides nothing.
    """

    def __init__(self, log_dir: str, purge_step: int | None = None) -> None:
        self._events: Any = require("tensorboard.compat.proto.event_pb2", "tensorboard")
        self._summaries: Any = require("tensorboard.compat.proto.summary_pb2", "tensorboard")
        writer: Any = require("tensorboard.summary.writer.event_file_writer", "tensorboard")
        self._writer = writer.EventFileWriter(log_dir)
        if purge_step is not None:
            start = self._events.SessionLog(status=self._events.SessionLog.START)
            self._writer.add_event(self._events.Event(wall_time=time.time(), step=purge_step, session_log=start))

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        """Writes a scalar."""
        self._add(self._summaries.Summary.Value(tag=tag, simple_value=float(value)), step)

    def add_text(self, tag: str, text: str, step: int = 0) -> None:
        """Writes a text, which is displayed as Markdown."""
        plugin = self._summaries.SummaryMetadata.PluginData(plugin_name="text")
        tensors: Any = require("tensorboard.compat.proto.tensor_pb2", "tensorboard")
        shapes: Any = require("tensorboard.compat.proto.tensor_shape_pb2", "tensorboard")
        shape = shapes.TensorShapeProto(dim=[shapes.TensorShapeProto.Dim(size=1)])
        tensor = tensors.TensorProto(dtype="DT_STRING", string_val=[text.encode("utf-8")], tensor_shape=shape)
        metadata = self._summaries.SummaryMetadata(plugin_data=plugin)
        self._add(self._summaries.Summary.Value(tag=f"{tag}/text_summary", metadata=metadata, tensor=tensor), step)

    def add_image(self, tag: str, pixels: np.ndarray, step: int, dataformats: str = "HWC") -> None:
        """Writes a picture of shape (height, width, 3), 8 bits for each colour."""
        target = BytesIO()
        require("PIL.Image", "plots").fromarray(pixels).save(target, format="PNG")
        height, width, colours = pixels.shape
        image = self._summaries.Summary.Image(
            height=height, width=width, colorspace=colours, encoded_image_string=target.getvalue()
        )
        self._add(self._summaries.Summary.Value(tag=tag, image=image), step)

    def _add(self, value: Any, step: int) -> None:
        summary = self._summaries.Summary(value=[value])
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=step, summary=summary))

    def flush(self) -> None:
        """Flushes the file."""
        self._writer.flush()

    def close(self) -> None:
        """Flushes and closes the file."""
        self._writer.close()
