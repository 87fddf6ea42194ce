"""Terms of a loss beside its cross-entropies: a z-loss that is added, and sums over the targets.

Calls of `torch.nn.functional.cross_entropy` are observed while a loss is computed. So the targets are those of the
model's own code, after its shift, and the logits those after its scale and soft-capping. Where the loss is computed in
chunks of the head's inputs, so are these terms.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from paceline.args.errors import UnsupportedOption
from paceline.pytorch.model.heads import output_embeddings
from paceline.pytorch.model.lazy_logits import LazyLogits
from paceline.pytorch.model.linear_cross_entropy import CrossEntropy
from paceline.pytorch.model.reductions import is_counted
from paceline.pytorch.model.token_sums import TokenSums


class Shards(Protocol):
    """Other processes that hold shards of the same sequences."""

    def whole_sums(self, own: Tensor) -> Tensor:
        """Returns sums over the targets of all shards, given those of a cross-entropy on this process. A collective."""


class LossTerms:
    """The terms of the cross-entropies of one loss.

    Args:
        option: the option that requests them, with its value; named in errors.
        z_weight: weight of the z-loss.

    Attributes:
        sums: over the targets seen while the last loss was computed.
    """

    def __init__(self, option: str, z_weight: float) -> None:
        self.option, self.z_weight = option, z_weight
        self.sums = TokenSums()
        self._shards: Shards | None = None
        self._num_seen = 0
        self._is_checked = False

    @contextmanager
    def observed(
        self, model: nn.Module, inner: nn.Module, shards: Shards | None, must_see: bool = True
    ) -> Iterator[None]:
        """Observes the cross-entropies that are computed while entered.

        Args:
            model: the model as it is called.
            inner: the same without the strategy's wrapper.
            shards: the processes that share its sequences; None: this process has whole ones.
            must_see: it is an error if none is computed.

        Raises:
            UnsupportedOption: none was computed, or one of another form than logits with class indices.
        """
        self._check(model, inner)
        self.sums, self._num_seen, self._shards = TokenSums(), 0, shards
        head = output_embeddings(inner)
        with ExitStack() as stack:
            # the mode of sharded attention is entered before the head, and has to end before this one
            if head is None or shards is not None:
                stack.enter_context(CrossEntropyMode(self))
            else:  # a mode costs some microseconds for each operation, so it is entered after the head
                self._enter_after(head, stack)
            yield
        if must_see and not self._num_seen:
            raise UnsupportedOption(
                f"{self.option}: the loss was computed without torch.nn.functional.cross_entropy of logits (by another "
                "function, or in a fused kernel such as Liger's): use that function, or leave the option out."
            )

    def _enter_after(self, head: nn.Module, stack: ExitStack) -> None:
        mode: list[TorchFunctionMode] = []

        def enter(*_: Any) -> None:
            if not mode:
                mode.append(stack.enter_context(CrossEntropyMode(self)))

        stack.callback(head.register_forward_hook(enter).remove)

    def _check(self, model: nn.Module, inner: nn.Module) -> None:
        if self._is_checked:
            return
        self._is_checked = True
        for each in (model, inner):
            if each._compiled_call_impl is not None or type(each).__name__ == "OptimizedModule":
                raise UnsupportedOption(
                    f"{self.option} is not supported with a model that is compiled as a whole, whose loss Python does "
                    "not see: set compile_regions=True, or leave one of them out."
                )

    def cross_entropy(
        self,
        logits: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """Computes a cross-entropy with its terms; the arguments are torch's.

        Raises:
            UnsupportedOption: the targets are no class indices, or the arguments are of the form before torch 0.4.
        """
        if size_average is not None or reduce is not None or target.is_floating_point():
            raise UnsupportedOption(
                f"{self.option}: a cross-entropy has targets that are probabilities, or a reduction given by "
                "size_average or reduce: give it class indices and reduction=, or leave the option out."
            )
        self._num_seen += 1
        loss, sums = CrossEntropy(ignore_index, reduction, label_smoothing, weight, self.z_weight), TokenSums()
        if isinstance(logits, LazyLogits):
            family = logits.recipe.family
            family.z_weight, family.sums, chunked_before = self.z_weight, sums, family.num_chunked
            try:
                found = replace(loss, z_weight=0.0)(logits, target)
            finally:
                family.z_weight, family.sums = 0.0, None
            if family.num_chunked > chunked_before:
                self._add(sums)
                return found
        else:
            found = replace(loss, z_weight=0.0)(logits, target)
        rows = logits.movedim(1, -1).reshape(-1, logits.shape[1]) if logits.dim() > 1 else logits.unsqueeze(0)
        sums.add_logits(rows, target.reshape(-1), ignore_index)
        self._add(sums)
        return loss.with_z_loss(found, rows, target) if self.z_weight else found

    def _add(self, sums: TokenSums) -> None:
        """Adds the targets of a cross-entropy."""
        if sums.total is not None and is_counted():
            self.sums.add_total(sums.total if self._shards is None else self._shards.whole_sums(sums.total))


class CrossEntropyMode(TorchFunctionMode):
    """Gives the cross-entropies that are computed while entered to `LossTerms`."""

    def __init__(self, terms: LossTerms) -> None:
        super().__init__()
        self._terms = terms

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func is not functional.cross_entropy:
            return func(*args, **named)
        if "input" in named:
            args = (named.pop("input"), *args)
        return self._terms.cross_entropy(*args, **named)
