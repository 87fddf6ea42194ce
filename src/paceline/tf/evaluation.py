"""Evaluation and prediction in TensorFlow: every sample once, sums of losses, rows of predictions, metrics."""

from __future__ import annotations

import inspect
import itertools
import logging
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from paceline.core.metrics import jsonable, prefix_metrics
from paceline.core.outputs import EvalLoopOutput, EvalPrediction, check_metrics
from paceline.core.rows import RowCollector
from paceline.core.signals import Interrupted
from paceline.core.spill import Spill
from paceline.core.streaming import is_streaming, with_last
from paceline.tf.batches import Array, map_leaves, separate, size_of, to_array
from paceline.tf.engine import place, told_plainly
from paceline.tf.framework import tf
from paceline.tf.objective import NUM_COUNTS, Objective, count
from paceline.tf.precision import evaluation_precision, in_precision

logger = logging.getLogger(__name__)


class Predictor:
    """Forward passes without gradients, compiled once for all evaluations of a Trainer.

    Args:
        strategy: where the replicas are. Each process evaluates every sample on its own ones.
        objective: calls the model, makes and weighs its loss.
        prediction_step: the Trainer's, bound: `(features, labels, count) -> predictions`, on one replica.
        distributed_prediction_steps: the Trainer's, bound: `((features, labels)) ->` what every replica returned.
        xla: compile with XLA.
    """

    def __init__(
        self,
        *,
        strategy: Any,
        objective: Objective,
        prediction_step: Callable[..., Any],
        distributed_prediction_steps: Callable[..., Any],
        xla: bool = False,
    ) -> None:
        self.strategy, self.objective = strategy, objective
        self.prediction_step, self.distributed_prediction_steps = prediction_step, distributed_prediction_steps
        self._counts: Any = None
        self._own: Any = None
        self._loss: Any = None
        self.num_traces = 0
        self.precision = ""  # of the evaluation: each has a trace of its own
        is_single = strategy.num_replicas_in_sync == 1
        self._run = tf.function(self._trace, reduce_retracing=True, jit_compile=True if xla and is_single else None)

    def __call__(self, batch: tuple[Any, Any]) -> tuple[Any, Any]:
        """What each replica makes of a batch, losses and predictions, on its device."""
        with told_plainly():
            results: tuple[Any, Any] = self._run(*place(self.strategy, batch, None), self.precision)
        self.objective.check_labels(batch[1])
        return results

    def read(self, size: int, results: tuple[Any, Any]) -> tuple[float | None, Any]:
        """The sum of a batch's losses (None without labels), and its predictions as arrays.

        Args:
            size: samples in the batch.
            results: what the call returned for it.
        """
        losses, outputs = results
        sizes = [part for part in self._sizes(size) if part]
        with told_plainly():
            loss = None if losses[0] is None else float(sum(float(value) for value in losses))
            parts = [map_leaves(to_host, output) for output in outputs[: len(sizes)]]
        return loss, parts[0] if len(parts) == 1 else tf.nest.map_structure(lambda *rows: join(rows), *parts)

    def _sizes(self, size: int) -> list[int]:
        num = 1 if self.strategy.num_replicas_in_sync == 1 else len(self.strategy.extended.worker_devices)
        bounds = [size * part // num for part in range(num + 1)]
        return [stop - start for start, stop in itertools.pairwise(bounds)]

    def _trace(self, features: Any, labels: Any, counts: Any, precision: str) -> tuple[Any, Any]:
        self.num_traces += 1
        self._counts = counts
        losses, outputs = self.distributed_prediction_steps((features, labels))
        return self._local(losses), self._local(outputs)

    def _local(self, value: Any) -> tuple[Any, ...]:
        """What each replica of this process returned."""
        if self.strategy.num_replicas_in_sync == 1:
            return (value,)
        first = next(leaf for leaf in tf.nest.flatten(value) if leaf is not None) if value is not None else None
        num = 1 if first is None else len(self.strategy.experimental_local_results(first))

        def pick(leaf: Any, number: int) -> Any:
            return None if leaf is None else self.strategy.experimental_local_results(leaf)[number]

        return tuple(tf.nest.map_structure(lambda leaf, n=number: pick(leaf, n), value) for number in range(num))

    def run_replicas(self, features: Any, labels: Any) -> tuple[Any, Any]:
        """Call the Trainer's prediction_step on every replica: losses and predictions of each."""
        results: tuple[Any, Any] = self.strategy.run(self._on_replica, args=(features, labels, self._counts))
        return results

    def _on_replica(self, features: Any, labels: Any, counts: Any) -> tuple[Any, Any]:
        self._own, self._loss = counts[0], None
        outputs = self.prediction_step(features, labels, counts[1][0])
        return self._loss, outputs

    def predict(self, features: Any, labels: Any, run_model: Callable[..., Any]) -> Any:
        """The predictions of one replica, the body of `TFTrainer.prediction_step`; its loss is added up beside."""
        loss, outputs = run_model(features, labels, False)
        if loss is not None:
            self._loss = self.objective.weigh(loss, labels, self._own, tf.ones([NUM_COUNTS]))
        return outputs


def check_metric(metric: Any, is_called_each: bool) -> None:
    """Refuse a function that `batch_eval_metrics` cannot call batch by batch.

    Raises:
        ValueError: it does not take `compute_result`.
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
    """A tensor as an array; bfloat16, which numpy lacks, as float32."""
    return to_array(tf.cast(leaf, tf.float32) if leaf.dtype == tf.bfloat16 else leaf)  # type: ignore[no-any-return]


def join(parts: tuple[Array, ...]) -> Array:
    """The rows of several replicas under each other."""
    return np.concatenate(parts) if np.ndim(parts[0]) else np.stack(parts)


class Gathering:
    """What an evaluation has seen so far: the sum of the losses, and rows for the metrics.

    Args:
        trainer: its arguments, predictor and metrics.
        loss_only: keep nothing but the loss.
        spill: when rows leave memory.
    """

    def __init__(self, trainer: Any, loss_only: bool, spill: Spill) -> None:
        self.trainer, self.loss_only = trainer, loss_only
        self.metric = trainer.compute_metrics if not loss_only and is_streaming(trainer.compute_metrics) else None
        if self.metric is not None:
            self.metric.reset()
        is_function = trainer.compute_metrics is not None and self.metric is None
        self.calls_each = is_function and trainer.args.batch_eval_metrics
        self.called: dict[str, Any] = {}  # what metrics that are called for each batch returned last
        self.loss, self.weight, self.num_samples = 0.0, 0.0, 0
        names = ("predictions", "label_ids", "inputs", "losses")
        self.host_every = trainer.args.eval_accumulation_steps or 1
        self.waiting: list[tuple[Any, Any, bool, Any]] = []  # batches whose results are on the device
        self.kept = {name: RowCollector(trainer.args.eval_do_concat_batches, spill=spill) for name in names}

    def add(self, batch: Any, is_last: bool) -> None:
        """Run the model over a batch; results of as many as `eval_accumulation_steps` move to the host together."""
        features, labels = separate(batch, self.trainer.label_names)
        self.waiting.append((features, labels, is_last, self.trainer.predictor((features, labels))))
        if is_last or len(self.waiting) >= self.host_every:
            waiting, self.waiting = self.waiting, []
            for results in waiting:
                self.take(*results)

    def take(self, features: Any, labels: Any, is_last: bool, results: Any) -> None:
        """Move the results of a batch to the host, and keep what is asked for."""
        trainer, size = self.trainer, size_of(features)
        loss, outputs = trainer.predictor.read(size, results)
        own = float(count(features, labels)[trainer.objective.kind])
        self.num_samples += size
        if loss is not None:
            self.loss, self.weight = self.loss + loss, self.weight + own
        if self.loss_only:
            return
        found = keep(trainer, features, labels, outputs, None if loss is None or not own else loss / own)
        if self.metric is not None and labels is not None:
            self.metric.update(EvalPrediction(**found))
            return
        if self.calls_each and labels is not None:
            self.called = self.trainer.compute_metrics(EvalPrediction(**found), compute_result=is_last) or self.called
            return
        for name, value in found.items():
            self.kept[name].add(value, size)

    def metrics(self, gathered: dict[str, Any], is_evaluation: bool) -> dict[str, Any]:
        """The user's metrics, and the mean loss."""
        metrics: dict[str, Any] = {}
        if self.metric is not None:
            metrics = dict(self.metric.compute())
        elif self.calls_each and not self.loss_only:
            metrics = dict(check_metrics(self.called))
        elif self.trainer.compute_metrics is not None and not self.loss_only:
            metrics = call_metrics(self.trainer.compute_metrics, gathered, is_evaluation)
        if self.weight:
            metrics["loss"] = self.loss / self.weight
        return metrics


def run_evaluation(
    trainer: Any, batches: Iterable[Any], loss_only: bool, prefix: str, is_evaluation: bool = True
) -> EvalLoopOutput:
    """Every batch once. The body of `TFTrainer.prediction_loop`.

    Returns: predictions and labels with one row per sample (None where only the loss is asked, or metrics are taken
        batch by batch), metrics under the prefix, and the number of samples.
    """
    args = trainer.args
    limit = None if args.eval_spill_gb == float("inf") else int(args.eval_spill_gb * 2**30)
    # always: the model is traced once for each precision, for evaluations in a run and those before and after it
    precision = evaluation_precision(args)
    trainer.predictor.precision = precision[0]
    with Spill(limit, args.output_dir) as spill, in_precision(trainer.model, *precision):
        seen = Gathering(trainer, loss_only, spill)
        for batch, is_last in with_last(batches):
            if trainer.run is not None and trainer.run.signals.requested is not None:
                raise Interrupted
            seen.add(batch, is_last)
            trainer.control = trainer.callback_handler.fire("on_prediction_step", args, trainer.state, trainer.control)
        gathered = {name: collector.result() for name, collector in seen.kept.items()}
    metrics = prefix_metrics(jsonable(seen.metrics(gathered, is_evaluation)), prefix)
    if seen.num_samples == 0:
        logger.warning("The evaluation gave no batch: its data is empty, or a generator that has been read before.")
    return EvalLoopOutput(gathered["predictions"], gathered["label_ids"], metrics, seen.num_samples)


def keep(trainer: Any, features: Any, labels: Any, outputs: Any, loss: float | None) -> dict[str, Any]:
    """What of a batch metrics are given."""
    host_labels = map_leaves(to_array, labels)
    if trainer.preprocess_logits_for_metrics is not None:
        outputs = map_leaves(to_array, trainer.preprocess_logits_for_metrics(outputs, host_labels))
    found = {"predictions": outputs, "label_ids": host_labels}
    include = trainer.args.include_for_metrics or ()
    if "inputs" in include:
        found["inputs"] = map_leaves(to_array, features)
    if "loss" in include:
        found["losses"] = loss
    return found


def call_metrics(metric: Callable[..., Any], gathered: dict[str, Any], is_evaluation: bool) -> dict[str, Any]:
    """The user's metrics over everything that was seen; none where there are no labels."""
    if gathered["predictions"] is None or gathered["label_ids"] is None:
        if not is_evaluation:
            return {}
        logger.warning("compute_metrics was not called: the batches hold no labels. Name them with label_names=[...].")
        return {}
    return dict(check_metrics(metric(EvalPrediction(**gathered))))
