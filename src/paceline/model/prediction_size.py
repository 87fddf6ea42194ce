"""How much an evaluation will keep, said as soon as it can be known."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.callbacks.memory import format_bytes
from paceline.core.spill import Spill
from paceline.model.signature import innermost

logger = logging.getLogger(__name__)


def expected_bytes(
    model: nn.Module, batch: Any, *, label_names: Sequence[str] = (), dtype: torch.dtype | None = None
) -> int | None:
    """What one batch's predictions and labels take on the host, before the model is called.

    Known where every token gives one number per word of the vocabulary: the model names the layer that makes them
    (`get_output_embeddings`, as models of transformers do), and the batch has as many tokens as it has labels or input
    ids. Those are the evaluations that fill a machine; of others, only the first batch's outputs tell.

    Args:
        model: not called.
        batch: the first one.
        label_names: of the labels among its fields.
        dtype: that the model is cast to; None: that of its weights.

    Returns: bytes, without what the model may return beside its logits; None where it cannot be known.
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
    item_bytes = 4 if kind == torch.bfloat16 else kind.itemsize  # which numpy lacks
    num_bytes: int = ids.numel() * weight.shape[0] * item_bytes + sum(label.nbytes for label in labels)
    return num_bytes


def announce(spill: Spill, batch_bytes: int | None, num_batches: int | None) -> None:
    """Warn of what will be kept, where it is more than memory is to hold, and a good deal more than was said before."""
    limit = spill.limit
    if limit is None or batch_bytes is None or num_batches is None:
        return
    expected = batch_bytes * num_batches
    if expected <= max(limit, 1.25 * spill.announced):
        return
    spill.announced = expected
    logger.warning(
        "This evaluation keeps about %s of predictions (%d batches of %s); past %s (eval_spill_gb) it goes to "
        "%s (%s free). To keep less: reduce them batch by batch with preprocess_logits_for_metrics, give a "
        "streaming metric as compute_metrics, or set prediction_loss_only=True.",
        format_bytes(expected),
        num_batches,
        format_bytes(batch_bytes),
        format_bytes(limit),
        spill.folder,
        format_bytes(shutil.disk_usage(spill.folder).free),
    )
