"""Attention by heads: an all-to-all gives each process all tokens of its own heads, in exchange for other heads.

This is the method of DeepSpeed-Ulysses (arXiv:2309.14509). Each process attends over whole sequences, so that a causal
mask needs no tensor and torch can use its fastest kernel. The data sent does not grow with the number of processes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional

from paceline.args.errors import UnsupportedOption

BLOCK = 1024  # smallest number of queries per attention call with a window


def sync(tensor: Tensor, size: int, group: Any) -> Tensor:
    """Sends the n-th of `size` equal pieces of the first dimension to the n-th process; differentiable."""
    pieces = [tensor.shape[0] // size] * size
    sent = functional.all_to_all_single_autograd(tensor.contiguous(), pieces, pieces, group)
    received: Tensor = functional.wait_tensor(sent)  # type: ignore[no-untyped-call]
    return received


def tokens_for_heads(tensor: Tensor, size: int, group: object) -> Tensor:
    """Converts (batch, heads, own tokens, features) to (batch, heads / size, all tokens, features)."""
    received = sync(tensor.transpose(0, 1), size, group)  # (pieces of tokens * own heads, batch, tokens, features)
    return received.view(size, -1, *received.shape[1:]).permute(2, 1, 0, 3, 4).flatten(2, 3)


def heads_for_tokens(tensor: Tensor, size: int, group: object) -> Tensor:
    """Converts (batch, own heads, all tokens, features) to (batch, heads, tokens / size, features)."""
    received = sync(tensor.movedim(2, 0), size, group)  # (pieces of heads * own tokens, batch, heads, features)
    return received.view(size, -1, *received.shape[1:]).permute(2, 0, 3, 1, 4).flatten(1, 2)


def attend_by_heads(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    size: int,
    group: Any,
    window: int | None = None,
    **options: Any,
) -> Tensor:
    """Runs torch's attention over whole sequences, given shards of them.

    Args:
        query, key, value: (batch, heads, own tokens, features); keys and values may have fewer heads, which queries
            share.
        mask: (all tokens, all tokens), or (batch or 1, 1 or heads, all tokens, all tokens), True where tokens attend;
            None: causal.
        size, group: number of processes that share a sequence, and their group.
        window: without a mask, the number of last tokens to attend to, including the token itself; None: all.
        options: options of `torch.nn.functional.scaled_dot_product_attention`.

    Returns:
        The attention output for this process's tokens, of the shape of `query`.

    Raises:
        UnsupportedOption: tensors of another shape, or an indivisible number of heads.
    """
    said = f"parallel={{'sp': {size}}}"
    if query.dim() != 4:
        raise UnsupportedOption(
            f"{said}: attention of queries of shape {tuple(query.shape)} is not supported: give it (batch, heads, "
            "tokens, features), or use cp, which keeps all heads."
        )
    heads, shared = query.shape[1], key.shape[1]
    if heads % size:
        raise UnsupportedOption(
            f"{said}: {heads} attention heads are not divisible by {size} processes: make sp a divisor, or use cp, "
            "which keeps all heads."
        )
    if shared % size:  # e.g. fewer heads than processes: each process gets copies of the heads that its queries need
        copies = math.lcm(shared, size) // shared
        key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
    if mask is not None and mask.dim() == 4 and mask.shape[1] > 1:
        mask = mask.chunk(size, 1)[torch.distributed.get_rank(group)]
    query, key, value = (tokens_for_heads(each, size, group) for each in (query, key, value))
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and not (mask is None and window is None):
        # no fast kernel supports grouped heads with a mask: the fallback would hold all scores in memory
        key, value, groups = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1), 1
    options["enable_gqa"] = groups > 1
    if mask is None and window is not None:
        seen = attend_in_blocks(query, key, value, window, **options)
    else:
        attention = nn.functional.scaled_dot_product_attention
        seen = attention(query, key, value, mask, is_causal=mask is None, **options)
    return heads_for_tokens(seen, size, group)


def attend_in_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int,
    block: int = BLOCK,
    **options: Any,
) -> Tensor:
    """Runs torch's attention of each token over the last `window` tokens, on (batch, heads, tokens, features).

    Queries are processed in blocks of `block` or `window` tokens, whichever is more, each with the keys that it needs.
    A full mask would take as much memory as the scores, which the kernels avoid storing.
    """
    length, block = query.shape[2], max(block, window)
    parts = []
    for start in range(0, length, block):
        first, end = max(start - window + 1, 0), min(start + block, length)
        keys = torch.arange(first, end, device=query.device)
        rows = keys[start - first :, None]
        mask = (keys <= rows) & (keys > rows - window)
        near, seen = (each.narrow(2, first, end - first) for each in (key, value))
        parts.append(nn.functional.scaled_dot_product_attention(query[:, :, start:end], near, seen, mask, **options))
    return torch.cat(parts, 2)
