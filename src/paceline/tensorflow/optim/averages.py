"""Averages of the weights in TensorFlow: the model is evaluated and saved with them, and trains with its own weights.

A moving average weighs the last steps most; stochastic weight averaging is the plain mean from a step on (Izmailov et
al., 2018, arXiv:1803.05407). Moving statistics of batch norm are averaged like weights. A checkpoint's variables hold
the average, and its `averages.npz` the weights that were trained.
"""

from __future__ import annotations

import logging
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from paceline.args.averages import SWA, AverageSettings, averaging_of
from paceline.args.errors import UnsupportedOption
from paceline.args.plan import Plan
from paceline.args.sections import Options
from paceline.core.events import CallbackHandler, TrainerCallback
from paceline.tensorflow.checkpoint.variables import CheckpointError, assign, num_bytes, values_of
from paceline.tensorflow.engine import TFEngine
from paceline.tensorflow.framework import plain, tf
from paceline.tensorflow.precision import has_loss_scale

logger = logging.getLogger(__name__)

FILE = "averages.npz"
STATISTICS = ("moving_mean", "moving_variance")  # of batch norm


class WeightAverages:
    """Keeps the average of a model's weights, and exchanges it with the weights to evaluate and to save.

    Args:
        settings: the kind and settings of the average.
        variables: the variables of the model that are averaged.

    Attributes:
        num_updates: updates of the average so far.
    """

    def __init__(self, settings: AverageSettings, variables: list[Any]) -> None:
        self.settings, self.variables = settings, variables  # on replicas, which are equal, the first one is read
        self.num_updates = 0
        self._averages: list[Any] = []
        self._raw: list[Any] | None = None  # the model's own values, on the host, while it holds the average
        self._blend = tf.function(self._blend_all)
        if settings.kind != SWA:
            self._begin()

    @property
    def exists(self) -> bool:
        """True if there is an average to exchange: before the first update of a mean there is none."""
        return bool(self._averages)

    def _begin(self) -> None:
        # in 16 bits, the small changes of an average would be lost in rounding
        wide = [tf.cast(each, tf.float32) if each.dtype.size < 4 else tf.identity(each) for each in self.variables]
        self._averages = [tf.Variable(value, trainable=False) for value in wide]

    def _blend_all(self, weight: Any) -> None:
        for average, variable in zip(self._averages, self.variables, strict=True):
            change = tf.cast(variable, average.dtype) - average
            average.assign_add(change * tf.cast(weight, average.dtype))

    def update(self) -> None:
        """Adds the current weights to the average."""
        if not self._averages:
            self._begin()
        self._blend(tf.constant(self.settings.weight(self.num_updates), tf.float64))
        self.num_updates += 1

    # ---- the exchange

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Returns a context in which the model holds the average. Does nothing if it holds it, or if there is none."""
        if self._raw is not None or not self.exists:
            yield
            return
        try:
            self._raw = values_of(self.variables)
            self._put_in()
            yield
        finally:
            self.restore_raw()

    def _put_in(self) -> None:
        for variable, average in zip(self.variables, self._averages, strict=True):
            variable.assign(tf.cast(average, variable.dtype))

    def restore_raw(self) -> None:
        """Puts the model's own weights back, if it holds the average."""
        if self._raw is not None:
            assign(self.variables, self._raw)
            self._raw = None

    def adopt(self) -> None:
        """Puts the average into the model for good, and frees it."""
        self.restore_raw()
        if self.exists:
            self._put_in()
        self._averages = []

    # ---- in a checkpoint

    def num_bytes(self) -> int:
        """Returns the bytes that a checkpoint takes for them."""
        return 2 * num_bytes(self._averages)

    def write(self, folder: Path) -> None:
        """Writes the model's own weights and the average; nothing if there is no average."""
        if not self.exists:
            return
        raw = self._raw if self._raw is not None else values_of(self.variables)
        arrays: dict[str, Any] = {"kind": np.array(self.settings.kind), "num_updates": np.array(self.num_updates)}
        for number, (own, average) in enumerate(zip(raw, self._averages, strict=True)):
            # numpy's files know no bfloat16, which float32 holds exactly
            arrays[f"raw_{number}"] = own.astype(np.float32) if own.dtype.itemsize < 4 else own
            arrays[f"average_{number}"] = average.numpy()
        with open(folder / FILE, "wb") as file:
            np.savez(file, **arrays)

    def restore(self, checkpoint: Path, step: int) -> None:
        """Restores the average and the model's own weights from a checkpoint of an optimizer step.

        Raises:
            CheckpointError: the file is damaged, or belongs to another model.
        """
        if not (checkpoint / FILE).is_file():
            if self.settings.kind != SWA or step >= self.settings.start:
                logger.warning("%s holds no average: %s begins a new one.", checkpoint, self.settings.option)
            if self.settings.kind != SWA:
                self._begin()
            return
        try:
            # opened here, since numpy leaves a file open that it cannot read
            with open(checkpoint / FILE, "rb") as file, np.load(file, allow_pickle=False) as found:
                arrays = {name: found[name] for name in found.files}
            raw = [arrays[f"raw_{number}"] for number in range(len(self.variables))]
            averages = [arrays[f"average_{number}"] for number in range(len(self.variables))]
            kind, num_updates = str(arrays["kind"]), int(arrays["num_updates"])
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise CheckpointError(f"{checkpoint / FILE} is damaged, or of another model: {error}") from error
        self._check_shapes(checkpoint, [*raw, *averages])
        for variable, value in zip(self.variables, raw, strict=True):
            variable.assign(tf.cast(value, variable.dtype))
        self._averages, self.num_updates = [], 0
        self._blend = tf.function(self._blend_all)
        if kind != self.settings.kind:
            logger.warning("%s holds an average of the kind %r: %s begins a new one.", checkpoint, kind,
                           self.settings.option)  # fmt: skip
            if self.settings.kind != SWA:
                self._begin()
            return
        self._averages = [tf.Variable(value, trainable=False) for value in averages]
        self.num_updates = num_updates

    def _check_shapes(self, checkpoint: Path, values: list[Any]) -> None:
        shapes = [tuple(variable.shape) for variable in self.variables] * 2
        if [value.shape for value in values] != shapes or any(value.dtype.kind != "f" for value in values):
            raise CheckpointError(f"{checkpoint / FILE} holds the weights of another model.")


class Averaging(TrainerCallback):
    """Updates the average after each optimizer step that changed the weights."""

    def __init__(self, averages: WeightAverages, engine: TFEngine) -> None:
        self._averages, self._engine = averages, engine
        self._may_skip = engine.skips_non_finite or has_loss_scale(engine.optimizer)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Adds the weights to the average if this step is due; a skipped step adds nothing."""
        if not self._averages.settings.is_due(state.global_step):
            return
        is_applied = self._engine.unread[-1][-1]
        if is_applied is False or (self._may_skip and not bool(is_applied)):  # a read from the device
            return
        self._averages.update()


@contextmanager
def averaging(averages: WeightAverages | None, engine: TFEngine, handler: CallbackHandler) -> Iterator[None]:
    """Returns a context in which the average follows the optimizer steps; the model leaves it with its own weights."""
    if averages is None:
        yield
        return
    callback = Averaging(averages, engine)
    handler.callbacks.insert(0, callback)  # before callbacks that use the average
    try:
        yield
    finally:
        handler.pop_callback(callback)
        averages.restore_raw()


def statistics_of(model: Any) -> list[Any]:
    """Returns the moving statistics of a model's batch norm."""
    return [each for each in model.non_trainable_variables if each.name.split(":")[0].split("/")[-1] in STATISTICS]


def make_averages(options: Options, plan: Plan, model: Any, optimizer: Any, num_workers: int) -> WeightAverages | None:
    """Returns the averages of a run; None if no option requests them.

    Raises:
        UnsupportedOption: several workers, statistics of each replica, an optimizer that averages itself, a rewind, or
            a mean with batch norm.
    """
    if options.ema_decay is None and options.swa_start is None:
        return None
    settings = averaging_of(options, plan.max_steps, plan.updates_per_epoch)
    inner = getattr(optimizer, "inner_optimizer", optimizer)  # of a loss scale
    is_averaging = getattr(inner, "use_ema", False) or "ScheduleFree" in type(inner).__name__
    statistics = statistics_of(model)
    obstacles: Mapping[str, bool] = {
        f"{num_workers} workers: train on one machine, or use a Keras optimizer with use_ema=True": num_workers > 1,
        f"{type(inner).__name__}, which averages the weights itself: leave one of them out": is_averaging,
        "nonfinite_policy='rollback', which rewinds no average: set 'skip'": plan.nonfinite_policy == "rollback",
        "statistics that differ between replicas (synchronization=ON_READ): use one device": any(
            type(plain(each)).__name__ == "SyncOnReadVariable" for each in statistics
        ),
        "batch norm, whose statistics would be those of other weights: set ema_decay, which averages them": (
            settings.kind == SWA and bool(statistics)
        ),
    }
    for told, is_there in obstacles.items():
        if is_there:
            raise UnsupportedOption(f"{settings.option} with TensorFlow is not supported with {told}.")
    return WeightAverages(settings, [plain(each) for each in (*model.trainable_variables, *statistics)])


def warn_of_average(checkpoint: Path) -> None:
    """Warns of a run without an average that resumes from a checkpoint with one."""
    if (checkpoint / FILE).is_file():
        logger.warning(
            "%s holds an average of weights: without ema_decay or swa_start the run resumes from the average, and not "
            "from the weights that were trained.",
            checkpoint,
        )
