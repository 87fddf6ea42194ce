"""The life cycle of a training run: start, open the data, prepare, restore, run, finish, close.

A `Session` is made for each call and declares the attributes of the Trainer that it reads and writes: model, optimizer,
strategy, state, control. A `Run` holds the objects that live as long as one training. Each framework's session creates
these objects and connects them. The facades, which users and subclasses see, forward to their session.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, Self, TypeVar, overload

from paceline.args.plan import Plan
from paceline.core.contracts import Hooks, Notifying, Pending
from paceline.core.events import CallbackHandler, close_run
from paceline.core.headlines import RunFacts, headlines, show_header
from paceline.core.ledger import LOG, OTHER, SAVE, Ledger, describe, remedies, slow_processes
from paceline.core.lineage import PROGRESS_FILE, RECORD_NAME, RunMark, at, claimed
from paceline.core.log_text import LogText
from paceline.core.loop import Loop
from paceline.core.loop_evaluation import LoopEvaluation
from paceline.core.metrics import speed_metrics
from paceline.core.optional import LateModule
from paceline.core.outputs import TrainOutput
from paceline.core.record import write_run_record
from paceline.core.retry_writer import RetryWriter
from paceline.core.signals import StopSignals
from paceline.core.state import STEERING_KEY, Requests, TrainerControl, TrainerState
from paceline.core.worker_watch import WorkerWatch

if TYPE_CHECKING:
    from paceline.core import best_model, data_lengths, goodput, interrupts, provenance, resources, steering
else:
    best_model = LateModule("paceline.core.best_model")
    data_lengths = LateModule("paceline.core.data_lengths")
    goodput = LateModule("paceline.core.goodput")
    interrupts = LateModule("paceline.core.interrupts")
    provenance = LateModule("paceline.core.provenance")
    resources = LateModule("paceline.core.resources")
    steering = LateModule("paceline.core.steering")

logger = logging.getLogger(__name__)

COMMAND_FILE = ".paceline-control.json"  # as in `paceline.core.commands`, which few runs import
REMARK_SECONDS = 60.0  # advice from a shorter run is not logged as a warning: its times are not representative

Value = TypeVar("Value")
RunType = TypeVar("RunType", bound="Run")
FacadeType = TypeVar("FacadeType", bound="Facade")


class Kept(Generic[Value]):
    """An attribute of a session that is stored on its facade, so that users and subclasses can read and replace it.

    Args:
        name: the name of the facade's attribute; None for the same name as the session's.
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
    """The members of a facade that every session reads or calls. Users and subclasses may redefine them.

    Attributes:
        log: `(logs, start_time)`: stamps, stores and reports one row of metrics.
        train_dataset: the training data.
        eval_dataset: the evaluation data, or a dict of several.
        _tell_card: offers the model card to the callbacks.
    """

    train_dataset: Any
    eval_dataset: Any
    log: Callable[..., None]
    _tell_card: Callable[[], None]


class Stages(Protocol):
    """Measures the memory of each stage."""

    def stop(self, stage: str) -> dict[str, float]:
        """Ends a stage; returns its metrics."""
        ...


class Meter(Protocol):
    """Counts a quantity during a run, such as floating-point operations.

    The entries of a meter with `is_recorded = True` are the same in a resumed run, and become part of the log.
    """

    def row(self, times: Mapping[str, float]) -> dict[str, float]:
        """Returns the entries of a log row, given the row's times."""
        ...

    def describe(self) -> str:
        """Returns the rate of the whole run in words; an empty text if nothing was counted."""
        ...


def meters_in(handler: CallbackHandler) -> list[Meter]:
    """Returns the callbacks that are meters, too: those with `is_meter = True`."""
    return [each for each in handler.callbacks if getattr(each, "is_meter", False) is True]


class Lock(Protocol):
    """The exclusive right of a run to write to its output folder."""

    def check(self) -> None:
        """Raises an error if another process has taken over the lock."""

    def listen(self, name: str, notice: Callable[[], None]) -> None:
        """Calls `notice`, on another thread, while the folder holds a file of this name."""


class Boundary:
    """Settles, after an optimizer step, the checkpoints that were written and a command that has arrived.

    Args:
        saves: checkpoints that are being written.
        requests: the requests of the run.

    Attributes:
        is_due: there is something to settle. A plain attribute, since each step reads it.
    """

    def __init__(self, saves: Notifying, requests: Requests) -> None:
        self.saves, self.requests = saves, requests
        self.is_due = saves.is_due or requests.is_noticed
        saves.listen(self.wake)
        requests.listen(self.wake)

    def wake(self) -> None:
        """Lets the loop call `settle`; may be called by any thread."""
        self.is_due = True

    def settle(self) -> None:
        """Completes the checkpoints, and reads the command."""
        self.is_due = False  # first: what another thread notes from now on is settled by the next call
        if self.saves.is_due:
            self.saves.settle()
        if self.requests.is_noticed:
            self.requests.steering().receive()


@dataclass
class Run:
    """The parts of one training run, while it lasts.

    Attributes:
        plan: the plan at the start; after an out-of-memory the loop replaces its own copy only.
        feed: yields the data.
        engine: runs the optimizer steps.
        signals: stop requests.
        mark: identifies the checkpoints of this run.
        folder: output folder of the run.
        lock: the lock of the output folder; None if another process of the run holds it, or locks are unsupported.
        trial: the trial of a hyperparameter search, or None.
        ignore_keys: output keys that evaluation leaves out.
        first_step: `global_step` at the start, more than 0 after a resume.
        first_tokens: input tokens seen before `first_step`.
        loop: the training loop.
        is_trained: True once the loop has ended.
        retry_writer: writes the journal and the record of the run.
        log_text: the encoded rows of the log, kept between saves.
        begun: start of the run, a value of `time.monotonic()`.
        ledger: the time of the run by activity.
        resources: samples the machine; None if `log_resources` is off.
        meters: add entries to the log rows.
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
        """Starts sampling the machine's resources."""
        self.resources = resources.Resources()

    def row_entries(self) -> tuple[dict[str, float], dict[str, float]]:
        """Returns the entries of a training row: those for the log, and those for callbacks only.

        Both are empty for any other row.
        """
        entries, recorded = self.ledger.take_row(), dict[str, float]()
        for meter in self.meters if entries else ():
            (recorded if getattr(meter, "is_recorded", False) else entries).update(meter.row(entries))
        if entries and self.resources is not None:
            entries.update(self.resources.take())
        return recorded, entries

    def train(self) -> None:
        """Runs the loop to its end."""
        assert self.loop is not None
        self.loop.run()
        self.is_trained = True

    @property
    def evaluation(self) -> LoopEvaluation:
        """Returns what the loop has finished of the evaluation in progress."""
        assert self.loop is not None
        return self.loop.evaluation

    def begin_at(self, state: TrainerState) -> None:
        """Sets the start of the run to the position of a state."""
        self.first_step = state.global_step
        self.first_tokens = state.num_input_tokens_seen

    def claim(self, checkpoint: str) -> RunMark:
        """Assigns a checkpoint that was just written without a mark to this run; returns the run's mark."""
        self.mark = claimed(self.mark, self.folder, checkpoint)
        return self.mark

    def mark_now(self) -> RunMark:
        """Returns the mark of a checkpoint that is written now."""
        return at(self.mark, self.begun)


class Session(ABC, Generic[RunType, FacadeType]):
    """Runs the life cycle of one Trainer's trainings.

    A session is made for each call and has no state: the facade holds the attributes, so that a subclass may redefine
    each of them, and its methods are looked up when they are called.

    Args:
        facade: the Trainer, with the members that the session uses.

    Attributes:
        args: the current arguments, as callbacks get them.
        options: the arguments as paceline reads them: see `paceline.args.redeclared`.
        state: the training state, live; replaced by each run.
        callback_handler: the callbacks and their dispatch table.
        control: the flags of the callbacks, live.
        memory_stages: measures the memory of each stage.
        is_in_train: True while a run's loop is in progress.
        run: the run in progress, or None.
        run_mark: the mark of the run that was last started or resumed, or None.
        time_spent: seconds of the last run by activity (`paceline.core.ledger.ACTIVITIES`); empty before the first run.
        was_stopped: True if a signal has stopped the last run before its end.
        is_best_loaded: True if the last run has ended with the best model (`load_best_model_at_end`).
        data_remedy: advice on how to load this framework's data faster.
    """

    data_remedy: ClassVar[str]
    args: Kept[Any] = Kept()
    options: Kept[Any] = Kept("_own_options")
    state: Kept[TrainerState] = Kept()
    control: Kept[TrainerControl] = Kept()
    callback_handler: Kept[CallbackHandler] = Kept()
    memory_stages: Kept[Stages] = Kept()
    is_in_train: Kept[bool] = Kept()
    run: Kept[RunType | None] = Kept()
    run_mark: Kept[RunMark | None] = Kept()
    time_spent: Kept[Mapping[str, float]] = Kept()
    was_stopped: Kept[bool] = Kept()
    is_best_loaded: Kept[bool] = Kept("_is_best_loaded")

    def __init__(self, facade: Any) -> None:  # Any: the Protocol declares attributes that a Trainer has as methods
        self.facade: FacadeType = facade

    # ---- the life cycle

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
            resume: a checkpoint, True for the newest, or False or None, whose meaning the framework defines.
            trial: the trial of a hyperparameter search, or None.
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
        with self.lock(folder) as lock, interrupts.interrupts_described(partial(self.describe_stop, folder)):
            self.start(trial)
            checkpoint = self.find_checkpoint(resume)
            feed, plan = self.open_data(checkpoint)
            self.state = self.begin_state(plan, checkpoint, trial)
            self.run_mark = self.begin_mark(folder, checkpoint)
            if checkpoint is not None:
                plan = self.restore_position(feed, plan, checkpoint)
            signals = StopSignals(self.options.stop_signals, self.world_size > 1)
            with (
                self.surroundings(plan),
                signals,
                WorkerWatch(),
                self.watch() as watchdog,
                self.control.accepting(self.world_size > 1) as requests,
            ):
                run = self.prepare(plan, feed, signals, watchdog, folder)
                run.lock, run.trial, run.ignore_keys = lock, trial, ignore_keys
                with self.steered(run, requests, checkpoint):
                    run.loop = self.restore(run, checkpoint)
                    self.announce(run)
                    run.ledger.begin(setup=time.perf_counter() - begun)
                    with self.running(run):
                        run.train()
                        output = self.finish(run)
            if signals.is_keyboard:
                raise KeyboardInterrupt(f"stopped at step {self.state.global_step}")
        return output

    def describe_stop(self, folder: Path) -> str | None:
        """Returns the line about a run that Ctrl-C has stopped; None on ranks other than 0."""
        if not self.state.is_world_process_zero:
            return None
        return interrupts.describe_stop(folder, self.run_mark, self.state.global_step)

    @contextmanager
    def steered(self, run: RunType, requests: Requests, checkpoint: Path | None) -> Iterator[None]:
        """Context in which the changes of settings that callbacks and commands request are made."""

        def begin() -> steering.SettingChanges:
            return steering.SettingChanges(
                requests,
                self.settings(run),
                steering.Actions(partial(run.signals.agree, False), self.evaluation_obstacle),
                self.callback_handler,
                run.folder if self.options.should_save else None,
                run.retry_writer,
            )

        requests.open(begin)
        progress = checkpoint / PROGRESS_FILE if checkpoint is not None else None
        if progress is not None and progress.is_file() and STEERING_KEY.encode() in progress.read_bytes():
            requests.steering()  # among the callbacks when their states are restored
        if run.lock is not None:
            run.lock.listen(COMMAND_FILE, requests.notice)
        try:
            yield
        finally:
            requests.end()

    def make_loop(self, run: RunType, hooks: Hooks, saves: Notifying) -> Loop:
        """Returns the loop over the parts of a run.

        Args:
            hooks: functions that the loop calls.
            saves: checkpoints that are being written.
        """
        requests = self.control.requests
        pending: Pending = saves if requests is None else Boundary(saves, requests)
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
            saves=pending,
            ledger=run.ledger,
        )

    def announce(self, run: RunType) -> None:
        """Logs the plan of a run and writes the record `run.json` to the output folder."""
        facts = self.describe(run)
        for line in headlines(run.plan, facts.num_samples, facts.num_trainable):
            logger.info(line)
        logger.info("Plan:\n%s", run.plan.describe())
        for line in facts.lines:
            logger.info(line)
        self.show_header(run, facts)
        if not self.options.should_save:
            return
        extra = {
            "model": facts.model,
            "num_parameters": facts.num_parameters,
            **facts.record,
            "num_trainable_parameters": facts.num_trainable,
            "resumed_at_step": run.first_step,
        }
        write = partial(
            write_run_record,
            run.folder,
            args_dict=self.options.to_dict(),
            plan_dict=run.plan.to_dict(),
            seeds={"seed": run.plan.seed, "data_seed": run.plan.data_seed},
            extra=extra,
            run=run.mark,
        )
        run.retry_writer.put(run.folder / RECORD_NAME, write)

    def show_header(self, run: RunType, facts: RunFacts) -> None:
        """Prints a header for people on rank 0, unless the log shows the same or the display is disabled."""
        is_wanted = self.options.log_level == "passive" and not self.options.disable_tqdm
        if not is_wanted or not self.state.is_world_process_zero or logger.isEnabledFor(logging.INFO):
            return
        folder = run.folder if self.options.should_save else None
        input_name = getattr(self.callback_handler.model, "main_input_name", "input_ids")
        samples = data_lengths.describe_samples(self.facade.train_dataset, input_name)
        show_header(run.plan, facts, folder, run.first_step, samples)

    @contextmanager
    def running(self, run: RunType) -> Iterator[None]:
        """Marks the session as training; the parts of the run are closed at the end, even after an error."""
        if self.options.log_resources:
            run.sample_resources()
        self.is_in_train, self.run, self.is_best_loaded = True, run, False
        try:
            with self.recording(run), self.open(run):
                yield
        finally:
            if run.resources is not None:
                run.resources.close()
            run.feed.close()
            self.close(run)
            run.retry_writer.close()
            close_run(self.callback_handler, self.args, self.state, self.control)
            self.is_in_train, self.run = False, None

    def recording(self, run: RunType) -> AbstractContextManager[None]:
        """Returns a context manager that completes the record of a run, on the process that writes it."""
        if not (self.options.should_save and self.state.is_world_process_zero):
            return nullcontext()
        return provenance.recording(
            run.folder,
            run.mark_now,
            lambda: self.state,
            writer=run.retry_writer,
            handler=self.callback_handler,
            datasets=self.datasets(),
            uses_workers=self.options.dataloader_num_workers > 0,
            is_stopped=lambda: self.was_stopped or run.signals.is_keyboard,
            metric=run.plan.metric_for_best_model,
        )

    def datasets(self) -> dict[str, Any]:
        """Returns the user's datasets by name: `train`, `eval`, and `eval_NAME` if there are several."""
        evaluation = self.facade.eval_dataset
        several = evaluation if isinstance(evaluation, dict) else {}
        found = {"train": self.facade.train_dataset, **{f"eval_{name}": data for name, data in several.items()}}
        if not several:
            found["eval"] = evaluation
        return {name: dataset for name, dataset in found.items() if dataset is not None}

    def finish(self, run: RunType) -> TrainOutput:
        """Logs speed and loss of the whole run, completes its checkpoints, and loads the best model if requested."""
        loop, note, now = run.loop, run.ledger.note, run.ledger.now
        assert loop is not None
        is_complete = run.signals.requested is None  # a signal from now on comes too late to stop anything
        self.was_stopped = not is_complete
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
        slow = slow_processes(self.gather_times(run.ledger.seconds))  # before a callback may raise on one rank
        if self.options.load_best_model_at_end and is_complete:
            self.is_best_loaded = best_model.load_best(self.state, run.plan.metric_for_best_model, self.load_best)
        self.facade._tell_card()
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
        if is_complete:
            logger.info("Training completed: step %d, mean loss %.4g.", self.state.global_step, train_loss)
        note((OTHER, now()))
        run.ledger.settle()
        self.summarise_time(run, num_updates, slow)
        return TrainOutput(self.state.global_step, train_loss, metrics)

    def gather_times(self, seconds: Mapping[str, float]) -> list[Mapping[str, float]]:
        """Returns the seconds by activity of each rank."""
        return [seconds]

    def summarise_time(self, run: RunType, num_steps: int, slow: list[str]) -> None:
        """Stores the times of a run and logs a summary and advice; the advice of a long run is a warning.

        Args:
            run: the run.
            num_steps: its optimizer steps.
            slow: sentences about processes that the others wait for.
        """
        seconds = self.time_spent = run.ledger.seconds
        logger.info("Time %s.", describe(seconds, num_steps))
        for text in filter(None, (meter.describe() for meter in run.meters)):
            logger.info("%s.", text)
        is_counted = self.options.should_save and len(run.mark.starts) > 1
        used = goodput.goodput(run.folder, run.mark_now()) if is_counted else None
        if used is not None:
            logger.info("%s", used.describe())
        level = logging.WARNING if sum(seconds.values()) >= REMARK_SECONDS else logging.INFO
        for advice in [*remedies(seconds, self.data_remedy), *(slow if self.state.is_world_process_zero else ())]:
            logger.log(level, "%s", advice)

    def claim(self, run: RunType) -> None:
        """Assigns the checkpoint that was just written to the run, if it has no mark."""
        self.run_mark = run.claim(f"checkpoint-{self.state.global_step}")

    # ---- implemented for each framework

    @property
    @abstractmethod
    def world_size(self) -> int:
        """The number of processes that must agree to stop; 1 if a signal to one process ends the whole job."""

    @abstractmethod
    def lock(self, folder: Path) -> AbstractContextManager[Lock | None]:
        """Returns a context manager that locks the output folder, so that no other run trains in it."""

    @abstractmethod
    def start(self, trial: object) -> None:
        """Checks the arguments against the data, seeds all random generators, and calls `model_init` if given."""

    @abstractmethod
    def find_checkpoint(self, resume: str | bool | None) -> Path | None:
        """Returns the checkpoint to resume from, or None."""

    @abstractmethod
    def open_data(self, checkpoint: Path | None) -> tuple[Any, Plan]:
        """Returns the iterator over the training data, and the plan of a run over all of it."""

    @abstractmethod
    def begin_state(self, plan: Plan, checkpoint: Path | None, trial: object) -> TrainerState:
        """Returns a fresh state, or the checkpoint's state adapted to the current arguments."""

    @abstractmethod
    def begin_mark(self, folder: Path, checkpoint: Path | None) -> RunMark:
        """Returns the mark of the checkpoints of a run that starts now."""

    @abstractmethod
    def restore_position(self, feed: Any, plan: Plan, checkpoint: Path) -> Plan:
        """Moves the data iterator to the checkpoint's position; returns the plan of the remaining run."""

    @abstractmethod
    def surroundings(self, plan: Plan) -> AbstractContextManager[None]:
        """Adapts the model for training; the exit undoes that, and waits for uploads and pushes."""

    @abstractmethod
    def watch(self) -> AbstractContextManager[Any]:
        """Returns a context manager that watches the other ranks, if there are any."""

    @abstractmethod
    def prepare(self, plan: Plan, feed: Any, signals: StopSignals, watchdog: Any, folder: Path) -> RunType:
        """Prepares the model with the strategy, creates optimizer and engine, and returns the run."""

    @abstractmethod
    def restore(self, run: RunType, checkpoint: Path | None) -> Loop:
        """Loads the checkpoint's state other than weights and data position; returns the loop of the run."""

    @abstractmethod
    def settings(self, run: RunType) -> steering.Settings:
        """Returns the object that changes the settings of a run while it trains."""

    @abstractmethod
    def evaluation_obstacle(self) -> str | None:
        """Returns the reason why the run cannot evaluate; None if it can."""

    @abstractmethod
    def describe(self, run: RunType) -> RunFacts:
        """Returns the facts about a run for its log and its record."""

    @abstractmethod
    def open(self, run: RunType) -> AbstractContextManager[None]:
        """Puts model and optimizer into training mode."""

    @abstractmethod
    def close(self, run: RunType) -> None:
        """Waits for writes in progress and removes the files of interrupted ones. Raises nothing."""

    @abstractmethod
    def settle(self, run: RunType, train_loss: float) -> float:
        """Completes weights and counts after the last optimizer step; returns the training loss."""

    @abstractmethod
    def complete_saves(self, run: RunType) -> None:
        """Waits until the checkpoints of a run are written, then deletes those beyond the retention limit."""

    @abstractmethod
    def load_best(self, checkpoint: Path) -> bool:
        """Loads the best model; if it cannot be loaded, logs the reason, keeps the last weights and returns False."""
