"""Stores the predictions of an evaluation: on the device for a few batches, then on the host, then on disk."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.core.byte_sizes import format_memory
from paceline.core.disk_buffer import DiskBuffer
from paceline.core.outputs import EvalPrediction
from paceline.core.rows import RowCollector, map_nest
from paceline.pytorch.data.loading import loader_length
from paceline.pytorch.model.signature import innermost

logger = logging.getLogger(__name__)

# a list of values of these types is one row per sample, not a nested structure
ROW_TYPES = (str, bytes, int, float, bool, np.generic)


@dataclass(frozen=True)
class EvaluationOptions:
    """The options of an evaluation, from the arguments.

    Attributes:
        concatenate: return one array per output (False: a list of batches).
        streaming: compute metrics batch by batch: `compute_metrics` is called with `compute_result`, or is a
            `StreamingMetric`.
        include: those of `inputs` and `loss` that are passed to the metrics.
        host_every: move predictions to the host every `host_every` batches.
        dtype: cast the whole model to this dtype during evaluation; None disables it.
        spill_bytes: save predictions beyond this many bytes to disk; None: never.
        spill_folder: where they are saved if the system's temporary folder is in memory.
        extra_rows: names of further data with a row per sample.
    """

    concatenate: bool = True
    streaming: bool = False
    include: tuple[str, ...] = ()
    host_every: int = 1
    dtype: torch.dtype | None = None
    spill_bytes: int | None = None
    spill_folder: str | None = None
    extra_rows: tuple[str, ...] = ()


class PredictionBuffer:
    """Stores the predictions of an evaluation: on the device for a few batches, then on the host, then on disk.

    Args:
        options: which data to store, and where.
        disk_buffer: the memory limit, and the files for data beyond it.

    Attributes:
        num_samples: number of samples added.
    """

    def __init__(self, options: EvaluationOptions, disk_buffer: DiskBuffer) -> None:
        self.options = options
        self.disk_buffer = disk_buffer
        self.num_samples = 0
        self._waiting: list[tuple[dict[str, Any], int]] = []
        self._num_batches = 0
        names = ("predictions", "labels", "inputs", "losses", *options.extra_rows)
        self._collectors = {name: RowCollector(options.concatenate, disk_buffer=disk_buffer) for name in names}

    def add(self, rows: dict[str, Any], size: int, loader: object) -> None:
        """Adds one batch. After the first batch, warns if the expected total size exceeds the memory limit."""
        self.num_samples += size
        self._num_batches += 1
        self._waiting.append((rows, size))
        if self._num_batches == 1:
            self._flush()
            self._project(loader_length(loader))
        elif len(self._waiting) >= self.options.host_every:
            self._flush()

    def result(self, order: Sequence[int] | None = None) -> dict[str, Any]:
        """Returns all data by name; None for absent data.

        Args:
            order: the position of each row; None: order of arrival.
        """
        self._flush()
        return {name: collector.result(order) for name, collector in self._collectors.items()}

    def _flush(self) -> None:
        """Moves waiting results from the device to the host."""
        for rows, size in self._waiting:
            for name, value in rows.items():
                if value is not None:
                    self._collectors[name].add(to_host(value), size)
        self._waiting.clear()

    def _project(self, num_batches: int | None) -> None:
        """Warns if the expected total size exceeds the memory limit."""
        each = sum(collector.num_bytes for collector in self._collectors.values())
        announce(self.disk_buffer, each, num_batches)


def make_prediction(batch: dict[str, Any]) -> EvalPrediction:
    """Returns the input of `compute_metrics` for stored data."""
    return EvalPrediction(
        predictions=batch.get("predictions"),
        label_ids=batch.get("labels"),
        inputs=batch.get("inputs"),
        losses=batch.get("losses"),
    )


def to_host(value: object) -> Any:
    """Returns nested tensors as numpy arrays; bfloat16, which numpy lacks, becomes float32."""
    if isinstance(value, Tensor):
        is_on_host, value = value.is_cpu, value.detach().cpu()
        if value.dtype == torch.bfloat16:
            value = value.float()
        # a model may write its next outputs into the same memory, and a view would keep a whole larger tensor alive
        elif is_on_host or value.untyped_storage().nbytes() > value.nbytes:
            value = value.clone()
        return value.numpy()
    if isinstance(value, Mapping):
        return {key: to_host(item) for key, item in value.items()}
    if isinstance(value, list | tuple) and not is_row_list(value):
        return tuple(to_host(item) for item in value) if isinstance(value, tuple) else [to_host(v) for v in value]
    return value if value is None or isinstance(value, np.ndarray) else np.asarray(value)


def is_row_list(values: list[Any] | tuple[Any, ...]) -> bool:
    """Returns True if a sequence has one number or text per sample; all but the first may be None."""
    has_rows = bool(values) and isinstance(values[0], ROW_TYPES)
    return has_rows and all(value is None or isinstance(value, ROW_TYPES) for value in values)


def with_rows(arrays: Any, size: int) -> Any:
    """Returns the same nested structure with its 0-dim arrays or tensors repeated for each of `size` samples."""

    def repeated(value: Any) -> Any:
        if value.ndim:
            return value
        return value.expand(size) if isinstance(value, Tensor) else np.full(size, value)

    return map_nest(repeated, arrays)


def expected_bytes(
    model: nn.Module,
    batch: object,
    *,
    label_names: Sequence[str] = (),
    dtype: torch.dtype | None = None,
) -> int | None:
    """Returns the host bytes of one batch's logits and labels, before the model is called; None if unknown.

    The size is known for language models that name their head (`get_output_embeddings`, as models of transformers do):
    each label or input id then yields one logit per token of the vocabulary. Such evaluations can exhaust the host's
    memory. For other models, the size is known only after the first batch. Outputs other than logits are not included.

    Args:
        model: it is not called.
        batch: the first batch.
        label_names: names of the labels in the batch.
        dtype: the dtype to which the model is cast; None: the dtype of its weights.
    """
    inner = innermost(model)
    find_head = getattr(inner, "get_output_embeddings", None)
    head = find_head() if callable(find_head) else None
    weight = getattr(head, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not isinstance(batch, Mapping):
        return None
    labels = [batch[name] for name in label_names if isinstance(batch.get(name), Tensor)]
    is_encoder_decoder = bool(getattr(getattr(inner, "config", None), "is_encoder_decoder", False))
    ids = (labels or [None])[0] if is_encoder_decoder else batch.get(getattr(inner, "main_input_name", "input_ids"))
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point():
        return None
    kind: torch.dtype = dtype or weight.dtype
    item_bytes = 4 if kind == torch.bfloat16 else kind.itemsize  # numpy lacks bfloat16, which is stored as float32
    num_bytes: int = ids.numel() * weight.shape[0] * item_bytes + sum(label.nbytes for label in labels)
    return num_bytes


def announce(disk_buffer: DiskBuffer, batch_bytes: int | None, num_batches: int | None) -> None:
    """Warns if the expected size of all predictions exceeds the memory limit, and that of the last warning by 25 %."""
    limit = disk_buffer.limit
    if limit is None or batch_bytes is None or num_batches is None:
        return
    expected = batch_bytes * num_batches
    if expected <= max(limit, 1.25 * disk_buffer.announced):
        return
    disk_buffer.announce(expected)
    logger.warning(
        "This evaluation keeps about %s of predictions (%d batches of %s); past %s (eval_spill_gb) it goes to "
        "%s (%s free). To keep less: reduce them batch by batch with preprocess_logits_for_metrics, give a "
        "streaming metric as compute_metrics, or set prediction_loss_only=True.",
        format_memory(expected),
        num_batches,
        format_memory(batch_bytes),
        format_memory(limit),
        disk_buffer.folder,
        format_memory(shutil.disk_usage(disk_buffer.folder).free),
    )
