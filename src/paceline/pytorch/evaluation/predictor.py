"""Evaluation and prediction: the loop over the batches, mean losses, predictions, metrics and speed."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.core.contracts import Strategy
from paceline.core.disk_buffer import DiskBuffer
from paceline.core.metrics import jsonable, prefix_metrics, speed_metrics
from paceline.core.optional import LateModule
from paceline.core.outputs import EvalLoopOutput, check_metrics
from paceline.core.signals import Interrupted
from paceline.pytorch.data.loading import batch_size_of, close_loader, loader_length, order_by_length, sample_count
from paceline.pytorch.distributed.precision import narrow
from paceline.pytorch.distributed.strategy import is_out_of_memory
from paceline.pytorch.evaluation.loss_sum import LossSum
from paceline.pytorch.evaluation.prediction_buffer import (
    EvaluationOptions,
    PredictionBuffer,
    announce,
    make_prediction,
    to_host,
    with_rows,
)
from paceline.pytorch.model.loss import Counts, LossNormalizer
from paceline.pytorch.model.reductions import Observation
from paceline.pytorch.probes.loss import LossProbe, Part

if TYPE_CHECKING:
    from paceline.core import streaming
    from paceline.pytorch.evaluation.augmentation import TensorSteps
    from paceline.pytorch.evaluation.token_metrics import TokenMetrics
else:
    streaming = LateModule("paceline.core.streaming")

logger = logging.getLogger(__name__)

MAX_COPIES = 16  # copies of a batch on which a sum is tested; a constant, as the number of batches may be unknown

ADVICE_ON_MEMORY = (
    "Evaluation hit an out-of-memory error in a batch of {} samples. Set a smaller per_device_eval_batch_size; where "
    "predictions pile up on the device, eval_accumulation_steps=1; where they are not needed, "
    "prediction_loss_only=True, or preprocess_logits_for_metrics to keep less of them."
)


@dataclass(eq=False, kw_only=True)
class EvaluationLoop:
    """Runs a model over batches.

    Args:
        model: the model as the strategy prepared it.
        strategy: places its tensors.
        normalizer: weights losses.
        prediction_step: the Trainer's, bound: `(model, inputs, loss_only, ignore_keys) -> (loss, logits, labels)`.
        count_items: `(batches) -> num_items_in_batch` as passed to the model, which may be None.
        compute_metrics: `(EvalPrediction) -> dict`, with `compute_result` when streaming, or a `StreamingMetric`; None:
            the loss only.
        preprocess_logits: `(logits, labels) -> predictions to store`.
        options: the options from the arguments.
        name_inputs: gives the values of a tuple batch the names of forward's parameters.
        on_step: called after each batch (fires on_prediction_step).
        is_stopping: returns True if the run was asked to stop.
        expect: `(batch) -> expected bytes of its predictions`, or None if unknown.
        augmented: predicts each batch in several ways; None: once.
        token_metrics: computes metrics of the targets, with `log_token_metrics`; None: none.
        probes: find out the reduction of the loss by further passes.
    """

    multiple = 1.0  # the factor by which user code has multiplied the losses; they are divided by it
    waits_for_others = False  # True if passes run collectives, so that all processes must make the same number

    model: nn.Module
    strategy: Strategy
    normalizer: LossNormalizer
    prediction_step: Callable[..., tuple[Any, Any, Any]]
    count_items: Callable[[Sequence[Any]], Any]
    compute_metrics: Any  # a function, a StreamingMetric, or None
    preprocess_logits: Callable[[Any, Any], Any] | None
    options: EvaluationOptions
    name_inputs: Callable[[Any], Any]
    on_step: Callable[[], None]
    is_stopping: Callable[[], bool]
    expect: Callable[[Any], int | None] | None = None
    augmented: TensorSteps | None = None
    token_metrics: TokenMetrics | None = None
    probes: bool = True

    def __post_init__(self) -> None:
        self.metric: Any = self.compute_metrics if streaming.is_streaming(self.compute_metrics) else None
        if self.metric is not None:
            self.compute_metrics = None
        self._looks = False  # the batch in progress is probed
        self._before: Part | None = None  # the previous batch, if it had one sample
        self._streamed: dict[str, Any] = {}
        self._keeps = True  # store the model's outputs until the end

    def run(
        self,
        loader: object,
        *,
        loss_only: bool,
        ignore_keys: list[str] | None,
        prefix: str,
        keep_streamed: bool = False,
    ) -> EvalLoopOutput:
        """Evaluates every batch of `loader` once.

        Args:
            loader: yields the batches.
            loss_only: store only the loss.
            ignore_keys: outputs of the model to drop.
            prefix: prefix of the metric names.
            keep_streamed: store the predictions even with streaming metrics, because the caller returns them.

        Returns:
            Predictions and labels with one row per sample, in dataset order (None with `loss_only` or streaming),
            metrics, and the number of samples.
        """
        total, of_tokens = self._make_sum(), {}
        is_streamed = self.options.streaming and not loss_only
        self._keeps = not loss_only and (keep_streamed or not is_streamed)
        if self.metric is not None:
            self.metric.reset()
        with DiskBuffer(self.options.spill_bytes, self.options.spill_folder) as disk_buffer, self.normalizer.put_back():
            kept = self._make_buffer(disk_buffer)
            as_cast = casting(self.model, self.options.dtype, self.normalizer, self.strategy)
            self.normalizer.num_updates = 0
            with evaluating(self.model), as_cast:
                for batch, is_last in self._batches(loader):
                    rows, size = self._take(batch, total, kept, loader, loss_only, ignore_keys)
                    if self.strategy.is_lazy:
                        self.strategy.run_deferred()
                    if is_streamed:
                        self._stream(rows, size, is_last)
                    kept.add(rows if self._keeps or loss_only else {}, size, loader)
                    self.on_step()
            gathered = kept.result(order_by_length(loader))
            loss = total.mean()
            if self.token_metrics is not None:
                of_tokens = self.token_metrics.result(total.share, loss is not None)
        metrics = {**of_tokens, **self._metrics(gathered, loss_only)}
        if self.augmented is not None:
            metrics.update(self.augmented.finish(gathered))
        if loss is not None:
            metrics.setdefault("loss", loss)  # as in Hugging Face Trainer, the user's own goes first
        return EvalLoopOutput(
            predictions=gathered["predictions"],
            label_ids=gathered["labels"],
            metrics=prefix_metrics(jsonable(metrics), prefix),
            num_samples=kept.num_samples,
        )

    def _make_sum(self) -> LossSum:
        return LossSum(self.normalizer)

    def _make_buffer(self, disk_buffer: DiskBuffer) -> PredictionBuffer:
        return PredictionBuffer(self.options, disk_buffer)

    def _batches(self, loader: Any) -> Iterator[tuple[Any, bool]]:
        """Yields (batch, is_last); raises Interrupted if the run was asked to stop."""
        for batch, is_last in streaming.with_last(loader):
            if self.is_stopping():
                raise Interrupted
            self._looks = self._is_due(self.name_inputs(batch), is_last)
            yield batch, is_last
            self.normalizer.num_updates += 1

    def _take(
        self,
        batch: object,
        total: LossSum,
        kept: PredictionBuffer,
        loader: object,
        loss_only: bool,
        ignore_keys: list[str] | None,
    ) -> tuple[dict[str, Any], int]:
        """Runs one batch through the model; returns the data to store, and the number of samples."""
        batch = self.name_inputs(batch)
        size = batch_size_of(batch)
        if self.expect is not None and self._keeps and kept.num_samples == 0:
            announce(kept.disk_buffer, self.expect(batch), loader_length(loader))
        with advice_on_memory(size):
            return self._predict(batch, total, loss_only, ignore_keys), size

    def _predict(self, batch: object, total: LossSum, loss_only: bool, ignore_keys: list[str] | None) -> dict[str, Any]:
        """Runs one batch through the model, adds its loss to `total`, and returns the data to store, on the device."""
        counts = self.normalizer.count(batch)
        if self._looks:
            self._observe(batch, counts)
        self._before = Part(copy.copy(batch), counts) if counts.samples == 1 else None
        given = dict(batch) if isinstance(batch, Mapping) and "inputs" in self.options.include else None
        num_items = self.count_items([batch])  # before the pass, as an overridden compute_loss may pop the labels
        with nullcontext() if self.token_metrics is None else self.token_metrics.observed(self.model):
            loss, logits, labels = self._step(batch, loss_only, ignore_keys)
        if loss is not None:
            loss = loss.detach().mean()
            loss = loss if self.multiple == 1 else loss / self.multiple
            total.add(loss, counts, num_items)
        if logits is not None and self.preprocess_logits is not None:
            logits = self.preprocess_logits(logits, labels)
        rows = {"predictions": logits, "labels": labels}
        if given is not None:
            rows["inputs"] = given.get(getattr(self.model, "main_input_name", "input_ids"), given)
        if "loss" in self.options.include:
            rows["losses"] = loss
        return rows if self.augmented is None else {**rows, **self.augmented.rows()}

    def _step(self, batch: object, loss_only: bool, ignore_keys: list[str] | None) -> tuple[Any, Any, Any]:
        """Returns (loss, predictions, labels) of one batch, of one pass or of several combined ones."""
        if self.augmented is None:
            return self.prediction_step(self.model, batch, loss_only, ignore_keys)
        return self.augmented.step(self.prediction_step, self.model, batch, loss_only, ignore_keys)

    def _is_due(self, batch: object, is_last: bool) -> bool:
        """Returns True if the loss of this batch and of parts of it must be probed."""
        normalizer = self.normalizer
        is_said = normalizer.declared not in (None, "samples") or normalizer.is_scaled
        if not self.probes or is_said or (is_last and normalizer.num_updates == 0):
            return False  # the reduction is decided, or there is a single batch, whose weight does not matter
        counts = [part.counts for part in self._parts(batch, normalizer.count(batch))]
        is_done = normalizer.is_confirmed and not normalizer.is_open_for(counts, True, normalizer.candidates)
        return sum(item.samples for item in counts) > 1 and not is_done and normalizer.is_due(counts, by_row=True)

    def _parts(self, batch: object, counts: Counts) -> list[Part]:
        """Returns the samples for a probe: the batch, and with batches of one sample also the previous batch."""
        parts = [Part(batch, counts)]
        return [*parts, self._before] if counts.samples == 1 and self._before is not None else parts

    def _observe(self, batch: object, counts: Counts) -> None:
        """Probes the loss of a batch and of parts of it."""
        # no copies with collectives, because processes that only take part in a probe do not run copies
        copies = 1 if self.waits_for_others else MAX_COPIES
        probe = LossProbe(self.model, self._loss_of, 2, copies, self.waits_for_others, [self.prediction_step])
        self.normalizer.learn(self._gather(probe.look(self.normalizer, self._parts(copy.copy(batch), counts), None)))

    def _loss_of(self, batch: object, num_items: object) -> Tensor | None:
        return self.prediction_step(self.model, batch, True, None)[0]  # type: ignore[no-any-return]

    def _gather(self, observations: list[Observation]) -> list[Observation]:
        """Returns the observations of all processes."""
        return observations

    def _stream(self, rows: dict[str, Any], size: int, is_last: bool) -> None:
        """Passes one batch to the metrics; skips a batch without predictions or labels.

        A `StreamingMetric` gets arrays on the host. A function gets tensors on their device, as in Hugging Face
        Trainer.
        """
        if rows["predictions"] is None or rows["labels"] is None:
            return
        if self.metric is not None:
            rows = {name: to_host(value) for name, value in rows.items()}
        for name in {"predictions", "losses"} & rows.keys():
            rows[name] = with_rows(rows[name], size)
        prediction = make_prediction(rows)
        if self.metric is not None:
            self.metric.update(prediction)
        elif self.compute_metrics is not None:
            metrics = self.compute_metrics(prediction, compute_result=is_last) or self._streamed
            self._streamed = dict(check_metrics(metrics)) if is_last else metrics

    def _metrics(self, gathered: dict[str, Any], loss_only: bool) -> dict[str, Any]:
        """Returns the user's metrics over all results."""
        if loss_only:
            return {}
        if self.metric is not None:
            return dict(self.metric.compute())
        if self.options.streaming:
            return dict(self._streamed)
        if self.compute_metrics is None or gathered["predictions"] is None or gathered["labels"] is None:
            return {}
        return dict(check_metrics(self.compute_metrics(make_prediction(gathered))))


@contextmanager
def advice_on_memory(size: int) -> Iterator[None]:
    """Converts an out-of-memory error in a batch of `size` samples to a MemoryError that names remedies."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise MemoryError(ADVICE_ON_MEMORY.format(size)) from error


@contextmanager
def in_evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Sets evaluation mode, and restores the mode of every module afterwards."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in training.items():
            module.training = mode


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Sets evaluation mode and disables gradients; restores both afterwards."""
    with in_evaluation_mode(model), torch.no_grad():
        yield


@contextmanager
def casting(model: nn.Module, dtype: torch.dtype | None, normalizer: LossNormalizer, strategy: Any) -> Iterator[None]:
    """Casts a model and its floating-point inputs, but not labels, to `dtype`; None does nothing.

    The original weights are restored exactly afterwards.
    """
    if dtype is None:
        yield
        return
    cast = partial(narrow, dtype=dtype, kept=normalizer.label_names)
    handle = model.register_forward_pre_hook(lambda module, args, named: (cast(args), cast(named)), with_kwargs=True)
    try:
        with strategy.cast_model(model, dtype):
            yield
    finally:
        handle.remove()


@dataclass(eq=False, kw_only=True)
class Evaluator:
    """Implements `Trainer.evaluation_loop`.

    Args:
        make_loop: creates the loop over the batches after the contexts are entered.
        contexts: contexts around the loop, entered in this order: the weights to evaluate, the edits of the model.
        keeps_workers: `(loader) -> True` if its workers are kept alive after the evaluation.
        batch_size: samples per batch, for the log.
        loss_only: store only the loss, unless a call overrides it.
        reports_preparation: add the time of preparing the model, in seconds, to the metrics.
    """

    make_loop: Callable[[], EvaluationLoop]
    contexts: Sequence[Callable[[], AbstractContextManager[Any]]]
    keeps_workers: Callable[[Any], bool]
    batch_size: int
    loss_only: bool
    reports_preparation: bool

    def run(
        self,
        loader: object,
        description: str,
        loss_only: bool | None,
        ignore_keys: list[str] | None,
        prefix: str,
    ) -> EvalLoopOutput:
        """Runs the model over a loader once, and then stops the loader's workers unless a run keeps them.

        Args:
            loader: yields the batches.
            description: "Evaluation", or "Prediction", which returns predictions even with streaming metrics.
            loss_only: store only the loss; None: the default of this evaluator.
            ignore_keys: outputs of the model to drop.
            prefix: prefix of the metric names.
        """
        num_samples = sample_count(loader)
        logger.info("***** Running %s *****", description)
        logger.info("  Num examples = %s", "Unknown" if num_samples is None else num_samples)
        logger.info("  Batch size = %d", self.batch_size)
        start = time.perf_counter()
        try:
            with ExitStack() as stack:
                for context in self.contexts:
                    stack.enter_context(context())
                seconds = round(time.perf_counter() - start, 4)
                output = self.make_loop().run(
                    loader,
                    loss_only=self.loss_only if loss_only is None else loss_only,
                    ignore_keys=ignore_keys,
                    prefix=prefix,
                    keep_streamed=description == "Prediction",
                )
            if self.reports_preparation and output.metrics is not None:
                output.metrics[f"{prefix}_model_preparation_time"] = seconds
            return output
        finally:
            if not self.keeps_workers(loader):
                close_loader(loader)


def warn_of_gaps(output: EvalLoopOutput, prefix: str, label_names: Sequence[str], wants_metrics: bool) -> None:
    """Warns about requested results that an evaluation did not return, and of labels of some samples only.

    Args:
        output: the output of an evaluation without an error.
        prefix: prefix of the metric names.
        label_names: names under which a batch carries its labels.
        wants_metrics: the user's metrics are computed at the end, over all predictions.
    """
    if output.num_samples == 0:
        logger.warning("The evaluation yielded no batch: its data is empty, or an exhausted generator.")
        return
    names = ", ".join(label_names)
    if f"{prefix}_loss" not in (output.metrics or {}):
        logger.warning(
            "The evaluation has no %s_loss: the batches hold no target that counts under %s, or no loss is made "
            "of them. Name the columns of the labels with label_names=[...].",
            prefix,
            names,
        )
    if wants_metrics and output.label_ids is None:
        logger.warning(
            "compute_metrics was not called: the batches hold no labels under %s. Name them with label_names=[...].",
            names,
        )
    labels = output.label_ids
    if wants_metrics and isinstance(labels, np.ndarray) and len(labels) < (output.num_samples or 0):
        logger.warning(
            "compute_metrics was given the labels of %d of %d samples, whose rows are not those of the predictions: "
            "let every batch hold labels under %s.",
            *(len(labels), output.num_samples, names),
        )


def timed_metrics(output: EvalLoopOutput, prefix: str, start: float, num_batches: int | None) -> dict[str, float]:
    """Returns the metrics of an evaluation with its speed, which excludes preparing the model."""
    start += (output.metrics or {}).get(f"{prefix}_model_preparation_time", 0.0)
    spent = speed_metrics(prefix, start, num_samples=output.num_samples, num_steps=num_batches)
    return {**(output.metrics or {}), **spent}
