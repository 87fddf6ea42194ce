"""Calibration of classifiers: temperature, vector and isotonic scaling, fitted on held-out samples, in a JSON file."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from paceline.core.optional import require
from paceline.predictions.weights import log_softmax

Array = np.ndarray[Any, Any]
METHODS = ("temperature", "vector", "isotonic")
FILE_NAME = "calibration.json"
MAX_STEPS = 200


@dataclass(frozen=True)
class Calibrator:
    """Turns logits into calibrated probabilities.

    Attributes:
        method: "temperature" (one divisor of the logits, Guo et al. 2017), "vector" (a factor and an offset for each
            class), or "isotonic" (a monotone curve for each class, then normalized; Zadrozny and Elkan 2002).
        num_classes: number of classes.
        num_samples: samples that it was fitted on.
        parameters: "scale" and "bias", or the points "x" and "y" of each class's curve.
    """

    method: str
    num_classes: int
    num_samples: int
    parameters: dict[str, list[Any]] = field(default_factory=dict)

    def __call__(self, logits: Array) -> Array:
        """Returns probabilities, float64, of the shape of the logits.

        Raises:
            ValueError: the number of classes differs, or a logit is NaN.
        """
        given = np.asarray(logits)
        if given.ndim < 1 or given.shape[-1] != self.num_classes:
            raise ValueError(f"logits of shape {given.shape} are invalid: expected {self.num_classes} classes")
        if np.isnan(given).any():
            raise ValueError("logits contain NaN, which has no probability")
        if self.method != "isotonic":
            scale, bias = (np.asarray(self.parameters[name]) for name in ("scale", "bias"))
            return np.asarray(np.exp(log_softmax(given * scale + bias)))
        curves = zip(self.parameters["x"], self.parameters["y"], strict=True)
        points = np.exp(log_softmax(given))
        mapped = np.stack([np.interp(points[..., index], x, y) for index, (x, y) in enumerate(curves)], -1)
        total = mapped.sum(-1, keepdims=True)
        return np.where(total > 0, mapped / np.where(total > 0, total, 1), 1 / self.num_classes)

    def save(self, folder: str | Path) -> Path:
        """Writes `calibration.json` into the folder of a model; returns its path."""
        path = Path(folder, FILE_NAME)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{FILE_NAME}.incomplete-{os.getpid()}")
        content = {"method": self.method, "num_classes": self.num_classes, "num_samples": self.num_samples}
        try:
            text = json.dumps({**content, "parameters": self.parameters}, indent=2, allow_nan=False)
            temporary.write_text(text + "\n", encoding="utf-8")
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        return path

    @classmethod
    def load(cls, folder: str | Path) -> Calibrator:
        """Reads the calibration of a model from its folder.

        Raises:
            OSError: there is none.
            ValueError: the file is damaged.
        """
        path = Path(folder, FILE_NAME)
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            made = cls(str(found["method"]), int(found["num_classes"]), int(found["num_samples"]), found["parameters"])
            check_parameters(made)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is no calibration: {type(error).__name__}: {error}") from error
        return made


def check_parameters(calibrator: Calibrator) -> None:
    """Checks the numbers of a calibration.

    Raises:
        ValueError: the method is unknown, or a number is missing or not finite.
        KeyError, TypeError: the parameters have another structure.
    """
    parameters, number = calibrator.parameters, calibrator.num_classes
    if calibrator.method not in METHODS:
        raise ValueError(f"method={calibrator.method!r} is invalid: expected one of {', '.join(METHODS)}")
    names = ("x", "y") if calibrator.method == "isotonic" else ("scale", "bias")
    rows = [parameters[name] if calibrator.method == "isotonic" else [parameters[name]] for name in names]
    lengths = [[len(row) for row in each] for each in rows]
    is_complete = lengths[0] == lengths[1] and 0 not in lengths[0]
    expected = len(rows[0]) == number if calibrator.method == "isotonic" else lengths[0] == [number]
    if (
        not is_complete
        or not expected
        or not all(math.isfinite(float(v)) for each in rows for row in each for v in row)
    ):
        raise ValueError("its numbers are incomplete or not finite")


def fit_calibration(logits: Array, labels: Array, method: str = "temperature") -> Calibrator:
    """Fits a calibration on held-out samples, which training must not have used.

    Args:
        logits: `(samples, classes)`.
        labels: `(samples,)`, the true classes; -100 leaves a sample out.
        method: "temperature", "vector", or "isotonic", which needs scikit-learn.

    Raises:
        ValueError: the arrays do not fit together, or the method is unknown.
        ImportError: scikit-learn is missing.
    """
    if method not in METHODS:
        raise ValueError(f"method={method!r} is invalid: expected one of {', '.join(METHODS)}")
    rows, classes = checked(logits, labels)
    number = rows.shape[1]
    if method == "isotonic":
        return Calibrator(method, number, len(rows), fit_isotonic(rows, classes))
    scale, bias = fit_affine(rows, classes, has_vector=method == "vector")
    return Calibrator(method, number, len(rows), {"scale": scale.tolist(), "bias": bias.tolist()})


def checked(logits: Array, labels: Array) -> tuple[Array, Array]:
    """Returns logits in float64 and labels, without the samples that are left out.

    Raises:
        ValueError: they do not fit together, a logit is not finite, or there is no sample.
    """
    rows, classes = np.asarray(logits, dtype=np.float64), np.asarray(labels)
    if rows.ndim != 2 or rows.shape[1] < 2 or classes.shape != rows.shape[:1] or classes.dtype.kind not in "iu":
        raise ValueError(
            f"predictions of shape {rows.shape} and {classes.dtype} labels of shape {classes.shape} do not fit: "
            "expected (samples, classes) and one integer per sample"
        )
    rows, classes = rows[classes != -100], classes[classes != -100]
    if len(rows) == 0 or classes.min() < 0 or classes.max() >= rows.shape[1]:
        raise ValueError("there are no labels, or labels outside of the classes")
    if not np.isfinite(rows).all():
        raise ValueError("the predictions are not finite")
    return rows, classes


def fit_affine(rows: Array, classes: Array, has_vector: bool) -> tuple[Array, Array]:
    """Returns scale and bias of each class with the smallest log loss.

    The problem is convex in both; it is solved by damped Newton steps. The vector is held near the temperature by a
    penalty of 1e-4, without which classes that are separable on the samples would have no solution.
    """
    number = rows.shape[1]
    rows = rows - rows.mean(1, keepdims=True)
    targets = np.eye(number)[classes]
    size = 2 * number if has_vector else 1
    start = np.zeros(size)
    start[: number if has_vector else 1] = 1.0
    features = design(rows, has_vector)

    def evaluate(point: Array) -> tuple[float, Array, Array]:
        logs = log_softmax(features @ point)
        probabilities = np.exp(logs)
        change = point - start
        loss = -logs[np.arange(len(rows)), classes].mean() + 5e-5 * has_vector * change @ change
        gradient = np.einsum("nc,nck->k", probabilities - targets, features) / len(rows)
        mean = np.einsum("nc,nck->nk", probabilities, features)
        hessian = np.einsum("nc,nck,ncl->kl", probabilities, features, features) - mean.T @ mean
        penalty = 1e-4 * has_vector
        return float(loss), gradient + penalty * change, hessian / len(rows) + (penalty + 1e-10) * np.eye(size)

    point = minimize(evaluate, start)
    if not has_vector:
        return np.full(number, max(point[0], 1e-6)), np.zeros(number)  # a negative scale would reverse the classes
    return point[:number], point[number:]


def design(rows: Array, has_vector: bool) -> Array:
    """Returns `(samples, classes, parameters)`: the derivative of each logit by each parameter."""
    if not has_vector:
        return rows[:, :, None]
    number = rows.shape[1]
    return np.concatenate(
        [rows[:, :, None] * np.eye(number), np.broadcast_to(np.eye(number), (*rows.shape, number))], 2
    )


def minimize(evaluate: Callable[[Array], tuple[float, Array, Array]], point: Array) -> Array:
    """Returns the minimum of a convex function by Newton steps, halved until the value falls.

    Args:
        evaluate: returns value, gradient and Hessian.
        point: the start.
    """
    value, gradient, hessian = evaluate(point)
    for _ in range(MAX_STEPS):
        step = np.linalg.lstsq(hessian, gradient, rcond=None)[0]
        length = 1.0
        while length > 1e-10:
            proposed = evaluate(point - length * step)
            if proposed[0] < value:
                break
            length /= 2
        else:
            return point
        point = point - length * step
        is_done = value - proposed[0] < 1e-12
        value, gradient, hessian = proposed
        if is_done:
            break
    return point


def fit_isotonic(rows: Array, classes: Array) -> dict[str, list[Any]]:
    """Returns the points of a monotone curve for each class."""
    isotonic = require("sklearn.isotonic", "metrics")
    probabilities = np.exp(log_softmax(rows))
    xs, ys = [], []
    for index in range(rows.shape[1]):
        model = isotonic.IsotonicRegression(y_min=0.0, y_max=1.0, out_of_bounds="clip")
        model.fit(probabilities[:, index], (classes == index).astype(float))
        xs.append([float(x) for x in model.X_thresholds_])
        ys.append([float(y) for y in model.y_thresholds_])
    return {"x": xs, "y": ys}
