"""Manages the folder of a job: its identity, its progress, and training in it until the end or Ctrl-C."""

from __future__ import annotations

import json
import logging
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from paceline.args.places import is_url
from paceline.args.secrets import masked
from paceline.args.sections import Options
from paceline.checkpoint import folders
from paceline.checkpoint.lock import FolderInUse, holder_in
from paceline.checkpoint.resuming import AUTO
from paceline.checkpoint.stores import ObjectStore, StoreError, bring_files, bring_named, bring_run
from paceline.cli.errors import UsageError
from paceline.core.retry_writer import replace_whole
from paceline.core.signals import PREEMPTION_SIGNALS

if TYPE_CHECKING:
    from paceline.pytorch.trainer import Trainer
    from paceline.tensorflow.trainer import TFTrainer

logger = logging.getLogger(__name__)

JOB_NAME = "job.json"
STATE_NAME = "trainer_state.json"
SAVED_BY_TENSORFLOW = ("model.keras", "saved_model.pb")
WEIGHT_FILES = (
    "model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors",
    "tf_model.h5", *SAVED_BY_TENSORFLOW,
)  # fmt: skip
REMEDY = "give another --output_dir, or --fresh to start over"
Say = Callable[[str], None]
Show = Callable[[Any], str]  # formats a sample of the training set for display


@dataclass
class Job:
    """A job and its folder.

    Attributes:
        folder: the output folder.
        command: the command of the job, for instance `demo text`.
        identity: properties that must be equal at each start for the checkpoints to fit.
        settings: decisions of the first start that later starts reuse.
        finished: the length of the finished run, or None.
        checkpoint: the checkpoint to resume from, or None.
        again: what to run in order to resume: the same command, without the options that would start over.
    """

    folder: Path
    command: str
    identity: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    finished: dict[str, Any] | None = None
    checkpoint: Path | None = None
    again: str = "the same command"

    def write(self) -> None:
        """Writes `job.json` atomically, secrets masked."""
        self.folder.mkdir(parents=True, exist_ok=True)
        names = ("command", "identity", "settings", "finished")
        content = {"format": 1, **{name: getattr(self, name) for name in names}}
        text = json.dumps(masked(json.loads(json.dumps(content, default=str))), indent=2)
        replace_whole(self.folder / JOB_NAME, text + "\n")


def open_job(
    folder: Path,
    command: str,
    identity: Mapping[str, Any],
    *,
    fresh: bool,
    say: Say,
    resume: str | bool | None = None,
) -> Job:
    """Opens the folder of a job, which is new or holds the same job to resume.

    Args:
        folder: the output folder.
        command: the command of the job.
        identity: properties that must be equal at each start.
        fresh: True starts over; an existing folder is renamed, never deleted.
        say: receives messages about renamed, repaired and skipped files.
        resume: `resume_from_checkpoint` as given; with it, the folder may hold a run that no command started.

    Raises:
        UsageError: the folder holds another job, or a process trains in it; the message names it.
    """
    job = Job(folder, command, masked(json.loads(json.dumps(dict(identity), default=str))))
    is_named = resume is not None and str(resume).lower() != "true"
    left_out = ["--fresh"] * fresh + ["--resume_from_checkpoint"] * is_named
    if left_out:
        job.again += f" without {' and '.join(left_out)}"
    holder = holder_in(folder)
    if holder is not None:
        raise UsageError(f"{folder} is in use: {holder}, trains in it; end it first, or give another --output_dir")
    if fresh:
        move_aside(folder, say)
    folders.recover(folder, say)
    check_resume(resume, folder)
    earlier = read_job(folder)
    if earlier is None:
        found = folders.list_checkpoints(folder)
        if found and resume is None:
            raise UsageError(
                f"{folder} holds {found[-1].name} of a run that this command did not start: give another --output_dir, "
                "or --resume_from_checkpoint true to resume it"
            )
        return job
    _check_same(job, earlier)
    job.settings, job.finished = dict(earlier.get("settings") or {}), earlier.get("finished")
    job.checkpoint = folders.newest_valid(folder, say)
    return job


def bring_job(args: Options, fresh: bool, say: Say) -> None:
    """Downloads the files needed to resume a job whose output is in a store, if missing on this machine.

    Raises:
        UsageError: the store is unreachable, or `--fresh` is given.
    """
    if args.output_store is None:
        return
    if fresh:
        raise UsageError(f"--fresh: {args.output_store} is not empty; give another --output_dir")
    folder = Path(str(args.output_dir))
    try:
        bring_files(ObjectStore(args.output_store), folder)
        bring_run(args.output_store, folder, say)
    except (ImportError, StoreError) as error:
        raise UsageError(str(error)) from error


def resume_of(args: Options) -> str | bool | None:
    """Returns `resume_from_checkpoint` for the commands: None for "auto", their default; a URL is downloaded first.

    Raises:
        UsageError: there is no valid checkpoint at that URL.
    """
    resume: str | bool | None = args.resume_from_checkpoint
    if resume == AUTO:
        return None
    if is_url(resume):
        try:
            return str(bring_named(str(resume), args.output_store, Path(str(args.output_dir))))
        except (ImportError, StoreError) as error:
            raise UsageError(f"resume_from_checkpoint: {error}") from error
    return resume


def asks_to_resume(resume: str | bool | None) -> bool:
    """True if `resume_from_checkpoint` is set, and neither False nor the word "false"."""
    return resume is not None and str(resume).lower() != "false"


def named_checkpoint(resume: str | bool | None) -> Path | None:
    """Returns the checkpoint that `resume_from_checkpoint` names; None for booleans and None."""
    return Path(str(resume)) if asks_to_resume(resume) and str(resume).lower() != "true" else None


def is_of_tensorflow(checkpoint: Path) -> bool:
    """True if a folder holds a checkpoint or saved model of a TFTrainer."""
    return any((checkpoint / name).is_file() for name in ("variables.index", *SAVED_BY_TENSORFLOW))


def check_resume(resume: str | bool | None, folder: Path) -> None:
    """Checks that the named checkpoint can be loaded.

    Raises:
        UsageError: the checkpoint cannot be loaded; the message gives the reason.
    """
    if not asks_to_resume(resume):
        return
    named = named_checkpoint(resume)
    if named is None:
        if folders.newest_valid(folder, logger.warning) is None:
            raise UsageError(f"resume_from_checkpoint: there is no valid checkpoint in {folder}")
        return
    if not named.is_dir():
        raise UsageError(f"resume_from_checkpoint: there is no folder {named}")
    problems = folders.verify(named)
    if problems:
        raise UsageError(f"resume_from_checkpoint: {named} is damaged: {'; '.join(problems[:3])}")


def read_job(folder: Path) -> dict[str, Any] | None:
    """Reads `job.json`; returns None if it does not exist.

    Raises:
        UsageError: the file is damaged.
    """
    path = folder / JOB_NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read ({error}); {REMEDY}") from error
    if not isinstance(content, dict) or not isinstance(content.get("identity"), dict):
        raise UsageError(f"{path} is not a job of this command; {REMEDY}")
    return content


def _check_same(job: Job, earlier: Mapping[str, Any]) -> None:
    before, now = earlier["identity"], job.identity
    if earlier.get("command") != job.command:
        raise UsageError(f"{job.folder} holds a job of `paceline {earlier.get('command')}`: {REMEDY}")
    for key in sorted({*before, *now}):
        if before.get(key) != now.get(key):
            raise UsageError(
                f"{job.folder} holds another job: {key} was {_short(before.get(key))}, "
                f"now it is {_short(now.get(key))}; {REMEDY}"
            )


def kept(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options as given, for later starts, without secrets."""
    return {name: value for name, value in arguments.items() if name != "hub_token"}


def check_same(job: Job, identity: Mapping[str, Any]) -> None:
    """Checks that the inputs of a job are unchanged.

    Raises:
        UsageError: an input has changed; the message names the change.
    """
    now = masked(json.loads(json.dumps(dict(identity), default=str)))
    for key, before in job.identity.items():
        if now.get(key) != before:
            raise UsageError(
                f"{job.folder} cannot be reproduced: {key} was {_short(before)}, now it is {_short(now.get(key))}"
            )


def move_aside(folder: Path, say: Say) -> None:
    """Renames the folder of an earlier run to the next free `NAME-earlier-N`.

    Raises:
        UsageError: another program created the folder, or it is the current folder.
    """
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not (folder / JOB_NAME).is_file():
        raise UsageError(f"--fresh: {folder} was not made by this command: it stays; give another --output_dir")
    if Path.cwd().resolve().is_relative_to(folder.resolve()):
        raise UsageError(f"--fresh: {folder} holds the current folder and cannot be moved; give another --output_dir")
    number = 1
    while (target := folder.with_name(f"{folder.name}-earlier-{number}")).exists():
        number += 1
    folder.rename(target)
    say(f"The earlier run is now in {target}.")


def train_job(
    trainer: Trainer | TFTrainer, job: Job, length: Mapping[str, Any], say: Say, resume: str | bool | None = None
) -> int:
    """Trains the job from its current step to its end, and records that it is finished.

    Args:
        trainer: the Trainer of the job.
        job: the job.
        length: the options that determine the length of the run; recorded at the end.
        say: prints a message.
        resume: a checkpoint named by the user; None takes the job's newest one.

    Returns:
        The exit code: 0 at the end of the run, 130 after Ctrl-C, 128 + the signal's number after a signal.

    Raises:
        UsageError: another process trains in the folder.
    """
    start = resume
    if job.checkpoint is not None and resume is None:
        start = str(job.checkpoint)
        say(f"Resuming from {job.checkpoint}.  (--fresh starts over)")
    job.finished = None
    job.write()
    with noted_signals() as signals, quiet_stop():
        try:
            trainer.train(resume_from_checkpoint=start)
        except KeyboardInterrupt:
            say_stopped(trainer, job, say)
            return 130
        except FolderInUse as error:
            raise UsageError(str(error)) from error
    if signals and trainer.was_stopped:
        say_stopped(trainer, job, say)
        return 128 + signals[0]
    job.finished = {"global_step": trainer.state.global_step, **length}
    return 0


def is_finished(job: Job, length: Mapping[str, Any]) -> bool:
    """True if the run has finished at the current length and its results exist."""
    return (
        job.finished is not None
        and all(job.finished.get(key) == value for key, value in length.items())
        and (job.folder / STATE_NAME).is_file()
        and any((job.folder / name).is_file() for name in WEIGHT_FILES)
    )


def write_results(trainer: Trainer | TFTrainer, job: Job, *, evaluates: bool = True) -> dict[str, float]:
    """Writes the final model, the history and the metrics of the training, and records that the run is finished; then
    evaluates, and writes those metrics.

    The model comes first: an evaluation that fails or is interrupted must not lose what was trained.

    Returns:
        The metrics of the evaluation; empty without one.
    """
    trainer.save_model(_internal_call=True)  # does not push: the caller pushes once the results exist too
    trainer.save_state()
    if trained := training_metrics(trainer):
        trainer.save_metrics("train", trained)
    note_evaluated(job, not evaluates)
    if not evaluates:
        return {}
    try:
        metrics: dict[str, float] = trainer.evaluate()
    except BaseException as error:
        error.add_note(f"The training is complete: its model is in {job.folder}/, and {job.again} evaluates it.")
        raise
    if metrics:
        trainer.save_metrics("eval", metrics)
    trainer.save_state()
    note_evaluated(job, True)
    return metrics


def training_metrics(trainer: Trainer | TFTrainer) -> dict[str, Any]:
    """Returns the metrics of the training that the state has, which are those of its last start; empty without any."""
    rows = [row for row in trainer.state.log_history if "train_runtime" in row and "train_loss" in row]
    return {key: value for key, value in rows[-1].items() if key != "step"} if rows else {}


def note_evaluated(job: Job, is_evaluated: bool) -> None:
    """Records whether the model of a finished run has been evaluated, as far as its job asks for that."""
    job.finished = {**(job.finished or {}), "is_evaluated": is_evaluated}
    job.write()


def is_evaluated(job: Job) -> bool:
    """True if the last evaluation of a finished run has ended, or is not asked for."""
    return job.finished is not None and job.finished.get("is_evaluated", True) is not False


def restore_finished(trainer: Trainer | TFTrainer, job: Job, say: Say) -> None:
    """Loads the model and the state that `write_results` wrote, and reports that the run is finished."""
    assert job.finished is not None
    steps = job.finished["global_step"]
    say(f"This run is finished: {steps:,} steps. Its results follow.  (--fresh starts over)")
    trainer._load_from_checkpoint(str(job.folder))
    trainer.state = type(trainer.state).load_from_json(str(job.folder / STATE_NAME))


def train_or_restore(trainer: Trainer | TFTrainer, job: Job, given: Mapping[str, Any], say: Say, resume: Any) -> int:
    """Trains a job to its end and writes its results, or loads the results of a finished job. Returns the exit code.

    Args:
        trainer: the Trainer of the job.
        job: the job.
        given: the options as given, stored for `paceline replay`.
        say: prints a message.
        resume: see `train_job`.
    """
    length = {"max_steps": trainer.args.max_steps, "num_train_epochs": trainer.args.num_train_epochs}
    if is_finished(job, length) and is_evaluated(job):
        restore_finished(trainer, job, say)
        return 0
    job.settings["given"] = kept(given)
    code = train_job(trainer, job, length, say, resume)
    if code == 0:
        write_results(trainer, job)
    return code


@contextmanager
def noted_signals() -> Iterator[list[int]]:
    """Context manager that records SIGTERM and SIGUSR1; the Trainer's signal handlers call its handlers too."""
    noted: list[int] = []
    before: dict[int, Any] = {}

    def note(number: int, frame: FrameType | None) -> None:
        noted.append(number)

    try:
        for number in PREEMPTION_SIGNALS:
            before[number] = signal.signal(number, note)
    except ValueError:  # not allowed outside the main thread
        logger.debug("no signal handlers outside the main thread")
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


@contextmanager
def quiet_stop() -> Iterator[None]:
    """Context manager without the Trainer's line about Ctrl-C: `say_stopped` names the command that resumes."""
    line = logging.getLogger("paceline.core.interrupts")
    level = line.level
    line.setLevel(logging.ERROR)
    try:
        yield
    finally:
        line.setLevel(level)


def say_stopped(trainer: Trainer | TFTrainer, job: Job, say: Say) -> None:
    """Reports the step of a stopped run and how to resume it."""
    state = trainer.state
    found, _ = folders.own_checkpoints(job.folder)
    if found:
        resume = f"{found[-1]} is complete, and {job.again} resumes from there."
    else:
        resume = "no checkpoint has been written, and the next start begins from scratch."
    say(f"\nStopped at step {state.global_step:,} of {state.max_steps:,}: {resume}")


def _short(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
