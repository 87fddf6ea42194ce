"""Follows each member through a run: its losses, its best evaluation, and its early stopping."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from paceline.args.members import Member
from paceline.args.training import TrainingArguments
from paceline.callbacks.early_stopping import EarlyStoppingCallback
from paceline.core.events import TrainerCallback
from paceline.core.metrics import is_better
from paceline.core.state import TrainerControl, TrainerState
from paceline.pytorch.members.optimizer import MemberOptimizer
from paceline.pytorch.members.stack import MemberStack

logger = logging.getLogger(__name__)


class MemberWatch(TrainerCallback):
    """Follows the members; its state, with the best weights of each, is part of a checkpoint.

    Args:
        members: their settings.

    Attributes:
        stopping: patience and threshold of the early stopping of each member; None without it.
        criterion: name of the metric that decides which evaluation is the best, with its prefix.
        greater_is_better: its direction.
        repeats_steps: an out-of-memory may run the passes of a step again.
        keeps_best: the weights of each member's best evaluation are kept, and loaded at the end of training.
        best_metric: the best metric of each member, None before its first evaluation.
        best_step: the optimizer step of it.
        stopped_step: the step at which early stopping ended each member; None: not stopped.
        best: tensors of the members' best evaluations, stacked, by name.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = list(members)
        self.stopping: EarlyStoppingCallback | None = None
        self.criterion, self.greater_is_better, self.keeps_best = "eval_loss", False, False
        self.repeats_steps = False
        self._restored: Mapping[str, Any] | None = None
        self._stack: MemberStack | None = None
        self._optimizer: MemberOptimizer | None = None
        self._reset()

    def _reset(self) -> None:
        number = len(self.members)
        self.best_metric: list[float | None] = [None] * number
        self.best_step: list[int | None] = [None] * number
        self.stopped_step: list[int | None] = [None] * number
        self.best: dict[str, Tensor] = {}
        self._counters = [0] * number
        self._held: dict[int, dict[str, Tensor]] = {}  # the buffers of members that have stopped

    def stop_by(self, stopping: EarlyStoppingCallback) -> None:
        """Sets patience and threshold of the early stopping of each member."""
        self.stopping = stopping

    def compare_by(self, criterion: str, greater_is_better: bool, keeps_best: bool) -> None:
        """Sets which evaluation is the best, and if its weights are kept."""
        self.criterion, self.greater_is_better, self.keeps_best = criterion, greater_is_better, keeps_best

    # ---- the run

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Starts afresh, or where the checkpoint was."""
        if self.stopping is not None:
            self.stopping.on_train_begin(args, state, control)
        stack, optimizer = kwargs["model"], kwargs["optimizer"]
        self._stack, self._optimizer = stack, optimizer
        saved, self._restored = self._restored, None
        self._reset()
        stack.active.fill_(1)
        stack.sums.zero_()
        if saved is not None and state.global_step > 0:
            self._restore(saved)
        optimizer.stopped = [number for number, step in enumerate(self.stopped_step) if step is not None]
        for number in optimizer.stopped:
            stack.active[number] = 0
            self._held[number] = stack.buffers_of(number)

    def _restore(self, saved: Mapping[str, Any]) -> None:
        assert self._stack is not None
        assert self._optimizer is not None
        self.best_metric, self.best_step = list(saved["best_metric"]), list(saved["best_step"])
        self.stopped_step, self._counters = list(saved["stopped_step"]), list(saved["counters"])
        self._stack.sums.copy_(saved["sums"])
        self._optimizer.num_steps = int(saved["num_steps"])
        tensors = self._stack.stacked()
        self.best = {name: tensor.to(tensors[name].device) for name, tensor in saved["best"].items()}

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Notes the losses so far, if an out-of-memory may repeat the passes of this step."""
        if self.repeats_steps and self._stack is not None:
            self._stack.note_sums()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Puts back the buffers of members that have stopped, which the passes of the others change."""
        for number, buffers in self._held.items():
            assert self._stack is not None
            self._stack.load_member(number, buffers)

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Notes the best evaluation of each member, and stops members that have not improved."""
        if self._stack is None:  # an evaluation outside of a run
            return
        for number, member in enumerate(self.members):
            value = (metrics or {}).get(f"{self.criterion}/{member.name}")
            if value is not None and self.stopped_step[number] is None:
                self._note(number, float(value), state.global_step)
        if all(step is not None for step in self.stopped_step):
            control.should_training_stop = True

    def _note(self, number: int, value: float, step: int) -> None:
        assert self._stack is not None
        assert self._optimizer is not None
        if self.stopping is not None:
            is_progress = self._is_progress(value, self.best_metric[number])
            self._counters[number] = 0 if is_progress else self._counters[number] + 1
        if is_better(value, self.best_metric[number], self.greater_is_better):
            self.best_metric[number], self.best_step[number] = value, step
            if self.keeps_best:
                self._keep(number)
        if self.stopping is not None and self._counters[number] >= self.stopping.early_stopping_patience:
            self.stopped_step[number] = step
            self._optimizer.stopped.append(number)
            self._stack.active[number] = 0
            self._held[number] = self._stack.buffers_of(number)
            logger.info("Member %s has stopped at step %d.", self.members[number].name, step)

    def _is_progress(self, value: float, best: float | None) -> bool:
        assert self.stopping is not None
        if best is None:
            return not math.isnan(value)
        gain = value - best if self.greater_is_better else best - value
        return gain > (self.stopping.early_stopping_threshold or 0.0)

    def _keep(self, number: int) -> None:
        assert self._stack is not None
        for name, tensor in self._stack.stacked().items():
            if name not in self.best:
                self.best[name] = tensor.detach().clone()
            self.best[name][number] = tensor.detach()[number]

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Loads the best weights of each member, if they were kept."""
        stack = self._stack
        if stack is not None and self.keeps_best:
            for number, step in enumerate(self.best_step):
                if step is not None:
                    stack.load_member(number, {name: tensor[number] for name, tensor in self.best.items()})
        self._stack = self._optimizer = None

    def take_losses(self) -> list[float]:
        """Returns the mean loss of each member over the optimizer steps since the last call. Reads the device."""
        if self._stack is None or self._optimizer is None:
            return []
        steps = self._optimizer.take_steps()
        sums = self._stack.sums.tolist()
        self._stack.sums.zero_()
        return [value / steps for value in sums] if steps else []

    def norms(self) -> list[float]:
        """Returns the norm of each member's gradients in the last step."""
        norms = self._optimizer.norms if self._optimizer is not None else None
        return [] if norms is None else norms.tolist()

    def rates(self) -> list[float]:
        """Returns the learning rate of each member in the last step."""
        return [] if self._optimizer is None else self._optimizer.rates

    # ---- a checkpoint item

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of each member."""
        stack, optimizer = self._stack, self._optimizer
        return {
            "members": [member.to_dict() for member in self.members],
            "best_metric": list(self.best_metric),
            "best_step": list(self.best_step),
            "stopped_step": list(self.stopped_step),
            "counters": list(self._counters),
            "sums": None if stack is None else stack.sums.clone(),
            "num_steps": 0 if optimizer is None else optimizer.num_steps,
            "best": {name: tensor.clone() for name, tensor in self.best.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores it when training begins.

        Raises:
            ValueError: the checkpoint is of other members.
        """
        own = [member.to_dict() for member in self.members]
        if state["members"] != own:
            raise ValueError(f"the checkpoint is of the members {state['members']}, not {own}: resume with the same")
        self._restored = state
