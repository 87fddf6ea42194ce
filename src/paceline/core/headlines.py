"""Text at the start of a run: log lines in the wording of transformers, which scripts search for, and a header for
people on the standard output.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.args.plan import Plan
from paceline.core.optional import LateModule

terminal = LateModule("paceline.core.terminal")


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


def header(
    plan: Plan,
    model: str,
    num_parameters: int,
    num_trainable: int,
    device: str,
    folder: Path | None,
    first_step: int = 0,
) -> str:
    """Returns the header of a run, about ten lines.

    Args:
        model: the model's class name.
        num_parameters: elements of all parameters.
        num_trainable: elements of the trainable parameters.
        device: description of the device for people.
        folder: the output folder; None if this process saves nothing.
        first_step: optimizer steps before this start; more than 0 after a resume.
    """
    trained = "" if num_trainable == num_parameters else f", {num_trainable:,} of them trained"
    lines = [f"Training {model}: {num_parameters:,} parameters{trained}, on {device}", *plan.describe().splitlines()]
    if first_step:
        lines.append(f"resumed    at step {first_step:,} of {plan.max_steps:,}")
    if folder is not None:
        resume = "" if plan.save_strategy == "no" else "; to resume: train(resume_from_checkpoint=True)"
        lines.append(f"output     {folder}{resume}")
    return "\n  ".join(lines)


def show_header(*facts: Any) -> None:
    """Prints the header of these facts. A closed pipe or a full disk behind the output ends no training."""
    with suppress(OSError):
        terminal.show(header(*facts))
