"""Training data whose optimizer steps grow: more micro-batches per step, and longer sequences.

Both are functions of the number of optimizer steps made, so that a resumed run needs no other state. Sequences are cut
when the micro-batches of a step are drawn: a worker that prefetches does not know the step of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from paceline.args.warmups import BatchWarmup, LengthWarmup
from paceline.pytorch.data.batches import rebuild_mapping
from paceline.pytorch.data.feed import StatefulDataIterator, Window

ROW_MASK, POSITIONS, LABELS = "attention_mask", "position_ids", "labels"
DECODER_NAMES = (LABELS, "decoder_input_ids", "decoder_attention_mask", "decoder_inputs_embeds")
# names whose values are places in the sequence, which a cut would leave pointing outside of it
PLACES = ("start_positions", "end_positions", "cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k")


class SequenceCutter:
    """Cuts the samples of collated batches to their first tokens.

    Columns with the token length of the model's main input as their second dimension are cut with it. Those of a
    decoder are cut to the same maximum.

    Args:
        name: the model's main input, token ids of shape (samples, tokens).
        is_encoder_decoder: `labels` and the columns of the decoder have a token length of their own.

    Attributes:
        length: the maximum tokens of a sample; None: batches are returned as they are.
    """

    length: int | None = None

    def __init__(self, name: str, is_encoder_decoder: bool = False) -> None:
        self.name = name
        self.decoder_names = DECODER_NAMES if is_encoder_decoder else ()
        self._has_tokens: dict[str, bool] = {}  # column: it has the token length

    def __call__(self, batch: Any) -> Any:
        """Returns a batch with the samples cut; the given one is not changed.

        Raises:
            ValueError: a column cannot be cut; the message names it.
        """
        if self.length is None:
            return batch
        ids = batch.get(self.name) if isinstance(batch, Mapping) else None
        if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point():
            raise self._refused(self.name, "is no tensor of token ids, (samples, tokens), in the collated batch")
        width = ids.shape[1]
        if self._exceeds(width):
            check_padding(batch, ids, self._refused)
        return rebuild_mapping(batch, {key: self._cut(str(key), value, width) for key, value in batch.items()})

    def _cut(self, key: str, value: object, width: int) -> Any:
        """Returns the value of a column with its token dimensions cut."""
        if key in PLACES:
            raise self._refused(key, "holds places in the sequence")
        if not isinstance(value, Tensor | np.ndarray):
            if self._exceeds(width) and holds_tokens(value, width):
                raise self._refused(key, f"has the token length {width} inside of a {type(value).__name__}")
            return value
        if value.ndim < 2:
            return value
        if key in self.decoder_names:
            return cut_at(value, 1, self.length)
        if key == ROW_MASK and value.ndim > 2:
            return self._cut_mask(value, width)
        if key == POSITIONS and value.ndim == 3:  # (axes, samples, tokens)
            return cut_at(value, 2, self.length)
        return self._cut_rows(key, value, width)

    def _cut_rows(self, key: str, value: Tensor | NDArray[Any], width: int) -> Any:
        """Returns a column of shape (samples, ...), cut if its second dimension is the token length."""
        has_tokens = value.shape[1] == width
        if self._has_tokens.setdefault(key, has_tokens) != has_tokens:
            raise self._refused(key, f"has the token length of {self.name} in some batches and another one in others")
        if not self._exceeds(width):
            return value
        if key == LABELS and has_tokens and value.ndim == 2 and is_floating(value):
            raise self._refused(key, "may be one target per token or one per class")
        if width in value.shape[2:]:
            raise self._refused(key, f"of shape {tuple(value.shape)} has the token length {width} in another dimension")
        return cut_at(value, 1, self.length) if has_tokens else value

    def _exceeds(self, width: int) -> bool:
        return self.length is not None and width > self.length

    def _cut_mask(self, mask: Tensor | NDArray[Any], width: int) -> Any:
        """Returns an attention mask over pairs of tokens, of shape (..., tokens, tokens), cut in both dimensions."""
        if tuple(mask.shape[-2:]) != (width, width):
            raise self._refused(ROW_MASK, f"of shape {tuple(mask.shape)} is not over pairs of {width} tokens")
        return cut_at(cut_at(mask, mask.ndim - 2, self.length), mask.ndim - 1, self.length)

    def _refused(self, column: str, reason: str) -> ValueError:
        return ValueError(
            f"sequence_length_warmup: the batch cannot be cut to {self.length} tokens, because {column!r} {reason}. "
            "Leave sequence_length_warmup out, or let the data_collator return columns that can be cut at their end."
        )


def check_padding(batch: Mapping[str, Any], ids: Tensor, refused: Callable[[str, str], ValueError]) -> None:
    """Checks that the first tokens of each row are the first tokens of one sample.

    Args:
        batch: the collated batch.
        ids: token ids, of shape (samples, tokens).
        refused: `(column, reason) -> error`.

    Raises:
        ValueError: rows are padded on the left, or hold several samples.
    """
    mask, positions = batch.get(ROW_MASK), batch.get(POSITIONS)
    mask = mask if isinstance(mask, Tensor) and mask.shape == ids.shape else None
    if mask is not None and bool(((mask[:, 0] == 0) & (mask != 0).any(dim=1)).any()):
        raise refused(ROW_MASK, "shows padding on the left (padding_side='right' pads at the end)")
    if isinstance(positions, Tensor) and positions.shape == ids.shape:
        restarts = positions[:, 1:] <= positions[:, :-1]
        if mask is not None:
            restarts &= mask[:, 1:] != 0
        if bool(restarts.any()):
            raise refused(POSITIONS, "restarts within a row, which holds several samples")


def cut_at(value: Tensor | NDArray[Any], dim: int, length: int | None) -> Any:
    """Returns the first `length` places of a dimension of a tensor or array, contiguous."""
    if length is None or value.shape[dim] <= length:
        return value
    cut = value[(slice(None),) * dim + (slice(length),)]
    return cut.contiguous() if isinstance(cut, Tensor) else np.ascontiguousarray(cut)


def is_floating(value: Tensor | NDArray[Any]) -> bool:
    """Returns True for a tensor or array of floating-point numbers."""
    return value.is_floating_point() if isinstance(value, Tensor) else value.dtype.kind == "f"


def holds_tokens(value: object, width: int) -> bool:
    """Returns True if a list or mapping of a batch holds lists, tensors or arrays with the token length."""
    if isinstance(value, Mapping):
        return any(holds_tokens(item, width) for item in value.values())
    if isinstance(value, Tensor | np.ndarray):
        return width in value.shape
    if not isinstance(value, list | tuple):
        return False
    return any(holds_tokens(item, width) or (isinstance(item, list | tuple) and len(item) == width) for item in value)


class WarmingFeed(StatefulDataIterator):
    """Iterates over training data with the warm-ups of a run; it also adds their current values to log rows.

    Args:
        loader, collect, ignore_data_skip: see `StatefulDataIterator`.
        accumulation: micro-batches per optimizer step after the warm-up.
        batch_warmup: the micro-batches of each optimizer step; None: `accumulation`.
        length_warmup: the maximum sequence length of each optimizer step; None: samples are not cut.
        cutter: cuts the batches.
        step: returns the number of optimizer steps made.
    """

    def __init__(
        self,
        loader: Any,
        *,
        accumulation: int,
        collect: Callable[[Iterator[Any], int], Window],
        ignore_data_skip: bool,
        batch_warmup: BatchWarmup | None,
        length_warmup: LengthWarmup | None,
        cutter: SequenceCutter,
        step: Callable[[], int],
    ) -> None:
        super().__init__(
            loader,
            accumulation=accumulation,
            collect=lambda batches, number: collect(map(cutter, batches), number),
            ignore_data_skip=ignore_data_skip,
        )
        self.meters = (self,)
        self._batch_warmup, self._length_warmup, self._cutter = batch_warmup, length_warmup, cutter
        self._step = step
        self._drawn: int | None = None  # the number of steps made before the last window

    def draw(self) -> Window:
        """Returns the next accumulation window, of the current size and sequence length."""
        step = self._step()
        if self._batch_warmup is not None:
            self.accumulation = self._batch_warmup.count_at(step)
        if self._length_warmup is not None:
            self._cutter.length = self._length_warmup.length_at(step)
        window = super().draw()
        if window[0]:
            self._drawn = step
        return window

    # ---- a meter of the run

    def row(self, times: Mapping[str, float]) -> dict[str, float]:
        """Returns the entries of a log row: the values of the last optimizer step.

        Args:
            times: seconds by activity since the last row.
        """
        entries: dict[str, float] = {}
        if self._drawn is None:
            return entries
        if self._batch_warmup is not None:
            entries["global_batch_size"] = self._batch_warmup.size_at(self._drawn)
        length = self._length_warmup.length_at(self._drawn) if self._length_warmup is not None else None
        if length is not None:
            entries["sequence_length"] = length
        return entries

    def describe(self) -> str:
        """Returns an empty text: a warm-up has no rate of the whole run."""
        return ""
