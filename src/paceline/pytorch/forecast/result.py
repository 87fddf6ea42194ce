"""The result of `Trainer.plan`: the resolved plan of a run, and what the run will take."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from paceline.args.plan import Plan
from paceline.checkpoint.retention import Retention
from paceline.checkpoint.space import SMALL_FILES_BYTES
from paceline.core.byte_sizes import format_mib
from paceline.core.journal import FORMAT
from paceline.pytorch.forecast.rehearsal import StepMemoryEstimate

LOG_ROW = 250  # bytes of a row of log.jsonl, about
RUN_FILES_BYTES = 256 << 10  # the report, run.json, packages, arguments and results, rounded up


@dataclass(frozen=True)
class Disk:
    """The disk space that a run takes, in bytes.

    Attributes:
        weights: the model in a checkpoint.
        optimizer: the optimizer's state in a checkpoint; None if its size is known after the first step only.
        num_saves: checkpoints that are written, at most; None if it depends on the metrics.
        num_kept: checkpoints that are on disk at the same time, at most, including one that is being written; None if
            it depends on metrics or times.
        journal: the journal of all steps.
        log: the rows of the log, about.
    """

    weights: int
    optimizer: int | None
    num_saves: int | None
    num_kept: int | None
    journal: int
    log: int

    @property
    def checkpoint(self) -> int | None:
        """Returns the bytes of a checkpoint, without the headers of its tensors; None if unknown."""
        return None if self.optimizer is None else self.weights + self.optimizer + SMALL_FILES_BYTES

    @property
    def total(self) -> int | None:
        """Returns the bytes at the end of the run, with the saved model, about; None if a part of it is unknown."""
        if self.checkpoint is None or self.num_kept is None:
            return None
        return self.checkpoint * self.num_kept + self.weights + self.journal + self.log + RUN_FILES_BYTES


@dataclass(frozen=True)
class Evaluations:
    """The evaluations of a run.

    Attributes:
        number: number of evaluations during training; None if it is unknown.
        samples: samples of one evaluation, over all sets and processes; None if a set has no length.
        batches: batches of one evaluation, on each process; None if a set has no length.
    """

    number: int | None
    samples: int | None
    batches: int | None


@dataclass(frozen=True)
class Forecast:
    """The resources that a run will take.

    Attributes:
        plan: the resolved configuration of the run.
        memory: the memory of an optimizer step on one process; None if unknown, for the reason in `memory_note`.
        memory_note: what the numbers of the memory leave out; empty for nothing.
        disk: disk space.
        evaluations: the evaluations during training.
        samples: training samples of the run, over all processes.
        tokens: training tokens of the run, padding included, by the mean of the first micro-batches; None without
            `input_ids`.
        seconds_per_step: the seconds of a timed step; None if no step was timed.
        options: every option and its resolved value.
        changed: names of the options that differ from their defaults.
    """

    plan: Plan
    memory: StepMemoryEstimate | None
    memory_note: str
    disk: Disk
    evaluations: Evaluations
    samples: int
    tokens: int | None
    seconds_per_step: float | None
    options: Mapping[str, Any]
    changed: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns the forecast in JSON types."""
        seconds = self.seconds_per_step
        return {
            "plan": self.plan.to_dict(),
            "memory": None if self.memory is None else {**asdict(self.memory), "by_kind": dict(self.memory.by_kind)},
            "memory_note": self.memory_note,
            "disk": {**asdict(self.disk), "total": self.disk.total},
            "evaluations": asdict(self.evaluations),
            "samples": self.samples,
            "tokens": self.tokens,
            "seconds_per_step": seconds,
            "training_seconds": None if seconds is None else seconds * self.plan.max_steps,
            "options": dict(self.options),
            "changed": list(self.changed),
        }

    def __str__(self) -> str:
        lines = [self.plan.describe(), *self._memory(), *self._disk()]
        tokens = "" if self.tokens is None else f", about {self.tokens:,} tokens with padding"
        lines.append(f"data       {self.samples:,} samples in all{tokens}")
        if self.evaluations.number != 0:
            lines.append(f"evaluation {self._evaluation()}")
        if self.seconds_per_step is not None:
            minutes = self.seconds_per_step * self.plan.max_steps / 60
            lines.append(
                f"time       {self.seconds_per_step:.3g} s per step, {minutes:,.1f} minutes of training steps; "
                "evaluations and checkpoints come on top"
            )
        return "\n".join(lines)

    def _memory(self) -> list[str]:
        if self.memory is None:
            return [f"memory     not known: {self.memory_note}"]
        found = self.memory
        state = "optimizer unknown" if found.optimizer is None else f"optimizer {format_mib(found.optimizer)}"
        where = "the largest process" if found.peaks else "each process"
        lines = [
            f"memory     peak of a step {format_mib(found.peak)} on {where}, without the framework's own",
            f"           parameters {format_mib(found.parameters)}, gradients {format_mib(found.gradients)}, {state},",
            f"           activations {format_mib(found.activations)} per micro-batch, "
            f"logits {format_mib(found.logits)}",
        ]
        if found.peaks:
            lines.append(f"           processes of a pipeline {', '.join(map(format_mib, found.peaks))}")
        return lines + ([f"           {self.memory_note}"] if self.memory_note else [])

    def _disk(self) -> list[str]:
        disk = self.disk
        logs = f"journal {format_mib(disk.journal)}, log about {format_mib(disk.log)}"
        if disk.num_saves == 0:
            return [f"disk       no checkpoints; {logs}"]
        size = "of unknown size" if disk.checkpoint is None else f"of about {format_mib(disk.checkpoint)}"
        kept = "a number that depends on metrics" if disk.num_kept is None else f"at most {disk.num_kept:,}"
        total = "" if disk.total is None else f"; about {format_mib(disk.total)} in all"
        checkpoints = "checkpoint" if disk.num_kept == 1 else "checkpoints"
        return [f"disk       {kept} {checkpoints} {size} (weights {format_mib(disk.weights)}) at once; {logs}{total}"]

    def _evaluation(self) -> str:
        found = self.evaluations
        number = "an unknown number of times" if found.number is None else f"{found.number:,} times"
        number = "once" if found.number == 1 else number
        if found.samples is None or found.batches is None:
            return f"{number}, over data of unknown length"
        share = "" if found.number is None or not self.samples else f", {found.number * found.samples:,} samples in all"
        passes = "pass" if found.batches == 1 else "passes"
        return f"{number}, {found.samples:,} samples in {found.batches:,} forward {passes}{share}"


def count_saves(plan: Plan) -> int | None:
    """Returns the checkpoints that a run writes, at most; None if that depends on its metrics."""
    return count_actions(plan.save_strategy, plan.save_steps, plan)


def count_evaluations(plan: Plan) -> int | None:
    """Returns the evaluations of a run; None if their number is unknown."""
    number = count_actions(plan.eval_strategy, plan.eval_steps, plan)
    return None if number is None else number + plan.eval_on_start


def count_actions(strategy: str, steps: int, plan: Plan) -> int | None:
    """Returns how often something is done whose interval is `strategy`; None if that is unknown."""
    if strategy == "no":
        return 0
    if strategy == "steps":
        return math.ceil(plan.max_steps / steps)
    known = strategy == "epoch" and plan.updates_per_epoch is not None
    return math.ceil(plan.num_train_epochs) if known else None


def count_kept(num_saves: int | None, retention: Retention, keeps_best: bool, max_steps: int) -> int | None:
    """Returns the checkpoints on disk at once, at most, one that is being written included; None if unknown."""
    if num_saves is None or not retention.is_set:
        return num_saves
    if retention.every_hours:
        return num_saves  # as many hours as steps, at most
    pinned = retention.best + (max_steps // retention.every_steps if retention.every_steps else 0)
    return min(num_saves, (retention.last or 1) + pinned + keeps_best + 1)


def disk_of(plan: Plan, weights: int, optimizer: int | None, retention: Retention, keeps_best: bool) -> Disk:
    """Returns the disk space of a run.

    Args:
        weights, optimizer: bytes of these items of a checkpoint.
        retention: which checkpoints are kept.
        keeps_best: the best checkpoint is kept for the end of the run.
    """
    saves = count_saves(plan)
    logs = count_actions(plan.logging_strategy, plan.logging_steps, plan) or 1
    rows = logs + (count_evaluations(plan) or 0) + 1
    kept = count_kept(saves, retention, keeps_best, plan.max_steps)
    return Disk(weights, optimizer, saves, kept, plan.max_steps * FORMAT.itemsize, rows * LOG_ROW)
