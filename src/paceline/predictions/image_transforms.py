"""Transforms of a batch of images for test-time augmentation: flips, shifts, crops and zooms, of numpy arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

Images = Any  # an array of numpy, or of the framework of a subclass


@dataclass(frozen=True, kw_only=True)
class ImageTransform:
    """A transform of the images of a batch; returns a new batch with the same shapes.

    Args:
        key: the images in a batch that is a dict; None: the only array with 4 dimensions.
    """

    layout: ClassVar[str] = "(samples, height, width, channels)"
    axes: ClassVar[tuple[int, int]] = (1, 2)  # of height and width
    is_invertible: ClassVar[bool] = False

    key: str | None = None

    def __call__(self, batch: Any) -> Any:
        if not isinstance(batch, Mapping):
            if self.key is not None or not self.is_images(batch):
                kind = f"an array of shape {batch.shape}" if hasattr(batch, "shape") else f"a {type(batch).__name__}"
                raise ValueError(f"{self}: the batch is {kind}; expected images {self.layout}, or a dict with them")
            return self.apply(batch)
        key = self.key if self.key is not None else self.find_images(batch)
        if not self.is_images(batch.get(key)):
            raise ValueError(f"key={key!r} is invalid: the batch has the tensors {', '.join(map(str, batch))}")
        return {**batch, key: self.apply(batch[key])}

    def apply(self, images: Images) -> Images:
        """Returns the transformed images."""
        raise NotImplementedError

    def invert(self, outputs: Images) -> Images:
        """Returns dense outputs, such as masks, in the places of the images before the transform.

        Raises:
            ValueError: the transform loses pixels, so that it has no inverse.
        """
        raise ValueError(
            f'inverse="image" is invalid with {type(self).__name__}, which moves pixels out of the image: leave the '
            "transform out, or give a function as inverse"
        )

    def find_images(self, batch: Mapping[str, Any]) -> str:
        """Returns the name of the only array with 4 dimensions in a batch.

        Raises:
            ValueError: there is none, or there are several.
        """
        shapes = {name: tuple(value.shape) for name, value in batch.items() if hasattr(value, "shape")}
        found = [name for name, value in batch.items() if self.is_images(value) and len(shapes[name]) == 4]
        if len(found) != 1:
            raise ValueError(
                f"an image transform needs one tensor {self.layout} in the batch, and there are {len(found)} "
                f"({shapes}): name it, as in Flip('horizontal', key='pixel_values')"
            )
        return str(found[0])

    def extent(self, images: Images) -> tuple[int, int]:
        """Returns height and width."""
        return images.shape[self.axes[0]], images.shape[self.axes[1]]

    def at(self, images: Images, rows: slice, columns: slice) -> tuple[slice, ...]:
        """Returns the index of some rows and columns of all images."""
        index = [slice(None)] * images.ndim
        index[self.axes[0]], index[self.axes[1]] = rows, columns
        return tuple(index)

    def placed(self, images: Images, down: int, right: int, extent: tuple[int, int], fill: float) -> Images:
        """Returns images of another extent, into which these are put at an offset that may be negative."""
        shape = list(images.shape)
        shape[self.axes[0]], shape[self.axes[1]] = extent
        height, width = self.extent(images)
        to_rows, from_rows = spans(down, height, extent[0])
        to_columns, from_columns = spans(right, width, extent[1])
        placed = self.filled(images, shape, fill)
        placed[self.at(placed, to_rows, to_columns)] = images[self.at(images, from_rows, from_columns)]
        return placed

    # ---- what a subclass for another framework replaces

    def is_images(self, value: object) -> bool:
        """Returns True for an array that can be images."""
        return isinstance(value, np.ndarray) and value.ndim >= 3

    def filled(self, images: Images, shape: list[int], fill: float) -> Images:
        """Returns images of a shape and one value, of the type of these images."""
        return np.full(shape, fill, images.dtype)

    def flipped(self, images: Images, axis: int) -> Images:
        """Returns images in the reverse order along an axis."""
        return np.flip(images, axis)

    def resized(self, images: Images, rows: int, columns: int) -> Images:
        """Returns images of another size, interpolated linearly; integer pixels are rounded."""
        pixels = images.astype(np.float32)
        for axis, size in zip(self.axes, (rows, columns), strict=True):
            pixels = interpolated(pixels, axis, size)
        return (np.rint(pixels) if images.dtype.kind in "iu" else pixels).astype(images.dtype)


@dataclass(frozen=True)
class Flip(ImageTransform):
    """Flips images.

    Args:
        direction: "horizontal" (left and right) or "vertical" (top and bottom).
    """

    is_invertible: ClassVar[bool] = True

    direction: str = "horizontal"

    def __post_init__(self) -> None:
        if self.direction not in ("horizontal", "vertical"):
            raise ValueError(f"direction={self.direction!r} is invalid: expected 'horizontal' or 'vertical'")

    def apply(self, images: Images) -> Images:
        """Returns the flipped images."""
        return self.flipped(images, self.axes[self.direction == "horizontal"])

    def invert(self, outputs: Images) -> Images:
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

    def apply(self, images: Images) -> Images:
        """Returns the moved images."""
        height, width = self.extent(images)
        if abs(self.right) >= width or abs(self.down) >= height:
            raise ValueError(f"Shift: ({self.right}, {self.down}) moves all pixels out of images of {height} x {width}")
        return self.placed(images, self.down, self.right, (height, width), self.fill)


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

    def apply(self, images: Images) -> Images:
        """Returns the scaled parts."""
        height, width = self.extent(images)
        top, left = round(self.top * height), round(self.left * width)
        rows, columns = max(round(self.size * height), 1), max(round(self.size * width), 1)
        part = images[self.at(images, slice(top, top + rows), slice(left, left + columns))]
        return self.resized(part, height, width)


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

    def apply(self, images: Images) -> Images:
        """Returns the scaled images."""
        height, width = self.extent(images)
        rows, columns = max(round(height * self.factor), 1), max(round(width * self.factor), 1)
        scaled = self.resized(images, rows, columns)
        return self.placed(scaled, (height - rows) // 2, (width - columns) // 2, (height, width), self.fill)


def named(flip: type[Flip], shift: type[Shift], zoom: type[Zoom], crop: type[Crop]) -> dict[str, ImageTransform]:
    """Returns the transforms that have a name, of the classes of one framework."""
    return {
        "horizontal_flip": flip("horizontal"),
        "vertical_flip": flip("vertical"),
        "shift_left": shift(right=-1),
        "shift_right": shift(right=1),
        "shift_up": shift(down=-1),
        "shift_down": shift(down=1),
        "zoom_in": zoom(1.1),
        "zoom_out": zoom(0.9),
        "center_crop": crop(0.0625, 0.0625, 0.875),
        "top_left_crop": crop(0.0, 0.0, 0.875),
        "top_right_crop": crop(0.0, 0.125, 0.875),
        "bottom_left_crop": crop(0.125, 0.0, 0.875),
        "bottom_right_crop": crop(0.125, 0.125, 0.875),
    }


NAMED = named(Flip, Shift, Zoom, Crop)


def interpolated(values: Images, axis: int, size: int) -> Images:
    """Returns values along an axis at `size` positions between them; each value stands for the middle of its pixel."""
    number = values.shape[axis]
    positions = np.maximum((np.arange(size) + 0.5) * (number / size) - 0.5, 0)
    low = np.minimum(positions.astype(np.int64), number - 1)
    high = np.minimum(low + 1, number - 1)
    shares = (positions - low).astype(np.float32).reshape(-1, *[1] * (values.ndim - axis - 1))
    return values.take(low, axis) * (1 - shares) + values.take(high, axis) * shares


def spans(offset: int, size: int, room: int) -> tuple[slice, slice]:
    """Returns the destination and the source of `size` elements that are put into a room of elements at an offset."""
    start, stop = max(offset, 0), min(offset + size, room)
    return slice(start, stop), slice(start - offset, stop - offset)
