"""Token accuracy, entropy and perplexity of the targets of an evaluation, from the passes that compute its loss."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from paceline.pytorch.distributed.context_link import context_of
from paceline.pytorch.model.loss_terms import LossTerms
from paceline.pytorch.model.token_sums import NUM_SUMS, metrics_of

logger = logging.getLogger(__name__)


class TokenMetrics:
    """Sums over the targets of one evaluation.

    Args:
        option: the option that requests them, with its value; named in errors.
        unwrap: returns a model without the strategy's wrapper.
    """

    def __init__(self, option: str, unwrap: Callable[[nn.Module], nn.Module]) -> None:
        self._terms = LossTerms(option, z_weight=0.0)
        self._option, self._unwrap = option, unwrap
        self._total: torch.Tensor | None = None

    @contextmanager
    def observed(self, model: nn.Module) -> Iterator[None]:
        """Adds the targets of the cross-entropies that are computed while entered.

        Raises:
            UnsupportedOption: a cross-entropy has targets that are no class indices, or the model is compiled as a
                whole.
        """
        inner = self._unwrap(model)
        with self._terms.observed(model, inner, context_of(inner), must_see=False):
            yield
        sums = self._terms.sums.total
        if sums is not None:
            self._total = sums if self._total is None else self._total + sums

    def result(self, share: Callable[[list[float]], list[float]], has_loss: bool) -> dict[str, float]:
        """Returns the means over the targets of all processes; nothing without targets.

        Args:
            share: returns the sums over all processes. A collective.
            has_loss: the evaluation has a loss.
        """
        totals = share([0.0] * NUM_SUMS if self._total is None else self._total.tolist())
        if not totals[0] and has_loss:
            logger.warning(
                "%s: the loss of this evaluation was computed without torch.nn.functional.cross_entropy of logits, so "
                "it has no token metrics.",
                self._option,
            )
        return metrics_of(totals) if totals[0] else {}
