"""What an evaluation keeps of its batches: on the device for a few of them, then on the host, then on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.core.outputs import EvalPrediction
from paceline.core.rows import RowCollector, map_nest
from paceline.core.spill import Spill
from paceline.data.loading import loader_length
from paceline.model.prediction_size import announce

# a list of these is one row per sample, not a nest
ROW_TYPES = (str, bytes, int, float, bool, np.generic)


@dataclass(frozen=True)
class EvaluationOptions:
    """What the arguments ask of an evaluation.

    Attributes:
        concatenate: one array per output (False: a list of batches).
        streaming: metrics are taken batch by batch: `compute_metrics` is called with `compute_result`, or driven as a
            `StreamingMetric`.
        include: which of `inputs` and `loss` the metrics get.
        host_every: move predictions to the host every so many batches.
        dtype: cast the whole model to this type while it is evaluated; None leaves it.
        spill_bytes: what is kept for the end goes to disk past so many bytes; None: never.
        spill_folder: where to, when the system's temporary folder lies in memory.
    """

    concatenate: bool = True
    streaming: bool = False
    include: tuple[str, ...] = ()
    host_every: int = 1
    dtype: torch.dtype | None = None
    spill_bytes: int | None = None
    spill_folder: str | None = None


class Kept:
    """What an evaluation keeps of its batches: on the device for a few of them, then on the host, then on disk.

    Args:
        options: what to keep, and how long where.
        spill: the limit of what is held in memory, and the files past it.

    Attributes:
        num_samples: how many samples there were.
    """

    def __init__(self, options: EvaluationOptions, spill: Spill) -> None:
        self.options, self.spill = options, spill
        self.num_samples = 0
        self._waiting: list[tuple[dict[str, Any], int]] = []
        self._num_batches = 0
        names = ("predictions", "labels", "inputs", "losses")
        self._collectors = {name: RowCollector(options.concatenate, spill=spill) for name in names}

    def add(self, rows: dict[str, Any], size: int, loader: Any) -> None:
        """Keep one batch. After the first one, it is said what all of them will take."""
        self.num_samples += size
        self._num_batches += 1
        self._waiting.append((rows, size))
        if self._num_batches == 1:
            self._flush()
            self._project(loader_length(loader))
        elif len(self._waiting) >= self.options.host_every:
            self._flush()

    def result(self, order: Sequence[int] | None = None) -> dict[str, Any]:
        """Everything, by name; None for what there was not. `order`: the place of each row; None: as they came."""
        self._flush()
        return {name: collector.result(order) for name, collector in self._collectors.items()}

    def _flush(self) -> None:
        """Move what waits on the device to the host."""
        for rows, size in self._waiting:
            for name, value in rows.items():
                if value is not None:
                    self._collectors[name].add(to_host(value), size)
        self._waiting.clear()

    def _project(self, num_batches: int | None) -> None:
        """Warn of what will be kept, where it is more than memory is to hold."""
        each = sum(collector.num_bytes for collector in self._collectors.values())
        announce(self.spill, each, num_batches)


def make_prediction(batch: dict[str, Any]) -> EvalPrediction:
    """What metrics are given, from what was kept under these names."""
    return EvalPrediction(
        predictions=batch.get("predictions"),
        label_ids=batch.get("labels"),
        inputs=batch.get("inputs"),
        losses=batch.get("losses"),
    )


def to_host(value: Any) -> Any:
    """A nest of tensors as numpy arrays; bfloat16, which numpy lacks, as float32."""
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        if value.dtype == torch.bfloat16:
            value = value.float()
        elif value.untyped_storage().nbytes() > value.nbytes:
            value = value.clone()  # a part of something larger, which would be kept with it
        return value.numpy()
    if isinstance(value, Mapping):
        return {key: to_host(item) for key, item in value.items()}
    if isinstance(value, list | tuple) and not is_row_list(value):
        return tuple(to_host(item) for item in value) if isinstance(value, tuple) else [to_host(v) for v in value]
    return value if value is None or isinstance(value, np.ndarray) else np.asarray(value)


def is_row_list(values: list[Any] | tuple[Any, ...]) -> bool:
    """Whether a sequence is one row per sample: numbers or texts, some perhaps missing, and nothing else."""
    has_rows = bool(values) and isinstance(values[0], ROW_TYPES)
    return has_rows and all(value is None or isinstance(value, ROW_TYPES) for value in values)


def with_rows(arrays: Any, size: int) -> Any:
    """The same nest, its 0-dim arrays or tensors repeated for each of `size` samples."""

    def repeated(value: Any) -> Any:
        if value.ndim:
            return value
        return value.expand(size) if isinstance(value, Tensor) else np.full(size, value)

    return map_nest(repeated, arrays)
