"""Changes of a run's settings while it trains: the learning rate, weight decay and clipping.

Callbacks request changes through `TrainerControl`, and users by `paceline control`. They are made when the next
optimizer step starts, on all processes alike, and recorded in `control.jsonl`, so that a replay makes them too.
"""

from __future__ import annotations

import json
import logging
import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from paceline.args.errors import UnsupportedOption
from paceline.core.commands import ACTIONS, CHANGES, CommandRefused, answer_command, check_value, take_command
from paceline.core.events import CallbackHandler, TrainerCallback
from paceline.core.journal import CHANGES_FILE, truncate_changes
from paceline.core.retry_writer import RetryWriter, append_line
from paceline.core.state import STEERING_KEY, Request, Requests, TrainerControl, TrainerState

logger = logging.getLogger(__name__)

OPERATIONS = {"learning_rate": ("set", "scale"), "weight_decay": ("set", "scale"), "max_grad_norm": ("set",)}


class Settings(Protocol):
    """The settings of a framework's optimizer, schedule and engine."""

    def obstacle(self, name: str) -> str | None:
        """Returns the reason why a setting cannot be changed, or an action taken; None if it can."""
        ...

    def read(self, name: str) -> float:
        """Returns the current value of a setting."""
        ...

    def change(self, name: str, operation: str, value: float) -> None:
        """Sets or scales a setting from the next optimizer step on.

        Raises:
            ValueError: the setting cannot be changed to this value now.
        """
        ...


@dataclass(frozen=True)
class Actions:
    """Functions for the commands that act and change no setting.

    Attributes:
        stop: ends the run after the optimizer step, with a checkpoint if saving is on.
        evaluation_obstacle: returns the reason why the run cannot evaluate; None if it can.
    """

    stop: Callable[[], None]
    evaluation_obstacle: Callable[[], str | None]


@dataclass(frozen=True)
class Made:
    """A change that was made, and what it replaced."""

    step: int
    request: Request
    before: float


class SettingChanges(TrainerCallback):
    """Makes the requested changes of one run; added to its callbacks by the first request.

    Args:
        requests: the requests of the run.
        settings: changes the settings.
        actions: saves, evaluates and stops.
        handler: the callbacks of the run.
        folder: the output folder; None if this process writes no files.
        retry_writer: writes `control.jsonl`.
    """

    state_key = STEERING_KEY

    def __init__(
        self,
        requests: Requests,
        settings: Settings,
        actions: Actions,
        handler: CallbackHandler,
        folder: Path | None,
        retry_writer: RetryWriter,
    ) -> None:
        self.requests, self.settings, self.actions = requests, settings, actions
        self.folder, self.retry_writer = folder, retry_writer
        self.handler = handler
        self._limit: float | None = None  # a changed max_grad_norm, which the arguments do not hold
        self._made: list[Made] = []  # in this start of the run
        self._is_obstructed = False  # a file that cannot be removed was reported
        self._recorded: dict[int, list[Request]] | None = None  # by step, while a run is replayed
        handler.callbacks.insert(0, self)  # first: a request of another callback's on_step_begin is for the step after

    def end(self) -> None:
        """Removes this from the callbacks, and refuses the commands that the run has not acted on."""
        self.handler.pop_callback(self)
        for request in (*self.requests.pending, *self.requests.agreed):
            self._answer(request, False, "the run has ended before its next optimizer step")

    # ---- requests

    def value(self, name: str) -> float:
        """Returns a setting as it will be after the pending requests.

        Raises:
            UnsupportedOption: the setting cannot be changed in this run.
        """
        self._check_support(name)
        value = self.settings.read(name)
        for request in (*self.requests.agreed, *self.requests.pending):
            if request["name"] == name:
                value = request["value"] * (value if request["operation"] == "scale" else 1)
        return value

    def ask(self, name: str, operation: str, value: object) -> None:
        """Requests a change from a callback.

        Raises:
            ValueError: the value is not in the range of the setting.
            UnsupportedOption: the setting cannot be changed in this run.
        """
        number = check_value(name, operation, value)
        if self._recorded is not None:  # a replay makes the recorded changes
            return
        self._check_support(name)
        self.requests.pending.append(request_of(name, operation, number, "callback"))

    def follow(self, changes: Sequence[Mapping[str, Any]]) -> None:
        """Makes the recorded changes of another run at their steps, and ignores requests.

        Args:
            changes: from `read_changes`.
        """
        self._recorded = {}
        self.requests.pending.clear()
        self.requests.agreed.clear()
        for change in changes:
            name, operation, value = (change.get(key) for key in ("name", "operation", "value"))
            if name in OPERATIONS and operation in OPERATIONS[name]:
                request = request_of(name, operation, check_value(name, operation, value), "record")
                self._recorded.setdefault(change["step"], []).append(request)

    def receive(self) -> None:
        """Reads the command that has arrived, and queues its request."""
        self.requests.is_noticed = False
        if self.folder is None:
            return
        try:
            found = take_command(self.folder)
            if found is not None:
                self._accept(*found)
        except CommandRefused as error:
            if not (error.is_left and self._is_obstructed):
                logger.warning("A command in %s was refused: %s.", self.folder, str(error).rstrip("."))
            self._is_obstructed = error.is_left
            if error.command_id is not None:
                answer_command(self.folder, error.command_id, False, str(error))

    def _accept(self, command: str, name: str, value: float | None, command_id: str) -> None:
        obstacle = self.settings.obstacle(name)
        if obstacle is None and command == "evaluate":
            obstacle = self.actions.evaluation_obstacle()
        if obstacle is not None:
            raise CommandRefused(obstacle, command_id)
        operation = "act" if command in ACTIONS else CHANGES[command][1]
        self.requests.pending.append(request_of(name, operation, value, "command", command_id))

    def _check_support(self, name: str) -> None:
        obstacle = self.settings.obstacle(name)
        if obstacle is not None:
            raise UnsupportedOption(f"control.{name}: {obstacle}")

    # ---- an optimizer step

    def on_step_begin(self, args: object, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Makes the requested changes."""
        requests = self.requests
        step = state.global_step
        if self._made and self._made[-1].step >= step:
            self._undo(step)
        if self._recorded is not None:
            due = self._recorded.get(step, [])
        elif requests.is_shared:
            due, requests.agreed = requests.agreed, []
        else:
            due, requests.pending = requests.pending, []
        for request in due:
            if request["operation"] == "act":
                self._act(request, step, control)
            else:
                self._change(request, state)

    def _act(self, request: Request, step: int, control: TrainerControl) -> None:
        if request["name"] == "stop":
            self.actions.stop()
        else:
            control.request(request["name"])
        text = f"accepted at step {step}: {request['name']} after step {step + 1}"
        logger.warning("Command %s.", text)
        self._answer(request, True, text)

    def _change(self, request: Request, state: TrainerState) -> None:
        """Makes one change.

        Raises:
            ValueError: the change, requested by a callback, cannot be made now.
        """
        step, name, before = state.global_step, request["name"], self.settings.read(request["name"])
        try:
            if request["operation"] == "scale" and math.isinf(before * request["value"]):
                raise ValueError(f"{name}: {before:g} times {request['value']:g} is not finite.")
            self.settings.change(name, request["operation"], request["value"])
        except ValueError as error:
            if request["source"] != "command":
                raise
            logger.warning("A command was refused: %s", error)
            self._answer(request, False, str(error))
            return
        after = self.settings.read(name)
        if name == "max_grad_norm":
            self._limit = after
        self._made.append(Made(step, request, before))
        text = f"{name} is {after:g} (was {before:g}) from step {step + 1} on"
        if state.is_world_process_zero:
            logger.log(logging.WARNING if request["source"] == "command" else logging.INFO, "%s.", text)
        self._answer(request, True, f"accepted at step {step}: {text}")
        self._record({**request, "step": step, "before": before, "after": after, "time": time.time()})

    def _undo(self, step: int) -> None:
        """Follows a rewind to `step`, which restored optimizer and schedule: commands are made again."""
        if self.folder is not None:
            path = self.folder / CHANGES_FILE
            self.retry_writer.put(path, partial(truncate_changes, path, step))
        undone = [made for made in self._made if made.step >= step]
        self._made = self._made[: len(self._made) - len(undone)]
        for made in reversed(undone):
            if made.request["name"] == "max_grad_norm":
                self._limit = made.before
                self.settings.change("max_grad_norm", "set", made.before)
        waiting = self.requests.agreed if self.requests.is_shared else self.requests.pending
        known = {request["id"] for request in waiting}
        waiting += [
            made.request for made in undone if made.request["source"] == "command" and made.request["id"] not in known
        ]

    # ---- records

    def _answer(self, request: Request, is_accepted: bool, text: str) -> None:
        if request["source"] == "command" and self.folder is not None:
            answer_command(self.folder, request["id"], is_accepted, text)

    def _record(self, change: Mapping[str, Any]) -> None:
        if self.folder is not None:
            path = self.folder / CHANGES_FILE
            self.retry_writer.put(path, partial(append_line, path, f"{json.dumps(change)}\n"))

    # ---- the state in a checkpoint

    def state_dict(self) -> dict[str, Any]:
        """Returns the changed clipping norm, and the requests that are not made yet."""
        waiting = [*self.requests.agreed, *self.requests.pending]
        # a resumed run would stop at once by a command to stop
        return {"max_grad_norm": self._limit, "requests": [each for each in waiting if each["operation"] != "act"]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the clipping norm and the requests."""
        limit, requests = state["max_grad_norm"], self.requests
        if limit is not None:
            limit = check_value("max_grad_norm", "set", limit)
            self.settings.change("max_grad_norm", "set", limit)
        self._limit = limit
        restored = [dict(request) for request in state["requests"]]
        known = {request["id"] for request in restored}
        # a rewind keeps commands, whose senders wait; a resumed run has none yet
        commands = [each for each in (*requests.agreed, *requests.pending) if each["source"] == "command"]
        # with several processes each one restores the same requests, and their next exchange takes those of the first
        requests.pending = restored + [each for each in commands if each["id"] not in known]
        requests.agreed = []


def rate_factor(operation: str, value: float, before: float) -> float:
    """Returns the factor that scales a learning rate from `before` to `value`, or by `value`.

    Raises:
        ValueError: the rate is 0, or too small, and cannot be scaled to a value.
    """
    if operation == "scale":
        return value
    if before == 0:
        raise ValueError(
            f"learning_rate: the schedule's rate is 0 for the next optimizer step and cannot be scaled to {value:g}: "
            "use scale_learning_rate, or set the rate once the warm-up has begun."
        )
    factor = value / before
    if math.isinf(factor):
        raise ValueError(f"learning_rate: the factor from {before:g} to {value:g} is not finite.")
    return factor


def request_of(name: str, operation: str, value: float | None, source: str, command_id: str | None = None) -> Request:
    """Returns a request.

    Args:
        name: a key of `OPERATIONS`, or one of `ACTIONS`.
        operation: "set", "scale", or "act" for an action.
        value: None for an action.
        source: "callback", "command" or "record".
        command_id: the id of a command; None makes a new id.
    """
    request_id = uuid.uuid4().hex if command_id is None else command_id
    return {"name": name, "operation": operation, "value": value, "source": source, "id": request_id}
