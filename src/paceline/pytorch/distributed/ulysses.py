"""Attention by heads: an all-to-all trades tokens of other heads for all tokens of a process's own heads.

Of DeepSpeed-Ulysses (arXiv:2309.14509). Each process then attends with whole sequences, so that a causal mask needs no
tensor and torch can take its fastest kernel; the data sent does not grow with the number of processes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional

from paceline.args.errors import UnsupportedOption

BLOCK = 1024  # queries that justify a call of their own


def sync(tensor: Tensor, size: int, group: Any) -> Tensor:
    """Sends the n-th of `size` equal pieces of the first dimension to the n-th process; differentiable."""
    pieces = [tensor.shape[0] // size] * size
    sent = functional.all_to_all_single_autograd(tensor.contiguous(), pieces, pieces, group)
    received: Tensor = functional.wait_tensor(sent)  # type: ignore[no-untyped-call]
    return received


def tokens_for_heads(tensor: Tensor, size: int, group: object) -> Tensor:
    """(batch, heads, own tokens, features) -> (batch, heads / size, all tokens, features)."""
    received = sync(tensor.transpose(0, 1), size, group)  # (pieces of tokens * own heads, batch, tokens, features)
    return received.view(size, -1, *received.shape[1:]).permute(2, 1, 0, 3, 4).flatten(2, 3)


def heads_for_tokens(tensor: Tensor, size: int, group: object) -> Tensor:
    """(batch, own heads, all tokens, features) -> (batch, heads, tokens / size, features)."""
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
    """Runs torch's attention over whole sequences, given shards: (batch, heads, own tokens, features), the same
    returned.

    Args:
        query, key, value: of this process's tokens; keys and values may have fewer heads, which queries share.
        mask: (all tokens, all tokens), or (batch or 1, 1 or heads, all tokens, all tokens), True where they attend;
            None: causal.
        size, group: the processes that have the other shards.
        window: without a mask: tokens attend to this many only, themselves among them; None: to all before them.
        options: of `torch.nn.functional.scaled_dot_product_attention`.

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
    if shared % size:  # fewer than processes, say: each gets a copy of those that its queries need
        copies = math.lcm(shared, size) // shared
        key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
    if mask is not None and mask.dim() == 4 and mask.shape[1] > 1:
        mask = mask.chunk(size, 1)[torch.distributed.get_rank(group)]
    query, key, value = (tokens_for_heads(each, size, group) for each in (query, key, value))
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and not (mask is None and window is None):
        # no kernel takes groups and a mask: without this, all scores would be in memory
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
    """Runs torch's attention of each token over the last `window` ones, of (batch, heads, tokens, features).

    Queries go in blocks of `block` or `window` tokens, whichever is more, each with the keys that it needs: a mask of
    all tokens by all would be as large as the scores that the kernels do not hold.
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
