"""Ranks the samples of one replayed optimizer step by their own loss and gradient norm, to find the one to blame."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.args.training import TrainingArguments
from paceline.core.events import TrainerCallback
from paceline.core.state import TrainerControl, TrainerState
from paceline.pytorch.data.batches import split_batch
from paceline.pytorch.data.dispatch import source_of
from paceline.pytorch.data.identity import has_ids
from paceline.pytorch.evaluation.predictor import in_evaluation_mode
from paceline.pytorch.model.outputs import check_loss


@dataclass(frozen=True)
class BlamedSample:
    """One sample of an optimizer step.

    Attributes:
        id: index in the training set, or position in the epoch, as in `Replayed.sample_ids`.
        loss: the loss of the sample alone, with dropout off, at the weights that the step started from; NaN if all of
            its targets are ignored.
        grad_norm: norm of the gradient of this loss over all trained parameters, before clipping; 0 without targets.
        score: greatest distance of loss or norm from their medians in the step, in mean absolute deviations from them;
            infinite if one is not finite.
    """

    id: int
    loss: float
    grad_norm: float
    score: float


class StepSnapshot(TrainerCallback):
    """Keeps the weights before an optimizer step and its micro-batches.

    Args:
        step: `global_step` after the optimizer step.

    Attributes:
        weights: parameters and buffers by name, in host memory; empty before the step.
        batches: the micro-batches, as the loader gave them.
    """

    wants = frozenset({"inputs"})

    def __init__(self, step: int) -> None:
        self.step = step
        self.weights: dict[str, Tensor] = {}
        self.batches: list[Any] = []

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        if model is not None and state.global_step == self.step - 1:
            self.weights = {name: tensor.detach().to("cpu", copy=True) for name, tensor in _tensors(model)}

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        inputs: Sequence[Any] = (),
        **kwargs: Any,
    ) -> None:
        if state.global_step == self.step:
            self.batches = list(inputs)

    def restore(self, model: nn.Module) -> None:
        """Puts the weights from before the step back into a model."""
        with torch.no_grad():
            for name, tensor in _tensors(model):
                if name in self.weights and self.weights[name].shape == tensor.shape:
                    tensor.copy_(self.weights[name])


def single_samples(loader: object, ids: Sequence[int], batches: Sequence[Any]) -> Iterator[Any]:
    """Yields each sample of a step as a batch of one.

    Samples with an index are read again and collated alone, whatever order the collator gives a batch; those of a
    stream are rows of the step's micro-batches, in their order.

    Raises:
        ValueError: the micro-batches of a stream have no row per sample, as packed ones.
    """
    if has_ids(loader):
        source = source_of(loader)
        for index in ids:
            yield source.collate_fn([source.dataset[index]])
        return
    rows = [row for batch in batches for row in split_batch(batch, 1)]
    if len(rows) != len(ids):
        raise ValueError(
            f"blame: the micro-batches of this step hold {len(rows)} rows of {len(ids)} samples, so that no row is a "
            "sample. Packed rows of a stream cannot be separated: set packing=False, or give a dataset with an index."
        )
    yield from rows


def blame(
    ids: Sequence[int],
    samples: Iterable[Any],
    model: nn.Module,
    *,
    compute_loss: Callable[[nn.Module, Any], Any],
    prepare: Callable[[Any], Any],
    precision: Callable[[], AbstractContextManager[Any]],
    has_targets: Callable[[Any], bool],
) -> list[BlamedSample]:
    """Returns the samples, the most conspicuous first.

    Args:
        ids: their ids.
        samples: each as a batch of one, in the order of the ids.
        model: the model, with the weights from before the step.
        compute_loss: the Trainer's.
        prepare: moves a batch to the device.
        precision: returns the context of the forward pass.
        has_targets: returns False for a batch of which every target is ignored.

    Raises:
        ValueError: the loss of a sample cannot be computed alone.
    """
    measured = []
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # cuDNN has no backward pass of recurrent layers in evaluation mode
    with in_evaluation_mode(model), torch.enable_grad(), torch.backends.cudnn.flags(enabled=False):
        for index, sample in zip(ids, samples, strict=True):
            if not has_targets(sample):
                measured.append((index, math.nan, 0.0))
                continue
            with precision():
                loss = _loss_of(compute_loss, model, prepare(sample), index)
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            measured.append((index, float(loss.detach()), _norm(gradients)))
    return rank(measured)


def rank(measured: Sequence[tuple[int, float, float]]) -> list[BlamedSample]:
    """Returns the samples with their scores, the highest first, and those without targets last; ties keep their order.

    Args:
        measured: (id, loss, gradient norm) of each sample; without targets NaN and 0.
    """
    with_targets = [each for each in measured if not _is_empty(each)]
    of_loss = _distances([loss for _, loss, _ in with_targets])
    of_norm = _distances([norm for _, _, norm in with_targets])
    scored = [BlamedSample(*each, max(of_loss(each[1]), of_norm(each[2]))) for each in with_targets]
    empty = [BlamedSample(*each, 0.0) for each in measured if _is_empty(each)]
    return [*sorted(scored, key=lambda sample: -sample.score), *empty]


def _is_empty(each: tuple[int, float, float]) -> bool:
    return math.isnan(each[1]) and each[2] == 0.0


def _distances(values: Sequence[float]) -> Callable[[float], float]:
    """Returns a function from a value to its distance from the median, in mean absolute deviations from the median."""
    finite = sorted(value for value in values if math.isfinite(value))
    median = finite[len(finite) // 2] if finite else 0.0
    scale = sum(abs(value - median) for value in finite) / len(finite) if finite else 0.0

    def distance(value: float) -> float:
        if not math.isfinite(value):
            return math.inf
        return abs(value - median) / scale if scale else 0.0

    return distance


def _loss_of(compute_loss: Callable[[nn.Module, Any], Any], model: nn.Module, batch: Any, index: int) -> Tensor:
    try:
        loss = compute_loss(model, batch)
    except Exception as error:
        raise ValueError(
            f"blame: the loss of sample {index} alone, with the model in evaluation mode, could not be computed "
            f"({type(error).__name__}: {error}). The replay without blame shows the samples of the step."
        ) from error
    return check_loss(loss, "compute_loss")


def _norm(gradients: Sequence[Tensor | None]) -> float:
    squares = [gradient.detach().double().square().sum() for gradient in gradients if gradient is not None]
    return math.sqrt(float(torch.stack(squares).sum())) if squares else 0.0


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()
