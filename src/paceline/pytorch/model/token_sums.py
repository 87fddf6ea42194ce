"""Sums over the targets of cross-entropies, from which token accuracy, entropy and perplexity are computed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

NUM_SUMS = 5
CHUNK_BYTES = 2**25  # of a chunk of logits in float32, of which a copy is made
LARGEST_EXPONENT = 700.0  # for which exp() is finite, rounded down


def metrics_of(totals: Sequence[float]) -> dict[str, float]:
    """Returns the metrics by their names in log rows, of `TokenSums.total` with at least one target."""
    number = totals[0]
    _, accuracy, entropy, loss, _ = (total / number for total in totals)
    perplexity = math.inf if loss > LARGEST_EXPONENT else math.exp(loss)  # of NaN: NaN
    return {"mean_token_accuracy": accuracy, "entropy": entropy, "perplexity": perplexity}


class TokenSums:
    """Sums over targets that are not ignored, kept on the device.

    Attributes:
        total: `(5,)`: the number of targets, those with the largest logit, the sums of the entropies and of the
            negative log-likelihoods in nats, and of the squared logarithms of the softmax's normalizer. None: no target
            was added.
    """

    def __init__(self) -> None:
        self.total: Tensor | None = None

    def add(self, kept: Tensor, correct: Tensor, entropies: Tensor, losses: Tensor, normalizers: Tensor) -> None:
        """Adds rows, `(N,)` each.

        Args:
            kept: flags of the targets that count.
            correct: flags of the targets with the largest logit.
            entropies: the entropies of the predicted distributions.
            losses: negative log-likelihoods.
            normalizers: logarithms of the softmax's normalizers.
        """
        dtype = torch.float32 if kept.device.type == "mps" else torch.float64  # MPS has no float64
        columns = [torch.ones_like(losses), correct.to(losses.dtype), entropies, losses, normalizers.square()]
        self.add_total(torch.stack(columns).masked_fill(~kept, 0).sum(1, dtype=dtype))

    def add_total(self, total: Tensor) -> None:
        """Adds sums of the form of `total`."""
        self.total = total if self.total is None else self.total + total

    def add_logits(self, logits: Tensor, targets: Tensor, ignore_index: int) -> None:
        """Adds the rows of logits, `(N, num_classes)`, with targets `(N,)`."""
        size = max(1, CHUNK_BYTES // (4 * logits.shape[1]))
        with torch.no_grad(), torch.autocast(logits.device.type, enabled=False):
            for start in range(0, len(targets), size):
                part, target = logits[start : start + size].detach(), targets[start : start + size]
                kept = target != ignore_index
                part = part.to(torch.float64 if part.dtype == torch.float64 else torch.float32)
                maximum, best = part.max(1)
                picked = part.gather(1, torch.where(kept, target, 0).unsqueeze(1)).squeeze(1)
                powers = (part - maximum.unsqueeze(1)).exp_()
                sums = powers.sum(1)
                self.add_softmax(kept, best == target, picked - maximum, maximum, sums, powers)

    def add_softmax(
        self, kept: Tensor, correct: Tensor, picked: Tensor, maximum: Tensor, sums: Tensor, powers: Tensor
    ) -> None:
        """Adds rows whose softmax is computed already.

        Args:
            kept: flags of the targets that count, `(N,)`.
            correct: flags of the targets with the largest logit, `(N,)`.
            picked: the targets' logits minus the row's largest, `(N,)`.
            maximum: the largest logits, `(N,)`.
            sums: sums of the powers over the classes, `(N,)`.
            powers: exponentials of the logits minus the row's largest, `(N, num_classes)`.
        """
        logs = sums.log()
        entropies = logs + torch.special.entr(powers).sum(1) / sums  # entr(p) = -p log p, 0 where p is 0
        self.add(kept, correct, entropies, logs - picked, logs + maximum)
