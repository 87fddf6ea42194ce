"""Test-time augmentation with torch: the passes over one batch, whose predictions stay on their device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from paceline.predictions.augmentation import AugmentedSteps, Transform, name_of
from paceline.predictions.combination import Combination
from paceline.predictions.image_transforms import ImageTransform
from paceline.pytorch.evaluation.combine import TensorCombination
from paceline.pytorch.evaluation.image_transforms import NAMED


class TensorSteps(AugmentedSteps):
    """Runs the prediction steps of one evaluation with augmentation."""

    named: ClassVar[Mapping[str, ImageTransform]] = NAMED
    combination: ClassVar[type[Combination]] = TensorCombination
    remedy: ClassVar[str] = "Name the other outputs in ignore_keys; generated tokens cannot be combined."
    _versions: dict[str, int]  # of the batch in progress

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
        self.check_is_wanted(loss_only)
        if not isinstance(batch, Mapping):
            raise ValueError(
                f"augmentation: a batch is {type(batch).__name__}; transforms are given a dict of tensors."
            )
        self._versions = versions_of(batch)
        loss, first, labels = predict(model, dict(batch), False, ignore_keys)
        is_numbers = isinstance(labels, Tensor) and labels.is_floating_point()
        combined = self.combine(
            batch,
            first,
            labels.shape if is_numbers else None,
            lambda changed: predict(model, changed, False, ignore_keys)[1],
        )
        return loss, combined, labels

    def is_array(self, value: object) -> bool:
        """Returns True for a tensor."""
        return isinstance(value, Tensor)

    def is_floating(self, value: Any) -> bool:
        """Returns True for a tensor of floating-point numbers."""
        return torch.is_floating_point(value)

    def transformed(self, transform: Transform, batch: Any) -> Any:
        """Returns a transformed batch."""
        changed = transform(dict(batch))
        name = name_of(transform)
        if not isinstance(changed, Mapping):
            raise ValueError(f"augmentation: the transform {name} returned {type(changed).__name__}; expected a batch.")
        for key, version in self._versions.items():
            if batch[key]._version != version:
                raise ValueError(
                    f"augmentation: the transform {name} or the model changed the tensor {key!r} in place, which other "
                    "passes read: return a new tensor, as with torch.where or clone()."
                )
        return changed


def versions_of(batch: Mapping[str, Any]) -> dict[str, int]:
    """Returns the counts of changes in place of a batch's tensors, where torch keeps them."""
    return {
        name: value._version for name, value in batch.items() if isinstance(value, Tensor) and not value.is_inference()
    }
