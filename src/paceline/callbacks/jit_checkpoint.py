"""A checkpoint when the process is told to end, also where none is written otherwise."""

from __future__ import annotations

from typing import Any

from paceline.core.events import TrainerCallback
from paceline.core.state import TrainerControl, TrainerState


class JITCheckpointCallback(TrainerCallback):
    """Asks for what `enable_jit_checkpoint=True` asks for: a checkpoint on SIGTERM, whatever `save_strategy` says.

    The signals themselves are the loop's (`stop_signals`): it finishes the update, saves, and leaves `train`.

    Raises (when training starts):
        ValueError: `stop_signals=False` leaves the signals alone.
    """

    saves_on_signal = True

    def set_trainer(self, trainer: Any) -> None:
        """Check the arguments of a Trainer; there is nothing else to set."""
        check(trainer.args)

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        check(args)


def check(args: Any) -> None:
    """Whether the loop listens to signals."""
    if not args.stop_signals:
        raise ValueError("JITCheckpointCallback saves on a signal, and stop_signals=False ignores them: leave it True.")
