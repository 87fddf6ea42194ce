"""The folder of a job: whose it is, whether it is done, where to go on; and training in it until the end or Ctrl-C."""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from paceline.args.places import is_url
from paceline.cli.errors import UsageError
from paceline.core import folders
from paceline.core.resuming import AUTO
from paceline.core.signals import PREEMPTION_SIGNALS
from paceline.core.stores import ObjectStore, StoreError, bring_files, bring_named, bring_run

if TYPE_CHECKING:
    from paceline.tf.trainer import TFTrainer
    from paceline.trainer import Trainer

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
Show = Callable[[Any], str]  # a sample of the training set, for a person to read


@dataclass
class Job:
    """A job and its folder.

    Attributes:
        folder: the output folder.
        command: what made it, for instance `demo text`.
        identity: what may not change from start to start: else the checkpoints belong to something else.
        settings: what was decided at the first start and holds at the next ones.
        finished: the length of the run that was finished, or None.
        checkpoint: where to go on, or None.
    """

    folder: Path
    command: str
    identity: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    finished: dict[str, Any] | None = None
    checkpoint: Path | None = None

    def write(self) -> None:
        """Write `job.json`, in one step."""
        self.folder.mkdir(parents=True, exist_ok=True)
        content = {
            "format": 1,
            "command": self.command,
            "identity": self.identity,
            "settings": self.settings,
            "finished": self.finished,
        }
        temporary = self.folder / f".{JOB_NAME}.incomplete-{os.getpid()}"
        temporary.write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")
        temporary.replace(self.folder / JOB_NAME)


def open_job(
    folder: Path,
    command: str,
    identity: Mapping[str, Any],
    *,
    fresh: bool,
    say: Say,
    resume: str | bool | None = None,
) -> Job:
    """Find out what a folder holds: nothing yet, this job (to go on with), or something else (an error).

    Args:
        fresh: start over; what is there is moved aside, never deleted.
        say: told what was moved, repaired or passed over.
        resume: `resume_from_checkpoint` as given; one that this command did not make is no error then.

    Raises:
        UsageError: the folder holds another job; the message names what differs.
    """
    job = Job(folder, command, json.loads(json.dumps(dict(identity), default=str)))
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
                "or --resume_from_checkpoint true to go on with it"
            )
        return job
    _check_same(job, earlier)
    job.settings, job.finished = dict(earlier.get("settings") or {}), earlier.get("finished")
    job.checkpoint = folders.newest_valid(folder, say)
    return job


def bring_job(args: Any, fresh: bool, say: Say) -> None:
    """Where the output belongs to a store and this machine lacks it, bring what a job goes on with.

    Raises:
        UsageError: the store cannot be reached, or is to be started over in.
    """
    if args.output_store is None:
        return
    if fresh:
        raise UsageError(f"--fresh: {args.output_store} holds what is there; give another --output_dir")
    folder = Path(str(args.output_dir))
    try:
        bring_files(ObjectStore(args.output_store), folder)
        bring_run(args.output_store, folder, say)
    except (ImportError, StoreError) as error:
        raise UsageError(str(error)) from error


def resume_of(args: Any) -> str | bool | None:
    """`resume_from_checkpoint` as the commands take it: "auto" is what they do, and a URL is brought here.

    Raises:
        UsageError: there is no good checkpoint at that URL.
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
    """Whether `resume_from_checkpoint` asks for anything: not when it is unset or false, as a word too."""
    return resume is not None and str(resume).lower() != "false"


def named_checkpoint(resume: str | bool | None) -> Path | None:
    """The checkpoint that `resume_from_checkpoint` names; None where it leaves the choice, or asks for none."""
    return Path(str(resume)) if asks_to_resume(resume) and str(resume).lower() != "true" else None


def is_of_tensorflow(checkpoint: Path) -> bool:
    """Whether a folder holds what a TFTrainer wrote: a checkpoint, or a saved model."""
    return any((checkpoint / name).is_file() for name in ("variables.index", *SAVED_BY_TENSORFLOW))


def check_resume(resume: str | bool | None, folder: Path) -> None:
    """Whether the checkpoint that was named can be loaded.

    Raises:
        UsageError: it cannot; the message says why.
    """
    if not asks_to_resume(resume):
        return
    named = named_checkpoint(resume)
    if named is None:
        if folders.newest_valid(folder, logger.warning) is None:
            raise UsageError(f"resume_from_checkpoint: there is no good checkpoint in {folder}")
        return
    if not named.is_dir():
        raise UsageError(f"resume_from_checkpoint: there is no folder {named}")
    problems = folders.verify(named)
    if problems:
        raise UsageError(f"resume_from_checkpoint: {named} is damaged: {'; '.join(problems[:3])}")


def read_job(folder: Path) -> dict[str, Any] | None:
    """What `job.json` says, or None where there is none.

    Raises:
        UsageError: the file is damaged.
    """
    path = folder / JOB_NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read ({error}); {REMEDY}") from error
    if not isinstance(content, dict) or not isinstance(content.get("identity"), dict):
        raise UsageError(f"{path} is no job of this command; {REMEDY}")
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
    """Options as they were given, to start the job with them again; secrets are not written down."""
    return {name: value for name, value in arguments.items() if name != "hub_token"}


def check_same(job: Job, identity: Mapping[str, Any]) -> None:
    """Whether what a job was made of is still there.

    Raises:
        UsageError: it has changed; the message says what.
    """
    now = json.loads(json.dumps(dict(identity), default=str))
    for key, before in job.identity.items():
        if now.get(key) != before:
            raise UsageError(
                f"{job.folder} cannot be made again: {key} was {_short(before)}, now it is {_short(now.get(key))}"
            )


def move_aside(folder: Path, say: Say) -> None:
    """Rename the folder of an earlier run to the next free `NAME-earlier-N`.

    Raises:
        UsageError: the folder was not made by this command, or one works inside it.
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
    """Train from where the job stands until its end, and note the end.

    Args:
        length: the options that say how long the run is; kept with the note that it finished.
        resume: a checkpoint named by the person; None: the job's own newest.

    Returns:
        The exit code: 0 when the run came to its end, 130 after Ctrl-C, 128 + the signal's number after a signal.
    """
    start = resume if resume is not None else None if job.checkpoint is None else str(job.checkpoint)
    if job.checkpoint is not None and resume is None:
        say(f"Going on from {job.checkpoint}.  (--fresh starts over)")
    job.finished = None
    job.write()
    with noted_signals() as signals:
        try:
            trainer.train(resume_from_checkpoint=start)
        except KeyboardInterrupt:
            say_stopped(trainer, job, say)
            return 130
    if signals and trainer.state.global_step < trainer.state.max_steps:
        say_stopped(trainer, job, say)
        return 128 + signals[0]
    job.finished = {"global_step": trainer.state.global_step, **length}
    return 0


def is_finished(job: Job, length: Mapping[str, Any]) -> bool:
    """Whether the run came to its end at the length that is asked for now, and what it left is there."""
    return (
        job.finished is not None
        and all(job.finished.get(key) == value for key, value in length.items())
        and (job.folder / STATE_NAME).is_file()
        and any((job.folder / name).is_file() for name in WEIGHT_FILES)
    )


def write_results(trainer: Trainer | TFTrainer, job: Job, *, evaluates: bool = True) -> dict[str, float]:
    """Evaluate, write the final model, the history and the metrics, then the note that the run is finished.

    Returns:
        The metrics; empty without an evaluation.
    """
    metrics = trainer.evaluate() if evaluates else {}
    trainer.save_model(_internal_call=True)  # what is pushed is pushed when the results are there too
    if metrics:
        trainer.save_metrics("eval", metrics)
    trainer.save_state()
    job.write()
    return metrics


def restore_finished(trainer: Trainer | TFTrainer, job: Job, say: Say) -> None:
    """Load what `write_results` wrote, and say so."""
    assert job.finished is not None
    steps = job.finished["global_step"]
    say(f"This run is finished: {steps:,} steps. Its results follow.  (--fresh starts over)")
    trainer._load_from_checkpoint(str(job.folder))
    trainer.state = type(trainer.state).load_from_json(str(job.folder / STATE_NAME))


@contextmanager
def noted_signals() -> Iterator[list[int]]:
    """While entered, SIGTERM and SIGUSR1 are noted; the Trainer's own handlers come on top and call these."""
    noted: list[int] = []
    before: dict[int, Any] = {}

    def note(number: int, frame: FrameType | None) -> None:
        noted.append(number)

    try:
        for number in PREEMPTION_SIGNALS:
            before[number] = signal.signal(number, note)
    except ValueError:  # outside the main thread nobody may
        logger.debug("no signal handlers outside the main thread")
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def say_stopped(trainer: Trainer | TFTrainer, job: Job, say: Say) -> None:
    """Where a run stands that was stopped, and how to go on."""
    state = trainer.state
    say(f"\nStopped at step {state.global_step:,} of {state.max_steps:,}.")
    found = folders.list_checkpoints(job.folder)
    if found:
        say(f"{found[-1]} holds everything: run the same command again to go on from there.")
    else:
        say("No checkpoint was written (save_strategy): the next start begins anew.")


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
