"""Resuming from a checkpoint: its selection, the initial state, and a report of changed arguments."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from paceline.args import sections
from paceline.args.places import is_url
from paceline.args.plan import Plan, follow_length
from paceline.args.sections import Options
from paceline.checkpoint import folders
from paceline.checkpoint.stores import bring_named, bring_run
from paceline.core.lineage import RunMark, is_of_run, is_part, mark_of, run_in
from paceline.core.state import TrainerState

logger = logging.getLogger(__name__)

STATE_FILE = "trainer_state.json"
AUTO = "auto"  # value of resume_from_checkpoint: the newest valid checkpoint, or a fresh start if there is none

_LOGGED = {"include_num_input_tokens_seen", "logging_nan_inf_filter"}  # they change the values in the log

# other options for paths and display, which do not change the run's results
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
    if field.name not in _LOGGED
} | {"train_batch_size", "eval_batch_size", "logging_dir", "output_store"}


def newest_checkpoint(folder: Path, store: str | None) -> Path | None:
    """Returns the newest valid checkpoint of a run, from its folder or downloaded from its store.

    Raises: StoreError, OSError.
    """
    folders.recover(folder, logger.warning)
    if store:
        return bring_run(store, folder, logger.warning)
    return folders.newest_valid(folder, logger.warning)


def find_checkpoint(resume: str | bool | None, output_dir: str, store: str | None) -> Path | None:
    """Returns the checkpoint to resume from, or None.

    Args:
        resume: a folder or URL; True for the newest valid checkpoint; "auto" for the same, or None if there is none;
            None or False for no checkpoint. Booleans may be text.
        output_dir: the output folder.
        store: the URL of the object store that mirrors the output folder, or None.

    Raises:
        ValueError: no checkpoint was found, or the named one is damaged; the message gives the reason.
    """
    folder = Path(output_dir)
    if isinstance(resume, str) and resume.lower() in ("true", "false"):
        resume = resume.lower() == "true"
    if resume is None or resume is False:
        return None
    if resume is True or resume == AUTO:
        found = newest_checkpoint(folder, store)
        if found is None and resume is True:
            also = f" nor in {store}" if store else ""
            others = _said_of_others(folder)
            raise ValueError(f"No valid checkpoint found in output directory ({output_dir}){also}{others}")
        return found
    named = bring_named(resume, store, folder) if is_url(resume) else Path(resume)
    check_named(named, resume)
    run = run_in(named.parent)
    if named.parent.resolve() == folder.resolve() and not is_part(run, named.name, mark_of(named)):
        logger.warning(
            "%s does not belong to the run started or resumed last in this folder. It is named, so training resumes "
            "from it; resume_from_checkpoint=True takes the newest of the last run.",
            named,
        )
    return named


def check_named(named: Path, resume: str) -> None:
    """Checks that a folder is a complete checkpoint.

    Args:
        named: the folder.
        resume: the folder or URL as the user gave it.

    Raises:
        ValueError: it is not a checkpoint, or damaged; the message gives the reason.
    """
    problems = folders.verify(named) if named.is_dir() else ["it is not a folder"]
    if problems and not any((named / name).exists() for name in (folders.MANIFEST_NAME, STATE_FILE)):
        problems = ["it holds no manifest and no trainer_state.json, so it is no checkpoint"]
    if problems:
        raise ValueError(
            f"Can't resume from {named}: {'; '.join(problems)}. Can't find a valid checkpoint at {resume}: "
            "resume_from_checkpoint=True takes the newest good one."
        )


def _said_of_others(folder: Path) -> str:
    """Returns a part of an error message about checkpoints of other runs in a folder; empty if there are none."""
    _, others = folders.own_checkpoints(folder)
    if not others:
        return ""
    return (
        f": the run started or resumed last there has written none, and {', '.join(path.name for path in others)} "
        f"{'is' if len(others) == 1 else 'are'} of another. To resume from that, name it: "
        f"resume_from_checkpoint='{others[-1]}'. To start a new run: resume_from_checkpoint=False, or 'auto', which "
        "does so if there is no checkpoint of the run."
    )


def begin_state(
    plan: Plan,
    checkpoint: Path | None,
    *,
    is_local_process_zero: bool,
    is_world_process_zero: bool,
    is_trial: bool = False,
    trial_name: str | None = None,
    trial_params: object = None,
) -> TrainerState:
    """Returns a fresh state, or the checkpoint's state; the plan overrides saved intervals and lengths.

    Args:
        plan: the plan of the run.
        checkpoint: the checkpoint that the run resumes from, or None.
        is_local_process_zero: True if this process has local rank 0.
        is_world_process_zero: True if this process has rank 0.
        is_trial: True if the run is a trial of a hyperparameter search.
        trial_name: the trial's name.
        trial_params: a mapping with the trial's hyperparameters; anything else means that they are unknown.
    """
    saved = checkpoint / STATE_FILE if checkpoint is not None else None
    state = TrainerState.load_from_json(str(saved)) if saved is not None and saved.is_file() else TrainerState()
    if checkpoint is not None:
        state.best_model_checkpoint = find_best(state, checkpoint)
    state.logging_steps, state.eval_steps, state.save_steps = plan.logging_steps, plan.eval_steps, plan.save_steps
    state.train_batch_size = plan.micro_batch_size
    state.max_steps, state.num_train_epochs = plan.max_steps, plan.num_epochs
    state.is_local_process_zero = is_local_process_zero
    state.is_world_process_zero = is_world_process_zero
    state.is_hyper_param_search = is_trial
    state.trial_name = trial_name
    state.trial_params = dict(trial_params) if isinstance(trial_params, Mapping) else None
    if state.epoch is None:
        state.epoch = 0
    return state


def adapt_intervals(state: TrainerState, args: Options, plan: Plan, restored: Plan) -> Plan:
    """Returns the plan of a resumed run; if its length differs, intervals that are ratios follow it.

    Args:
        state: the state of the run, whose intervals are set.
        args: the arguments.
        plan: the plan of a run from the start.
        restored: the same with the length of the resumed run.
    """
    if restored.max_steps == plan.max_steps:
        return restored
    adapted = follow_length(plan, args, restored.max_steps)
    adapted = dataclasses.replace(adapted, max_steps=restored.max_steps, warmup_steps=restored.warmup_steps)
    state.set_intervals(adapted.logging_steps, adapted.eval_steps, adapted.save_steps)
    return adapted


def find_best(state: TrainerState, checkpoint: Path) -> str | None:
    """Returns a state's best checkpoint if it exists and belongs to the run of `checkpoint`; else None."""
    if state.best_model_checkpoint is None:
        return None
    best = Path(state.best_model_checkpoint)
    if not best.is_dir():
        best = checkpoint.with_name(best.name)  # the run folder may have been moved
    if not best.is_dir():
        logger.warning("The best checkpoint so far, %s, is gone: it will not be loaded.", state.best_model_checkpoint)
        return None
    mark = mark_of(best)
    if best != checkpoint and mark is not None and not is_part(mark_of(checkpoint), best.name, mark):
        logger.warning("The best checkpoint so far, %s, now belongs to another run: it will not be loaded.", best)
        return None
    return str(best)


def report_kept(folder: Path, run: RunMark, checkpoint: Path | None) -> None:
    """Logs a warning with the checkpoints of other runs in a folder, which this run neither counts nor deletes.

    Args:
        folder: the output folder.
        run: the mark of the run that starts now.
        checkpoint: the checkpoint that the run resumes from; None if it starts over, which is then logged too.
    """
    others = [path for path in folders.list_checkpoints(folder) if not is_of_run(run, path.name, mark_of(path))]
    if not others:
        return
    begins = ""
    if checkpoint is None:
        begins = f"Training starts over; train(resume_from_checkpoint={str(others[-1])!r}) resumes. "
    logger.warning(
        "%s%s holds %s of another run: not counted or deleted by save_total_limit, and overwritten if this run reaches "
        "the same step. Use another output_dir to keep them apart.",
        begins,
        folder,
        ", ".join(path.name for path in others),
    )


def announce_resume(state: TrainerState, checkpoint: Path) -> None:
    """Logs the step at which a run resumes, and warns if it is already complete."""
    logger.info(
        "  Resuming training from checkpoint with epoch %d and global step %d of %d: %s.",
        state.epoch or 0,
        state.global_step,
        state.max_steps,
        checkpoint,
    )
    if state.global_step >= state.max_steps:
        logger.warning(
            "%s is at step %d of %d: nothing is left to train, and its model is kept unchanged.",
            checkpoint,
            state.global_step,
            state.max_steps,
        )


def changed_arguments(saved: Mapping[str, Any], present: Mapping[str, Any]) -> dict[str, str]:
    """Returns `name before -> now` by name for every changed option that may affect the run's results.

    Args:
        saved: saved options by name, as numbers, booleans and text (`to_sanitized_dict`).
        present: current options in the same form.
    """
    return {
        name: f"{name} {saved[name]} -> {value}"
        for name, value in present.items()
        if name not in _INCIDENTAL and name in saved and not is_same(saved[name], value)
    }


def report_changes(
    checkpoint: Path,
    progress: Mapping[str, Any] | None,
    present: Mapping[str, Any],
    overridden: Collection[str] = (),
) -> None:
    """Logs, in one line, the options that have changed since the checkpoint was written.

    Args:
        checkpoint: the checkpoint that a run resumes from.
        progress: the content of its `progress.json`.
        present: the current options in the form of `to_sanitized_dict`.
        overridden: options whose values the restored optimizer and schedule have replaced by those of the checkpoint.
    """
    saved = (progress or {}).get("arguments")
    if not isinstance(saved, Mapping):
        return
    changes = changed_arguments(saved, present)
    if not changes:
        return
    kept = [name for name in changes if name in overridden]
    told = _said_of_overridden(kept, saved, present) if kept else ""
    logger.warning("Changed since %s was written: %s.%s", checkpoint.name, ", ".join(changes.values()), told)


def _said_of_overridden(kept: list[str], saved: Mapping[str, Any], present: Mapping[str, Any]) -> str:
    """Returns the part of a message about changed options that have no effect, because the optimizer was restored."""
    until = " until the phase ends" if present.get("phases") not in (None, str(None)) else ""
    # a setting that is 0 cannot be changed during a run
    settable = [f"control.{name}" for name in kept if name in ("learning_rate", "weight_decay") and saved[name]]
    during = f"set {' and '.join(settable)} in a callback's on_train_begin, or " if settable else ""
    return (
        f" The restored optimizer and schedule keep the checkpoint's values of {', '.join(kept)}{until}. To change "
        f"them, {during}start a new run from the checkpoint's weights."
    )


def forget_other_best(state: TrainerState, progress: Mapping[str, Any] | None, present: Mapping[str, Any]) -> None:
    """Resets the best model of a state that was chosen by another metric, or in the other direction.

    Args:
        state: the state of the checkpoint.
        progress, present: see `report_changes`.
    """
    saved = (progress or {}).get("arguments")
    if state.best_metric is None or not isinstance(saved, Mapping):
        return
    before, now = (
        (str(options.get("metric_for_best_model")).removeprefix("eval_"), options.get("greater_is_better"))
        for options in (saved, present)
    )
    if before == now or "None" in (before[0], now[0]):
        return
    logger.warning(
        "The best model so far, of step %s, was chosen by %s=%s with greater_is_better=%s. Now it is %s with "
        "greater_is_better=%s: the next evaluation is the best one so far.",
        *(state.best_global_step, before[0], state.best_metric, before[1], *now),
    )
    state.forget_best()


def forget_other_count(state: TrainerState, progress: Mapping[str, Any] | None, present: Mapping[str, Any]) -> None:
    """Resets the count of input tokens if they were not counted before the checkpoint, or in another unit.

    Args:
        state: the state of the checkpoint.
        progress, present: see `report_changes`.
    """
    name = "include_num_input_tokens_seen"
    saved, now = (progress or {}).get("arguments"), str(present.get(name, "no"))
    unknown = "no" if state.num_input_tokens_seen == 0 else now  # another library wrote the checkpoint
    before = str(saved.get(name, unknown)) if isinstance(saved, Mapping) else unknown
    if now == "no" or now == before or state.global_step == 0:
        return
    if state.is_world_process_zero:
        logger.warning(
            "%s=%r, and it was %r before: num_input_tokens_seen counts the tokens since optimizer step %d only.",
            *(name, now, before, state.global_step),
        )
    state.forget_tokens()


def is_same(before: object, now: object) -> bool:
    """True if an option is unchanged; NaN equals NaN."""
    return bool(before == now) or (before != before and now != now)
