"""Evaluation and prediction in TensorFlow: every sample is processed once, for losses, predictions and metrics."""

from __future__ import annotations

import inspect
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.core.disk_buffer import DiskBuffer
from paceline.core.metrics import jsonable, prefix_metrics
from paceline.core.outputs import EvalLoopOutput, EvalPrediction, check_metrics
from paceline.core.rows import RowCollector
from paceline.core.signals import Interrupted
from paceline.core.streaming import is_streaming, with_last
from paceline.predictions.augmentation import EXTRA_ROWS, AugmentedSteps
from paceline.tensorflow.coupling import OF_EVALUATION, CouplingCheck
from paceline.tensorflow.data.batches import Array, map_leaves, separate, size_of, split_weights, to_array, to_rows
from paceline.tensorflow.framework import tf
from paceline.tensorflow.objective import SAMPLES, TOKENS, Objective, Share, count, mean_of
from paceline.tensorflow.placement import place
from paceline.tensorflow.precision import in_precision
from paceline.tensorflow.traced_errors import told_plainly

logger = logging.getLogger(__name__)


@dataclass(eq=False, kw_only=True)
class Predictor:
    """Runs forward passes without gradients, compiled once for all evaluations of a Trainer.

    Args:
        strategy: places the replicas. Each process evaluates every sample on its own replicas.
        objective: calls the model, computes and weights its loss.
        prediction_step: the Trainer's bound method `(features, labels, count) -> predictions`, on one replica.
        distributed_prediction_steps: the Trainer's bound method `((features, labels)) -> results of every replica`.
        xla: compile with XLA, on a single replica.
    """

    strategy: Any
    objective: Objective
    prediction_step: Callable[..., Any]
    distributed_prediction_steps: Callable[..., Any]
    xla: bool = False

    def __post_init__(self) -> None:
        self._counts: Any = None
        self._share = Share(None, None)
        self._loss: Any = None
        self._is_prediction = False  # set while a replica is traced
        self._is_prepared = False  # for batches with labels
        self.num_traces = 0
        compiles = self.xla and self.strategy.num_replicas_in_sync == 1
        self._coupling = CouplingCheck(OF_EVALUATION)  # of evaluations of several parts
        self._shares: set[float] = set()  # targets per sample of the batches so far
        self._run = tf.function(self._trace, reduce_retracing=True, jit_compile=True if compiles else None)

    def __call__(self, batch: tuple[Any, Any], precision: str, is_prediction: bool) -> tuple[Any, Any]:
        """Returns the losses and predictions of each replica, on its device.

        Args:
            batch: (features, labels) on the host.
            precision: precision of the evaluation; each precision has its own trace.
            is_prediction: without labels no loss is computed.
        """
        if not self._is_prepared:
            self._is_prepared = batch[1] is not None
            with self.strategy.scope():
                self.objective.prepare(batch)
            self.objective.check_replicas(int(self.strategy.num_replicas_in_sync), 1)
        with told_plainly():
            placed = place(self.strategy, batch, None)
            results: tuple[Any, Any] = self._run(*placed, precision, is_prediction)
        self.objective.check_labels(batch[1])
        return results

    def check(self, batches: Sequence[tuple[Any, Any]], num_batches: int) -> None:
        """Checks that the loss of an evaluation of several parts does not depend on their size; warns once.

        Args:
            batches: those that were not passed before, (features, labels) on the host.
            num_batches: batches of the evaluation so far.
        """
        self._check_shares(batches)
        self._coupling.see(self.objective, batches, num_batches * int(self.strategy.num_replicas_in_sync))

    def _check_shares(self, batches: Sequence[tuple[Any, Any]]) -> None:
        """Warns once if batches differ in targets per sample, and the divisor of a compiled loss is unknown."""
        compiled = self.objective.compiled
        names = [] if compiled is None or self.objective.loss_weight is not None else compiled.opaque_losses()
        if not names or len(self._shares) > 1:
            return
        counts = [count(*batch) for batch in batches]
        self._shares.update(round(each[TOKENS] / each[SAMPLES], 9) for each in counts)
        if len(self._shares) > 1:
            logger.warning(
                "%s of the model is treated as a mean over samples in an evaluation, and its batches differ in targets "
                "per sample: for a mean over targets, the loss depends on the size of the batches. Set loss_weight.",
                " and ".join(names),
            )

    def read(self, batch: tuple[Any, Any], results: tuple[Any, Any]) -> tuple[tuple[float, float, float] | None, Any]:
        """Returns (loss, its weight, layers' losses) of a batch, None without labels; and the predictions as arrays.

        Args:
            batch: the batch that was passed to the call.
            results: the result of that call.
        """
        losses, outputs = results
        with told_plainly():
            loss = None if losses[0] is None else self._mean(batch, losses)
            # a replica without a sample of its own has predicted a copy of the first one
            sizes = self._sizes(size_of(batch[0])) if len(outputs) > 1 else [1]
            parts = [map_leaves(to_host, output) for output, size in zip(outputs, sizes, strict=True) if size]
        return loss, parts[0] if len(parts) == 1 else tf.nest.map_structure(lambda *rows: join(rows), *parts)

    def _mean(self, batch: tuple[Any, Any], losses: Sequence[Mapping[int, Any]]) -> tuple[float, float, float]:
        """Returns (loss, its weight, layers' losses) of a batch, from what was measured on each replica."""
        [kind] = losses[0]
        found = [map_leaves(to_array, loss[kind]) for loss in losses]
        return mean_of(found, float(count(*batch)[kind]), size_of(batch[0]))

    def _sizes(self, size: int) -> list[int]:
        """Returns the samples of each replica of this process, as `share_out` splits them."""
        num = 1 if self.strategy.num_replicas_in_sync == 1 else len(self.strategy.extended.worker_devices)
        bounds = [size * part // num for part in range(num + 1)]
        return [stop - start for start, stop in itertools.pairwise(bounds)]

    def _trace(
        self, features: object, labels: object, counts: object, precision: str, is_prediction: bool
    ) -> tuple[Any, Any]:
        self.num_traces += 1
        self._counts = counts
        self._is_prediction = is_prediction
        losses, outputs = self.distributed_prediction_steps((features, labels))
        return self._local(losses), self._local(outputs)

    def _local(self, value: Any) -> tuple[Any, ...]:
        """Returns the results of this process's replicas."""
        if self.strategy.num_replicas_in_sync == 1:
            return (value,)
        first = next(leaf for leaf in tf.nest.flatten(value) if leaf is not None) if value is not None else None
        num = 1 if first is None else len(self.strategy.experimental_local_results(first))

        def pick(leaf: Any, number: int) -> Any:
            return None if leaf is None else self.strategy.experimental_local_results(leaf)[number]

        return tuple(tf.nest.map_structure(lambda leaf, n=number: pick(leaf, n), value) for number in range(num))

    def run_replicas(self, features: Any, labels: Any) -> tuple[Any, Any]:
        """Calls the Trainer's prediction_step on every replica; returns the losses and predictions of each."""
        results: tuple[Any, Any] = self.strategy.run(self._on_replica, args=(features, labels, self._counts))
        return results

    def _on_replica(self, features: Any, labels: Any, counts: Any) -> tuple[Any, Any]:
        labels, sample_weight = split_weights(labels)
        self._share, self._loss = Share(counts[0], counts[1], sample_weight), None
        self.objective.begin(self._share, self._is_prediction)
        outputs = self.prediction_step(features, labels, counts[1][0])
        self.objective.end()
        return self._loss, outputs

    def predict(self, features: object, labels: object, run_model: Callable[..., Any]) -> Any:
        """Returns the predictions of one replica and stores its loss; the body of `TFTrainer.prediction_step`."""
        loss, outputs = run_model(features, labels, False)
        if loss is not None:
            measured = self.objective.measure(loss, labels, self._share)
            self._loss = {self.objective.kind: measured}  # of this trace: a later one may have another kind of loss
        return outputs


def check_metric(metric: object, is_called_each: bool) -> None:
    """Checks that `batch_eval_metrics` can call a metric function batch by batch.

    Raises:
        ValueError: the function does not take `compute_result`.
    """
    if not is_called_each or not callable(metric):
        return
    names = inspect.signature(metric).parameters
    if "compute_result" not in names and all(item.kind is not item.VAR_KEYWORD for item in names.values()):
        raise ValueError(
            "batch_eval_metrics=True calls `compute_metrics(prediction, compute_result=...)` for each batch: give "
            "it a parameter `compute_result`, or set batch_eval_metrics=False."
        )


def to_host(leaf: Any) -> Array:
    """Returns a tensor as an array; bfloat16, which numpy lacks, becomes float32."""
    return to_rows(tf.cast(leaf, tf.float32) if leaf.dtype == tf.bfloat16 else leaf)  # type: ignore[no-any-return]


def join(parts: tuple[Array, ...]) -> Array:
    """Concatenates the rows of several replicas; stacks scalars."""
    return np.concatenate(parts) if np.ndim(parts[0]) else np.stack(parts)


@dataclass(frozen=True)
class EvaluationSettings:
    """The options of evaluations.

    Attributes:
        label_names: the keys that are labels, if batches are dicts; None: those known from transformers.
        precision: the precision in which the model computes.
        precision_option: the option that set it, for errors; None if it is that of the training.
        calls_each: metric functions are called for each batch.
        accumulation_steps: number of batches whose results stay on the device before they move to the host together.
        concatenates: rows of batches are joined; False keeps a list with an entry per batch.
        include: additional inputs of metrics, among "inputs" and "loss".
        spill_gb: rows beyond this size in memory, in GiB, are written to a file; infinity never writes.
        spill_folder: folder of that file.
    """

    label_names: Sequence[str] | None
    precision: str
    precision_option: str | None
    calls_each: bool
    accumulation_steps: int
    concatenates: bool
    include: Sequence[str]
    spill_gb: float
    spill_folder: str

    def disk_buffer(self) -> DiskBuffer:
        """Returns the buffer of the rows of one evaluation."""
        limit = None if self.spill_gb == float("inf") else int(self.spill_gb * 2**30)
        return DiskBuffer(limit, self.spill_folder)


@dataclass(eq=False, kw_only=True)
class Gathering:
    """Collects the results of an evaluation: the sum of the losses, and rows for the metrics.

    Args:
        compute_metrics: a function, a `StreamingMetric`, or None.
        preprocess: `(predictions, labels) -> predictions to store`, of one batch; None stores them unchanged.
        settings: the options of evaluations.
        loss_only: keep only the loss.
        disk_buffer: takes rows that exceed the memory limit.
        extra_rows: the names of further results, with a number for each sample.
        keeps_all: keep the rows even if metrics are computed batch by batch, because the caller returns them.
    """

    compute_metrics: Any
    preprocess: Callable[[Any, Any], Any] | None
    settings: EvaluationSettings
    loss_only: bool
    disk_buffer: DiskBuffer
    extra_rows: Sequence[str] = ()
    keeps_all: bool = False

    def __post_init__(self) -> None:
        self.include = self.settings.include
        self.metric = self.compute_metrics if not self.loss_only and is_streaming(self.compute_metrics) else None
        if self.metric is not None:
            self.metric.reset()
        self.calls_each = self.compute_metrics is not None and self.metric is None and self.settings.calls_each
        self.called: dict[str, Any] = {}  # latest result of a metric function that is called for each batch
        self.loss = 0.0
        self.weight = 0.0
        self.num_samples = 0
        self.layers = 0.0  # the layers' losses, times the samples
        self.has_labels = False  # of a batch so far
        names = ("predictions", "label_ids", "inputs", "losses", *self.extra_rows)
        self.kept = {name: RowCollector(self.settings.concatenates, disk_buffer=self.disk_buffer) for name in names}

    def add(
        self,
        features: Any,
        labels: Any,
        loss: tuple[float, float, float] | None,
        outputs: Any,
        is_last: bool,
        extra: Mapping[str, Any],
    ) -> None:
        """Adds a batch to the sums, and keeps the requested results.

        Args:
            features, labels: the batch, on the host.
            loss: the mean, its weight and the layers' losses; None without labels.
            outputs: the predictions, on the host.
            is_last: no batch follows.
            extra: the further results.
        """
        size = size_of(features)
        labels, _ = split_weights(labels)
        self.num_samples += size
        self.has_labels = self.has_labels or labels is not None
        if loss is not None:
            mean, weight, layers = loss
            self.loss, self.weight = self.loss + mean * weight, self.weight + weight
            self.layers += layers * size
        if self.loss_only:
            return
        found = self._keep(features, labels, outputs, None if loss is None or not loss[1] else loss[0] + loss[2])
        is_streamed = labels is not None and (self.metric is not None or self.calls_each)
        if is_streamed and self.metric is not None:
            self.metric.update(EvalPrediction(**found))
        elif is_streamed:
            self.called = self.compute_metrics(EvalPrediction(**found), compute_result=is_last) or self.called
        if is_streamed and not self.keeps_all:
            return
        for name, value in {**found, **extra}.items():
            self.kept[name].add(value, size)

    def _keep(self, features: object, labels: object, outputs: object, loss: float | None) -> dict[str, Any]:
        """Returns the parts of a batch that the metrics receive."""
        host_labels = map_leaves(to_rows, labels)
        if self.preprocess is not None:
            outputs = map_leaves(to_array, self.preprocess(outputs, host_labels))
        found = {"predictions": outputs, "label_ids": host_labels}
        if "inputs" in self.include:
            found["inputs"] = map_leaves(to_array, features)
        if "loss" in self.include:
            found["losses"] = loss
        return found

    def rows(self) -> dict[str, Any]:
        """Returns the kept results by name, with one row per sample; None for results that were not kept."""
        return {name: collector.result() for name, collector in self.kept.items()}

    def metrics(self, rows: dict[str, Any], is_evaluation: bool) -> dict[str, Any]:
        """Returns the metrics of the user's function or object."""
        if self.metric is not None:
            return dict(self.metric.compute())
        if self.compute_metrics is None or self.loss_only:
            return {}
        if self.calls_each:
            return dict(check_metrics(self.called))
        kept = {name: value for name, value in rows.items() if name not in self.extra_rows}
        return call_metrics(self.compute_metrics, kept, is_evaluation)

    def mean_loss(self) -> float | None:
        """Returns the mean loss over all samples or targets; None without labels."""
        return self.loss / self.weight + self.layers / self.num_samples if self.weight else None


@dataclass(eq=False, kw_only=True)
class Evaluator:
    """Runs the model over all batches of a dataset once.

    Args:
        model: computes in the precision of the settings during an evaluation.
        predictor: runs the forward passes.
        settings: the options of evaluations.
        compute_metrics: a function, a `StreamingMetric`, or None.
        preprocess: `(predictions, labels) -> predictions to store`, of one batch; None stores them unchanged.
        compiled: a compiled model whose metrics each evaluation resets and accumulates; None without one.
        is_interrupted: returns True once a signal has requested a stop.
        on_step: called after each batch.
        augmented: predicts each batch in several ways; None: once.
    """

    model: Any
    predictor: Predictor
    settings: EvaluationSettings
    compute_metrics: Any
    preprocess: Callable[[Any, Any], Any] | None
    compiled: Any
    is_interrupted: Callable[[], bool]
    on_step: Callable[[], None]
    augmented: AugmentedSteps | None = None

    def run(
        self, batches: Iterable[Any], *, loss_only: bool, prefix: str, is_evaluation: bool = True
    ) -> EvalLoopOutput:
        """Evaluates every batch once. The body of `TFTrainer.prediction_loop`.

        Args:
            batches: each with features and labels, or features alone.
            loss_only: keep only the loss.
            prefix: prefix of the metric names.
            is_evaluation: False if labels may be missing.

        Returns: predictions and labels with one row per sample (None if only the loss is requested, or an evaluation
            computes metrics batch by batch), metrics under the prefix, and the number of samples.

        Raises:
            Interrupted: a signal requested a stop.
        """
        if self.augmented is not None:
            self.augmented.check_is_wanted(loss_only)
        precision = self.settings.precision, self.settings.precision_option
        with self.settings.disk_buffer() as disk_buffer, in_precision(self.model, *precision):
            seen = Gathering(
                compute_metrics=self.compute_metrics,
                preprocess=self.preprocess,
                settings=self.settings,
                loss_only=loss_only,
                disk_buffer=disk_buffer,
                extra_rows=() if self.augmented is None else EXTRA_ROWS,
                keeps_all=not is_evaluation,
            )
            if self.compiled is not None:
                self.compiled.reset_metrics()
            self._run_batches(batches, seen, not is_evaluation)
            rows = seen.rows()
        metrics = seen.metrics(rows, is_evaluation)
        if self.compiled is not None:
            metrics = {**self.compiled.read_metrics(seen.has_labels), **metrics}
        if self.augmented is not None:
            metrics.update(self.augmented.finish(rows))
        loss = seen.mean_loss()
        if loss is not None:
            metrics.setdefault("loss", loss)  # the user's own goes first
        if seen.num_samples == 0:
            logger.warning("The evaluation yielded no batch: its data is empty, or an exhausted generator.")
        named = prefix_metrics(jsonable(metrics), prefix)
        return EvalLoopOutput(rows["predictions"], rows["label_ids"], named, seen.num_samples)

    def _run_batches(self, batches: Iterable[Any], seen: Gathering, is_prediction: bool) -> None:
        waiting: list[tuple[Any, Any, Any, bool]] = []  # batches whose results are still on the device
        unchecked: list[tuple[Any, Any]] = []
        for number, (batch, is_last) in enumerate(with_last(batches), 1):
            if self.is_interrupted():
                raise Interrupted
            features, labels = separate(batch, self.settings.label_names)
            unchecked.append((features, labels))
            results = self.predictor((features, labels), self.settings.precision, is_prediction)
            if number > 1 or self.predictor.strategy.num_replicas_in_sync > 1:
                self.predictor.check(unchecked, number)
                unchecked = []
            waiting.append((features, labels, results, is_last))
            if is_last or len(waiting) >= self.settings.accumulation_steps:
                for features, labels, results, ends in waiting:
                    loss, outputs = self._read(features, labels, results)
                    seen.add(features, labels, loss, outputs, ends, self.augmented.rows() if self.augmented else {})
                waiting.clear()
            self.on_step()

    def _read(self, features: Any, labels: Any, results: tuple[Any, Any]) -> tuple[Any, Any]:
        """Returns the loss and the predictions of one batch, of one pass or of several combined ones."""
        loss, outputs = self.predictor.read((features, labels), results)
        if self.augmented is None:
            return loss, outputs
        found, _ = split_weights(labels)
        is_numbers = getattr(getattr(found, "dtype", None), "name", "").startswith(("float", "bfloat"))
        return loss, self.augmented.combine(features, outputs, tuple(found.shape) if is_numbers else None, self._pass)

    def _pass(self, features: Any) -> Any:
        """Returns the predictions of transformed features."""
        batch = features, None
        return self.predictor.read(batch, self.predictor(batch, self.settings.precision, True))[1]


def call_metrics(metric: Callable[..., Any], gathered: dict[str, Any], is_evaluation: bool) -> dict[str, Any]:
    """Returns the user's metrics over all results; empty without labels."""
    if gathered["predictions"] is None or gathered["label_ids"] is None:
        if not is_evaluation:
            return {}
        logger.warning("compute_metrics was not called: the batches hold no labels. Name them with label_names=[...].")
        return {}
    return dict(check_metrics(metric(EvalPrediction(**gathered))))
