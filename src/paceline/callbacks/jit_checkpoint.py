"""Writes a checkpoint on a stop signal, also with `save_strategy="no"`."""

from __future__ import annotations

from typing import Any

from paceline.args.redeclared import own_options
from paceline.args.training import TrainingArguments
from paceline.core.events import TrainerCallback
from paceline.core.state import TrainerControl, TrainerState


class JITCheckpointCallback(TrainerCallback):
    """Requests a checkpoint on SIGTERM with any `save_strategy`, as `enable_jit_checkpoint=True` does.

    The loop handles the signals (`stop_signals`): it finishes the optimizer step, saves, and returns from `train`.

    Raises (when training starts):
        ValueError: `stop_signals=False` disables the signal handlers.
    """

    saves_on_signal = True

    def set_trainer(self, trainer: Any) -> None:
        """Checks the arguments of a Trainer; sets nothing."""
        check(trainer.args)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        check(args)


def check(args: TrainingArguments) -> None:
    """Checks that the loop handles signals."""
    if not own_options(args).stop_signals:
        raise ValueError("JITCheckpointCallback requires stop_signals=True: leave it True.")
