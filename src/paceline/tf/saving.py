"""Checkpoints of TensorFlow: variables as `tf.train.Checkpoint` writes them, the rest as JSON, published at once.

A checkpoint is a folder `checkpoint-STEP` with

    variables.index, variables.data-*   model, optimizer, generators: `tf.train.Checkpoint(model=...)` reads them
    trainer_state.json                  as on the torch side
    progress.json                       position in the data, callbacks, random state, arguments
    manifest.json                       size and SHA-256 of each file

and what `save_pretrained` writes, where the model has that.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import random
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from paceline.core import folders
from paceline.core.events import callback_states, restore_callback_states
from paceline.core.resuming import PROGRESS_FILE, STATE_FILE, is_same, report_changes
from paceline.core.retention import retention_of, rotate
from paceline.core.space import Place
from paceline.core.state import export_states, write_values
from paceline.core.summary import UpdateSummary
from paceline.tf.following import FollowingSchedule
from paceline.tf.framework import keras, plain, tf
from paceline.tf.randomness import capture_random, random_variables, restore_random

logger = logging.getLogger(__name__)

VARIABLES = "variables"
INDEX_FILE = f"{VARIABLES}.index"
KERAS_FILE = "model.keras"
PRETRAINED_FILE = "tf_model.h5"  # of save_pretrained
SAVED_MODEL_FILE, SAVED_VARIABLES = "saved_model.pb", "variables/variables"


class CheckpointError(ValueError):
    """A checkpoint is damaged, or does not fit this run; the message names its folder."""


# ---- what is in one


def trackable(model: Any, optimizer: Any = None) -> Any:
    """What is written and read: the model, and with an optimizer also that and the generators."""
    if optimizer is None:
        return tf.train.Checkpoint(model=model)
    everything = [plain(variable) for variable in model.variables]  # those too that a layer does not track
    return tf.train.Checkpoint(
        model=model, optimizer=optimizer, weights=everything, random=random_variables(model)
    )


def restore_variables(checkpoint: Path, model: Any, optimizer: Any = None) -> None:
    """Read the variables of a checkpoint into the model, and into the optimizer where one is given.

    Raises:
        CheckpointError: there are none, they are damaged, or they are those of another model or optimizer.
    """
    if not (checkpoint / INDEX_FILE).is_file():
        raise CheckpointError(f"{checkpoint} holds no {INDEX_FILE}: it is no checkpoint of TensorFlow.")
    read_variables(trackable(model, optimizer), checkpoint / VARIABLES)


def read_variables(target: Any, path: Path) -> None:
    """Read the variables under `path` into a `tf.train.Checkpoint` of what holds them now.

    Raises:
        CheckpointError: they are damaged, or those of another model or optimizer.
    """
    try:
        status = target.read(str(path))
        status.assert_existing_objects_matched()
        status.expect_partial()
    except (AssertionError, ValueError, TypeError, tf.errors.OpError) as error:
        told = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise CheckpointError(f"{path.parent} does not fit this model and optimizer: {told[0][:300]}") from error


# ---- writing


def save_checkpoint(trainer: Any) -> bool:
    """Write and publish one checkpoint. Returns whether it is there: not where the disk refused, which is logged."""
    state, args = trainer.state, trainer.args
    folder = Path(args.output_dir) / folders.checkpoint_name(state.global_step)
    best_before = state.best_model_checkpoint
    if state.best_global_step:
        best = folder.with_name(folders.checkpoint_name(state.best_global_step))
        if best == folder or best.is_dir():
            state.best_model_checkpoint = str(best)
    if not trainer.is_world_process_zero():
        write_beside(trainer, folder)
        return True
    try:
        Place(folder.parent).check(num_bytes(trainer))
        with folders.staged(folder) as temporary:
            fill(trainer, temporary)
        rotate(folder.parent, retention_of(args), list(state.log_history), state.best_model_checkpoint)
    except (OSError, tf.errors.OpError) as error:
        if isinstance(error, tf.errors.OpError) and not is_refusal(error):
            raise
        state.best_model_checkpoint = best_before
        logger.warning(
            "%s could not be written: %s. Training goes on; the checkpoints before it are whole. The next save is "
            "tried when it is due.",
            folder,
            told_of(error),
        )
        return False
    if args.push_to_hub:
        trainer._push_from_checkpoint(str(folder))
    return True


def told_of(error: BaseException) -> str:
    """What an error says, without the nodes and temporary files that TensorFlow names before and after."""
    text = str(error)
    if isinstance(error, tf.errors.OpError):
        text = re.sub(r"\{\{.*?\}\}|\[Op:\w+\]", "", text).rpartition(";")[2].strip() or text
    return text[:300]


def is_refusal(error: Any) -> bool:
    """Whether TensorFlow says that the disk refused."""
    errors = tf.errors
    kinds = (
        errors.ResourceExhaustedError,
        errors.PermissionDeniedError,
        errors.UnavailableError,
        errors.NotFoundError,
        errors.FailedPreconditionError,
        errors.OutOfRangeError,  # a file too large
        errors.UnknownError,  # a disk that fails
    )
    return isinstance(error, kinds)


def num_bytes(trainer: Any) -> int:
    """Bytes of all variables that a checkpoint holds."""
    variables = [*trainer.model.variables, *(() if trainer.args.save_only_model else optimizer_variables(trainer))]
    return sum(int(np.prod(v.shape)) * tf.as_dtype(v.dtype).size for v in variables)


def optimizer_variables(trainer: Any) -> list[Any]:
    """The variables of the optimizer."""
    found = trainer.optimizer.variables
    return list(found() if callable(found) else found)


def write_beside(trainer: Any, folder: Path) -> None:
    """On a worker that writes no files: take part in reading the variables, which all workers do together."""
    aside = folder.parent / f".{folder.name}.incomplete-{trainer.world.process_index}"
    try:
        write_variables(trainer, aside)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def write_variables(trainer: Any, folder: Path) -> None:
    """The variables of the model, and of all else unless only the model is to be saved."""
    optimizer = None if trainer.args.save_only_model else trainer.optimizer
    trackable(trainer.model, optimizer).write(str(folder / VARIABLES))
    (folder / "checkpoint").unlink(missing_ok=True)


def fill(trainer: Any, folder: Path) -> None:
    """Write everything that belongs into a checkpoint."""
    state = trainer.state
    write_variables(trainer, folder)
    if callable(getattr(trainer.model, "save_pretrained", None)):
        trainer.model.save_pretrained(str(folder))
    if callable(getattr(trainer.processing_class, "save_pretrained", None)):
        trainer.processing_class.save_pretrained(str(folder))
    exporting = [*trainer.callback_handler.callbacks, trainer.control]
    state.stateful_callbacks = export_states([item for item in exporting if callable(getattr(item, "state", None))])
    write_values(state.plain_values(), folder / STATE_FILE)
    (folder / PROGRESS_FILE).write_text(describe_progress(trainer), encoding="utf-8")


def describe_progress(trainer: Any) -> str:
    """The text of `progress.json`.

    Raises:
        TypeError: a callback's state is no plain value.
    """
    run = trainer.run
    loop = run.loop if run is not None else None
    progress: dict[str, Any] = {
        "format": 1,
        "framework": "tensorflow",
        "feed": run.feed.state_dict() if run is not None else None,
        "callbacks": callback_states(trainer.callback_handler),
        "unlogged": dataclasses.asdict(loop.unlogged) if loop is not None else {},
        "length": {"planned": loop.plan.max_steps, "max_steps": trainer.state.max_steps} if loop is not None else {},
        "random": capture_random(),
        "traces": run.engine.traces() if run is not None else {},
        "schedule": schedule_state(trainer.lr_scheduler),
        "arguments": trainer.args.to_sanitized_dict(),
    }
    try:
        return json.dumps(progress, indent=1)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"The state of a callback cannot be saved ({error}): let state_dict() return numbers, text, lists, dicts."
        ) from error


def schedule_state(schedule: Any) -> dict[str, Any] | None:
    """What a schedule that follows the evaluations has seen; None of one that is a function of the step."""
    return schedule.state_dict() if isinstance(schedule, FollowingSchedule) else None


def save_model(model: Any, folder: Path) -> Path:
    """Write a model so that it can be loaded without this package: `save_pretrained`, `.keras`, or a SavedModel.

    Returns: the folder or file to load.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if callable(getattr(model, "save_pretrained", None)):
        model.save_pretrained(str(folder))
        return folder
    if isinstance(model, keras.Model) or hasattr(model, "save"):
        path = folder / KERAS_FILE
        temporary = folder / f".model.incomplete-{random.getrandbits(32):08x}.keras"
        try:
            model.save(str(temporary))
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        return path
    tf.saved_model.save(model, str(folder))
    return folder


def load_model(model: Any, folder: Path) -> None:
    """Read the weights of a checkpoint, or of what `save_model` wrote, into a model.

    Raises:
        CheckpointError: there is neither, or it is that of another model.
    """
    path = next((folder / name for name in (KERAS_FILE, PRETRAINED_FILE) if (folder / name).is_file()), None)
    if path is None and (folder / SAVED_MODEL_FILE).is_file():
        read_variables(tf.train.Checkpoint(root=model), folder / SAVED_VARIABLES)
        return
    if path is None or (folder / INDEX_FILE).is_file():
        restore_variables(folder, model)
        return
    try:
        if isinstance(model, keras.Model) or not hasattr(model, "load_weights"):
            model.set_weights(keras.saving.load_model(path, compile=False).get_weights())
        else:  # of tf_keras, whose files Keras 3 does not read; transformers' TF models are too
            model.load_weights(str(path))
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise CheckpointError(f"{path} does not fit this model: {error}") from error


# ---- reading


def read_progress(checkpoint: Path) -> dict[str, Any]:
    """What `progress.json` says.

    Raises:
        CheckpointError: it is not there, or damaged.
    """
    try:
        progress = json.loads((checkpoint / PROGRESS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{checkpoint} holds no readable {PROGRESS_FILE}: {error}") from error
    if not isinstance(progress, dict):
        raise CheckpointError(f"{checkpoint / PROGRESS_FILE} does not hold a mapping.")
    return progress


def restore(trainer: Any, checkpoint: Path, progress: Mapping[str, Any]) -> None:
    """Everything but the position in the data: variables, callbacks, random state, the log in progress."""
    if "arguments" in progress and progress["arguments"].get("save_only_model") == trainer.args.save_only_model:
        is_whole = not trainer.args.save_only_model
    else:
        is_whole = not (progress.get("arguments") or {}).get("save_only_model", False)
    restore_variables(checkpoint, trainer.model, trainer.optimizer if is_whole else None)
    if not is_whole:
        logger.warning("%s holds the model only: the optimizer starts anew.", checkpoint)
    control = (trainer.state.stateful_callbacks or {}).get("TrainerControl", {}).get("args", {})
    for name in ("should_evaluate", "should_epoch_stop"):  # asked for, and not done yet
        setattr(trainer.control, name, bool(control.get(name, False)))
    restore_callback_states(
        trainer.callback_handler,
        progress.get("callbacks") or {},
        with_arguments=trainer.args.restore_callback_states_from_checkpoint,
    )
    report_changes(trainer, checkpoint, progress)
    if "random" in progress:
        restore_random(progress["random"])
    if is_whole and progress.get("schedule") and isinstance(trainer.lr_scheduler, FollowingSchedule):
        trainer.lr_scheduler.load_state_dict(progress["schedule"])
    logger.info("Resuming from %s: step %d of %d.", checkpoint, trainer.state.global_step, trainer.state.max_steps)


def restore_summary(progress: Mapping[str, Any]) -> UpdateSummary:
    """The updates that the next log is a mean of."""
    return UpdateSummary.restored(progress.get("unlogged") or {})


def restore_position(trainer: Any, feed: Any, plan: Any, checkpoint: Path, progress: Mapping[str, Any]) -> Any:
    """Put the feed where the checkpoint stands, and plan the updates that are left from there.

    With another batch size, accumulation or number of epochs, the samples that are left make another number of updates.
    """
    state, args = trainer.state, trainer.args
    try:
        feed.load_state_dict(progress["feed"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{checkpoint / PROGRESS_FILE}: {error}") from error
    if args.max_steps > 0 or plan.updates_per_epoch is None:
        return plan
    length, before, now = progress.get("length") or {}, progress.get("arguments") or {}, args.to_sanitized_dict()
    names = ("num_train_epochs", "max_steps", "gradient_accumulation_steps", "per_device_train_batch_size")
    if length and all(name in before and is_same(before[name], now[name]) for name in names):
        planned, state.max_steps = int(length["planned"]), int(length["max_steps"])
    else:
        left = plan.micro_batches_per_epoch - feed.batches
        done = feed.epoch * plan.updates_per_epoch + plan.updates_per_epoch + (-left // plan.accumulation)
        planned = state.max_steps = state.global_step + max(plan.max_steps - done, 0)
    return dataclasses.replace(plan, max_steps=planned, warmup_steps=args.get_warmup_steps(planned))
