"""Text at the start of a run: log lines in the wording of transformers, which scripts search for, and a header for
people on the standard output.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.args.plan import Plan
from paceline.core.optional import LateModule
from paceline.core.resume_command import resume_command

terminal = LateModule("paceline.core.terminal")


@dataclass(frozen=True)
class RunFacts:
    """Facts about a run for its log and its record.

    Attributes:
        num_trainable: elements of the trainable parameters.
        num_parameters: elements of all parameters.
        num_samples: samples of one epoch; None if unknown.
        record: further entries of `run.json`.
        lines: further log lines.
        device: description of the model's device for people.
        model: the model's class name.
        describe_parts: returns further lines of the header; called if it is printed.
    """

    num_trainable: int
    num_parameters: int
    device: str
    model: str
    num_samples: int | None = None
    record: Mapping[str, Any] = field(default_factory=dict)
    lines: tuple[str, ...] = ()
    describe_parts: Callable[[], Sequence[str]] = tuple


def headlines(plan: Plan, num_samples: int | None, num_trainable: int) -> list[str]:
    """Returns the log lines at the start of a run.

    Args:
        num_samples: samples of one epoch; None if the data has no length. The samples of the whole run are then shown.
        num_trainable: elements of the trainable parameters.
    """
    in_run = plan.num_micro_batches(plan.max_steps) * plan.global_batch_size // plan.accumulation_steps
    shown = in_run if num_samples is None else num_samples
    per_epoch = plan.max_steps if plan.updates_per_epoch is None else plan.updates_per_epoch
    return [
        "***** Running training *****",
        f"  Num examples = {shown:,}",
        f"  Num Epochs = {plan.num_epochs:,}",
        f"  Num update steps per epoch = {per_epoch:,}",
        f"  Instantaneous batch size per device = {plan.micro_batch_size:,}",
        f"  Total train batch size (w. parallel, distributed & accumulation) = {plan.global_batch_size:,}",
        f"  Gradient Accumulation steps = {plan.accumulation_steps}",
        f"  Total optimization steps = {plan.max_steps:,}",
        f"  Number of trainable parameters = {num_trainable:,}",
    ]


def header(plan: Plan, facts: RunFacts, folder: Path | None, first_step: int = 0, samples: Sequence[str] = ()) -> str:
    """Returns the header of a run, about ten lines, and then the notes of the plan.

    Args:
        folder: the output folder; None if this process saves nothing.
        first_step: optimizer steps before this start; more than 0 after a resume.
        samples: lines about the samples of the training data.
    """
    is_whole = facts.num_trainable == facts.num_parameters
    trained = "" if is_whole else f", {facts.num_trainable:,} of them trained"
    lines = [f"Training {facts.model}: {facts.num_parameters:,} parameters{trained}, on {facts.device}"]
    planned = plan.describe().splitlines()
    notes = [line for line in planned if line.startswith("note ")]
    lines += [*(line for line in planned if line not in notes), *samples, *facts.describe_parts()]
    if first_step:
        lines.append(f"resumed    at step {first_step:,} of {plan.max_steps:,}")
    if folder is not None:
        resume = "" if plan.save_strategy == "no" else f"; to resume: {_how_to_resume(plan)}"
        lines.append(f"output     {folder}{resume}")
    return "\n  ".join(lines + notes)


def _how_to_resume(plan: Plan) -> str:
    command = resume_command(sys.argv)
    if command is None:
        return "train(resume_from_checkpoint=True)"
    return command if plan.world_size == 1 else "the same command"  # the launcher's command line is unknown


def optimizer_line(optimizer: str, rates: Iterable[float], schedule: str) -> str:
    """Returns the line of the header about the optimizer: its name, the least and the greatest rate, the schedule."""
    found = sorted(set(rates))
    shown = found[:: max(len(found) - 1, 1)]
    rate = f", learning rate {' to '.join(f'{each:g}' for each in shown)}" if shown else ""
    return f"optimizer  {optimizer}{rate}, schedule {schedule}"


def show_header(plan: Plan, facts: RunFacts, folder: Path | None, first_step: int, samples: Sequence[str] = ()) -> None:
    """Prints the header of a run. A closed pipe or a full disk behind the output does not end the training."""
    with suppress(OSError):
        terminal.show(header(plan, facts, folder, first_step, samples))
