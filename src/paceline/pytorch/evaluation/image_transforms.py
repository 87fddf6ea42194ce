"""Transforms of a batch of images for test-time augmentation: flips, shifts, crops and zooms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, kw_only=True)
class ImageTransform:
    """A transform of the images of a batch; returns a new batch with the same shapes.

    Args:
        key: the images in the batch, `(samples, channels, height, width)`; None: the only tensor with 4 dimensions.
    """

    key: str | None = None

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        key = self.key if self.key is not None else find_images(batch)
        if not isinstance(batch.get(key), Tensor) or batch[key].ndim < 3:
            raise ValueError(f"key={key!r} is invalid: the batch has the tensors {', '.join(map(str, batch))}")
        return {**batch, key: self.apply(batch[key])}

    def apply(self, images: Tensor) -> Tensor:
        """Returns the transformed images; height and width are the last two dimensions."""
        raise NotImplementedError

    def invert(self, outputs: Tensor) -> Tensor:
        """Returns dense outputs, such as masks, in the places of the images before the transform.

        Raises:
            ValueError: the transform loses pixels, so that it has no inverse.
        """
        raise ValueError(
            f'inverse="image" is invalid with {type(self).__name__}, which moves pixels out of the image: leave the '
            "transform out, or give a function as inverse"
        )


@dataclass(frozen=True)
class Flip(ImageTransform):
    """Flips images.

    Args:
        direction: "horizontal" (left and right) or "vertical" (top and bottom).
    """

    direction: str = "horizontal"

    def __post_init__(self) -> None:
        if self.direction not in ("horizontal", "vertical"):
            raise ValueError(f"direction={self.direction!r} is invalid: expected 'horizontal' or 'vertical'")

    def apply(self, images: Tensor) -> Tensor:
        """Returns the flipped images."""
        return images.flip(-1 if self.direction == "horizontal" else -2)

    def invert(self, outputs: Tensor) -> Tensor:
        """Returns the outputs, flipped back."""
        return self.apply(outputs)


@dataclass(frozen=True)
class Shift(ImageTransform):
    """Moves images by whole pixels.

    Args:
        right, down: pixels; negative ones move to the left, and up.
        fill: value of the pixels that become free.
    """

    right: int = 0
    down: int = 0
    fill: float = 0.0

    def apply(self, images: Tensor) -> Tensor:
        """Returns the moved images."""
        height, width = images.shape[-2:]
        if abs(self.right) >= width or abs(self.down) >= height:
            raise ValueError(f"Shift: ({self.right}, {self.down}) moves all pixels out of images of {height} x {width}")
        moved = torch.full_like(images, self.fill)
        to_y, from_y = spans(self.down, height)
        to_x, from_x = spans(self.right, width)
        moved[..., to_y, to_x] = images[..., from_y, from_x]
        return moved


@dataclass(frozen=True)
class Crop(ImageTransform):
    """Cuts a part out of each image and scales it to the size of the image.

    Args:
        top, left: first row and column, as shares of height and width.
        size: height and width of the part, as a share of those of the image.
    """

    top: float = 0.0
    left: float = 0.0
    size: float = 0.875

    def __post_init__(self) -> None:
        if not 0 < self.size <= 1 or not 0 <= self.top <= 1 - self.size or not 0 <= self.left <= 1 - self.size:
            raise ValueError(f"{self} is invalid: expected a part inside of the image")

    def apply(self, images: Tensor) -> Tensor:
        """Returns the scaled parts."""
        height, width = images.shape[-2:]
        top, left = round(self.top * height), round(self.left * width)
        rows, columns = max(round(self.size * height), 1), max(round(self.size * width), 1)
        return resized(images[..., top : top + rows, left : left + columns], height, width)


@dataclass(frozen=True)
class Zoom(ImageTransform):
    """Scales images about their center; the size stays.

    Args:
        factor: above 1 enlarges the center; below 1 shrinks the image onto a background.
        fill: value of the background.
    """

    factor: float = 1.1
    fill: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.factor < float("inf"):
            raise ValueError(f"factor={self.factor} is invalid: expected a number above 0")

    def apply(self, images: Tensor) -> Tensor:
        """Returns the scaled images."""
        height, width = images.shape[-2:]
        rows, columns = max(round(height * self.factor), 1), max(round(width * self.factor), 1)
        scaled = resized(images, rows, columns)
        top, left = (height - rows) // 2, (width - columns) // 2
        return functional.pad(scaled, (left, width - columns - left, top, height - rows - top), value=self.fill)


NAMED: dict[str, ImageTransform] = {
    "horizontal_flip": Flip("horizontal"),
    "vertical_flip": Flip("vertical"),
    "shift_left": Shift(right=-1),
    "shift_right": Shift(right=1),
    "shift_up": Shift(down=-1),
    "shift_down": Shift(down=1),
    "zoom_in": Zoom(1.1),
    "zoom_out": Zoom(0.9),
    "center_crop": Crop(0.0625, 0.0625, 0.875),
    "top_left_crop": Crop(0.0, 0.0, 0.875),
    "top_right_crop": Crop(0.0, 0.125, 0.875),
    "bottom_left_crop": Crop(0.125, 0.0, 0.875),
    "bottom_right_crop": Crop(0.125, 0.125, 0.875),
}


def find_images(batch: Mapping[str, Any]) -> str:
    """Returns the name of the only tensor with 4 dimensions in a batch.

    Raises:
        ValueError: there is none, or there are several.
    """
    found = [name for name, value in batch.items() if isinstance(value, Tensor) and value.ndim == 4]
    if len(found) != 1:
        shapes = {name: tuple(value.shape) for name, value in batch.items() if isinstance(value, Tensor)}
        raise ValueError(
            f"an image transform needs one tensor (samples, channels, height, width) in the batch, and there are "
            f"{len(found)} ({shapes}): name it, as in Flip('horizontal', key='pixel_values')"
        )
    return str(found[0])


def resized(images: Tensor, rows: int, columns: int) -> Tensor:
    """Returns images of another size, interpolated linearly; integer pixels are rounded."""
    *outer, height, width = images.shape
    pixels = images.reshape(-1, 1, height, width)
    scaled = functional.interpolate(pixels.float(), (rows, columns), mode="bilinear", align_corners=False)
    scaled = scaled if images.is_floating_point() else scaled.round()
    return scaled.to(images.dtype).reshape(*outer, rows, columns)


def spans(offset: int, size: int) -> tuple[slice, slice]:
    """Returns the destination and the source of a move by `offset` along a dimension."""
    return slice(max(offset, 0), size + min(offset, 0)), slice(max(-offset, 0), size - max(offset, 0))
