"""The default intervals of logs, evaluations, checkpoints, and the end of training."""

from __future__ import annotations

from typing import Any

from paceline.args.training import TrainingArguments
from paceline.core.events import TrainerCallback, ignores_keywords
from paceline.core.state import TrainerControl, TrainerState


class DefaultFlowCallback(TrainerCallback):
    """Sets the control's flags by the `*_strategy` and `*_steps` options.

    `state.max_steps` and `state.*_steps` are read at each step, so that another callback can change them during
    training; 0 means never. With `eval_strategy="steps"` the last step is always evaluated, and with
    `save_strategy="steps"` it is always saved. A run of fewer steps than `logging_steps` logs once, at its last step.
    """

    @ignores_keywords
    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        step = state.global_step
        is_last = step >= state.max_steps
        interval = state.logging_steps if args.logging_strategy == "steps" else 0
        # a run of fewer steps than the interval would end without a loss
        if interval > 0 and (step % interval == 0 or (is_last and step < interval)):
            control.should_log = True
        if step == 1 and args.logging_first_step:
            control.should_log = True
        wants_evaluation = args.eval_strategy == "steps" and step >= args.eval_delay
        if wants_evaluation and (is_last or (state.eval_steps > 0 and step % state.eval_steps == 0)):
            control.should_evaluate = True
        if args.save_strategy == "steps" and (is_last or (state.save_steps > 0 and step % state.save_steps == 0)):
            control.should_save = True
        if is_last:
            control.should_training_stop = True
        return control

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        if args.logging_strategy == "epoch":
            control.should_log = True
        if args.eval_strategy == "epoch" and state.epoch >= args.eval_delay:
            control.should_evaluate = True
        if args.save_strategy == "epoch":
            control.should_save = True
        return control
