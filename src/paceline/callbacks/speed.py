"""How fast the run is going now, for displays."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from paceline.args.accelerator_config import is_on
from paceline.args.mesh import resolve_mesh
from paceline.core.state import TrainerState


class Speedometer:
    """Speed over the last seconds of training, from the state alone: no wait for the device.

    Tokens per second where `state.num_input_tokens_seen` is counted, else samples per second.

    Args:
        samples_per_step: samples of one update, all processes together.
        window: how many marks to look back over.
    """

    def __init__(self, samples_per_step: int, window: int = 20) -> None:
        self.samples_per_step = samples_per_step
        self._marks: deque[tuple[float, int, int]] = deque(maxlen=window)  # time, steps, tokens
        self._last = ""

    def mark(self, state: TrainerState) -> None:
        """Note where the run stands now, if it stands elsewhere than at the last mark."""
        if not self._marks or state.global_step > self._marks[-1][1]:
            self._marks.append((time.perf_counter(), state.global_step, state.num_input_tokens_seen))

    def restart(self, state: TrainerState) -> None:
        """Count from here: what lies just behind (an evaluation, a save) was not training."""
        self._marks.clear()
        self.mark(state)

    @property
    def steps_per_second(self) -> float | None:
        """Updates per second, or None before there are two marks."""
        if len(self._marks) < 2:
            return None
        (start, first, _), (end, last, _) = self._marks[0], self._marks[-1]
        return (last - first) / (end - start) if end > start else None

    def describe(self) -> str:
        """`"12,345 tok/s"` or `"678 samples/s"`: what it was last, empty before there have been two marks."""
        steps_per_second = self.steps_per_second
        if steps_per_second is None:
            return self._last
        (start, _, first), (end, _, last) = self._marks[0], self._marks[-1]
        if last > first:
            self._last = f"{_three_digits((last - first) / (end - start))} tok/s"
        else:
            self._last = f"{_three_digits(steps_per_second * self.samples_per_step)} samples/s"
        return self._last


def samples_per_update(args: Any, state: TrainerState) -> int:
    """Samples of one update, all processes together, as the arguments ask for them."""
    per_process: int | None = state.train_batch_size or getattr(args, "per_device_train_batch_size", None)
    accumulation: int = getattr(args, "gradient_accumulation_steps", 1)
    world_size: int = getattr(args, "world_size", 1)
    if world_size > 1 and is_on(getattr(args, "accelerator_config", None), "split_batches"):
        return int(args.per_device_train_batch_size) * accumulation
    if world_size > 1 and hasattr(args, "parallelism_config"):
        world_size = resolve_mesh(args, world_size).data_size
    return (per_process or 1) * accumulation * world_size


def length_of(loader: Any) -> int | None:
    """Batches of a loader, or None where it cannot tell."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def format_seconds(seconds: float) -> str:
    """`"1:02:03"` or `"02:03"`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute:02d}:{second:02d}"


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
