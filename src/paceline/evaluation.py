"""Evaluation and prediction: forward passes without gradients, sums of losses, rows of predictions, metrics."""

from __future__ import annotations

import importlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.core.contracts import Strategy
from paceline.core.metrics import jsonable, prefix_metrics, speed_metrics
from paceline.core.outputs import EvalLoopOutput, check_metrics
from paceline.core.signals import Interrupted
from paceline.core.spill import Spill
from paceline.core.streaming import StreamingMetric, is_streaming, with_last
from paceline.data.loading import batch_size_of, close_loader, loader_length, order_by_length
from paceline.distributed.precision import narrow, widened
from paceline.distributed.strategy import is_out_of_memory
from paceline.model.loss import IGNORE_INDEX, Counts, LossRule, Meaning
from paceline.model.objective import compute_loss_with_outputs
from paceline.model.outputs import detach, find_loss, is_named, is_same_value, read_predictions
from paceline.model.prediction_size import announce, expected_bytes
from paceline.model.prepare import edited_for_evaluation
from paceline.model.signature import innermost
from paceline.optim.modes import evaluation_weights
from paceline.predictions import EvaluationOptions, Kept, make_prediction, to_host, with_rows

if TYPE_CHECKING:
    from paceline.trainer import Trainer

logger = logging.getLogger(__name__)

ADVICE_ON_MEMORY = (
    "Out of memory while evaluating a batch of {} samples. Set a smaller per_device_eval_batch_size; where predictions "
    "pile up on the device, eval_accumulation_steps=1; where they are not needed, prediction_loss_only=True, or "
    "preprocess_logits_for_metrics to keep less of them."
)


@dataclass
class ReadingSum:
    """The losses so far under one reading of what they are: their sum, its weight, and what the model divided by."""

    total: Any = 0.0
    weight: float = 0.0
    divisors: float = 0.0

    def add(self, meaning: Meaning, loss: Tensor, counts: Counts, num_items: Any) -> None:
        """Add one batch; one without weight adds nothing, whatever its loss."""
        weight = meaning.weigh(counts.labels, counts.samples)
        if weight == 0:
            return
        divisor = float(num_items) if meaning.scaled and num_items is not None else float(weight)
        self.total = self.total + loss * divisor
        self.weight += weight
        self.divisors += divisor


class LossSum:
    """The weighted mean of the losses of any number of batches; the same for every way to cut the samples into batches.

    While several readings of the loss still agree, each batch is weighed under all of them, so that what a later
    batch decides counts for the earlier ones too. What is kept is one sum per reading, however many batches there are.
    """

    def __init__(self, rule: LossRule) -> None:
        self.rule = rule
        self._sums: dict[Meaning, ReadingSum] = {}

    def add(self, loss: Tensor, counts: Counts, num_items: Any) -> None:
        """Add one batch; nothing is read back from the device."""
        loss = loss.detach().double() if loss.device.type != "mps" else loss.detach()
        readings = [self.rule.meaning] if self.rule.is_settled else self.rule.held or [self.rule.meaning]
        self._sums = {meaning: self._sum_under(meaning) for meaning in readings}
        for meaning, reading in self._sums.items():
            reading.add(meaning, loss, counts, num_items)

    def _sum_under(self, meaning: Meaning) -> ReadingSum:
        """The sum so far; of a reading that was not followed so far, that of the likeliest one that was."""
        if meaning in self._sums:
            return self._sums[meaning]
        # that another value is ignored shows when there is one: before, the sums were the same
        alike = self._sums.get(replace(meaning, ignore_index=IGNORE_INDEX))
        return replace(alike or next(iter(self._sums.values()), ReadingSum()))

    def mean(self) -> float | None:
        """The mean loss; None when no batch had one. Waits for the device."""
        if not self._sums:
            return None
        return self._divide(self._sum_under(self.rule.meaning))

    def _divide(self, reading: ReadingSum) -> float | None:
        # a divisor that was never seen to hold is taken at its word
        weight = reading.weight if self.rule.is_verified else reading.divisors
        return float(reading.total) / weight if weight > 0 else None


class EvaluationLoop:
    """Runs a model over batches.

    Args:
        model: as the strategy prepared it.
        strategy: where its tensors live.
        rule: weighs losses.
        prediction_step: the Trainer's, bound: `(model, inputs, loss_only, ignore_keys) -> (loss, logits, labels)`.
        count_items: `(batches) -> num_items_in_batch` as the model gets it, or None.
        compute_metrics: `(EvalPrediction) -> dict`, with `compute_result` when streaming, or a `StreamingMetric`; None:
            the loss only.
        preprocess_logits: `(logits, labels) -> what is kept`.
        options: what the arguments ask.
        name_inputs: gives the values of a tuple batch the names of forward's parameters.
        on_step: called after each batch (fires on_prediction_step).
        is_stopping: whether the run was asked to stop.
        expect: `(batch) -> bytes` that its predictions will take, where that is known before; None: it is not.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        strategy: Strategy,
        rule: LossRule,
        prediction_step: Callable[..., tuple[Any, Any, Any]],
        count_items: Callable[[Sequence[Any]], Any],
        compute_metrics: Callable[..., dict[str, Any]] | StreamingMetric | None,
        preprocess_logits: Callable[[Any, Any], Any] | None,
        options: EvaluationOptions,
        name_inputs: Callable[[Any], Any],
        on_step: Callable[[], None],
        is_stopping: Callable[[], bool],
        expect: Callable[[Any], int | None] | None = None,
    ) -> None:
        self.model, self.strategy, self.rule = model, strategy, rule
        self.prediction_step, self.count_items = prediction_step, count_items
        self.metric: Any = compute_metrics if is_streaming(compute_metrics) else None
        self.compute_metrics: Any = None if self.metric is not None else compute_metrics
        self.preprocess_logits = preprocess_logits
        self.options, self.name_inputs, self.on_step, self.is_stopping = options, name_inputs, on_step, is_stopping
        self.expect = expect
        self._seen: Any = None
        self._streamed: dict[str, Any] = {}
        self._keeps = True  # what the model returns, for the end

    def run(
        self,
        loader: Any,
        *,
        loss_only: bool,
        ignore_keys: list[str] | None,
        prefix: str,
        keep_streamed: bool = False,
    ) -> EvalLoopOutput:
        """Evaluate every batch of `loader` once.

        Args:
            loader: gives the batches.
            loss_only: keep nothing but the loss.
            ignore_keys: outputs of the model to leave out.
            prefix: of the metrics' names.
            keep_streamed: keep the predictions though the metrics are streaming: they are what was asked for.

        Returns:
            predictions and labels with one row per sample, in the order of the dataset (None when `loss_only` or
            streaming), metrics, and the number of samples seen.
        """
        total = self._make_sum()
        is_streamed = self.options.streaming and not loss_only
        self._keeps = not loss_only and (keep_streamed or not is_streamed)
        if self.metric is not None:
            self.metric.reset()
        with Spill(self.options.spill_bytes, self.options.spill_folder) as spill, self.rule.put_back():
            kept = self._make_kept(spill)
            as_cast = casting(self.model, self.options.dtype, self.rule, self.strategy)
            with evaluating(self.model), as_cast:
                for batch, is_last in self._batches(loader):
                    rows, size = self._take(batch, total, kept, loader, loss_only, ignore_keys)
                    if self.strategy.defers:
                        self.strategy.run_deferred()
                    if is_streamed:
                        self._stream(rows, size, is_last)
                    kept.add(rows if self._keeps or loss_only else {}, size, loader)
                    self.on_step()
            gathered = kept.result(order_by_length(loader))
            loss = total.mean()
        metrics = self._metrics(gathered, loss_only)
        if loss is not None:
            metrics["loss"] = loss
        return EvalLoopOutput(
            predictions=gathered["predictions"],
            label_ids=gathered["labels"],
            metrics=prefix_metrics(jsonable(metrics), prefix),
            num_samples=kept.num_samples,
        )

    def _make_sum(self) -> LossSum:
        return LossSum(self.rule)

    def _make_kept(self, spill: Spill) -> Kept:
        return Kept(self.options, spill)

    def _batches(self, loader: Any) -> Iterator[tuple[Any, bool]]:
        """Each batch, and whether it is the last. Raises: Interrupted, where the run was asked to stop."""
        for batch, is_last in with_last(loader):
            if self.is_stopping():
                raise Interrupted
            yield batch, is_last

    def _take(
        self, batch: Any, total: LossSum, kept: Kept, loader: Any, loss_only: bool, ignore_keys: list[str] | None
    ) -> tuple[dict[str, Any], int]:
        """One batch through the model; what of it is to be kept, and how many samples it has."""
        batch = self.name_inputs(batch)
        size = batch_size_of(batch)
        if self.expect is not None and self._keeps and kept.num_samples == 0:
            announce(kept.spill, self.expect(batch), loader_length(loader))
        with advice_on_memory(size):
            return self._predict(batch, total, loss_only, ignore_keys), size

    def _predict(self, batch: Any, total: LossSum, loss_only: bool, ignore_keys: list[str] | None) -> dict[str, Any]:
        """One batch through the model: adds its loss, returns what of it is to be kept, still on the device."""
        rule = self.rule
        counts = rule.count(batch)
        looking = rule.telling(counts) > 0
        handle = self.model.register_forward_hook(self._keep) if looking else None
        given = dict(batch) if isinstance(batch, Mapping) and "inputs" in self.options.include else None
        num_items = self.count_items([batch])  # now: an overridden compute_loss may take the labels out
        try:
            loss, logits, labels = self.prediction_step(self.model, batch, loss_only, ignore_keys)
        finally:
            if handle is not None:
                handle.remove()
        if loss is not None:
            loss = loss.detach().mean()
            if looking:
                rule.look(loss, self._seen, counts, num_items)
            total.add(loss, counts, num_items)
        self._seen = None
        if logits is not None and self.preprocess_logits is not None:
            logits = self.preprocess_logits(logits, labels)
        rows = {"predictions": logits, "labels": labels}
        if given is not None:
            rows["inputs"] = given.get(getattr(self.model, "main_input_name", "input_ids"), given)
        if "loss" in self.options.include:
            rows["losses"] = loss
        return rows

    def _keep(self, module: nn.Module, args: Any, outputs: Any) -> None:
        self._seen = outputs

    def _stream(self, rows: dict[str, Any], size: int, is_last: bool) -> None:
        """Give one batch to the metrics. A batch without labels has none to give.

        A `StreamingMetric` gets arrays on the host, a function the tensors where they are: as the reference has it.
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
        """The user's metrics over everything that was seen."""
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
    """Says what to do where memory runs out over a batch of `size` samples."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise MemoryError(ADVICE_ON_MEMORY.format(size)) from error


@contextmanager
def in_evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode; afterwards every module is in the mode it was in."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in training.items():
            module.training = mode


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, without gradients; afterwards everything is as before."""
    with in_evaluation_mode(model), torch.no_grad():
        yield


@contextmanager
def casting(model: nn.Module, dtype: torch.dtype | None, rule: LossRule, strategy: Any) -> Iterator[None]:
    """A model cast to `dtype`, if asked, and its floating-point inputs; labels as they are.

    Afterwards the weights are as before, to the bit.
    """
    if dtype is None:
        yield
        return
    cast = partial(narrow, dtype=dtype, kept=rule.label_names)
    handle = model.register_forward_pre_hook(lambda module, args, named: (cast(args), cast(named)), with_kwargs=True)
    try:
        with strategy.cast_model(model, dtype):
            yield
    finally:
        handle.remove()


def warn_of_gaps(trainer: Trainer, output: EvalLoopOutput, prefix: str, loss_only: bool) -> None:
    """Say what an evaluation was asked for and could not give, where it ends without an error."""
    if output.num_samples == 0:
        logger.warning("The evaluation gave no batch: its data is empty, or a generator that has been read before.")
        return
    names = ", ".join(trainer.label_names or trainer.objective.label_names)
    if f"{prefix}_loss" not in (output.metrics or {}):
        logger.warning(
            "The evaluation has no %s_loss: the batches hold no target that counts under %s, or no loss is made of "
            "them. Name the columns of the labels with label_names=[...].",
            prefix,
            names,
        )
    streams = trainer.args.batch_eval_metrics or is_streaming(trainer.compute_metrics)
    if trainer.compute_metrics is not None and not loss_only and not streams and output.label_ids is None:
        logger.warning(
            "compute_metrics was not called: the batches hold no labels under %s. Name them with label_names=[...].",
            names,
        )


def timed_metrics(output: EvalLoopOutput, prefix: str, start: float, num_batches: int | None) -> dict[str, float]:
    """The metrics of an evaluation with its speed beside them, which does not count what preparing the model took."""
    start += (output.metrics or {}).get(f"{prefix}_model_preparation_time", 0.0)
    spent = speed_metrics(prefix, start, num_samples=output.num_samples, num_steps=num_batches)
    return {**(output.metrics or {}), **spent}


def make_evaluation(trainer: Trainer) -> EvaluationLoop:
    """The evaluation of this Trainer, its hooks bound from the instance as it is now."""
    args = trainer.args
    dtype = torch.bfloat16 if args.bf16_full_eval else torch.float16 if args.fp16_full_eval else None
    options = EvaluationOptions(
        concatenate=args.eval_do_concat_batches,
        streaming=args.batch_eval_metrics or is_streaming(trainer.compute_metrics),
        include=tuple(args.include_for_metrics or ()),
        host_every=args.eval_accumulation_steps or 1,
        dtype=dtype,
        spill_bytes=None if math.isinf(args.eval_spill_gb) else int(args.eval_spill_gb * 2**30),
        spill_folder=args.output_dir,
    )
    handler = trainer.callback_handler

    def on_step() -> None:
        trainer.control = handler.fire("on_prediction_step", args, trainer.state, trainer.control)

    def is_stopping() -> bool:
        return trainer.run is not None and trainer.run.signals.requested is not None

    kind: Callable[..., EvaluationLoop] = EvaluationLoop
    if trainer.world.is_shared:
        shared = importlib.import_module("paceline.shared_evaluation")  # of no use to one process
        name = "StagedEvaluation" if trainer.strategy.runs_windows else "SharedEvaluation"
        kind = partial(getattr(shared, name), world=trainer.world, run=trainer.run)
    return kind(
        model=trainer.strategy.evaluation_model(trainer.model_wrapped),
        strategy=trainer.strategy,
        rule=trainer.loss_rule,
        prediction_step=trainer.prediction_step,
        count_items=lambda batches: trainer._get_num_items_in_batch(list(batches), trainer.world.device),
        compute_metrics=trainer.compute_metrics,
        preprocess_logits=trainer.preprocess_logits_for_metrics,
        options=options,
        name_inputs=trainer.objective.name_inputs,
        on_step=on_step,
        is_stopping=is_stopping,
        expect=partial(expected_bytes, trainer.model, label_names=trainer.label_names, dtype=dtype)
        if keeps_logits(trainer)
        else None,
    )


def keeps_logits(trainer: Trainer) -> bool:
    """Whether predictions are what the model returns: not generated, reduced, or made by a subclass's own step."""
    is_ours = str(getattr(trainer.prediction_step, "__module__", None)).startswith("paceline.")
    generates = getattr(trainer.args, "predict_with_generate", False)
    return is_ours and not generates and trainer.preprocess_logits_for_metrics is None


def run_evaluation(
    trainer: Trainer, loader: Any, description: str, loss_only: bool | None, ignore_keys: list[str] | None, prefix: str
) -> EvalLoopOutput:
    """The body of `Trainer.evaluation_loop`: one pass. The workers end with it, unless a run keeps them."""
    args, run = trainer.args, trainer.run
    logger.info("%s: %s batches", description, loader_length(loader) or "an unknown number of")
    edited = edited_for_evaluation(trainer.model, args) if trainer.edits is None else nullcontext()
    start = time.perf_counter()
    try:
        with evaluation_weights(trainer.optimizer, trainer.is_in_train), edited:
            seconds = round(time.perf_counter() - start, 4)
            output = make_evaluation(trainer).run(
                loader,
                loss_only=args.prediction_loss_only if loss_only is None else loss_only,
                ignore_keys=ignore_keys,
                prefix=prefix,
                keep_streamed=description == "Prediction",
            )
        if not trainer.is_prepared and output.metrics is not None:
            trainer.is_prepared = True
            output.metrics[f"{prefix}_model_preparation_time"] = seconds
        return output
    finally:
        if run is None or not (run.loaders.holds(loader) or loader is run.feed.loader):
            close_loader(loader)


def labels_in(trainer: Trainer, inputs: Any) -> list[str]:
    """The names of a batch's labels; none where it lacks one that it needs.

    Labels that were declared (`label_names`) are all needed. Of those that were found among the parameters of the
    model's forward, those without a default are, since nobody may have data for the others.
    """
    if not isinstance(inputs, Mapping):
        return []
    names = trainer.label_names or trainer.objective.label_names
    present = [name for name in names if inputs.get(name) is not None]
    needed = names if trainer.args.label_names else trainer.signature.required.intersection(names)
    return present if set(needed).issubset(present) else []


def predict_batch(
    trainer: Trainer, model: nn.Module, inputs: Any, loss_only: bool, ignore_keys: Sequence[str] | None
) -> tuple[Tensor | None, Any, Any]:
    """One batch without gradients: (loss, predictions, labels). The body of `Trainer.prediction_step`.

    Labels are taken before the loss is computed, since an overridden `compute_loss` may pop them. Where the batch lacks
    the labels the model is known to take, the model is called without a loss; labels it does not take are for
    `compute_loss`.
    """
    names = labels_in(trainer, inputs)
    has_labels = bool(names)
    if ignore_keys is None:
        config = getattr(innermost(trainer.model), "config", None)
        ignore_keys = getattr(config, "keys_to_ignore_at_inference", ["past_key_values"]) if config else []
    with torch.no_grad():
        num_items = trainer._get_num_items_in_batch([inputs], trainer.world.device) if has_labels else None
        inputs = trainer._prepare_inputs(inputs)
        labels = tuple(inputs[name] for name in names) if has_labels else None
        as_widened = widened(model) if trainer.strategy.precision.autocasts else nullcontext()
        with trainer.compute_loss_context_manager(), as_widened:
            if has_labels or not trainer.label_names or trainer.can_return_loss:
                loss, outputs = compute_loss_with_outputs(trainer.compute_loss, model, inputs, num_items)
            else:
                loss, outputs = None, trainer.objective.call(model, inputs)
    place = trainer.objective.loss_place
    holds_loss = is_named(outputs) or place.holds(outputs, loss, batch_size_of(inputs), has_labels)
    if loss is not None:
        candidate = None if holds_loss else find_loss(outputs)
        is_prediction = candidate is not None and is_same_value(candidate, loss)
        loss = loss.detach().mean() if not is_prediction else None
    if loss_only:
        return loss, None, None
    if labels is not None and len(labels) == 1:
        labels = labels[0]
    return loss, detach(read_predictions(outputs, ignore_keys, holds_loss)), detach(labels)
