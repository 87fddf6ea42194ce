"""The training loop: epochs, accumulation windows, and the actions due after each optimizer step. Handles no tensors.

on_train_begin
for each epoch:
    on_epoch_begin
    for each accumulation window of micro-batches:
        on_step_begin
        engine.step:    [forward, backward, on_substep_end] ... clip, on_pre_optimizer_step, step, on_optimizer_step
        on_step_end
        when due:       log -> on_log; evaluate -> on_log, on_evaluate; save -> on_save
    on_epoch_end, then log, evaluate, save if due
on_train_end                                                   (fired by the Trainer)
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.args.plan import Plan
from paceline.args.training import TrainingArguments
from paceline.core.contracts import Engine, Hooks, Pending, StatefulDataIterator, StepOutput
from paceline.core.events import CallbackHandler
from paceline.core.journal import NOT_COMPUTED, UpdateRow
from paceline.core.ledger import DATA, EVALUATE, LOG, OPTIMIZER, OTHER, SAVE, Ledger
from paceline.core.loop_evaluation import LoopEvaluation
from paceline.core.metrics import StartTime, best_metric_value, is_better
from paceline.core.micro_batches import MicroBatchSize
from paceline.core.nonfinite import NonFiniteGuard
from paceline.core.signals import Interrupted, StopSignals
from paceline.core.state import TrainerControl, TrainerState
from paceline.core.summary import UpdateSummary

logger = logging.getLogger(__name__)

MAX_SKIPPED = 1000  # epochs in a row that callbacks end before their first optimizer step
MAX_UNREAD = 1000  # optimizer steps whose metrics wait on the device, about 1 KB each, while nothing is due


class Loop:
    """Runs the optimizer steps of one training run.

    Args:
        args: the user's arguments, as passed to callbacks.
        plan: the resolved configuration; replaced only here, when an out-of-memory changes the micro-batch size.
        state: live; `max_steps` and the `*_steps` are read at each step.
        control: live; callbacks set its flags.
        handler: the callbacks.
        engine: runs the optimizer steps.
        feed: the data iterator.
        hooks: logs, evaluates, saves.
        signals: holds requests to stop the run.
        saves: checkpoints being written in the background.
        ledger: takes the time of each activity.
    """

    def __init__(
        self,
        *,
        args: TrainingArguments,
        plan: Plan,
        state: TrainerState,
        control: TrainerControl,
        handler: CallbackHandler,
        engine: Engine,
        feed: StatefulDataIterator,
        hooks: Hooks,
        signals: StopSignals,
        saves: Pending,
        ledger: Ledger,
    ) -> None:
        self.args = args
        self.plan = plan
        self.state = state
        self.control = control
        self.handler = handler
        self.engine = engine
        self.feed = feed
        self.hooks = hooks
        self.signals = signals
        self.saves = saves
        self.ledger = ledger
        self.start_time = StartTime()
        self.guard = NonFiniteGuard(plan.nonfinite_policy)
        self.unlogged = UpdateSummary()  # optimizer steps read since the last log
        self.num_samples = 0  # samples that this run trained on
        self.has_work = True  # the run was not complete before it began
        self.num_logged = 0  # optimizer steps with a loss that the logs of this run cover
        self.logged_sum = 0.0  # sum of the losses of these steps
        self.skipped: set[tuple[int, int]] = set()  # (epoch, first sample) of windows skipped by a rewind
        self.num_allowed_for = 0  # skipped windows that `plan.max_steps` excludes already
        self.is_heeded = False  # the run stops because it was requested to; a resumed run completes it
        self._unread: list[tuple[int, int, int, int]] = []  # (step, epoch, first, count) of steps not yet read
        self._snapshot: Any = None  # the last good state, if the policy is rollback
        self._ends_epoch = False  # the epoch was to end at the snapshot
        self.is_epoch_open = False  # on_epoch_end has not been fired for the epoch that began last
        self.evaluation = LoopEvaluation()
        self._num_skipped, self._skipped_at = 0, -1  # epochs in a row that a callback skipped, and their step
        self.micro_batches = MicroBatchSize(plan)
        self.batches_per_epoch = micro_batches_in(plan, state.max_steps)

    def follow(self, plan: Plan) -> None:
        """Adopts the plan of a later phase, between two epochs; length and intervals of the run stay as they are."""
        self.plan, self.micro_batches = plan, MicroBatchSize(plan)
        self.resize()
        self.batches_per_epoch = micro_batches_in(plan, self.state.max_steps)

    def resume(
        self,
        unlogged: UpdateSummary,
        skipped: set[tuple[int, int]],
        micro_batches: Mapping[str, Any] | None = None,
        is_epoch_open: bool = False,
        evaluation: Mapping[str, Any] | None = None,
    ) -> None:
        """Restores from a checkpoint: the steps not logged yet, the skipped windows, the micro-batch size, whether the
        epoch of the checkpoint has to be ended, and the evaluation that a signal has interrupted."""
        self.is_epoch_open = is_epoch_open
        self.evaluation.load_state_dict(evaluation or {})
        self.unlogged = unlogged
        self.skipped = skipped
        self.num_allowed_for = len(skipped) - (self.plan.max_steps - self.state.max_steps)
        self.micro_batches.load_state_dict(micro_batches or {})
        self.resize()

    def run(self) -> None:
        """Trains until `state.max_steps`, the last epoch, or a request to stop."""
        self.start_time, self.has_work = StartTime(), self.state.global_step < self.state.max_steps
        self.control = self.handler.on_train_begin(self.args, self.state, self.control)
        if self.guard.policy == "rollback":
            self.keep_snapshot()
        if self.control.should_evaluate:
            self.finish_pending()
        elif self.plan.eval_on_start and self.state.global_step == 0:
            self.evaluate_on_start()
        if self.is_epoch_open and self.state.global_step >= self.state.max_steps:
            self.run_epoch(self.feed.epoch)  # stopped between the last step and the end of its epoch
        # with max_steps the data is repeated until all steps are done
        num_epochs = math.inf if self.args.max_steps > 0 else self.plan.num_epochs
        while True:
            while not self.is_over and self.feed.epoch < num_epochs:
                self.run_epoch(self.feed.epoch)
            bad = self.collect()
            if bad is None:
                break
            self.rewind(bad)
            if self.control.should_save:
                self.hooks.act()
        if self.unlogged.num_updates:
            self.summarise()  # not logged, but part of the mean loss of the run

    @property
    def is_over(self) -> bool:
        """True if no further optimizer step is due."""
        return self.control.should_training_stop or self.state.global_step >= self.state.max_steps

    def run_epoch(self, epoch: int) -> None:
        """Runs one pass over the data, or the rest of it after a resume."""
        feed, handler, state, args, signals = self.feed, self.handler, self.state, self.args, self.signals
        note, now = self.ledger.note, self.ledger.now
        self.control = control = self.begin_epoch(epoch)
        per_epoch = self.batches_per_epoch
        has_stepped, is_exhausted = feed.batches > 0, False
        while not (control.should_epoch_stop or control.should_training_stop or state.global_step >= state.max_steps):
            first = feed.consumed
            note((OTHER, now()))
            batches, num_items = feed.draw()
            note((DATA, now()))
            if not batches:
                is_exhausted = True
                break
            has_stepped = True
            if self.skipped and (epoch, first) in self.skipped:
                continue
            if control.should_log or control.should_evaluate or control.should_save:
                control.begin_step()
            if handler.table["on_step_begin"]:
                self.control = control = handler.fire("on_step_begin", args, state, control)
            output = self.step(batches, num_items)
            state.global_step += 1
            state.epoch = epoch + feed.batches / per_epoch
            self._unread.append((state.global_step, epoch, first, feed.consumed - first))
            if self.hooks.count is not None:
                self.hooks.count(batches)
            extra = self.extras(batches, output) if handler.wanted else {}
            self.control = control = handler.fire("on_step_end", args, state, control, **extra)
            del output, extra  # frees the model's outputs before the next step
            if signals.requested is not None:
                self.heed_signal()
            if self.saves.is_due:
                self.settle_saves()
                control = self.control
            is_due = control.should_log or control.should_evaluate or control.should_save
            if is_due or len(self._unread) >= MAX_UNREAD:
                self.hooks.act()
                control = self.control
                if feed.is_restored:  # rewound: the position may be in an earlier epoch
                    return
        if not has_stepped:
            self.end_without_steps(epoch, is_exhausted)
        self.end_epoch(is_exhausted or control.should_epoch_stop or feed.batches >= per_epoch)

    def begin_epoch(self, epoch: int) -> TrainerControl:
        """Opens the data at its position and fires on_epoch_begin; returns the control."""
        feed, note, now = self.feed, self.ledger.note, self.ledger.now
        is_ended = self.control.should_epoch_stop and feed.is_restored and feed.consumed > 0  # before a restart
        note((OTHER, now()))
        feed.start_epoch(epoch)
        note((DATA, now()))
        self.is_epoch_open = True
        control = self.handler.on_epoch_begin(self.args, self.state, self.control)
        control.should_epoch_stop |= is_ended
        return control

    def end_without_steps(self, epoch: int, is_exhausted: bool) -> None:
        """Stops the training with a warning if a further epoch would have no step either.

        Args:
            epoch: the epoch, which had no step.
            is_exhausted: its data gave no batch; otherwise a callback ended it.
        """
        if is_exhausted:
            logger.warning(
                "There seems not to be a single sample in your epoch_iterator: the training data gave no batch in "
                "epoch %d, stopping training at step %d of %d.",
                *(epoch, self.state.global_step, self.state.max_steps),
            )
            self.control.should_training_stop = True
            return
        is_first = self._skipped_at != self.state.global_step
        self._skipped_at, self._num_skipped = self.state.global_step, 1 if is_first else self._num_skipped + 1
        if self._num_skipped > MAX_SKIPPED:
            logger.warning("Callbacks ended %d epochs in a row before a step: stopping training.", MAX_SKIPPED)
            self.control.should_training_stop = True

    def end_epoch(self, is_exhausted: bool) -> None:
        """Fires on_epoch_end, then logs, evaluates and saves if due; does nothing if a signal ended the epoch early."""
        if self.is_heeded:
            return
        if is_exhausted:  # a checkpoint written from now on resumes with the next epoch
            self.feed.finish_epoch()
        self.control.begin_step()
        self.is_epoch_open = False
        self.control = self.handler.on_epoch_end(self.args, self.state, self.control)
        if self.signals.requested is not None:
            self.heed_signal()
        if self.control.should_log or self.control.should_evaluate or self.control.should_save:
            self.hooks.act()

    # ---- one optimizer step

    def step(self, batches: Sequence[Any], num_items: object) -> StepOutput:
        """Runs one optimizer step; retries the same samples in smaller micro-batches after an out-of-memory."""
        table = self.handler.table
        listened = table["on_substep_end"] or table["on_pre_optimizer_step"] or table["on_optimizer_step"]
        emit = self.emit if listened else None
        self.engine.keep_outputs = "outputs" in self.handler.wanted
        self.engine.keep_batches = self.plan.auto_find_batch_size or "inputs" in self.handler.wanted
        sizes = self.micro_batches
        while True:
            if sizes.is_watched and sizes.is_reduced:
                batches = self.engine.split(batches, self.plan.micro_batch_size)
            try:
                output = self.engine.step(batches, num_items, emit)
                break
            except Exception as error:
                if not self.plan.auto_find_batch_size or not self.engine.is_out_of_memory(error):
                    raise
                sizes.shrink(error)
            # outside the handler: the traceback, which holds the failed step's tensors, is freed
            self.engine.discard()
            self.resize()
        if sizes.is_watched and sizes.count_step():
            self.resize()
        return output

    def resize(self) -> None:
        """Adopts the current micro-batch size; changes the loop's own copy of the plan only."""
        self.plan = self.micro_batches.plan
        self.state.train_batch_size = self.plan.micro_batch_size

    def emit(self, event: str, **extra: Any) -> None:
        """Fires an event from inside the engine's step."""
        self.ledger.note((OPTIMIZER, self.ledger.now()))  # clipping or the optimizer; microseconds after a pass
        self.control = self.handler.fire(event, self.args, self.state, self.control, **extra)
        self.ledger.note((OTHER, self.ledger.now()))

    def extras(self, batches: Sequence[Any], output: StepOutput) -> dict[str, Any]:
        """Returns the additional keywords of on_step_end that callbacks asked for."""
        seen = {"loss": sum(output.losses) if output.losses else None, "inputs": batches, "outputs": output.outputs}
        return {name: seen[name] for name in self.handler.wanted}

    # ---- what is due

    def settle_saves(self) -> None:
        """Completes the checkpoints that were written in the background."""
        self.ledger.note((OTHER, self.ledger.now()))
        self.saves.settle()
        self.ledger.note((SAVE, self.ledger.now()))

    def log_evaluate_save(self) -> None:
        """Logs, evaluates and saves, in this order, by the control's flags; rewinds instead if a step is bad."""
        note, now = self.ledger.note, self.ledger.now
        bad = self.collect()
        if bad is not None:
            self.rewind(bad)
            if not self.is_heeded:
                return
        if self.control.should_log and self.unlogged.num_updates:
            self.ledger.close_row()
            self.hooks.log(self.summarise(), self.start_time)
            self.ledger.keep_row()  # an overridden `log` may not have taken it, and the next log row is an evaluation's
            note((LOG, now()))
        try:
            if self.control.should_evaluate:
                self.evaluate()
        except Interrupted:
            self.evaluation.ends_run = self.control.should_training_stop
            self.control.should_evaluate = True  # a finished dataset of several has withdrawn it
            self.heed_signal()
        if self.signals.requested is not None and not self.is_heeded:
            self.heed_signal()
        if self.control.should_save:
            self.control.should_save = False
            note((OTHER, now()))
            if self.hooks.save():
                self.control = self.handler.on_save(self.args, self.state, self.control)
            note((SAVE, now()))
            if self.signals.requested is not None:  # received during the save: this step boundary is the last one
                self.is_heeded = self.control.should_training_stop = True
        if self._snapshot is not None:
            self.keep_snapshot()

    def collect(self) -> UpdateRow | None:
        """Reads the engine's step metrics and applies the policy for non-finite values.

        Returns:
            The optimizer step that the run must rewind before, or None.
        """
        unread, self._unread = self._unread, []
        self.ledger.note((OTHER, self.ledger.now()))
        readings = self.engine.read()
        self.ledger.note((self.ledger.reading, self.ledger.now()))
        self.ledger.settle()
        rows = [UpdateRow(*place, *reading) for place, reading in zip(unread, readings, strict=True)]
        bad = self.guard.find(rows)
        if bad is None:
            self.unlogged.add(rows)
            self.num_samples += sum([row.num_samples for row in rows])
            if rows:
                self.hooks.record(rows)
        return bad

    def summarise(self) -> dict[str, float]:
        """Returns the log row of the steps since the last log: mean loss, last gradient norm and learning rate."""
        past, self.unlogged = self.unlogged, UpdateSummary()
        logs: dict[str, float] = {}
        mean = past.mean_loss(self.plan.leave_out_non_finite)
        if mean is not None:
            logs["loss"] = mean[0]
            self.logged_sum += mean[0] * mean[1]
            self.num_logged += mean[1]
        if past.num_finite < past.num_counted:
            logs["nonfinite_steps"] = past.num_counted - past.num_finite
        if past.grad_norm != NOT_COMPUTED:
            logs["grad_norm"] = past.grad_norm
        logs["learning_rate"] = past.learning_rate
        return logs

    def mean_loss(self) -> float:
        """Returns the mean loss over the optimizer steps of this run, logged or not; NaN without any.

        As in transformers, it is 0.0 if the run was complete before it began.
        """
        nothing = math.nan if self.has_work else 0.0
        return self.logged_sum / self.num_logged if self.num_logged else nothing

    def keep_snapshot(self) -> None:
        """Stores the current state as the last good one."""
        self._snapshot, self._ends_epoch = self.hooks.snapshot(), self.control.should_epoch_stop

    def rewind(self, bad: UpdateRow) -> None:
        """Restores the last good state; the samples of the bad step will be skipped."""
        self.skipped.add((bad.epoch, bad.first))
        self.hooks.rewind(self._snapshot, bad)
        self.control.begin_step()
        self.control.should_epoch_stop = self._ends_epoch
        self.control.should_training_stop = False
        if self.args.max_steps <= 0:  # skipped steps shorten the run; max_steps must stay its last step
            num_lost = len(self.skipped) - self.num_allowed_for
            self.state.max_steps = min(self.state.max_steps, self.plan.max_steps - num_lost)
        logger.warning("Rewound to step %d; %d samples are skipped.", self.state.global_step, bad.num_samples)
        if self.signals.requested is not None:
            self.heed_signal()

    def evaluate(self, skip_scheduler: bool = False) -> None:
        """Evaluates and updates the best model."""
        self.ledger.note((OTHER, self.ledger.now()))
        try:
            with self.signals.stopping_evaluation():
                metrics = self.hooks.evaluate(skip_scheduler)
        finally:
            self.ledger.note((EVALUATE, self.ledger.now()))
        self.control.should_evaluate = False
        is_best = not skip_scheduler and self.note_best(metrics)
        if self.plan.save_strategy == "best":
            self.control.should_save = is_best

    def evaluate_on_start(self) -> None:
        """Evaluates before the first optimizer step; a run that is asked to stop meanwhile repeats it when resumed."""
        try:
            self.evaluate(skip_scheduler=True)
        except Interrupted:
            self.heed_signal()
            self.hooks.act()

    def note_best(self, metrics: dict[str, float]) -> bool:
        """Records the best metric. Returns True if this one is strictly better than all before."""
        name = self.plan.metric_for_best_model
        if name is None:
            return False
        value = best_metric_value(metrics, name)
        if not is_better(value, self.state.best_metric, bool(self.plan.greater_is_better)):
            return False
        self.state.best_metric = value
        self.state.best_global_step = self.state.global_step
        return True

    def finish_pending(self) -> None:
        """Runs the evaluation that a signal interrupted before the checkpoint was written."""
        logger.info("The evaluation after step %d was interrupted: evaluating now.", self.state.global_step)
        self.control.begin_step()
        self.control.should_evaluate = True
        self.control.should_training_stop |= self.evaluation.ends_run
        self.hooks.act()

    def heed_signal(self) -> None:
        """Stops training at this step boundary, after a checkpoint if saving is enabled."""
        self.is_heeded = True
        asked = [self.args.enable_jit_checkpoint, *(getattr(c, "saves_on_signal", 0) for c in self.handler.callbacks)]
        self.control.should_save = self.plan.save_strategy != "no" or True in asked
        self.control.should_training_stop = True


def micro_batches_in(plan: Plan, max_steps: int) -> int:
    """Returns the micro-batches of an epoch of `state.epoch`; a stream of unknown length counts as one epoch."""
    known = plan.micro_batches_per_epoch
    return max(known if known is not None else plan.num_micro_batches(max_steps), 1)
