"""Attention within the documents of packed rows, without a mask over pairs of tokens.

Documents of similar length are gathered into batches, padded at their ends, and passed to torch's scaled dot-product
attention. Under causal attention no token attends to later ones, so the padding needs no mask and the fastest kernel
applies. The cost grows with the squared lengths of the documents, not of the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.optional import require

NAME = "paceline_documents"
LAYOUT = "paceline_layout"  # attribute of the mask that stands for the documents
SPREAD = 0.8  # minimum length of a document relative to the longest document of its group


@dataclass(frozen=True)
class Group:
    """Documents that are computed together.

    Attributes:
        num: number of documents.
        width: tokens of the longest document.
        lengths: tokens of each document, int64 on the device; None: all have `width`.
    """

    num: int
    width: int
    lengths: Tensor | None


@dataclass(frozen=True)
class Layout:
    """The positions of the documents in packed rows.

    Attributes:
        groups: groups of documents of similar length.
        index: for each slot of the groups, the index of its token in the flattened rows.
        inverse: for each token of the flattened rows, its slot.
        padding: the slots that are padding.
    """

    groups: tuple[Group, ...]
    index: Tensor
    inverse: Tensor
    padding: Tensor


def document_starts(position_ids: Tensor) -> Tensor:
    """Returns a mask that is True where a document begins, with the shape of `position_ids`, (rows, tokens)."""
    begins = torch.ones_like(position_ids, dtype=torch.bool)
    begins[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
    return begins


def make_layout(position_ids: Tensor) -> Layout:
    """Returns the layout of packed rows; synchronizes with the device to read the document boundaries.

    Args:
        position_ids: (rows, tokens), restarting with each document.
    """
    num_tokens, device = position_ids.numel(), position_ids.device
    starts = document_starts(position_ids).flatten().nonzero()[:, 0].cpu()
    lengths = torch.diff(starts, append=torch.tensor([num_tokens]))
    lengths, order = lengths.sort(descending=True, stable=True)
    starts = starts[order]
    groups, indices, paddings = [], [], []
    first = num_slots = 0
    sizes: list[int] = lengths.tolist()
    for place in range(1, len(sizes) + 1):
        if place < len(sizes) and sizes[place] >= SPREAD * sizes[first]:
            continue
        width, own = sizes[first], lengths[first:place, None]
        offsets = torch.arange(width)
        index = starts[first:place, None] + torch.minimum(offsets, own - 1)
        is_padding = (offsets >= own).flatten()
        indices.append(index.flatten())
        paddings.append(is_padding.nonzero()[:, 0] + num_slots)
        is_even = sizes[place - 1] == width
        groups.append(Group(place - first, width, None if is_even else lengths[first:place].to(device)))
        num_slots += index.numel()
        first = place
    index, padding = torch.cat(indices), torch.cat(paddings)
    slots = torch.arange(num_slots)
    kept = torch.ones(num_slots, dtype=torch.bool)
    kept[padding] = False
    inverse = torch.empty(num_tokens, dtype=torch.int64)
    inverse[index[kept]] = slots[kept]
    return Layout(tuple(groups), index.to(device), inverse.to(device), padding.to(device))


class ToSlots(torch.autograd.Function):
    """Gathers tokens into slots. Padding slots have zero gradient, so the backward pass needs no sum."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, layout: Layout) -> Tensor:
        ctx.layout = layout
        return tokens.index_select(0, layout.index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.index_select(0, ctx.layout.inverse), None


class ToTokens(torch.autograd.Function):
    """Gathers the slots of tokens back into their order."""

    @staticmethod
    def forward(ctx: Any, slots: Tensor, layout: Layout) -> Tensor:
        ctx.layout = layout
        return slots.index_select(0, layout.inverse)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        layout: Layout = ctx.layout
        return gradient.index_select(0, layout.index).index_fill_(0, layout.padding, 0), None


to_slots: Callable[[Tensor, Layout], Tensor] = ToSlots.apply
to_tokens: Callable[[Tensor, Layout], Tensor] = ToTokens.apply
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def attend_by_document(query: Tensor, key: Tensor, value: Tensor, layout: Layout, attend: Attend) -> Tensor:
    """Returns the attention output within each document, of shape (rows, tokens, heads, width of a value).

    Args:
        query, key, value: (rows, heads, tokens, width); key and value may have fewer heads.
        layout: the layout of the rows.
        attend: `(query, key, value, lengths) -> output`, from tensors (documents, heads, tokens, width) to
            (documents, tokens, heads, width); `lengths` as in `Group`.
    """
    rows, _, num_tokens, _ = query.shape
    slots = [to_slots(each.transpose(1, 2).flatten(0, 1), layout) for each in (query, key, value)]
    outputs, start = [], 0
    for group in layout.groups:
        stop = start + group.num * group.width
        q, k, v = (each[start:stop].view(group.num, group.width, *each.shape[1:]).transpose(1, 2) for each in slots)
        outputs.append(attend(q, k, v, group.lengths).flatten(0, 1))
        start = stop
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    result = to_tokens(joined, layout)
    return result.view(rows, num_tokens, *result.shape[1:])


def document_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Returns the output of transformers' SDPA function, computed within documents if the mask carries their layout.

    Raises:
        RuntimeError: the model copied the mask, which lost its layout.
    """
    sdpa = require("transformers.integrations.sdpa_attention", "transformers").sdpa_attention_forward
    layout = getattr(attention_mask, LAYOUT, None)
    if layout is None:
        if attention_mask is not None and attention_mask.numel() == 1 and query.shape[2] > 1:
            raise RuntimeError("The model copied the mask that stands for the documents of packed rows.")
        output: tuple[Tensor, None] = sdpa(module, query, key, value, attention_mask, **options)
        return output
    is_causal = options.pop("is_causal", None)
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)

    def attend(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None) -> Tensor:
        mask = None
        if not causal and lengths is not None:
            mask = (torch.arange(key.shape[2], device=key.device) < lengths[:, None])[:, None, None]
        attended: Tensor = sdpa(module, query, key, value, mask, is_causal=causal, **options)[0]
        return attended

    return attend_by_document(query, key, value, layout, attend), None


def layout_mask(position_ids: Tensor) -> Tensor:
    """Returns a mask of one element that carries the layout of packed rows as an attribute."""
    mask = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=position_ids.device)
    setattr(mask, LAYOUT, make_layout(position_ids))
    return mask


def register() -> str:
    """Registers the attention with transformers, with SDPA's masks for batches that are not packed.

    Returns the name of the attention.
    """
    modeling = require("transformers.modeling_utils", "transformers")
    masking = require("transformers.masking_utils", "transformers")
    if NAME not in modeling.ALL_ATTENTION_FUNCTIONS:
        modeling.AttentionInterface.register(NAME, document_attention)
        masking.AttentionMaskInterface.register(NAME, masking.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    return NAME
