"""Cross-entropy of a linear layer's outputs in chunks of rows, without storing the logits of all rows.

The gradients are computed in the forward pass, while the logits of each chunk exist. This takes as many matrix products
as without chunks, and stores one gradient of the shape of the weights between the passes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from paceline.pytorch.model.linear_head import Adapter, Cast, Head, Scale, Shift, Squash, Step, split
from paceline.pytorch.model.token_sums import TokenSums
from paceline.pytorch.model.vocabulary_shard import Shard

# size of a chunk's logits in float32; a few such tensors exist at a time
CHUNK_BYTES = 2**25
CHUNK_BYTES_ON_DEVICE = 2**28
MIN_CHUNK_ROWS = 16  # limits the number of chunks, each of which reads and writes the gradient of the weights
HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, eq=False)
class CrossEntropy:
    """The arguments of `torch.nn.functional.cross_entropy` beside its input and target, and the weight of a z-loss.

    The z-loss of a row is the squared logarithm of the softmax's normalizer. It counts as the row's cross-entropy does:
    not for an ignored target, and times the weight of the target's class.
    """

    ignore_index: int = -100
    reduction: str = "mean"
    label_smoothing: float = 0.0
    weight: Tensor | None = None
    z_weight: float = 0.0

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Returns the loss computed by torch's own function."""
        found = functional.cross_entropy(
            logits,
            targets,
            weight=self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )
        return self.with_z_loss(found, logits, targets) if self.z_weight else found

    def with_z_loss(self, loss: Tensor, logits: Tensor, targets: Tensor) -> Tensor:
        """Returns a cross-entropy plus the z-loss of its logits.

        Args:
            loss: the cross-entropy, reduced.
            logits: `(N, num_classes)`.
            targets: N class indices, of the shape of a loss without a reduction.
        """
        is_half = logits.dtype in HALF
        with torch.autocast(logits.device.type, enabled=False):
            rows = torch.logsumexp(logits.float() if is_half else logits, -1).square().view(targets.shape)
        rows = self.z_weight * self.row_weights(targets).to(rows.dtype) * rows
        if self.reduction != "none":
            rows = rows.sum()
        if self.reduction == "mean":
            rows = rows / self.divisor(targets)
        return loss + rows.to(loss.dtype)

    def row_weights(self, targets: Tensor) -> Tensor:
        """Returns the weight of each target: that of its class, or 1; 0 if it is ignored."""
        kept = targets != self.ignore_index
        return kept if self.weight is None else self.weight[torch.where(kept, targets, 0)] * kept

    def divisor(self, targets: Tensor) -> Tensor:
        """Returns the divisor of a mean, 0-dim: the number of targets that count, or the sum of their weights."""
        return self.row_weights(targets).sum()


class Kernel(Protocol):
    """Computes row losses and gradients in the place of this module's chunks."""

    def check(self, rows: Tensor, head: Head, loss: CrossEntropy) -> None:
        """Checks that the kernel computes a loss as defined.

        Raises:
            UnsupportedOption: it does not.
        """

    def __call__(
        self,
        rows: Tensor,
        targets: Tensor,
        head: Head,
        loss: CrossEntropy,
        factors: Tensor | None,
        needs: Sequence[bool],
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Returns the loss of each row, `(N,)`, and the gradients of rows, weight and bias.

        Args:
            rows: `(N, num_features)`.
            targets: `(N,)`.
            head: the linear layer, without adapters, and all of its classes.
            loss: its reduction is left to the caller.
            factors: `(N,)`; the gradients are those of the sum of `factors * losses`. All are 1 unless the reduction is
                `none`. None: no gradients.
            needs: flags of rows, weight and bias: a gradient is needed.
        """


def linear_cross_entropy(
    rows: Tensor,
    targets: Tensor,
    head: Head,
    loss: CrossEntropy,
    chunk_rows: int | None = None,
    sums: TokenSums | None = None,
    kernel: Kernel | None = None,
) -> Tensor:
    """Returns `loss(head.logits(rows), targets)`, computed in chunks.

    Args:
        rows: `(N, num_features)`, the inputs of the linear layer.
        targets: `(N,)`, class indices.
        head: the linear layer, and the operations after it.
        loss: its reduction may be `mean`, `sum` or `none`.
        chunk_rows: rows per chunk; None: determined by the number of classes.
        sums: the targets are added to these; None: to none.
        kernel: used in the place of chunks, if there are no sums, which it does not compute. It has been checked for
            this loss.

    Returns:
        The loss, 0-dim, or `(N,)` without a reduction; float32 for 16-bit logits.
    """
    size = chunk_rows or default_chunk_rows(head.weight.shape[0], rows.device)
    scalings = (1.0, *(adapter.scaling for adapter in head.adapters))
    job = _Job(head.autocast, head.steps, loss, size, scalings, sums, head.shard, kernel if sums is None else None)
    found: Tensor = _Chunked.apply(rows, targets, job, *head.tensors)  # type: ignore[no-untyped-call]
    return found


def default_chunk_rows(num_classes: int, device: torch.device) -> int:
    """Returns the default number of rows per chunk."""
    limit = CHUNK_BYTES if device.type == "cpu" else CHUNK_BYTES_ON_DEVICE
    return max(MIN_CHUNK_ROWS, limit // (4 * num_classes))


@dataclass
class _Gradients:
    """Gradients summed over chunks, in float32 or float64; each is None if it is not needed.

    Attributes:
        rows: `(N, num_features)`, including the inputs of the adapters.
        bias: `(num_classes,)`.
        weights: the gradients of the layer and of the adapters.
    """

    rows: Tensor | None
    bias: Tensor | None
    weights: list[Tensor | None]

    def scaled(self, factor: Tensor | None, dtypes: Sequence[torch.dtype]) -> list[Tensor | None]:
        """Returns the gradients of rows, weight, bias and adapters times a factor, in these dtypes.

        Overwrites the sums. The factor includes a GradScaler's scale, so it is applied before the cast to float16,
        which would otherwise lose small gradients.
        """
        # a factor on a device is not read, which would synchronize
        is_one = factor is None or (factor.device.type == "cpu" and float(factor) == 1)
        found: list[Tensor | None] = []
        totals = (self.rows, self.weights[0], self.bias, *self.weights[1:])
        for total, dtype in zip(totals, dtypes, strict=True):
            if total is not None and factor is not None and not is_one:
                total.mul_(factor)
            found.append(None if total is None else total.to(dtype))
        return found


@dataclass(eq=False)
class _Job:
    """The arguments of one loss, without the head's parameters, which autograd saves.

    Attributes:
        scalings: factors of the products of the layer, which is 1, and of the adapters.
        sums: the targets are added to these; None: to none.
        shard: the classes of this process; None: all.
        kernel: used in the place of chunks; None: none.
    """

    autocast: torch.dtype | None
    steps: tuple[Step, ...]
    loss: CrossEntropy
    chunk_rows: int
    scalings: tuple[float, ...]
    sums: TokenSums | None = None
    shard: Shard | None = None
    kernel: Kernel | None = None

    def run(
        self,
        rows: Tensor,
        targets: Tensor,
        tensors: Sequence[Tensor | None],
        factors: Tensor | None,
        needs: Sequence[bool],
    ) -> tuple[Tensor, _Gradients]:
        """Returns the loss of each row, `(N,)`, and the gradients of the sum of `factors * losses`.

        Args:
            rows: `(N, num_features)`.
            targets: `(N,)`.
            tensors: the tensors of the head, in the order of `Head.tensors`.
            factors: `(N,)`; None: no gradients.
            needs: flags of rows and of each tensor: a gradient is needed.
        """
        weight, bias, *rest = tensors
        if self.kernel is not None and weight is not None:
            head = Head(weight, bias, self.autocast, self.steps)
            losses, (of_rows, of_weight, of_bias) = self.kernel(rows, targets, head, self.loss, factors, needs)
            return losses, _Gradients(of_rows, of_bias, [of_weight])
        weights = [each for each in (weight, *rest) if each is not None]
        dtype = self.autocast or weights[0].dtype
        work = torch.float64 if dtype == torch.float64 else torch.float32
        turned = [each.to(self.autocast or each.dtype).t() for each in weights]
        bias = None if bias is None else bias.to(dtype)
        gradients = self._empty(rows, weights, bias, work, needs if factors is not None else (False,) * len(needs))
        losses = torch.zeros(len(targets), dtype=work, device=rows.device)
        for places in self._chunks(targets):
            columns = split(rows[places], weights)
            parts = [part.to(each.dtype) for part, each in zip(columns, turned, strict=True)]
            target, factor = targets[places], None if factors is None else factors[places]
            logits = self._outputs(parts, turned, bias)
            losses[places], slopes = self._row_losses(logits.to(work), target, factor)
            if slopes is not None:
                self._add(gradients, places, parts, turned, slopes.to(dtype))
        return losses, gradients

    def differentiable_gradients(
        self, saved: Sequence[Tensor | None], slope: Tensor, needs: Sequence[bool]
    ) -> list[Tensor | None]:
        """Returns the gradients as nodes of the graph, for a second derivative; the logits are computed whole.

        Args:
            saved: the rows, the targets and the tensors of the head.
            slope: gradient of the loss.
            needs: flags of the rows and of each tensor: a gradient is needed.

        Raises:
            RuntimeError: the classes are split over processes.
        """
        if self.shard is not None:
            raise RuntimeError(
                "A second derivative of a loss without logits is not supported with tensor parallelism: set "
                "linear_cross_entropy=False."
            )
        rows, targets, weight, bias, *rest = saved
        assert weight is not None
        adapters = tuple(
            Adapter(each, scaling) for each, scaling in zip(rest, self.scalings[1:], strict=True) if each is not None
        )
        head = Head(weight, bias, self.autocast, self.steps, adapters)

        def loss_of(rows: Tensor, head: Head) -> Tensor:
            with torch.autocast(rows.device.type, enabled=False):
                logits = head.logits(rows)
                return self.loss(logits.float() if logits.dtype in HALF else logits, targets)  # type: ignore[arg-type]

        return head.gradients(rows, loss_of, slope, needs)  # type: ignore[arg-type]

    def _outputs(self, parts: Sequence[Tensor], turned: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        """Returns the outputs of the head for the rows of a chunk, in the dtype of the layer."""
        logits = torch.mm(parts[0], turned[0]) if bias is None else torch.addmm(bias, parts[0], turned[0])
        dtype = logits.dtype
        for part, weight, scaling in zip(parts[1:], turned[1:], self.scalings[1:], strict=True):
            if logits.dtype == weight.dtype:
                logits.addmm_(part, weight, alpha=scaling)
            else:  # adapters of a higher precision are summed in it, and rounded once
                logits = logits.add(torch.mm(part, weight), alpha=scaling)
        return logits.to(dtype)

    def _add(
        self,
        gradients: _Gradients,
        places: Any,
        parts: Sequence[Tensor],
        turned: Sequence[Tensor],
        slopes: Tensor,
    ) -> None:
        """Adds the gradients of a chunk, given those of the head's outputs."""
        start = 0
        for index, (part, weight, scaling) in enumerate(zip(parts, turned, self.scalings, strict=True)):
            slope = slopes.to(weight.dtype)
            if gradients.rows is not None:
                product = torch.mm(slope, weight.t()).to(gradients.rows.dtype)
                gradients.rows[places, start : start + len(weight)] = product if scaling == 1 else product.mul_(scaling)
            total = gradients.weights[index]
            if total is not None:
                add_product(total, slope.t(), part, scaling)
            start += len(weight)
        if gradients.bias is not None:
            gradients.bias.add_(slopes.sum(0, dtype=gradients.bias.dtype))

    def _empty(
        self, rows: Tensor, weights: Sequence[Tensor], bias: Tensor | None, work: torch.dtype, needs: Sequence[bool]
    ) -> _Gradients:
        zeros = partial(torch.zeros, dtype=work, device=rows.device)
        needs_of_weights = (needs[1], *needs[3:])
        return _Gradients(
            zeros(rows.shape) if needs[0] else None,
            zeros(weights[0].shape[:1]) if needs[2] and bias is not None else None,
            [zeros(each.shape) if need else None for each, need in zip(weights, needs_of_weights, strict=True)],
        )

    def _chunks(self, targets: Tensor) -> Iterator[Any]:
        """Yields the row indices of each chunk. On the CPU, rows with an ignored target are skipped."""
        if targets.device.type == "cpu":
            kept = targets != self.loss.ignore_index
            if not bool(kept.all()):
                places = kept.nonzero().squeeze(1)
                for start in range(0, len(places), self.chunk_rows):
                    yield places[start : start + self.chunk_rows]
                return
        for start in range(0, len(targets), self.chunk_rows):
            yield slice(start, start + self.chunk_rows)

    def _row_losses(self, logits: Tensor, targets: Tensor, factors: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Returns the losses of a chunk, and the gradient of the sum of `factors * losses` with respect to the linear
        layer's outputs. Overwrites the logits.
        """
        is_squashed = any(isinstance(step, Squash) for step in self.steps)
        if self.shard is None and (self.loss.weight is not None or is_squashed):
            return self._row_losses_by_autograd(logits, targets, factors)
        derivative = self._apply_steps(logits)
        scale = derivative if isinstance(derivative, float) else 1.0
        if self.shard is None:
            return self._row_losses_in_place(logits, targets, factors, scale)
        losses, slopes = self._row_losses_of_shard(self.shard, logits, targets, factors, scale)
        if slopes is not None and isinstance(derivative, Tensor):
            slopes.mul_(derivative)
        return losses, slopes

    def _apply_steps(self, logits: Tensor) -> float | Tensor:
        """Applies the operations between the layer and the loss, in place.

        Returns:
            Their derivative: one number if they are linear, else a tensor of the logits' shape.
        """
        derivative: float | Tensor = 1.0
        for step in self.steps:
            if isinstance(step, Scale):
                logits.mul_(step.factor)
                derivative = derivative * step.factor
            elif isinstance(step, Shift):
                logits.add_(step.offset if self.shard is None else self.shard.own(step.offset, logits.shape[1]))
            elif isinstance(step, Squash):
                logits.tanh_()
                derivative = (1 - logits.square()).mul_(derivative)
        return derivative

    def _row_losses_in_place(
        self, logits: Tensor, targets: Tensor, factors: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor | None]:
        kept = targets != self.loss.ignore_index
        index = torch.where(kept, targets, 0).unsqueeze(1)
        smoothing = self.loss.label_smoothing
        maximum, best = (logits.amax(1, keepdim=True), None) if self.sums is None else logits.max(1, keepdim=True)
        picked = logits.gather(1, index) - maximum
        mean = logits.mean(1, keepdim=True) - maximum if smoothing else picked
        sums = logits.sub_(maximum).exp_().sum(1, keepdim=True)
        losses = sums.log() - torch.lerp(picked, mean, smoothing) if smoothing else sums.log() - picked
        if self.sums is not None and best is not None:
            correct = (best == index).squeeze(1)
            self.sums.add_softmax(kept, correct, picked.squeeze(1), maximum.squeeze(1), sums.squeeze(1), logits)
        normalizers = sums.log() + maximum if self.loss.z_weight else sums
        if self.loss.z_weight:
            losses = losses + self.loss.z_weight * normalizers.square()
        losses = losses.squeeze(1).masked_fill_(~kept, 0)
        if factors is None:
            return losses, None
        factor = (factors.to(logits.dtype) * scale).masked_fill(~kept, 0).unsqueeze(1)
        if self.loss.z_weight:
            slopes = logits.mul_(factor * (1 + 2 * self.loss.z_weight * normalizers) / sums)
        else:
            slopes = logits.mul_(factor / sums)
        if smoothing:
            slopes.sub_(factor * (smoothing / logits.shape[1]))
        return losses, slopes.scatter_add_(1, index, factor * (smoothing - 1))

    def _row_losses_of_shard(
        self, shard: Shard, logits: Tensor, targets: Tensor, factors: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the losses of a chunk, and the gradient with respect to the logits of this process's classes.

        A collective.
        """
        check_classes(targets, shard.num_classes, self.loss.ignore_index)
        kept = (targets != self.loss.ignore_index).unsqueeze(1)
        weights = _ShardWeights.of(self.loss, shard, targets, logits)
        index = targets.unsqueeze(1) - shard.start
        is_own = kept & (index >= 0) & (index < logits.shape[1])
        index = torch.where(is_own, index, 0)
        own_maximum, best = logits.max(1, keepdim=True)
        maximum = shard.largest(own_maximum.clone())
        shifted = logits.sub_(maximum)
        picked = shifted.gather(1, index).masked_fill_(~is_own, 0)
        total = weights.sum_of(shifted) if weights.smoothing else picked
        powers = shifted.exp_()
        picked, total, sums = shard.summed(torch.stack([picked, total, powers.sum(1, keepdim=True)]))
        if self.sums is not None:
            first = shard.first(torch.where(own_maximum == maximum, best + shard.start, shard.num_classes))
            entropies = shard.summed(torch.special.entr(powers).sum(1, keepdim=True)) / sums + sums.log()
            columns = (kept, first == targets.unsqueeze(1), entropies, sums.log() - picked, sums.log() + maximum)
            self.sums.add(*(column.squeeze(1) for column in columns))
        normalizers = sums.log() + maximum
        losses = weights.total * sums.log() - weights.target * picked
        if weights.smoothing:
            losses = losses - weights.smoothing * total
        losses = losses + self.loss.z_weight * weights.row * normalizers.square()
        losses = losses.masked_fill_(~kept, 0).squeeze(1)
        if factors is None:
            return losses, None
        factor = (factors.unsqueeze(1).to(logits.dtype) * scale).masked_fill(~kept, 0)
        slopes = powers.mul_(factor * (weights.total + 2 * self.loss.z_weight * weights.row * normalizers) / sums)
        if weights.smoothing:
            slopes.sub_(factor * weights.smoothing * weights.classes)
        return losses, slopes.scatter_add_(1, index, factor * -weights.target * is_own)

    def _row_losses_by_autograd(
        self, logits: Tensor, targets: Tensor, factors: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        dtype = logits.dtype
        weight = self.loss.weight
        with torch.autocast(logits.device.type, enabled=False), torch.set_grad_enabled(factors is not None):
            found = logits.requires_grad_(factors is not None)
            for step in self.steps:
                if not isinstance(step, Cast):
                    found = step(found)
            loss = replace(self.loss, weight=None if weight is None else weight.to(dtype), reduction="none")
            losses = loss(found, targets)
            if self.sums is not None:
                self.sums.add_logits(found, targets, loss.ignore_index)
            if factors is None:
                return losses, None
            (slopes,) = torch.autograd.grad(losses, logits, factors.to(dtype))
        return losses.detach(), slopes


@dataclass(frozen=True, eq=False)
class _ShardWeights:
    """Weights of the negative log-probabilities whose sum is the loss of a row, with label smoothing and class weights.

    Attributes:
        row: weight of the target's class, `(N, 1)`, or 1.0 without class weights.
        target: weight of the target's log-probability without its share of the smoothing; as `row`.
        classes: weights of this process's classes, `(num_local_classes,)`, or 1.0.
        smoothing: factor of `classes`; 0 without label smoothing.
        total: sum of all weights of a row; as `row`.
    """

    row: float | Tensor
    target: float | Tensor
    classes: float | Tensor
    smoothing: float
    total: float | Tensor

    @classmethod
    def of(cls, loss: CrossEntropy, shard: Shard, targets: Tensor, logits: Tensor) -> _ShardWeights:
        """Returns the weights for N targets and the logits of this process's classes."""
        row: float | Tensor = 1.0
        classes: float | Tensor = 1.0
        mean: float | Tensor = 1.0
        if loss.weight is not None:
            every = loss.weight.to(logits.dtype)
            row = loss.row_weights(targets).to(logits.dtype).unsqueeze(1)
            classes, mean = shard.own(every, logits.shape[1]), every.mean()
        target = (1 - loss.label_smoothing) * row
        total = target + loss.label_smoothing * mean
        return cls(row, target, classes, loss.label_smoothing / shard.num_classes, total)

    def sum_of(self, logits: Tensor) -> Tensor:
        """Returns the sum of each row's logits times the weights of their classes, `(N, 1)`."""
        weighted = logits * self.classes if isinstance(self.classes, Tensor) else logits
        return weighted.sum(1, keepdim=True)


def check_classes(targets: Tensor, num_classes: int, ignore_index: int) -> None:
    """Raises the error of torch's cross-entropy for a target that is no class: no shard would find it.

    Raises:
        IndexError: there is one.
        RuntimeError: on a GPU, at its next synchronization.
    """
    is_valid = (targets == ignore_index) | ((targets >= 0) & (targets < num_classes))
    if targets.device.type == "cuda":
        torch._assert_async(is_valid.all(), "a target is out of bounds")
    elif not bool(is_valid.all()):
        raise IndexError(f"Target {int(targets[~is_valid][0])} is out of bounds.")


def add_product(total: Tensor, one: Tensor, other: Tensor, factor: float) -> None:
    """Adds a matrix product times a factor to a sum, which may have another precision."""
    if total.dtype == one.dtype:
        total.addmm_(one, other, alpha=factor)
    else:
        total.add_(torch.mm(one, other), alpha=factor)


class _Chunked(torch.autograd.Function):
    """The loss as a node of the graph."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, targets: Tensor, job: _Job, *tensors: Tensor | None) -> Tensor:
        ctx.job, ctx.gradients = job, None
        ctx.dtypes = [rows.dtype if each is None else each.dtype for each in (rows, *tensors)]
        ctx.save_for_backward(rows, targets, *tensors)
        needs = ctx.needs_input_grad[0], *ctx.needs_input_grad[3:]
        reduction = job.loss.reduction
        ctx.divisor = job.loss.divisor(targets) if reduction == "mean" else None
        factors = _ones(targets) if reduction != "none" and any(needs) else None
        with torch.autocast(rows.device.type, enabled=False):
            losses, gradients = job.run(rows, targets, tensors, factors, needs)
        if reduction == "none":
            return losses
        ctx.gradients = gradients if factors is not None else None
        total = losses.sum()
        return total if ctx.divisor is None else total / ctx.divisor

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        if torch.is_grad_enabled():  # create_graph=True
            needs = ctx.needs_input_grad[0], *ctx.needs_input_grad[3:]
            of_rows, *rest = ctx.job.differentiable_gradients(ctx.saved_tensors, slope, needs)
            return of_rows, None, None, *rest
        gradients, ctx.gradients = ctx.gradients, None
        is_reduced = ctx.job.loss.reduction != "none"
        if gradients is None:  # no reduction, or a second backward pass through a retained graph
            rows, targets, *tensors = ctx.saved_tensors
            factors = _ones(targets) if is_reduced else slope
            job = replace(ctx.job, sums=None)  # the forward pass has added the targets
            needs = ctx.needs_input_grad[0], *ctx.needs_input_grad[3:]
            with torch.autocast(rows.device.type, enabled=False):
                _, gradients = job.run(rows, targets, tensors, factors, needs)
        if ctx.divisor is not None:
            slope = slope / ctx.divisor.masked_fill(ctx.divisor == 0, 1)  # zero gradients if no target counts, as torch
        of_rows, *rest = gradients.scaled(slope if is_reduced else None, ctx.dtypes)
        return of_rows, None, None, *rest


def _ones(targets: Tensor) -> Tensor:
    """Returns unit factors of the row losses, used until the gradient of the reduced loss is known."""
    return torch.ones(targets.shape, dtype=torch.float32, device=targets.device)
