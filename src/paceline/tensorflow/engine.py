"""One optimizer step in TensorFlow: gradients are computed per replica, summed, clipped and applied; compiled once.

An optimizer step of one micro-batch without callbacks for its events is a single `tf.function`. Otherwise there are
three (accumulate for each micro-batch, clip, apply), and events fire between them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.args.errors import UnsupportedOption
from paceline.core.contracts import Emit, StepOutput
from paceline.core.journal import NOT_COMPUTED
from paceline.core.ledger import COMPUTE, OPTIMIZER, OTHER, TRANSFER, Ledger
from paceline.core.micro_batches import may_retry
from paceline.tensorflow.coupling import OF_STEP, CouplingCheck
from paceline.tensorflow.data.batches import Array, map_leaves, rows, size_of, split_weights
from paceline.tensorflow.framework import plain, tf
from paceline.tensorflow.objective import NUM_COUNTS, TOKENS, Objective, Share, count
from paceline.tensorflow.optim.optimizers import make_sum, own_part
from paceline.tensorflow.optim.schedules import count_skipped
from paceline.tensorflow.overflow import Watch
from paceline.tensorflow.placement import as_tensor, gather, place
from paceline.tensorflow.precision import has_loss_scale, loss_scale, scale_loss
from paceline.tensorflow.randomness import UncountedDraws
from paceline.tensorflow.traced_errors import told_plainly
from paceline.tensorflow.traces import describe, record

logger = logging.getLogger(__name__)

FUSED, ACCUMULATE = "fused", "accumulate"  # the functions that are traced per batch shape
NORM_EPSILON = 1e-6  # as torch adds to the norm before dividing by it


@dataclass(eq=False, kw_only=True)
class TFEngine:
    """Runs the optimizer steps of a TensorFlow model.

    Args:
        strategy: places the replicas.
        objective: calls the model, computes and weights its loss.
        optimizer: a Keras 3 or tf_keras optimizer; steps the trainable variables.
        training_step: the Trainer's bound method `(features, labels, count) -> gradients`, on one replica.
        apply_gradients: the Trainer's bound method `(features, labels, count)`, on one replica.
        distributed_training_steps: the Trainer's bound method `((features, labels)) -> results of every replica`.
        max_grad_norm: clips the norm of the gradients; infinity only computes it.
        skips_non_finite: an optimizer step with a non-finite loss or norm is not applied. On several replicas the
            host reads both before each step is applied, which waits for the devices.
        is_retried: an optimizer step that runs out of memory is retried in smaller parts, so nothing may be applied
            before all its gradients are computed.
        xla: compile forward and backward with XLA.
        watch: detects inf and NaN in each pass; None: disabled.
        ledger: takes the time of each activity.
    """

    strategy: Any
    objective: Objective
    optimizer: Any
    training_step: Callable[..., Any]
    apply_gradients: Callable[..., Any]
    distributed_training_steps: Callable[..., Any]
    max_grad_norm: float
    skips_non_finite: bool = False
    is_retried: bool = False
    xla: bool = False
    watch: Watch | None = None
    ledger: Ledger = field(default_factory=Ledger)

    def __post_init__(self) -> None:
        self.model = self.objective.model
        whole = {"distributed_training_steps": self.distributed_training_steps, "apply_gradients": self.apply_gradients}
        self.own_updates = [name for name, method in whole.items() if is_own(method, name)]
        self.keep_outputs = False
        self.keep_batches = False
        self.num_replicas = int(self.strategy.num_replicas_in_sync)
        self.trainables = list(self.model.trainable_variables)
        self.variables = [plain(variable) for variable in self.trainables]
        # one replica cannot decide alone to skip the optimizer step, so the host does
        self.asks_first = self.skips_non_finite and self.num_replicas > 1 and not has_loss_scale(self.optimizer)
        self.is_in_parts = self.is_retried or self.asks_first
        self.is_applying = False  # the step in progress, or the one that failed, has begun to change the parameters
        if not self.variables:
            raise ValueError("The model has no trainable variables: call it on a batch once, or build it, before.")
        self.unread: list[tuple[Any, Any, Any, Any]] = []  # loss, norm, rate, is_applied of each step
        self.num_traces = 0  # traces of the functions below; must not grow from step to step
        self._sums: list[Any] = []  # accumulated gradients of the current optimizer step, variables per replica
        self._loss: Any = None  # accumulated loss of the current optimizer step, a variable per replica
        # set while a replica is traced: the share of its batch in the optimizer step, loss and outputs of the model
        self._share = Share(None, None)
        self._traced_loss: Any = None
        self._traced_outputs: Any = None
        self._counts: Any = None
        self._divisors: Any = None
        self._weights: tuple[Array, Any] | None = None  # counts of the last one-batch step, as a tensor
        self._coupling = CouplingCheck(OF_STEP)  # of optimizer steps of several parts
        self.uncounted_draws = UncountedDraws()
        self.compile()

    def follow(self, objective: Objective, trainables: Sequence[Any]) -> None:
        """Trains other variables of the model, or with another loss, from the next optimizer step on.

        Args:
            objective: the objective of the same model.
            trainables: the variables that are trained; the others get no gradient.
        """
        self.objective, self.trainables = objective, list(trainables)
        self.variables = [plain(variable) for variable in self.trainables]
        self._sums, self._loss = [], None
        self.num_traces = 0
        self._coupling = CouplingCheck(OF_STEP)
        self.compile()

    def compile(self) -> None:
        """Recreates the compiled functions; they are traced at their next call."""
        self._of_batches = {
            FUSED: tf.function(self._run_fused, reduce_retracing=True),
            ACCUMULATE: tf.function(self._run_accumulate, reduce_retracing=True),
        }
        self.traced: list[dict[str, Any]] = []
        self._divide = tf.function(self._run_divide, reduce_retracing=True)
        self._clip = tf.function(self._run_clip)
        self._apply = tf.function(self._run_apply)
        self._forget = tf.function(lambda: self.strategy.run(self._forget_one))
        self._compiled = tf.function(self._differentiate, jit_compile=True) if self.xla else None

    # ---- the contract of the loop

    def step(self, batches: Sequence[Any], num_items: object, emit: Emit | None) -> StepOutput:
        """Runs one optimizer step. A window whose targets are all ignored changes nothing and logs no loss."""
        self.is_applying = False
        counts = [count(*batch) for batch in batches]
        totals = np.sum(counts, axis=0)
        if totals[TOKENS] == 0:
            return self._skip()
        self._prepare(batches)
        was_traced = self.num_traces > 0
        self.ledger.note((OTHER, self.ledger.now()))
        with nullcontext() if self.watch is None else self.watch.told(), told_plainly():
            if len(batches) == 1 and emit is None and not self.is_in_parts:
                divisors = self._all_divisors(batches, totals) if self.num_replicas > 1 else None
                loss, norm, rate, applied, outputs = self._call(FUSED, batches[0], totals, divisors)
                kept = [outputs]
            else:
                loss, norm, rate, applied, kept = self._step_in_parts(batches, totals, emit)
        if not was_traced:
            self._check_labels(batches)
        if self.watch is not None:
            self.watch.check_used()
        self.unread.append((loss, norm, rate, applied))
        return StepOutput((loss,), kept if self.keep_outputs else ())

    def _prepare(self, batches: Sequence[Any]) -> None:
        """Prepares the loss before an optimizer step is traced or called, and checks that it can be computed.

        Raises:
            ValueError: labels do not fit the loss.
            UnsupportedOption: on several replicas, the divisor of the loss is unknown.
        """
        if self.num_traces == 0:
            with self.strategy.scope():
                self.objective.prepare(batches[0])
        self._check_labels(batches)
        num_parts = len(batches) * self.num_replicas
        if num_parts > 1:
            if self._coupling.num_seen == 0:  # the first steps may be whole, until memory runs out
                self.objective.check_replicas(self.num_replicas, len(batches))
            self._coupling.see(self.objective, batches, num_parts)

    def _all_divisors(self, batches: Sequence[Any], totals: Array) -> Any:
        """Returns Keras' divisors of the compiled losses of the whole optimizer step; None without compiled losses.

        This runs the model, since divisors may depend on its masks; TensorFlow prunes all other operations.
        """
        compiled = self.objective.compiled
        if compiled is None or compiled.loss is None or compiled.has_own_loss:
            return None
        return tf.add_n([self._divide(*self._place(batch, totals)) for batch in batches])

    def _check_labels(self, batches: Sequence[Any]) -> None:
        for _, labels in batches:
            self.objective.check_labels(labels)

    def _step_in_parts(self, batches: Sequence[Any], totals: Array, emit: Emit | None) -> tuple[Any, ...]:
        if self.own_updates:
            self._refuse_parts(len(batches))
        self._prepare_sums()
        kept, last = [], len(batches) - 1
        is_whole = len(batches) == 1 and self.num_replicas == 1
        divisors = None if is_whole else self._all_divisors(batches, totals)
        for index, batch in enumerate(batches):
            kept.append(self._call(ACCUMULATE, batch, totals, divisors))
            if emit is not None and index < last:
                emit("on_substep_end")
        loss, norm = self._clip()
        if emit is not None:
            emit("on_pre_optimizer_step")
        if self.asks_first and not math.isfinite(float(loss) + float(norm)):
            rate, applied = self.learning_rate(), False
            count_skipped(self.optimizer, 1)
            self.discard()
        else:
            self.is_applying = True
            rate, applied = self._apply(loss, norm)
        self.ledger.note((OPTIMIZER, self.ledger.now()))
        if emit is not None:
            emit("on_optimizer_step")
        return loss, norm, rate, applied, kept

    def _refuse_parts(self, num_batches: int) -> None:
        """Refuses to split an optimizer step that an overridden method computes as a whole.

        Raises:
            UnsupportedOption: always; the message names the cause and the remedy.
        """
        if self.asks_first:
            reason, remedy = f"nonfinite_policy='skip' on {self.num_replicas} replicas", "another nonfinite_policy"
        elif self.is_in_parts:
            reason, remedy = "auto_find_batch_size=True", "auto_find_batch_size=False"
        elif num_batches > 1:
            reason, remedy = f"{num_batches} micro-batches (gradient_accumulation_steps)", "1 of them, of more samples"
        else:
            reason = "a callback on on_substep_end, on_pre_optimizer_step or on_optimizer_step"
            remedy = "another event of that callback"
        raise UnsupportedOption(
            f"{' and '.join(self.own_updates)} of this Trainer would not be called: {reason} splits an optimizer step, "
            f"which it makes as a whole. Use {remedy}, or override training_step, which every micro-batch calls."
        )

    def _call(self, name: str, batch: object, totals: Array, divisors: object) -> Any:
        """Calls a compiled function with a batch; records the trace if there is a new one."""
        is_alone = name == FUSED and self.num_replicas == 1
        placed = self._place_alone(batch, totals) if is_alone else self._place(batch, totals)
        self.ledger.note((TRANSFER, self.ledger.now()))
        before = self.num_traces
        try:
            return self._of_batches[name](*placed, divisors, self.keep_outputs)
        finally:
            self.ledger.note((COMPUTE, self.ledger.now()))
            if self.num_traces != before:
                self._note(name, batch, divisors, self.keep_outputs)

    def _note(self, name: str, batch: object, divisors: object, with_outputs: bool) -> None:
        trace = {"function": name, "batch": describe(batch), "with_outputs": with_outputs}
        record(self.traced, {**trace, "is_divided": divisors is not None})

    def trace(self, name: str, batch: Any, with_outputs: bool, is_divided: bool = False) -> None:
        """Traces a function for batches like this one, as a call would, without computing anything."""
        if name == ACCUMULATE:
            self._prepare_sums()
        totals = np.ones(NUM_COUNTS)
        with self.strategy.scope():
            self.objective.prepare(batch)
        divisors = self._all_divisors([batch], totals) if is_divided else None
        self._of_batches[name].get_concrete_function(*self._place(batch, totals), divisors, with_outputs)
        self._note(name, batch, divisors, with_outputs)

    def traces(self) -> dict[str, Any]:
        """Returns the traces of the functions so far, in order, JSON-serializable."""
        return {"num_replicas": self.num_replicas, "calls": self.traced}

    def read(self) -> list[tuple[float, float, float, bool]]:
        """Returns (loss, grad_norm, learning_rate, has_loss) of each optimizer step since the last read."""
        unread, self.unread = self.unread, []
        hides = has_loss_scale(self.optimizer)  # then the norm of a skipped step, which overflowed, is not reported
        return [
            (
                math.nan if loss is None else float(loss),
                NOT_COMPUTED if hides and not applied else float(norm),
                float(rate),
                loss is not None,
            )
            for loss, norm, rate, applied in unread
        ]

    def is_out_of_memory(self, error: BaseException) -> bool:
        """True if smaller micro-batches may avoid this error and no part of the step has been applied yet.

        An out-of-memory while the update is applied gets a note with the reason why it is not retried.
        """
        return isinstance(error, tf.errors.ResourceExhaustedError) and may_retry(error, self.is_applying)

    def discard(self) -> None:
        """Drops the gradients of a failed optimizer step."""
        if self._sums:
            self._forget()

    def split(self, batches: Sequence[Any], micro_batch_size: int) -> list[Any]:
        """Splits batches into micro-batches of at most `micro_batch_size` samples per replica."""
        step = micro_batch_size * self.num_replicas
        return [
            tuple(rows(part, start, start + step) for part in batch)
            for batch in batches
            for start in range(0, size_of(batch[0]), step)
        ]

    def _skip(self) -> StepOutput:
        logger.warning("Every target of this optimizer step is ignored: the step was skipped and no loss logged.")
        self.unread.append((None, NOT_COMPUTED, self.learning_rate(), False))
        return StepOutput(())

    def learning_rate(self) -> float:
        """Returns the learning rate of the next optimizer step."""
        return float(rate_of(self.optimizer))

    # ---- batches to replicas

    def _place(self, batch: object, totals: Array) -> tuple[Any, Any, Any]:
        """Returns a batch on the replicas: features, labels, and the counts that weight the loss."""
        return place(self.strategy, batch, totals)

    def _place_alone(self, batch: object, totals: Array) -> tuple[Any, Any, Any]:
        """Returns a batch that is a whole optimizer step on one device.

        The tensor of its counts is cached, since most steps have the same counts.
        """
        if self._weights is None or not np.array_equal(self._weights[0], totals):
            self._weights = (totals, tf.constant(np.stack([totals, totals]), tf.float32))
        features, labels = map_leaves(as_tensor, batch)
        return features, labels, self._weights[1]

    # ---- traced: all replicas

    def _run_fused(
        self, features: object, labels: object, counts: object, divisors: object, with_outputs: bool
    ) -> tuple[Any, ...]:
        self.num_traces += 1
        self._counts, self._divisors = counts, divisors
        with self._watching(), self.uncounted_draws.looking():
            results = self.distributed_training_steps((features, labels))
        loss, norm, rate, applied, outputs = results
        first = [self.local(value)[0] for value in (loss, norm, rate, applied)]
        return (*first, self._gathered(outputs) if with_outputs else None)

    def run_replicas(self, function: Callable[..., Any], features: Any, labels: Any) -> Any:
        """Calls `function(features, labels, count of targets)` on every replica and returns the results."""
        return self.strategy.run(self._on_replica, args=(function, features, labels, self._counts, self._divisors))

    def _on_replica(
        self, function: Callable[..., Any], features: object, labels: object, counts: Any, divisors: Any
    ) -> Any:
        labels, sample_weight = split_weights(labels)
        self._share = Share(counts[0], counts[1], sample_weight, divisors)
        self._traced_loss, self._traced_outputs = None, None
        self.objective.begin(self._share, is_of_step=True)  # for a training_step that does not call `gradients`
        results = function(features, labels, self.num_items)
        self.objective.end()
        return results

    @property
    def num_items(self) -> Any:
        """Returns the number of labels other than -100 in the whole optimizer step, a float32 scalar.

        Only valid while a replica is traced.
        """
        return self._share.totals[TOKENS]

    def _run_divide(self, features: Any, labels: Any, counts: Any) -> Any:
        found = self.strategy.run(self._divide_one, args=(features, labels, counts))
        return found if self.num_replicas == 1 else self.strategy.reduce(tf.distribute.ReduceOp.SUM, found, axis=None)

    def _divide_one(self, features: Any, labels: Any, counts: Any) -> Any:
        labels, sample_weight = split_weights(labels)
        return self.objective.divisors(features, labels, Share(counts[0], counts[1], sample_weight))

    def _run_accumulate(
        self, features: object, labels: object, counts: object, divisors: object, with_outputs: bool
    ) -> Any:
        self.num_traces += 1
        self._counts, self._divisors = counts, divisors
        with self._watching(), self.uncounted_draws.looking():
            outputs = self.run_replicas(self._accumulate_one, features, labels)
        return self._gathered(outputs) if with_outputs else None

    def _watching(self) -> AbstractContextManager[None]:
        return nullcontext() if self.watch is None else self.watch.watching()

    def _run_clip(self) -> tuple[Any, Any]:
        self.num_traces += 1
        loss, norm = self.strategy.run(self._clip_one)
        return self.local(loss)[0], self.local(norm)[0]

    def _run_apply(self, loss: Any, norm: Any) -> tuple[Any, Any]:
        self.num_traces += 1
        rate, applied = self.strategy.run(self._apply_one, args=(loss, norm))
        return self.local(rate)[0], self.local(applied)[0]

    def local(self, value: Any) -> tuple[Any, ...]:
        """Returns the values of this process's replicas."""
        return tuple(self.strategy.experimental_local_results(value))

    def _gathered(self, outputs: object) -> Any:
        """Returns the concatenated outputs of all replicas of this process that have samples of their own."""
        return outputs if self.num_replicas == 1 else gather(self.strategy, outputs, self._counts)

    # ---- traced: one replica

    def update(self, features: object, labels: object, num_items: object) -> tuple[Any, ...]:
        """Computes and applies gradients on one replica; the body of `TFTrainer.apply_gradients`.

        Returns: loss, gradient norm and learning rate of the optimizer step, True if it was applied, and the outputs.
        """
        gradients = self._gradients_of(features, labels, num_items)
        outputs, loss = self._traced_outputs, self._loss_now()
        loss, gradients = self._sum_replicas(loss, gradients)
        gradients, norm = self._clipped(gradients)
        rate, applied = self._apply_now(gradients, loss, norm)
        return loss, norm, rate, applied, outputs

    def gradients(
        self, features: object, labels: object, num_items: object, run_model: Callable[..., Any]
    ) -> list[Any]:
        """Returns this replica's gradients of the step's loss: the body of `TFTrainer.training_step`."""
        function = self._compiled if self._compiled is not None else self._differentiate
        values, loss, outputs = function(features, labels, num_items, run_model, self._share)
        self._traced_loss, self._traced_outputs = loss, outputs
        if self.watch is not None and not has_loss_scale(self.optimizer):
            return self.watch.gradients(values, self.trainables)
        return list(values)

    def _differentiate(
        self, features: object, labels: object, num_items: object, run_model: Callable[..., Any], share: Share
    ) -> tuple[Any, Any, Any]:
        self.objective.begin(share)
        with tf.GradientTape() as tape:
            if self.watch is not None:
                self.watch.begin(features)
            loss, outputs = run_model(features, labels, True)
            if loss is None:
                raise ValueError(
                    "The training batches hold no labels that a loss could be made of: give (features, labels), or "
                    "name the columns with label_names=[...]."
                )
            part, shown = self.objective.take(loss, labels, share)
            if self.watch is not None:
                one = self.watch.end(loss, outputs)
                part, shown = part * one, shown * one
            scaled = scale_loss(self.optimizer, part)
        return tape.gradient(scaled, self.variables), shown, outputs

    def _gradients_of(self, features: object, labels: object, num_items: object) -> list[Any]:
        """Returns the gradients of `training_step`, dense, of the variables that are trained."""
        gradients = dense(self.training_step(features, labels, num_items))
        every = self.model.trainable_variables
        if len(gradients) != len(self.variables) and len(gradients) == len(every):  # an override gives those of all
            by_variable = {id(plain(variable)): value for variable, value in zip(every, gradients, strict=True)}
            return [by_variable[id(variable)] for variable in self.variables]
        return gradients

    def _loss_now(self) -> Any:
        return tf.constant(math.nan) if self._traced_loss is None else self._traced_loss

    def _accumulate_one(self, features: object, labels: object, num_items: object) -> Any:
        gradients = self._gradients_of(features, labels, num_items)
        for total, value in zip(self._sums, gradients, strict=True):
            if value is not None:
                total.assign_add(tf.cast(value, total.dtype))
        self._loss.assign_add(self._loss_now())
        return self._traced_outputs

    def _clip_one(self) -> tuple[Any, Any]:
        values = [tf.identity(total.value()) for total in self._sums]
        loss, gradients = self._sum_replicas(tf.identity(self._loss.value()), values)
        gradients, norm = self._clipped(gradients)
        for total, value in zip(self._sums, gradients, strict=True):
            total.assign(value)
        return loss, norm

    def _apply_one(self, loss: object, norm: object) -> tuple[Any, Any]:
        # copies, since the sums are reset before these values are used
        gradients: list[Any] = [tf.identity(total.value()) for total in self._sums]
        self._forget_one()
        return self._apply_now(gradients, loss, norm)

    def _forget_one(self) -> None:
        for total in (*self._sums, self._loss):
            total.assign(tf.zeros_like(total))

    def _sum_replicas(self, loss: object, gradients: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Returns the sums of the loss and the gradients over all replicas, equal on each replica."""
        if self.num_replicas == 1:
            return loss, list(gradients)
        there = [number for number, value in enumerate(gradients) if value is not None]
        context = tf.distribute.get_replica_context()
        summed = context.all_reduce(tf.distribute.ReduceOp.SUM, [loss, *(gradients[number] for number in there)])
        result: list[Any] = [None] * len(gradients)
        for number, value in zip(there, summed[1:], strict=True):
            result[number] = value
        return summed[0], result

    def _clipped(self, gradients: Sequence[Any]) -> tuple[list[Any], Any]:
        """Returns the gradients clipped to the maximum norm, and their norm before clipping."""
        norm = tf.linalg.global_norm([tf.cast(value, tf.float32) for value in gradients if value is not None])
        norm = norm / loss_scale(self.optimizer)
        if math.isinf(self.max_grad_norm):
            return list(gradients), norm
        factor = tf.minimum(self.max_grad_norm / (norm + NORM_EPSILON), 1.0)
        return [None if value is None else value * tf.cast(factor, value.dtype) for value in gradients], norm

    def _apply_now(self, gradients: Sequence[Any], loss: Any, norm: Any) -> tuple[Any, Any]:
        """Steps the optimizer. Returns the learning rate, and True if the step was applied."""
        rate = tf.identity(rate_of(self.optimizer))
        pairs = [
            (own_part(value, variable, has_loss_scale(self.optimizer)) if self.num_replicas > 1 else value, variable)
            for value, variable in zip(gradients, self.trainables, strict=True)
            if value is not None
        ]
        if not pairs:
            raise ValueError("No gradient reaches the model's variables: its loss does not depend on them.")
        is_finite = tf.math.is_finite(loss + norm)
        is_decided = self.asks_first or has_loss_scale(self.optimizer)  # the host or the optimizer skips bad steps
        if not self.skips_non_finite or is_decided:
            self.optimizer.apply_gradients(pairs)
            return rate, is_finite if has_loss_scale(self.optimizer) else tf.constant(True)

        def apply() -> Any:
            self.optimizer.apply_gradients(pairs)
            return tf.constant(True)

        applied = tf.cond(is_finite, apply, lambda: tf.constant(False))
        count_skipped(self.optimizer, tf.cast(~applied, tf.int64))
        return rate, applied

    def _prepare_sums(self) -> None:
        """Creates the variables that accumulate gradients, unless they exist."""
        if self._sums:
            return
        with self.strategy.scope():
            self._sums = [make_sum(variable) for variable in self.variables]
            self._loss = make_sum(tf.constant(0.0))


def is_own(method: object, name: str) -> bool:
    """True if a bound method of a Trainer overrides that of TFTrainer, the base class that first defines it."""
    classes = reversed(type(getattr(method, "__self__", None)).__mro__)
    first = next((vars(item)[name] for item in classes if name in vars(item)), None)
    return getattr(method, "__func__", method) is not first


def rate_of(optimizer: Any) -> Any:
    """Returns the learning rate of the next optimizer step, a float32 scalar."""
    rate = optimizer.learning_rate
    if callable(rate) and not hasattr(rate, "dtype"):
        rate = rate(optimizer.iterations)
    return tf.cast(tf.convert_to_tensor(rate), tf.float32)


def dense(gradients: Sequence[Any]) -> list[Any]:
    """Returns gradients as dense tensors: the norm of a sparse one would count repeated rows separately."""
    return [tf.convert_to_tensor(value) if isinstance(value, tf.IndexedSlices) else value for value in gradients]
