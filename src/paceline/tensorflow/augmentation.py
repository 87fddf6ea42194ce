"""Test-time augmentation with TensorFlow: the transformed copies of one batch, as arrays on the host."""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.args.errors import UnsupportedOption
from paceline.predictions.augmentation import AugmentedSteps, TestTimeAugmentation, Transform, name_of
from paceline.predictions.image_transforms import ImageTransform
from paceline.tensorflow.data.batches import map_leaves, size_of, to_array
from paceline.tensorflow.framework import keras


class ArraySteps(AugmentedSteps):
    """Combines the predictions of one evaluation with augmentation.

    Raises:
        UnsupportedOption: a transform of images, whose channels come first.
    """

    def __init__(self, augmentation: TestTimeAugmentation) -> None:
        super().__init__(augmentation)
        of_images = [each for each in self.transforms if isinstance(each, ImageTransform)]
        if of_images and keras.config.image_data_format() == "channels_first":
            raise UnsupportedOption(
                f"augmentation: {of_images[0]} is not supported with Keras' image_data_format 'channels_first': give a "
                "function from features to features."
            )

    def transformed(self, transform: Transform, batch: Any) -> Any:
        """Returns transformed features; those given to the transform are read-only."""
        try:
            changed = transform(map_leaves(read_only, batch))
            size_of(changed)
        except ValueError as error:
            kind = "changed features in place, which other passes read, or" if "read-only" in str(error) else ""
            raise ValueError(
                f"augmentation: the transform {name_of(transform)} {kind or 'failed, or'} returned no features with a "
                f"row per sample: {error}"
            ) from error
        return changed


def read_only(leaf: Any) -> Any:
    """Returns a view of an array that cannot be written to; ragged and sparse tensors are unchanged."""
    array = to_array(leaf)
    if not isinstance(array, np.ndarray):
        return array
    view = array.view()
    view.flags.writeable = False
    return view
