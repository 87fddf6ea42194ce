"""The events of a short run, in their order: the same with torch and with TensorFlow."""

from __future__ import annotations

from typing import Any

from paceline import TrainerCallback
from paceline.core.events import EVENTS

# of a run of one epoch: two optimizer steps of two micro-batches, evaluated in one batch and saved after the second
TWO_STEPS: dict[str, Any] = {
    "gradient_accumulation_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_strategy": "steps",
    "save_steps": 2,
}
STEP = ("step_begin", "substep_end", "pre_optimizer_step", "optimizer_step", "step_end", "log")
EVENTS_OF_TWO_STEPS = [
    *("init_end", "train_begin", "epoch_begin", *STEP, *STEP),
    *("prediction_step", "log", "evaluate", "save", "epoch_end", "log", "train_end"),
]


class Recorder(TrainerCallback):
    """Records the name of each event; the model must be among its keywords."""

    def __init__(self) -> None:
        self.events: list[str] = []


def note(event: str) -> Any:
    def method(self: Recorder, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append(event.removeprefix("on_"))
        assert kwargs["model"] is not None

    return method


for name in EVENTS:
    setattr(Recorder, name, note(name))
