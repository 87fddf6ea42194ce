"""Test-time augmentation: several passes over transformed copies of each batch, combined to one prediction a sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from paceline.core.outputs import PredictionOutput
from paceline.predictions.combination import Combination, check_kind, check_reduction, check_weights
from paceline.predictions.image_transforms import NAMED, ImageTransform

Transform = Callable[[Any], Any]
Inverse = Callable[[Any], Any]
EXTRA_ROWS = ("agreement", "spread")


class TestTimeAugmentation:
    """Predicts each batch several times, transformed in several ways, and combines the predictions.

    Loss and labels are those of the batch as it is. Costs one forward pass per transform. Memory: running sums of the
    size of one batch's predictions; the median stores the predictions of all passes over one batch.

    Transforms should be deterministic: random ones draw from global generators, and processes that share a
    batch (tensor or context parallelism) must all transform it in the same way.

    Args:
        transforms: functions from a batch on the host to a new batch with the same samples in the same order, or names
            of `image_transforms.NAMED`, such as "horizontal_flip" and "shift_left". `Trainer` passes a batch as a dict
            of tensors, `TFTrainer` its features as an array or a dict of arrays.
        inverse: brings outputs that are places (masks, boxes) back: one function `(outputs) -> outputs` for each
            transform (None: unchanged), or "image" for outputs with the height and width of the images in the same
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
        for each in transforms:
            check_transform(each)
        self.transforms = list(transforms)
        check_inverse(inverse, self.transforms)
        self.inverse = inverse
        check_reduction(reduce, outputs)
        self.reduce = reduce
        self.outputs = outputs
        self.include_original = include_original
        self.weights = check_weights(weights, len(self.transforms) + include_original, reduce)

    def __repr__(self) -> str:
        return f"TestTimeAugmentation({len(self.transforms)} transforms, reduce={self.reduce!r})"


class AugmentedSteps:
    """Combines the predictions of one evaluation with augmentation, and keeps agreement and spread.

    A subclass for each framework runs the passes.

    Args:
        augmentation: the transforms and the reduction.

    Attributes:
        agreement, spread: one number per sample of the last evaluation that returned predictions; None before it.
        num_runs: number of evaluations.

    Raises:
        TypeError: it is no `TestTimeAugmentation`.
    """

    named: ClassVar[Mapping[str, ImageTransform]] = NAMED
    combination: ClassVar[type[Combination]] = Combination
    remedy: ClassVar[str] = "Return one output from the model."  # for several outputs

    def __init__(self, augmentation: TestTimeAugmentation) -> None:
        if not isinstance(augmentation, TestTimeAugmentation):
            raise TypeError(f"augmentation={augmentation!r} is invalid: expected a TestTimeAugmentation.")
        self.augmentation = augmentation
        self.transforms = [self.named[each] if isinstance(each, str) else each for each in augmentation.transforms]
        self.inverses = inverses_of(augmentation.inverse, self.transforms)
        self.agreement: Any = None
        self.spread: Any = None
        self.num_runs = 0
        self._rows: dict[str, Any] = {}

    def check_is_wanted(self, loss_only: bool) -> None:
        """Checks that an evaluation uses predictions.

        Raises:
            ValueError: it computes only the loss.
        """
        if loss_only:
            raise ValueError(
                "augmentation: only the loss is computed, which is that of the batch as it is. Set compute_metrics and "
                "prediction_loss_only=False, or call predict."
            )

    def check_was_used(self, name: str, owner: str) -> None:
        """Checks that an evaluation has run these steps.

        Args:
            name: the method that runs them, unless it is overridden.
            owner: its class.

        Raises:
            ValueError: the method was overridden, and did not run them.
        """
        if not self.num_runs:
            raise ValueError(
                f"augmentation was not used, because the overridden {name} does not call that of {owner}: leave it "
                f"out, or call super().{name} there."
            )

    def combine(self, batch: Any, first: Any, label_shape: Any, predict: Callable[[Any], Any]) -> Any:
        """Returns the combined predictions of a batch.

        Args:
            batch: what transforms are given.
            first: the predictions of the batch as it is.
            label_shape: the shape of labels that are one floating-point array; None for other labels.
            predict: runs a transformed batch through the model; returns predictions.

        Raises:
            ValueError: there are no predictions to combine, or a transform returned something else than it must.
        """
        settings = self.augmentation
        weights = list(settings.weights)
        self._check_first(first)
        check_kind(first.shape, label_shape, settings.outputs)
        combined = self.combination(settings.reduce, settings.outputs)
        if settings.include_original:
            combined.add(first, weights.pop(0))
        for transform, inverse, weight in zip(self.transforms, self.inverses, weights, strict=True):
            predictions = predict(self.transformed(transform, batch))
            predictions = predictions if inverse is None else inverse(predictions)
            self._check_rows(transform, predictions, len(first))
            combined.add(predictions, weight)
        self._rows = {"agreement": combined.agreement(), "spread": combined.spread()}
        return combined.result()

    def is_array(self, value: object) -> bool:
        """Returns True for an array of the framework."""
        return isinstance(value, np.ndarray)

    def is_floating(self, value: Any) -> bool:
        """Returns True for an array of floating-point numbers."""
        return value.dtype.kind == "f"  # type: ignore[no-any-return]

    def transformed(self, transform: Transform, batch: Any) -> Any:
        """Returns a transformed batch.

        Raises:
            ValueError: the transform returned no batch, or changed the given one.
        """
        raise NotImplementedError

    def _check_first(self, first: Any) -> None:
        if self.is_array(first) and self.is_floating(first) and first.ndim > 0:
            return
        kind = f"{first.dtype} tensor" if self.is_array(first) else type(first).__name__
        raise ValueError(
            f"augmentation: the predictions are a {kind}; one floating-point tensor with a row per sample can be "
            f"combined. {self.remedy}"
        )

    def _check_rows(self, transform: Transform, predictions: Any, number: int) -> None:
        has_rows = self.is_array(predictions) and predictions.ndim > 0
        if has_rows and len(predictions) == number:
            return
        found = f"{len(predictions)} rows" if has_rows else "no rows"
        raise ValueError(
            f"augmentation: the predictions of the transform {name_of(transform)} have {found}, the batch has {number} "
            "samples: a transform must keep the samples and their order."
        )

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


def name_of(transform: Transform) -> str:
    """Returns the name of a transform for messages."""
    return str(getattr(transform, "__name__", repr(transform)))


def check_transform(given: object) -> None:
    """Checks a transform.

    Raises:
        ValueError: it is neither a function nor a known name.
    """
    if (isinstance(given, str) and given not in NAMED) or not (isinstance(given, str) or callable(given)):
        raise ValueError(f"transforms: {given!r} is invalid: expected a function, or one of {', '.join(NAMED)}")


def check_inverse(given: Any, transforms: Sequence[str | Transform]) -> None:
    """Checks the inverses of transforms.

    Raises:
        ValueError: there is not one for each transform, or a transform has none.
    """
    if given is None:
        return
    if given == "image":
        built_in = [NAMED[each] if isinstance(each, str) else each for each in transforms]
        if not all(isinstance(each, ImageTransform) for each in built_in):
            raise ValueError('inverse="image" is invalid with functions as transforms: give a list of functions')
        for each in built_in:
            if isinstance(each, ImageTransform) and not each.is_invertible:
                each.invert(None)  # raises
    elif isinstance(given, str) or callable(given) or len(given) != len(transforms):
        raise ValueError(f'inverse={given!r} is invalid: expected "image", or one function or None for each transform')


def inverses_of(given: Any, transforms: Sequence[Any]) -> list[Inverse | None]:
    """Returns the inverse of each transform; None for outputs that are used as they are."""
    if given is None:
        return [None] * len(transforms)
    return [each.invert for each in transforms] if given == "image" else list(given)
