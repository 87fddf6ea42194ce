"""The life of a training run, in its order: start, open the data, prepare, restore, run, finish, close.

A `Session` is made for each call and declares the attributes of the Trainer that it reads and writes: model, optimizer,
strategy, state, control. A `Run` holds what lives as long as one training. Each framework's session makes the parts and
hands every part what it works on. The facades, which users and subclasses see, forward to their session.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, Self, TypeVar, overload

from paceline.args.plan import Plan
from paceline.core.contracts import Hooks, Pending
from paceline.core.events import CallbackHandler
from paceline.core.headlines import header, headlines
from paceline.core.ledger import LOG, OTHER, SAVE, Ledger, describe, remedies, slow_processes
from paceline.core.lineage import RECORD_NAME, RunMark, at, claimed
from paceline.core.log_text import LogText
from paceline.core.loop import Loop
from paceline.core.metrics import speed_metrics
from paceline.core.optional import LateModule
from paceline.core.outputs import TrainOutput
from paceline.core.record import write_run_record
from paceline.core.retry_writer import RetryWriter
from paceline.core.signals import StopSignals
from paceline.core.state import TrainerControl, TrainerState
from paceline.core.worker_watch import WorkerWatch

if TYPE_CHECKING:
    from paceline.core import goodput, resources
else:
    goodput = LateModule("paceline.core.goodput")
    resources = LateModule("paceline.core.resources")

logger = logging.getLogger(__name__)

REMARK_SECONDS = 60.0  # a run that is shorter says little about where the time of a real one goes

Value = TypeVar("Value")
RunType = TypeVar("RunType", bound="Run")
FacadeType = TypeVar("FacadeType", bound="Facade")


class Kept(Generic[Value]):
    """An attribute of a session that its facade keeps, where users and subclasses read and replace it.

    Args:
        name: of the facade's attribute; None: the same as the session's.
    """

    def __init__(self, name: str | None = None) -> None:
        self.name = name

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = self.name or name

    @overload
    def __get__(self, session: None, owner: type) -> Self: ...

    @overload
    def __get__(self, session: Any, owner: type) -> Value: ...

    def __get__(self, session: Any, owner: type) -> Any:
        return self if session is None else getattr(session.facade, str(self.name))

    def __set__(self, session: Any, value: Value) -> None:
        setattr(session.facade, str(self.name), value)


class Facade(Protocol):
    """The members of a facade that every session reads or calls, as its user or a subclass defines them.

    Attributes:
        log: `(logs, start_time)`: stamps, stores and reports one row of metrics.
    """

    log: Callable[..., None]


@dataclass(frozen=True)
class RunFacts:
    """Facts about a run for its log and its record.

    Attributes:
        num_trainable: elements of the trainable parameters.
        num_parameters: elements of all parameters.
        num_samples: samples of one epoch; None if unknown.
        record: further entries of `run.json`.
        lines: further log lines.
        device: where the model is, for people.
        model: name of its class.
    """

    num_trainable: int
    num_parameters: int
    device: str
    model: str
    num_samples: int | None = None
    record: Mapping[str, Any] = field(default_factory=dict)
    lines: tuple[str, ...] = ()


class Stages(Protocol):
    """Measurements of the memory of each stage."""

    def stop(self, stage: str) -> dict[str, float]:
        """Ends a stage; returns its metrics."""
        ...


class Meter(Protocol):
    """Counts something in the course of a run, such as its floating-point operations."""

    def row(self, times: Mapping[str, float]) -> dict[str, float]:
        """Returns the entries of a row of logs, given the times in it."""
        ...

    def describe(self) -> str:
        """Returns the rate of the whole run in words; empty if nothing was counted."""
        ...


class Lock(Protocol):
    """The exclusive right of a run to write to its output folder."""

    def check(self) -> None:
        """Raises if another process has taken it over."""


@dataclass
class Run:
    """The parts of one training run, while it lasts.

    Attributes:
        plan: as it was at the start; the loop's own changes after an out-of-memory.
        feed: yields the data.
        engine: runs the optimizer steps.
        signals: stop requests.
        mark: identifies the checkpoints of this run.
        folder: output folder of the run.
        lock: of the output folder; None: another process holds it, or locks are unsupported.
        trial: of a hyper-parameter search, or None.
        ignore_keys: output keys that evaluation leaves out.
        first_step: `global_step` at the start, more than 0 after a resume.
        first_tokens: input tokens seen before it.
        loop: decides when.
        is_trained: the loop has ended.
        retry_writer: writes the journal and the record of the run.
        log_text: the rows of the log as text, from one save to the next.
        begun: start of the run, in seconds of a monotonic clock.
        ledger: the time of the run by activity.
        resources: samples the machine; None: `log_resources` is off.
        meters: add entries to the rows of logs.
    """

    plan: Plan
    feed: Any
    engine: Any
    signals: StopSignals
    mark: RunMark
    folder: Path
    lock: Lock | None = None
    trial: Any = None
    ignore_keys: list[str] | None = None
    first_step: int = 0
    first_tokens: int = 0
    loop: Loop | None = None
    is_trained: bool = False
    retry_writer: RetryWriter = field(default_factory=RetryWriter)
    log_text: LogText = field(default_factory=LogText)
    begun: float = field(default_factory=time.monotonic)
    ledger: Ledger = field(default_factory=Ledger)
    resources: resources.Resources | None = None
    meters: tuple[Meter, ...] = ()

    def sample_resources(self) -> None:
        """Starts to sample the machine."""
        self.resources = resources.Resources()

    def row_entries(self) -> dict[str, float]:
        """Returns what callbacks get in a training row beside its metrics; empty for any other row."""
        entries = self.ledger.take_row()
        for meter in self.meters if entries else ():
            entries.update(meter.row(entries))
        if entries and self.resources is not None:
            entries.update(self.resources.take())
        return entries

    def train(self) -> None:
        """Runs the loop to its end."""
        assert self.loop is not None
        self.loop.run()
        self.is_trained = True

    def begin_at(self, state: TrainerState) -> None:
        """Takes the position of a state as the start of the run."""
        self.first_step = state.global_step
        self.first_tokens = state.num_input_tokens_seen

    def claim(self, checkpoint: str) -> RunMark:
        """Marks a checkpoint that was just written as one of the run, if its writer did not; returns the mark."""
        self.mark = claimed(self.mark, self.folder, checkpoint)
        return self.mark

    def mark_now(self) -> RunMark:
        """Returns the mark of a checkpoint that is written now."""
        return at(self.mark, self.begun)


class Session(ABC, Generic[RunType, FacadeType]):
    """The parts of one Trainer, and the order of life of its runs.

    A session is made for each call and holds nothing itself: the facade keeps the attributes, so that a subclass may
    define each as it likes, and its methods are looked up when they are called.

    Args:
        facade: the members that the session uses; a Trainer has them.

    Attributes:
        args: the arguments, as they are now.
        state: the training state, live; replaced by each run.
        callback_handler: the callbacks, and which of them each event calls.
        control: the flags of the callbacks, live.
        memory_stages: the memory of each stage.
        is_in_train: True while a run's loop is in progress.
        run: the run in progress, or None.
        run_mark: of the run that was last started or resumed, or None.
        time_spent: seconds of the last run by activity (`paceline.core.ledger.ACTIVITIES`); empty before.
        data_remedy: what makes the data of this framework come faster.
    """

    data_remedy: ClassVar[str]
    args: Kept[Any] = Kept()
    state: Kept[TrainerState] = Kept()
    control: Kept[TrainerControl] = Kept()
    callback_handler: Kept[CallbackHandler] = Kept()
    memory_stages: Kept[Stages] = Kept()
    is_in_train: Kept[bool] = Kept()
    run: Kept[RunType | None] = Kept()
    run_mark: Kept[RunMark | None] = Kept()
    time_spent: Kept[Mapping[str, float]] = Kept()

    def __init__(self, facade: Any) -> None:  # a Trainer: its methods are no variables, as those of a Protocol are
        self.facade: FacadeType = facade

    # ---- the order of life

    def train(
        self,
        folder: Path,
        resume: str | bool | None,
        trial: object = None,
        ignore_keys: list[str] | None = None,
    ) -> TrainOutput:
        """Trains from the start or from a checkpoint to the end.

        Args:
            folder: output folder of the run.
            resume: a checkpoint, True for the newest, or False or None as the framework defines them.
            trial: of a hyper-parameter search, or None.
            ignore_keys: output keys that evaluation leaves out.

        Raises:
            RuntimeError: a run of the same Trainer is in progress.
            FolderInUse: another process trains in the folder.
            KeyboardInterrupt: Ctrl-C, after a checkpoint was written (if saving is on).
        """
        if self.run is not None and not self.run.is_trained:
            raise RuntimeError(
                "train() was called while a run of the same Trainer is in progress: call it after that has ended (set "
                "control.should_training_stop=True in a callback to end it), or make another Trainer."
            )
        begun = time.perf_counter()
        with self.lock(folder) as lock:
            self.start(trial)
            checkpoint = self.find_checkpoint(resume)
            feed, plan = self.open_data(checkpoint)
            self.state = self.begin_state(plan, checkpoint, trial)
            self.run_mark = self.begin_mark(folder, checkpoint)
            if checkpoint is not None:
                plan = self.restore_position(feed, plan, checkpoint)
            signals = StopSignals(self.args.stop_signals, self.world_size > 1)
            with self.surroundings(plan), signals, WorkerWatch(), self.watch() as watchdog:
                run = self.prepare(plan, feed, signals, watchdog, folder)
                run.lock, run.trial, run.ignore_keys = lock, trial, ignore_keys
                run.loop = self.restore(run, checkpoint)
                self.announce(run)
                run.ledger.begin(setup=time.perf_counter() - begun)
                with self.running(run):
                    run.train()
                    output = self.finish(run)
        if signals.is_keyboard:
            raise KeyboardInterrupt(f"stopped at step {self.state.global_step}; the run can be resumed from there")
        return output

    def is_best(self, checkpoint: Path) -> bool:
        """True if the present model is the best, and its own checkpoint could not be written.

        Args:
            checkpoint: the best that was written; a warning says so if a better model is lost.
        """
        step = self.state.best_global_step
        if not step or checkpoint.name == f"checkpoint-{step}":
            return False
        if step == self.state.global_step:
            logger.warning("The best model, of step %d, is the present one: no checkpoint is loaded.", step)
            return True
        logger.warning("The best model, of step %d, could not be written: %s is loaded instead.", step, checkpoint)
        return False

    def make_loop(self, run: RunType, hooks: Hooks, saves: Pending) -> Loop:
        """Returns the loop over the parts of a run.

        Args:
            hooks: what it calls.
            saves: checkpoints that are being written.
        """
        return Loop(
            args=self.args,
            plan=run.plan,
            state=self.state,
            control=self.control,
            handler=self.callback_handler,
            engine=run.engine,
            feed=run.feed,
            hooks=hooks,
            signals=run.signals,
            saves=saves,
            ledger=run.ledger,
        )

    def announce(self, run: RunType) -> None:
        """Logs the plan of a run, and writes it beside the outputs as `run.json`."""
        facts = self.describe(run)
        for line in headlines(run.plan, facts.num_samples, facts.num_trainable):
            logger.info(line)
        logger.info("Plan:\n%s", run.plan.describe())
        for line in facts.lines:
            logger.info(line)
        self.show_header(run, facts)
        if not self.args.should_save:
            return
        extra = {
            "num_parameters": facts.num_parameters,
            **facts.record,
            "num_trainable_parameters": facts.num_trainable,
            "resumed_at_step": run.first_step,
        }
        write = partial(
            write_run_record,
            run.folder,
            args_dict=self.args.to_dict(),
            plan_dict=run.plan.to_dict(),
            seeds={"seed": run.plan.seed, "data_seed": run.plan.data_seed},
            extra=extra,
            run=run.mark,
        )
        run.retry_writer.put(run.folder / RECORD_NAME, write)

    def show_header(self, run: RunType, facts: RunFacts) -> None:
        """Prints a header for people on the first process, unless the log shows the same or no display is wanted."""
        is_wanted = self.args.log_level == "passive" and not self.args.disable_tqdm
        if not is_wanted or not self.state.is_world_process_zero or logger.isEnabledFor(logging.INFO):
            return
        folder = run.folder if self.args.should_save else None
        print(
            header(run.plan, facts.model, facts.num_parameters, facts.num_trainable, facts.device, folder), flush=True
        )

    @contextmanager
    def running(self, run: RunType) -> Iterator[None]:
        """Marks the session as training; the parts of the run are closed at the end, even after an error."""
        if self.args.log_resources:
            run.sample_resources()
        self.is_in_train, self.run = True, run
        try:
            with self.open(run):
                yield
        finally:
            if run.resources is not None:
                run.resources.close()
            run.feed.close()
            self.close(run)
            run.retry_writer.close()
            self.is_in_train, self.run = False, None

    def finish(self, run: RunType) -> TrainOutput:
        """Logs speed and loss of the whole run, completes its checkpoints, and loads the best model if requested."""
        loop, note, now = run.loop, run.ledger.note, run.ledger.now
        assert loop is not None
        is_complete = run.signals.requested is None
        num_updates = self.state.global_step - run.first_step
        train_loss = self.settle(run, loop.mean_loss())
        metrics = speed_metrics("train", loop.start_time, num_samples=loop.num_samples, num_steps=num_updates)
        metrics["total_flos"] = self.state.total_flos
        metrics["train_loss"] = train_loss
        metrics.update(self.memory_stages.stop("train"))
        note((OTHER, now()))
        run.ledger.settle()
        run.ledger.close_row()
        self.facade.log(metrics)
        run.ledger.take_row()
        note((LOG, now()))
        self.complete_saves(run)
        note((SAVE, now()))
        run.ledger.settle()
        slow = slow_processes(self.gather_times(run.ledger.seconds))  # here, since a callback may raise on one of them
        best = self.state.best_model_checkpoint
        if self.args.load_best_model_at_end and best is not None and is_complete and not self.is_best(Path(best)):
            self.load_best(Path(best))
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
        if is_complete:
            logger.info("Training completed: step %d, mean loss %.4g.", self.state.global_step, train_loss)
        note((OTHER, now()))
        run.ledger.settle()
        self.summarise_time(run, num_updates, slow)
        return TrainOutput(self.state.global_step, train_loss, metrics)

    def gather_times(self, seconds: Mapping[str, float]) -> list[Mapping[str, float]]:
        """Returns the seconds by activity of each process, by rank."""
        return [seconds]

    def summarise_time(self, run: RunType, num_steps: int, slow: list[str]) -> None:
        """Keeps the times of a run, and logs them in words; a long run is told what would make it shorter.

        Args:
            run: the run.
            num_steps: its optimizer steps.
            slow: sentences about processes that the others wait for.
        """
        seconds = self.time_spent = run.ledger.seconds
        logger.info("Time %s.", describe(seconds, num_steps))
        for text in filter(None, (meter.describe() for meter in run.meters)):
            logger.info("%s.", text)
        used = (
            goodput.goodput(run.folder, run.mark_now()) if self.args.should_save and len(run.mark.starts) > 1 else None
        )
        if used is not None:
            logger.info("%s", used.describe())
        level = logging.WARNING if sum(seconds.values()) >= REMARK_SECONDS else logging.INFO
        for advice in [*remedies(seconds, self.data_remedy), *(slow if self.state.is_world_process_zero else ())]:
            logger.log(level, "%s", advice)

    def claim(self, run: RunType) -> None:
        """Marks the checkpoint that was just written as one of the run, if its writer did not."""
        self.run_mark = run.claim(f"checkpoint-{self.state.global_step}")

    # ---- what each framework makes of these

    @property
    @abstractmethod
    def world_size(self) -> int:
        """The number of processes that stop together."""

    @abstractmethod
    def lock(self, folder: Path) -> AbstractContextManager[Lock | None]:
        """Locks the output folder: while entered, no other run trains in it."""

    @abstractmethod
    def start(self, trial: object) -> None:
        """Checks the arguments against the data, seeds all randomness, and makes a fresh model if there is a
        `model_init`.
        """

    @abstractmethod
    def find_checkpoint(self, resume: str | bool | None) -> Path | None:
        """Returns the checkpoint to resume from, or None."""

    @abstractmethod
    def open_data(self, checkpoint: Path | None) -> tuple[Any, Plan]:
        """Returns the feed of the training data, and the plan of a run over all of it."""

    @abstractmethod
    def begin_state(self, plan: Plan, checkpoint: Path | None, trial: object) -> TrainerState:
        """Returns a fresh state, or that of the checkpoint under the present arguments."""

    @abstractmethod
    def begin_mark(self, folder: Path, checkpoint: Path | None) -> RunMark:
        """Returns the mark of the checkpoints of a run that starts now."""

    @abstractmethod
    def restore_position(self, feed: Any, plan: Plan, checkpoint: Path) -> Plan:
        """Moves the feed to the checkpoint's position; returns the plan of what remains."""

    @abstractmethod
    def surroundings(self, plan: Plan) -> AbstractContextManager[None]:
        """Edits the model for training and takes that back at the end; the end waits for uploads and pushes."""

    @abstractmethod
    def watch(self) -> AbstractContextManager[Any]:
        """Watches the other processes, if there are any."""

    @abstractmethod
    def prepare(self, plan: Plan, feed: Any, signals: StopSignals, watchdog: Any, folder: Path) -> RunType:
        """Hands the model to the strategy, creates optimizer and engine, and returns the parts of the run."""

    @abstractmethod
    def restore(self, run: RunType, checkpoint: Path | None) -> Loop:
        """Loads what the checkpoint holds beside weights and position; returns the loop of the run."""

    @abstractmethod
    def describe(self, run: RunType) -> RunFacts:
        """Returns the facts about a run that its log and its record name."""

    @abstractmethod
    def open(self, run: RunType) -> AbstractContextManager[None]:
        """Puts model and optimizer into training mode."""

    @abstractmethod
    def close(self, run: RunType) -> None:
        """Waits for writes in progress and clears what an interrupted one left. Raises nothing."""

    @abstractmethod
    def settle(self, run: RunType, train_loss: float) -> float:
        """Completes weights and counts after the last optimizer step; returns the training loss."""

    @abstractmethod
    def complete_saves(self, run: RunType) -> None:
        """Waits until the checkpoints of a run are written, and applies the retention."""

    @abstractmethod
    def load_best(self, checkpoint: Path) -> None:
        """Loads the best model; if it cannot be loaded, logs the reason and keeps the last weights."""
