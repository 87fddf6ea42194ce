"""Training speed for displays."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from paceline.args.accelerator_config import is_on
from paceline.args.mesh import resolve_mesh
from paceline.args.redeclared import own_options
from paceline.args.training import TrainingArguments
from paceline.args.warmups import BatchWarmup, resolve_batch_warmup
from paceline.core.ledger import ACTIVITIES, COMPUTE, DATA, FORWARD, PREFIX, TRANSFER, training_seconds
from paceline.core.state import TrainerState

MOST_MARKS = 512  # steps whose times are kept for the expected time
ROUNDING = 1e-6  # rounding error, in epochs
BEFORE_BACKWARD = tuple(f"{PREFIX}{ACTIVITIES[activity]}" for activity in (DATA, TRANSFER, FORWARD))
COMPUTED = f"{PREFIX}{ACTIVITIES[COMPUTE]}"  # forward and backward pass, where they are not told apart


class Speedometer:
    """Measures the speed of the last steps from the state alone, without synchronizing the device.

    The unit is tokens per second if `state.num_input_tokens_seen` is counted, else samples per second.

    Args:
        samples_per_step: the global batch size in samples.
        window: number of marks to average over.
        warmup: the warm-up of the batch size, or None.
    """

    def __init__(self, samples_per_step: int, window: int = 20, warmup: BatchWarmup | None = None) -> None:
        self.samples_per_step = samples_per_step
        self.warmup = warmup
        self._marks: deque[tuple[float, int, int]] = deque(maxlen=window)  # time, steps, tokens
        self._last = self._last_pace = ""

    def mark(self, state: TrainerState) -> None:
        """Records time and step if the step has changed since the last mark."""
        if not self._marks or state.global_step > self._marks[-1][1]:
            self._marks.append((time.perf_counter(), state.global_step, state.num_input_tokens_seen))

    def restart(self, state: TrainerState) -> None:
        """Restarts the measurement, after time that was not training (an evaluation, a save)."""
        self._marks.clear()
        self.mark(state)

    @property
    def steps_per_second(self) -> float | None:
        """The optimizer steps per second, or None before there are two marks."""
        if len(self._marks) < 2:
            return None
        (start, first, _), (end, last, _) = self._marks[0], self._marks[-1]
        return (last - first) / (end - start) if end > start else None

    def describe_pace(self) -> str:
        """Returns the last pace, such as `"1.23 step/s"`; empty before there are two marks."""
        pace = self.steps_per_second
        if pace is not None:
            self._last_pace = f"{_three_digits(pace)} step/s"
        return self._last_pace

    def describe(self) -> str:
        """Returns the last speed, such as `"12,345 tok/s"` or `"678 samples/s"`; empty before there are two marks."""
        steps_per_second = self.steps_per_second
        if steps_per_second is None:
            return self._last
        (start, first_step, first), (end, last_step, last) = self._marks[0], self._marks[-1]
        if last > first:
            self._last = f"{_three_digits((last - first) / (end - start))} tok/s"
        else:
            samples = self._samples(last_step) - self._samples(first_step)
            self._last = f"{_three_digits(samples / (end - start))} samples/s"
        return self._last

    def _samples(self, step: int) -> int:
        """Returns the samples of the first `step` optimizer steps."""
        warmup = self.warmup
        return step * self.samples_per_step if warmup is None else warmup.total(step) * warmup.unit


class TimeLeft:
    """Expects the time that a training will still take, from the pace of its steps and the length of its pauses.

    The pace is that of the later half of the steps, without pauses; the first one, which compiles and allocates, never
    counts. A pause (an evaluation, a save) is expected to last the median of its kind. Before the first evaluation, its
    samples are expected to take the time of as many training samples up to the end of the forward pass, as the last log
    row has measured it; without a row a third of the time, because a forward pass has a third of the operations of a
    forward and a backward pass.

    Args:
        first: the step that the training starts at.
        now: the time of the start, in seconds.
    """

    def __init__(self, first: int, now: float) -> None:
        self._marks: list[tuple[int, float]] = []  # step, seconds of training up to it
        self._pauses: dict[str, list[float]] = {}
        self._paused_at: dict[str, int] = {}
        self._first, self._begun = first, now
        self._paused, self._ended = 0.0, now
        self._eval_share = 1 / 3  # of the time of a training sample, which a sample of an evaluation takes

    def mark(self, step: int, now: float) -> None:
        """Notes the end of a step."""
        self._ended = max(self._ended, now)
        if step > (self._marks[-1][0] if self._marks else self._first):
            self._marks.append((step, now - self._begun - self._paused))
            if len(self._marks) > MOST_MARKS:
                del self._marks[1::2]

    def read(self, row: Mapping[str, Any]) -> None:
        """Takes the times of a log row, from which the length of the first evaluation is estimated."""
        total = training_seconds(row)
        passes = sum(row.get(name, 0.0) for name in BEFORE_BACKWARD) + row.get(COMPUTED, 0.0) / 3
        if total > 0 and passes > 0:
            self._eval_share = passes / total

    def pause(self, kind: str, step: int, ended: float, now: float) -> None:
        """Notes the end of a pause that began when `step` had ended, or after an earlier pause since then."""
        seconds = max(now - max(ended, self._ended), 0.0)
        self._ended = now
        self._paused += seconds
        self._pauses.setdefault(kind, []).append(seconds)
        self._paused_at[kind] = step

    def left(self, args: TrainingArguments, state: TrainerState, samples_per_step: int, now: float) -> float | None:
        """Returns the expected seconds from now on; None before the pace of two steps is known."""
        if len(self._marks) < 2:
            return None
        last, seconds = self._marks[-1]
        half = (self._first + last) / 2
        before, earlier = next((mark for mark in reversed(self._marks[:-1]) if mark[0] <= half), self._marks[0])
        pace = max(seconds - earlier, 0.0) / (last - before)
        total = pace * max(state.max_steps - state.global_step, 0)
        for kind in ("eval", "save"):
            number = pauses_left(kind, args, state, self._paused_at.get(kind) == state.global_step)
            seconds = 0.0
            if kind in self._pauses:
                seconds = statistics.median(self._pauses[kind])
            elif kind == "eval":
                seconds = pace / samples_per_step * (state.num_eval_samples or 0) * self._eval_share
            total += number * seconds
            if kind == "eval" and number:  # one that is going on, or has been logged, is partly over
                total -= min(max(now - self._ended, 0.0), seconds)
        return total


def pauses_left(kind: str, args: TrainingArguments, state: TrainerState, is_over: bool) -> int:
    """Returns the number of evaluations or saves that are still to come.

    Args:
        kind: "eval" or "save".
        args: the arguments, of which the strategy and `eval_delay` are read.
        state: the state, of which the interval is read.
        is_over: True if that of the last step has ended.
    """
    if is_over and state.global_step >= state.max_steps:
        return 0  # also if the run ends within an epoch
    strategy = getattr(args, f"{kind}_strategy", "no")
    delay = math.ceil(getattr(args, "eval_delay", 0)) if kind == "eval" else 0
    if strategy == "epoch":
        epoch = state.epoch or 0.0
        first = math.floor(epoch + ROUNDING) + 1 if is_over else math.ceil(epoch - ROUNDING)
        return max(math.ceil(state.num_train_epochs) - max(first, delay, 1) + 1, 0)
    if strategy != "steps":
        return 0
    first = max(state.global_step + is_over, delay, 1)
    interval = int(getattr(state, f"{kind}_steps", None) or 0)
    number = state.max_steps // interval - (first - 1) // interval if interval > 0 else 0
    is_last_due = interval <= 0 or state.max_steps % interval != 0  # the last step is one in any case
    return max(number, 0) + (is_last_due and first <= state.max_steps)


def speedometer_of(args: TrainingArguments, state: TrainerState) -> Speedometer:
    """Returns the speedometer of a run."""
    args = own_options(args)
    size, warmup = global_batch_size(args, state), None
    if getattr(args, "batch_size_warmup", None) is not None:
        warmup = resolve_batch_warmup(args, args.gradient_accumulation_steps, size)
    return Speedometer(size, warmup=warmup)


def global_batch_size(args: TrainingArguments, state: TrainerState) -> int:
    """Returns the global batch size in samples, computed from the arguments."""
    per_process: int | None = state.train_batch_size or getattr(args, "per_device_train_batch_size", None)
    if getattr(args, "auto_find_batch_size", False):  # after an out-of-memory the state's is smaller
        per_process = args.per_device_train_batch_size
    accumulation: int = getattr(args, "gradient_accumulation_steps", 1)
    world_size: int = getattr(args, "world_size", 1)
    if world_size > 1 and is_on(getattr(args, "accelerator_config", None), "split_batches"):
        return int(args.per_device_train_batch_size) * accumulation
    if world_size > 1 and hasattr(args, "parallelism_config"):
        world_size = resolve_mesh(own_options(args), world_size).data_size
    return (per_process or 1) * accumulation * world_size


def length_of(loader: Any) -> int | None:
    """Returns the number of batches of a loader, or None if it has no length."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def format_seconds(seconds: float) -> str:
    """Formats seconds as `"1:02:03"` or `"02:03"`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute:02d}:{second:02d}"


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
