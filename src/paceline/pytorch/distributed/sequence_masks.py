"""Attention masks of sequence shards: boolean, True where tokens attend."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from paceline.args.errors import UnsupportedOption


def is_plain(mask: object, positions: Tensor) -> bool:
    """True if each token attends to all tokens before it: there is no padding, and one text in each row."""
    if isinstance(mask, Tensor):
        return mask.dim() == 2 and bool(mask.all())
    return bool((positions.diff(dim=1) == 1).all())


def mask_of(given: object, positions: Tensor, total: int, rows: tuple[int, int], said: str) -> Tensor:
    """Returns the causal attention mask of some tokens over all: (batch or 1, 1, tokens, all).

    Args:
        given: the attention_mask of the whole sequences, (batch, length). If None, a new text begins where `positions`
            restart.
        positions: (batch, length).
        total: tokens of the whole sequences, with the padding that makes them divisible.
        rows: index of the first token, and the number of tokens.
        said: the option that sharded the sequences, for the error.

    Raises:
        UnsupportedOption: the mask has another number of dimensions.
    """
    keys = torch.arange(total, device=positions.device)
    allowed = (keys[None, :] <= keys.narrow(0, *rows)[:, None])[None, None]
    if isinstance(given, Tensor):
        if given.dim() != 2:
            raise UnsupportedOption(
                f"{said} with an attention_mask of {given.dim()} dimensions is not supported: give one number for each "
                "token."
            )
        present = nn.functional.pad(given.bool(), (0, total - given.shape[1]), value=False)
        return allowed & present[:, None, None, :]
    if positions.shape[1] == 1:
        return allowed
    texts = (positions.diff(dim=1, prepend=positions[:, :1] - 1) != 1).cumsum(1)
    texts = nn.functional.pad(texts, (0, total - texts.shape[1]), value=-1)
    return allowed & (texts.narrow(1, *rows)[:, None, :, None] == texts[:, None, None, :])


def with_itself(mask: Tensor, rows: tuple[int, int]) -> Tensor:
    """Returns the mask, changed so that a token with nothing to attend to attends to itself."""
    keys = torch.arange(mask.shape[-1], device=mask.device)
    is_own = keys[None, :] == keys.narrow(0, *rows)[:, None]
    return mask | (is_own & ~mask.any(-1, keepdim=True))


def within(mask: Tensor, rows: tuple[int, int], window: int) -> Tensor:
    """Returns the mask, restricted to the last `window` tokens, including the token itself."""
    keys = torch.arange(mask.shape[-1], device=mask.device)
    return mask & (keys[None, :] > keys.narrow(0, *rows)[:, None] - window)


def narrowest_window(config: object) -> float:
    """Returns the smallest attention span of a transformers model's layers in tokens, from its configuration."""
    window, layers = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if window is None or not ("sliding_attention" in layers if layers else getattr(config, "use_sliding_window", True)):
        return math.inf
    return float(window)
