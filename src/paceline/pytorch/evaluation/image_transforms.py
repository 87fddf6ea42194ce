"""Transforms of a batch of images for test-time augmentation, of tensors: flips, shifts, crops and zooms."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from torch.nn import functional

from paceline.predictions import image_transforms as of_arrays


class TensorImages:
    """Replaces the operations on arrays of an image transform by those on tensors, wherever they are."""

    layout: ClassVar[str] = "(samples, channels, height, width)"
    axes: ClassVar[tuple[int, int]] = (-2, -1)

    def is_images(self, value: object) -> bool:
        """Returns True for a tensor that can be images."""
        return isinstance(value, Tensor) and value.ndim >= 3

    def filled(self, images: Tensor, shape: list[int], fill: float) -> Tensor:
        """Returns images of a shape and one value, of the type of these images."""
        return images.new_full(shape, fill)

    def flipped(self, images: Tensor, axis: int) -> Tensor:
        """Returns images in the reverse order along an axis."""
        return images.flip(axis)

    def resized(self, images: Tensor, rows: int, columns: int) -> Tensor:
        """Returns images of another size, interpolated linearly; integer pixels are rounded."""
        *outer, height, width = images.shape
        pixels = images.reshape(-1, 1, height, width)
        scaled = functional.interpolate(pixels.float(), (rows, columns), mode="bilinear", align_corners=False)
        scaled = scaled if images.is_floating_point() else scaled.round()
        return scaled.to(images.dtype).reshape(*outer, rows, columns)


class Flip(TensorImages, of_arrays.Flip):
    """Flips images: `Flip("horizontal")` or `Flip("vertical")`."""


class Shift(TensorImages, of_arrays.Shift):
    """Moves images by whole pixels: `Shift(right=1, down=-1, fill=0.0)`."""


class Crop(TensorImages, of_arrays.Crop):
    """Cuts a part out of each image and scales it to the size of the image: `Crop(top, left, size)`, in shares."""


class Zoom(TensorImages, of_arrays.Zoom):
    """Scales images about their center; the size stays: `Zoom(factor, fill)`."""


NAMED = of_arrays.named(Flip, Shift, Zoom, Crop)
