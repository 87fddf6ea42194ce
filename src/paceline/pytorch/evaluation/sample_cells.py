"""The cells of a table of samples: inputs, labels, predictions and their confidence, and pictures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from paceline.core.rows import PADDING

MAX_CHARACTERS = 1000  # length of a cell
MOST_NUMBERS = 16  # size of an array that is shown as numbers
CHANNELS = (1, 3, 4)
LEAST_PIXELS = 4  # height and width from which an array of channels is a picture
TILE = 64  # height of a picture in the figure, at least, in pixels
FRAME = 3  # pixels
RIGHT, WRONG, UNKNOWN = (46, 125, 50), (198, 40, 40), (160, 160, 160)  # colours of frames
MAIN_INPUTS = ("input_ids", "pixel_values", "input_values", "input_features", "inputs_embeds")


class Words(Protocol):
    """Names classes, and decodes tokens; see `sample_text.Reader`."""

    names: Mapping[int, str]

    @property
    def has_decoder(self) -> bool:
        """True if tokens have texts."""

    def text(self, tokens: Sequence[int]) -> str:
        """Returns the text of token ids."""

    def name(self, number: int) -> str | int:
        """Returns the name of a class, or its number."""


@dataclass(frozen=True)
class Result:
    """The cells of one prediction.

    Attributes:
        label, prediction: a class, numbers or text; None without one.
        confidence: the probability of the predicted class; None for other predictions.
        is_right: True if the prediction is the label; None if that is not known.
    """

    label: Any = None
    prediction: Any = None
    confidence: float | None = None
    is_right: bool | None = None


def shortened(text: str) -> str:
    """Returns a text, cut to the length of a cell."""
    return text if len(text) <= MAX_CHARACTERS else f"{text[: MAX_CHARACTERS - 1]}…"


def numbers(array: np.ndarray) -> str:
    """Returns an array as text: its numbers, or its shape if there are many."""
    if array.size > MOST_NUMBERS or array.dtype.kind not in "biuf":
        return f"{array.dtype} of shape {tuple(array.shape)}"
    return ", ".join(f"{each:.4g}" if array.dtype.kind == "f" else str(each) for each in array.ravel().tolist())


def input_of(row: object) -> str:
    """Returns the texts in a row of the data; empty without any."""
    values = row.values() if isinstance(row, Mapping) else ()
    return shortened(" | ".join(each for each in values if isinstance(each, str)))


def main_inputs(batch: object, label_names: Sequence[str], count: int) -> list[np.ndarray | None]:
    """Returns the main input of each of `count` samples of a batch; None without a tensor of one row per sample."""
    values = batch if isinstance(batch, Mapping) else {}
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor) and value.ndim}
    tensors = {name: value for name, value in tensors.items() if len(value) == count}
    names = [*(name for name in MAIN_INPUTS if name in tensors), *(name for name in tensors if name not in label_names)]
    if not names:
        return [None] * count
    chosen = tensors[names[0]].detach().cpu()
    return list((chosen.float() if chosen.is_floating_point() else chosen).numpy())  # numpy has no bfloat16


# ---- predictions


def results_of(
    predictions: object, labels: object, count: int, reader: Words, inputs: Sequence[np.ndarray | None] = ()
) -> list[Result]:
    """Returns the cells of predictions and labels.

    Args:
        predictions, labels: of `count` samples: arrays, or nests of which the first array of so many rows is shown.
        count: number of samples.
        reader: names the classes, and decodes tokens; see `sample_text.Reader`.
        inputs: the main input of each sample. Labels that repeat input tokens are those of a causal model, which
            predicts at each place the label of the next.
    """
    outputs, targets = first_rows(predictions, count), first_rows(labels, count)
    is_causal = targets is not None and repeats_inputs(targets, inputs)
    found = []
    for index in range(count):
        output = None if outputs is None else outputs[index]
        target = None if targets is None else targets[index]
        found.append(result_of(output, target, reader, is_causal))
    return found


def repeats_inputs(targets: np.ndarray, inputs: Sequence[np.ndarray | None]) -> bool:
    """True if every label is the input token at its own place.

    Args:
        targets: (samples, length), with -100 for tokens without a label.
        inputs: token ids of each sample, whose lengths may differ.
    """
    num_labels = 0
    for target, tokens in zip(targets, inputs, strict=False):
        if target.ndim != 1 or tokens is None or tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            return False
        places = np.flatnonzero(target != PADDING)
        num_labels += len(places)
        if len(places) and (places[-1] >= len(tokens) or (target[places] != tokens[places]).any()):
            return False
    return num_labels > 0


def first_rows(nest: object, count: int) -> np.ndarray | None:
    """Returns the first array in a nest that has one row per sample; of a dict, `logits` first."""
    if isinstance(nest, np.ndarray):
        return nest if nest.ndim and len(nest) == count and nest.dtype.kind in "biuf" else None
    if isinstance(nest, Mapping):
        order = sorted(nest, key=lambda name: name != "logits")
        return next((found for name in order if (found := first_rows(nest[name], count)) is not None), None)
    if isinstance(nest, list | tuple):
        return next((found for each in nest if (found := first_rows(each, count)) is not None), None)
    return None


def result_of(output: np.ndarray | None, target: np.ndarray | None, reader: Words, is_causal: bool = False) -> Result:
    """Returns the cells of one sample; the outputs of a causal model are compared with the next labels."""
    if output is None:
        return Result(label=None if target is None else plain(target, reader))
    is_float = output.dtype.kind == "f"
    if is_float and output.ndim == 1 and len(output) > 1 and is_class(target):
        return class_result(output, target, reader)
    if target is not None and is_float and output.shape == target.shape and is_choice(target):
        return choice_result(output, target, reader)
    if target is not None and is_tokens(output, target):
        return tokens_result(output[:-1], target[1:], reader) if is_causal else tokens_result(output, target, reader)
    return Result(None if target is None else plain(target, reader), numbers(output))


def is_class(target: np.ndarray | None) -> bool:
    """True if a label is absent, or the number of a class."""
    return target is None or (target.ndim == 0 and target.dtype.kind in "iu")


def is_choice(target: np.ndarray) -> bool:
    """True if labels are a 0 or 1 for each of several classes."""
    return target.ndim == 1 and len(target) > 1 and bool(np.isin(target, (0, 1)).all())


def is_tokens(output: np.ndarray, target: np.ndarray) -> bool:
    """True if there is a class for each token: outputs (length, classes), labels (length,)."""
    return output.ndim == 2 and target.shape == output.shape[:1] and target.dtype.kind in "iu"


def choice_result(output: np.ndarray, target: np.ndarray, reader: Words) -> Result:
    """Returns the cells of logits of several independent classes, shape (classes,)."""
    chosen, true = np.flatnonzero(output > 0).tolist(), np.flatnonzero(target).tolist()
    names = [", ".join(str(reader.name(number)) for number in each) for each in (true, chosen)]
    return Result(names[0], names[1], is_right=true == chosen)


def class_result(output: np.ndarray, target: np.ndarray | None, reader: Words) -> Result:
    """Returns the cells of logits or probabilities of classes, shape (classes,)."""
    scores = output.astype(np.float64)
    is_probability = bool((scores >= 0).all()) and math.isclose(scores.sum(), 1, abs_tol=1e-3)
    best = int(scores.argmax()) if np.isfinite(scores).all() else None
    if best is None:
        return Result(None if target is None else reader.name(int(target)), numbers(output))
    weights = scores if is_probability else np.exp(scores - scores.max())
    label = None if target is None else int(target)
    return Result(
        None if label is None else reader.name(label),
        reader.name(best),
        round(float(weights[best] / weights.sum()), 4),
        None if label is None else label == best,
    )


def tokens_result(output: np.ndarray, target: np.ndarray, reader: Words) -> Result:
    """Returns the cells of one class per token, for the tokens with a label; shape (length, classes)."""
    has_label = target != PADDING
    chosen, true = output.argmax(1)[has_label].tolist(), target[has_label].tolist()
    is_vocabulary = reader.has_decoder and not reader.names
    texts = [
        reader.text(each) if is_vocabulary else shortened(" ".join(str(reader.name(number)) for number in each))
        for each in (true, chosen)
    ]
    return Result(texts[0], texts[1], is_right=true == chosen)


def plain(target: np.ndarray, reader: Words) -> Any:
    """Returns a label as a cell."""
    if target.ndim == 0 and target.dtype.kind in "iu":
        return reader.name(int(target))
    return float(target) if target.ndim == 0 else numbers(target)


# ---- pictures


def picture_of(row: object, value: object, shape: Sequence[int] | None) -> np.ndarray | None:
    """Returns the picture of a sample, shape (height, width, 3), 8 bits; None if it has none.

    Args:
        row: a row of the data, which may hold a picture of Pillow.
        value: the main input of the sample.
        shape: the shape of a picture in a flat row; None: see `EvaluationSamples`.

    Raises:
        ValueError: the input has not as many values as a picture of this shape.
    """
    own = [each for each in (row.values() if isinstance(row, Mapping) else ()) if hasattr(each, "getbands")]
    if own:
        return np.asarray(own[0].convert("RGB"))
    if not isinstance(value, np.ndarray):
        return None
    if shape is not None:
        if value.size != math.prod(shape):
            raise ValueError(f"picture_shape={tuple(shape)} is invalid: inputs have {value.size} values.")
        value = value.reshape(tuple(shape) if len(shape) == 3 else (1, *shape))
    if value.ndim != 3 or value.dtype.kind not in "fu":
        return None
    if value.shape[0] not in CHANNELS:
        value = np.moveaxis(value, -1, 0)  # channels last
    if value.shape[0] not in CHANNELS or (shape is None and min(value.shape[1:]) < LEAST_PIXELS):
        return None
    return coloured(value[:3])


def coloured(channels: np.ndarray) -> np.ndarray:
    """Returns channels (1 or 3, height, width) as a picture whose values fill 0 to 255."""
    values = np.nan_to_num(channels.astype(np.float64), posinf=0.0, neginf=0.0)
    if channels.dtype != np.uint8:
        low, high = values.min(), values.max()
        values = (values - low) * (255 / (high - low if high > low else 1.0))
    picture = np.moveaxis(np.round(values).astype(np.uint8), 0, -1)
    return np.repeat(picture, 3, axis=2) if picture.shape[2] == 1 else picture


def montage(pictures: Sequence[tuple[np.ndarray, bool | None]]) -> np.ndarray:
    """Returns one picture of several, row by row; a green frame is a right prediction, a red one a wrong one."""
    tiles = [framed(enlarged(picture), is_right) for picture, is_right in pictures]
    height, width = (max(tile.shape[axis] for tile in tiles) for axis in (0, 1))
    columns = math.ceil(math.sqrt(len(tiles)))
    rows = math.ceil(len(tiles) / columns)
    sheet = np.full((rows * height, columns * width, 3), 255, dtype=np.uint8)
    for index, tile in enumerate(tiles):
        top, left = (index // columns) * height, (index % columns) * width
        sheet[top : top + tile.shape[0], left : left + tile.shape[1]] = tile
    return sheet


def enlarged(picture: np.ndarray) -> np.ndarray:
    """Returns a small picture, enlarged by a whole factor."""
    factor = max(math.ceil(TILE / picture.shape[0]), 1)
    return picture.repeat(factor, axis=0).repeat(factor, axis=1)


def framed(picture: np.ndarray, is_right: bool | None) -> np.ndarray:
    """Returns a picture in a frame, with a margin around it."""
    colour = UNKNOWN
    if is_right is not None:
        colour = RIGHT if is_right else WRONG
    height, width = picture.shape[:2]
    tile = np.full((height + 4 * FRAME, width + 4 * FRAME, 3), 255, dtype=np.uint8)
    tile[FRAME:-FRAME, FRAME:-FRAME] = colour
    tile[2 * FRAME : -2 * FRAME, 2 * FRAME : -2 * FRAME] = picture
    return tile
