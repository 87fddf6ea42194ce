"""Going on from a checkpoint: which one, what state it begins with, and what is other than when it was written."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.args import sections
from paceline.args.places import is_url
from paceline.args.plan import Plan
from paceline.core import folders
from paceline.core.state import TrainerState
from paceline.core.stores import bring_named, bring_run

logger = logging.getLogger(__name__)

STATE_FILE = "trainer_state.json"
PROGRESS_FILE = "progress.json"
AUTO = "auto"  # as resume_from_checkpoint: the newest good checkpoint, or a fresh start where there is none

# options that say where things go and what is shown; what a run computes does not depend on them
_INCIDENTAL = {
    field.name
    for section in (
        sections.RunSection,
        sections.LogSection,
        sections.HubSection,
        sections.ResumeSection,
        sections.DebugSection,
        sections.ScriptSection,
    )
    for field in dataclasses.fields(section)
} | {"train_batch_size", "eval_batch_size", "logging_dir", "output_store"}


def newest_checkpoint(args: Any) -> Path | None:
    """The newest good checkpoint of a run: of its folder, or brought into that from its store.

    Raises: StoreError, OSError.
    """
    folder = Path(args.output_dir)
    folders.recover(folder, logger.warning)
    if args.output_store:
        return bring_run(args.output_store, folder, logger.warning)
    return folders.newest_valid(folder, logger.warning)


def find_checkpoint(args: Any, resume: str | bool | None) -> Path | None:
    """The checkpoint to go on from: named, or the newest that verifies (True; "auto": if there is any).

    Raises:
        ValueError: none was found, or the one named is damaged; the message says which and why.
    """
    if resume is None:
        resume = args.resume_from_checkpoint
    if isinstance(resume, str) and resume.lower() in ("true", "false"):
        resume = resume.lower() == "true"
    if resume is None or resume is False:
        return None
    if resume is True or resume == AUTO:
        found = newest_checkpoint(args)
        if found is None and resume is True:
            store = f" nor in {args.output_store}" if args.output_store else ""
            raise ValueError(f"No valid checkpoint found in output directory ({args.output_dir}){store}")
        return found
    url = resume if is_url(resume) else None
    named = bring_named(url, args.output_store, Path(args.output_dir)) if url is not None else Path(resume)
    problems = folders.verify(named) if named.is_dir() else ["it is not a folder"]
    if problems and not any((named / name).exists() for name in (folders.MANIFEST_NAME, STATE_FILE)):
        problems = ["it holds no manifest and no trainer_state.json, so it is no checkpoint"]
    if problems:
        raise ValueError(
            f"Can't resume from {named}: {'; '.join(problems)}. resume_from_checkpoint=True takes the newest good one."
        )
    return named


def begin_state(trainer: Any, plan: Plan, checkpoint: Path | None, trial: Any) -> TrainerState:
    """A fresh state, or the checkpoint's; what the arguments say now wins over what they said then."""
    saved = checkpoint / STATE_FILE if checkpoint is not None else None
    state = TrainerState.load_from_json(str(saved)) if saved is not None and saved.is_file() else TrainerState()
    if not isinstance(state.global_step, int) or state.global_step < 0:
        raise ValueError(f"{saved}: global_step cannot be {state.global_step!r}.")
    if state.best_model_checkpoint is not None and checkpoint is not None:
        beside = checkpoint.with_name(Path(state.best_model_checkpoint).name)  # the run may have come from elsewhere
        if not Path(state.best_model_checkpoint).is_dir() and beside.is_dir():
            state.best_model_checkpoint = str(beside)
    if state.best_model_checkpoint is not None and not Path(state.best_model_checkpoint).is_dir():
        logger.warning("The best checkpoint so far, %s, is gone: it will not be loaded.", state.best_model_checkpoint)
        state.best_model_checkpoint = None
    state.logging_steps, state.eval_steps, state.save_steps = plan.logging_steps, plan.eval_steps, plan.save_steps
    state.train_batch_size = plan.micro_batch_size
    state.max_steps, state.num_train_epochs = plan.max_steps, plan.num_epochs
    state.is_local_process_zero = trainer.is_local_process_zero()
    state.is_world_process_zero = trainer.is_world_process_zero()
    state.is_hyper_param_search = trial is not None
    if state.epoch is None:
        state.epoch = 0
    return state


def changed_arguments(saved: Mapping[str, Any], present: Mapping[str, Any]) -> list[str]:
    """`name before -> now` for every option that differs and that what a run computes may depend on.

    Args:
        saved: options by name, as numbers, truth values and text (`to_sanitized_dict`).
        present: the same, of now.
    """
    return [
        f"{name} {saved[name]} -> {value}"
        for name, value in present.items()
        if name not in _INCIDENTAL and name in saved and not is_same(saved[name], value)
    ]


def report_changes(trainer: Any, checkpoint: Path, progress: Mapping[str, Any] | None) -> None:
    """List, in one line of the log, the options that are others than when the checkpoint was written."""
    saved = (progress or {}).get("arguments")
    if not isinstance(saved, Mapping) or not trainer.is_world_process_zero():
        return
    changes = changed_arguments(saved, trainer.args.to_sanitized_dict())
    if changes:
        logger.warning("Changed since %s was written: %s.", checkpoint.name, ", ".join(changes))


def is_same(before: Any, now: Any) -> bool:
    """Whether an option is what it was; NaN is itself."""
    return bool(before == now) or (before != before and now != now)
