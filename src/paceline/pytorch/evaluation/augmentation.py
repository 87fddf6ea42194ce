"""Test-time augmentation: several passes over transformed copies of each batch, combined to one prediction a sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.core.outputs import PredictionOutput
from paceline.pytorch.evaluation.combine import Combination, check_kind, check_reduction, check_weights
from paceline.pytorch.evaluation.image_transforms import NAMED, ImageTransform

Transform = Callable[[Any], Any]
Inverse = Callable[[Any], Any]
EXTRA_ROWS = ("agreement", "spread")


class TestTimeAugmentation:
    """Predicts each batch several times, transformed in several ways, and combines the predictions.

    Loss and labels are those of the batch as it is. Costs one forward pass per transform. Memory: running sums of the
    size of one batch's predictions; the median stores the predictions of all passes over one batch.

    Transforms should be deterministic: random ones draw from torch's global generators, and processes that share a
    batch (tensor or context parallelism) must all transform it in the same way.

    Args:
        transforms: functions from a batch (a dict of tensors on the host) to a new batch with the same samples in the
            same order, or names of `image_transforms.NAMED`, such as "horizontal_flip" and "shift_left".
        inverse: brings outputs that are places (masks, boxes) back: one function `(outputs) -> outputs` for each
            transform (None: unchanged), or "image" for outputs with the height and width of the images as their last
            dimensions. None: outputs are used as they are.
        reduce: "mean", "geometric", "median", "max" or "vote"; see `Combination`.
        outputs: the kind of predictions: "logits", "binary_logits", "probabilities" or "values".
        weights: one per pass, first that of the batch as it is if it is included; None: equal.
        include_original: the batch as it is also counts.

    Raises:
        ValueError: an argument is invalid.
    """

    __test__ = False  # no class of tests

    def __init__(
        self,
        transforms: Sequence[str | Transform],
        *,
        inverse: str | Sequence[Inverse | None] | None = None,
        reduce: str = "mean",
        outputs: str = "logits",
        weights: Sequence[float] | None = None,
        include_original: bool = True,
    ) -> None:
        if isinstance(transforms, str) or not transforms:
            raise ValueError(f"transforms={transforms!r} is invalid: expected a list with at least one transform")
        self.transforms = [find_transform(each) for each in transforms]
        self.inverses = find_inverses(inverse, self.transforms)
        check_reduction(reduce, outputs)
        self.reduce = reduce
        self.outputs = outputs
        self.include_original = include_original
        self.weights = check_weights(weights, len(self.transforms) + include_original, reduce)

    def __repr__(self) -> str:
        return f"TestTimeAugmentation({len(self.transforms)} transforms, reduce={self.reduce!r})"


class AugmentedSteps:
    """Runs the prediction steps of one evaluation with augmentation, and keeps agreement and spread.

    Args:
        augmentation: the transforms and the reduction.

    Attributes:
        agreement, spread: one number per sample of the last evaluation that returned predictions; None before it.
        num_runs: number of evaluations.
    """

    def __init__(self, augmentation: TestTimeAugmentation) -> None:
        self.augmentation = augmentation
        self.agreement: Any = None
        self.spread: Any = None
        self.num_runs = 0
        self._rows: dict[str, Any] = {}

    def step(
        self, predict: Callable[..., tuple[Any, Any, Any]], model: Any, batch: Any, loss_only: bool, ignore_keys: Any
    ) -> tuple[Any, Any, Any]:
        """Returns the loss and the labels of a batch as it is, and the combined predictions.

        Args:
            predict: the Trainer's `prediction_step`.
            model, batch, loss_only, ignore_keys: its arguments.

        Raises:
            ValueError: there are no predictions to combine, or a transform returned something else than it must.
        """
        if loss_only:
            raise ValueError(
                "augmentation: only the loss is computed, which is that of the batch as it is. Set compute_metrics and "
                "prediction_loss_only=False, or call predict."
            )
        if not isinstance(batch, Mapping):
            raise ValueError(
                f"augmentation: a batch is {type(batch).__name__}; transforms are given a dict of tensors."
            )
        settings = self.augmentation
        weights = list(settings.weights)
        versions = {name: value._version for name, value in batch.items() if is_versioned(value)}
        loss, first, labels = predict(model, dict(batch), False, ignore_keys)
        combined = self._combination(first, labels)
        if settings.include_original:
            combined.add(first, weights.pop(0))
        for transform, inverse, weight in zip(settings.transforms, settings.inverses, weights, strict=True):
            changed = transform(dict(batch))
            check_batch(transform, changed, batch, versions)
            predictions = predict(model, changed, False, ignore_keys)[1]
            predictions = predictions if inverse is None else inverse(predictions)
            check_rows(transform, predictions, len(first))
            combined.add(predictions, weight)
        agreement = combined.agreement()
        self._rows = {"agreement": agreement, "spread": combined.spread()}
        return loss, combined.result(), labels

    def _combination(self, first: Any, labels: Any) -> Combination:
        if not isinstance(first, Tensor) or not first.is_floating_point() or first.ndim == 0:
            kind = f"{first.dtype} tensor" if isinstance(first, Tensor) else type(first).__name__
            raise ValueError(
                f"augmentation: the predictions are a {kind}; one floating-point tensor with a row per sample can be "
                "combined. Name the other outputs in ignore_keys; generated tokens cannot be combined."
            )
        check_kind(first, labels, self.augmentation.outputs)
        return Combination(self.augmentation.reduce, self.augmentation.outputs)

    def rows(self) -> dict[str, Any]:
        """Returns agreement and spread of the samples of the last batch."""
        return self._rows

    def finish(self, gathered: Mapping[str, Any]) -> dict[str, float]:
        """Keeps agreement and spread of all samples; returns their means as metrics."""
        self.agreement, self.spread = (gathered.get(name) for name in EXTRA_ROWS)
        self.num_runs += 1
        found = {name: gathered.get(name) for name in EXTRA_ROWS}
        return {
            name: float(np.mean(rows)) for name, rows in found.items() if isinstance(rows, np.ndarray) and rows.size
        }


def make_steps(augmentation: object) -> AugmentedSteps:
    """Returns the steps of an evaluation with augmentation.

    Raises:
        TypeError: it is no `TestTimeAugmentation`.
    """
    if not isinstance(augmentation, TestTimeAugmentation):
        raise TypeError(f"augmentation={augmentation!r} is invalid: expected a TestTimeAugmentation.")
    return AugmentedSteps(augmentation)


class AugmentedOutput(PredictionOutput):
    """The result of `predict` with augmentation; unpacks into (predictions, label_ids, metrics).

    Attributes:
        agreement: `(samples,)`, the share of passes that predict what their combination predicts; None for values.
        spread: `(samples,)`, the standard deviation of probabilities or values over the passes.
    """

    agreement: Any = None
    spread: Any = None

    @classmethod
    def of(cls, output: PredictionOutput, steps: AugmentedSteps) -> AugmentedOutput:
        """Returns the output with the agreement and the spread of its samples."""
        made = cls(*output)
        made.agreement, made.spread = steps.agreement, steps.spread
        return made


def find_transform(given: str | Transform) -> Transform:
    """Returns the transform of a name, or the given function.

    Raises:
        ValueError: it is neither a function nor a known name.
    """
    if isinstance(given, str) and given in NAMED:
        return NAMED[given]
    if isinstance(given, str) or not callable(given):
        raise ValueError(f"transforms: {given!r} is invalid: expected a function, or one of {', '.join(NAMED)}")
    return given


def find_inverses(
    given: str | Sequence[Inverse | None] | None, transforms: Sequence[Transform]
) -> list[Inverse | None]:
    """Returns the inverse of each transform; None for outputs that are used as they are.

    Raises:
        ValueError: there is not one for each transform, or a transform has none.
    """
    if given is None:
        return [None] * len(transforms)
    if given == "image":
        built_in = [each for each in transforms if isinstance(each, ImageTransform)]
        if len(built_in) != len(transforms):
            raise ValueError('inverse="image" is invalid with functions as transforms: give a list of functions')
        for each in built_in:
            each.invert(torch.zeros(1, 1, 8, 8))
        return [each.invert for each in built_in]
    if isinstance(given, str) or callable(given) or len(given) != len(transforms):
        raise ValueError(f'inverse={given!r} is invalid: expected "image", or one function or None for each transform')
    return list(given)


def is_versioned(value: object) -> bool:
    """Returns True for a tensor whose changes in place can be detected."""
    return isinstance(value, Tensor) and not value.is_inference()


def check_batch(transform: Transform, changed: object, batch: Mapping[str, Any], versions: Mapping[str, int]) -> None:
    """Checks what a transform returned, and that it left the batch as it was.

    Raises:
        ValueError: it is no dict, or a tensor of the batch was changed in place.
    """
    name = getattr(transform, "__name__", repr(transform))
    if not isinstance(changed, Mapping):
        raise ValueError(f"augmentation: the transform {name} returned {type(changed).__name__}; expected a batch.")
    for key, version in versions.items():
        if batch[key]._version != version:
            raise ValueError(
                f"augmentation: the transform {name} changed the tensor {key!r} in place, which other passes read: "
                "return a new tensor, as with torch.where or clone()."
            )


def check_rows(transform: Transform, predictions: object, number: int) -> None:
    """Checks that a pass predicted as many samples as the batch has.

    Raises:
        ValueError: it did not.
    """
    if isinstance(predictions, Tensor) and predictions.ndim > 0 and len(predictions) == number:
        return
    name = getattr(transform, "__name__", repr(transform))
    found = f"{len(predictions)} rows" if isinstance(predictions, Tensor) and predictions.ndim else "no rows"
    raise ValueError(
        f"augmentation: the predictions of the transform {name} have {found}, the batch has {number} samples: "
        "a transform must keep the samples and their order."
    )
