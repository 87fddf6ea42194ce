"""Base of the reporters of tracking services: one run per training, continued when the training is resumed."""

from __future__ import annotations

import contextvars
import logging
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.args.places import output_folder
from paceline.args.training import TrainingArguments
from paceline.callbacks.reporters.base import (
    CardReporter,
    MakeCard,
    NumberFilter,
    changed_project,
    num_parameters,
    run_name_of,
    settings_of,
    tags_of,
)
from paceline.core.media import Media
from paceline.core.optional import is_installed, require
from paceline.core.signals import PREEMPTION_SIGNALS
from paceline.core.state import TrainerControl, TrainerState

logger = logging.getLogger(__name__)


CLOSE_SECONDS = 30.0  # the end of a training waits this long for a client to end its run

LEFT_OPEN: dict[type[Any], ServiceReporter] = {}  # by service: the reporter whose run is open


class ServiceReporter(CardReporter):
    """Base class of reporters that write a run of a tracking service, on the main process of a training.

    The life cycle: an active run of the user is used and left open; otherwise `open_run` starts one, or continues that
    of the checkpoint if project and `run_name` are the same. An evaluation before the training opens the run of the
    training; one after it continues that run. Each trial of a hyperparameter search has its own run.

    A subclass implements `open_run`, `id_of`, `log_settings`, `log_row` and `close_run`, and where the service has them
    `active_run`, `log_tags`, `log_media`, `log_card`, `upload` and `upload_at_end`. All of them may raise: the run
    continues. A `close_run` that takes longer than `CLOSE_SECONDS` is left to a thread in the background.

    Attributes:
        service: the name of the service in messages.
        extra: the extra that installs its package.
        ends_with_training: False leaves the run open after the training, for what the script still logs.
        uploads_checkpoints: True passes every checkpoint to `upload`.
        closes_in_thread: False calls `close_run` in the thread of the training, for as long as it takes.

    Raises:
        ImportError: the package is not installed.
    """

    service = ""
    extra = ""
    ends_with_training = True
    uploads_checkpoints = False
    closes_in_thread = True

    def __init__(self) -> None:
        require_installed(self.requires, self.extra)
        self._run: Any = None
        self._initialized = False
        self._is_ours = False
        self._is_training = False
        self._num_trainings = 0
        self._trial: str | None = None  # that `_run` belongs to
        self._identity: dict[str, Any] = {}
        self._resumes: Mapping[str, Any] = {}
        self._filter = NumberFilter(self.service)
        self._tags: tuple[str, ...] = ()  # known before `open_run`
        self._card = ""  # known before `upload_at_end`
        self._closing: threading.Thread | None = None  # ends a run that took too long

    # ---- what a service implements

    def active_run(self) -> Any:
        """Returns the run that the script has opened itself; None without one."""
        return None

    def open_run(self, args: TrainingArguments, name: str | None, run_id: str | None) -> Any:
        """Starts a run, or continues one.

        Args:
            args: the arguments of the training.
            name: the name of the run or trial.
            run_id: the id of the run to continue; None for a new one.
        """
        raise NotImplementedError

    def id_of(self) -> str | None:
        """Returns the id by which `open_run` continues the run `_run`; None if it cannot be continued."""
        raise NotImplementedError

    def log_settings(self, settings: dict[str, Any]) -> None:
        """Records the arguments and the model's configuration; secrets are masked."""
        raise NotImplementedError

    def log_tags(self, tags: list[str]) -> None:
        """Adds tags to the run."""

    def log_row(self, row: dict[str, float], state: TrainerState) -> None:
        """Records the numbers of a row of logs at `state.global_step`."""
        raise NotImplementedError

    def log_media(self, media: Media, state: TrainerState) -> None:
        """Records a figure or a table."""

    def log_card(self, text: str, state: TrainerState) -> None:
        """Records the model card, in Markdown, at the end of a training."""

    def close_run(self) -> None:
        """Ends a run that `open_run` has opened."""
        raise NotImplementedError

    def upload(self, folder: Path, args: TrainingArguments, state: TrainerState) -> None:
        """Uploads a checkpoint."""

    def upload_at_end(self, args: TrainingArguments, state: TrainerState, model: Any, processor: Any) -> None:
        """Uploads what belongs to the end of a training."""

    # ---- events

    @property
    def reads_checkpoint(self) -> bool:  # type: ignore[override]
        """True if `on_save` needs the files."""
        return self.uploads_checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Returns the ids of the run, for a resumed training."""
        return dict(self._resumes if self._run is None else self._identity)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the run to continue, if it still applies."""
        self._resumes = dict(state)

    def __getstate__(self) -> dict[str, Any]:
        # clients hold threads, which cannot be copied
        return {**vars(self), "_run": None, "_initialized": False, "_closing": None}

    def setup(self, args: TrainingArguments, state: TrainerState, model: Any = None, **kwargs: Any) -> None:
        """Finds or opens the run and logs the settings. May be overridden."""
        if not state.is_world_process_zero or self._is_still_closing():
            self._initialized = True
            return
        if self._run is None:
            self._trial = state.trial_name
            name = name_of(args, state)
            identity = {"project": changed_project(args), "run_name": name}
            self._tags = tags_of(model)
            with signals_kept():
                run = self.active_run()
                self._is_ours = run is None
                self._run = self.open_run(args, name, self._id_to_resume(identity)) if run is None else run
            if self._is_ours:
                LEFT_OPEN[type(self)] = self
            self._identity = {"run_id": self.id_of(), **identity}
        self._initialized, self._resumes = True, {}
        try:
            self.log_settings(settings_with_size(args, model))
        except Exception as error:  # a failure to record settings must not stop the metrics
            logger.warning("%s did not accept the settings of the run: %s", self.service, error)
        try:
            self.log_tags(list(self._tags))
        except Exception as error:
            logger.warning("%s did not accept the tags of the run: %s", self.service, error)

    def _id_to_resume(self, identity: Mapping[str, Any]) -> str | None:
        before = self._resumes
        is_same = all(before.get(key) == value for key, value in identity.items())
        return before.get("run_id") if is_same else None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        if self._num_trainings or state.is_hyper_param_search:
            self._close()  # of another training, which an error may have ended
            if state.global_step == 0:
                self._resumes = {}
        self._close_other()
        self._num_trainings += 1
        self._is_training = True
        if not self._initialized:
            self.setup(args, state, model, **kwargs)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if not logs or not state.is_world_process_zero:
            return
        if self._run is not None and self._is_ours and self._trial != state.trial_name:
            self._close()  # an evaluation after a search belongs to no trial
            self._resumes = {}
        if not self._initialized:
            self.setup(args, state, model)
        if self._run is None:
            return
        self.log_row(self._filter.numbers(logs), state)
        if self._num_trainings and not self._is_training and self.ends_with_training:
            self._close()

    def on_media(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, media: Media, **kwargs: Any
    ) -> None:
        """Records a figure or a table, if the service has them."""
        if type(self).log_media is ServiceReporter.log_media or not state.is_world_process_zero:
            return
        if not self._initialized:
            self.setup(args, state, kwargs.get("model"))
        if self._run is None:
            return
        self.log_media(media, state)
        if self._num_trainings and not self._is_training and self.ends_with_training:
            self._close()

    def record_card(self, make_card: MakeCard, args: TrainingArguments, state: TrainerState, model: Any) -> None:
        """Records the model card, if the service has a place for it."""
        if type(self).log_card is not ServiceReporter.log_card and self._run is not None:
            self._card = make_card()
            self.log_card(self._card, state)

    def on_predict(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.on_log(args, state, control, model=kwargs.get("model"), logs=metrics)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.uploads_checkpoints and self._run is not None:
            self.upload(checkpoint_of(args, state), args, state)

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        processing_class: Any = None,
        **kwargs: Any,
    ) -> None:
        self._is_training = False
        if self._run is None:
            return
        try:
            self.upload_at_end(args, state, model, processing_class)
        finally:
            if self.ends_with_training:
                self._close()

    def _close_other(self) -> None:
        """Ends the run that another Trainer's training has left open, which would be taken for the script's own."""
        other = LEFT_OPEN.get(type(self))
        if other is None or other is self:
            return
        try:
            other._close()
        except Exception as error:  # it costs this training nothing
            logger.warning("%s did not end the run of the training before: %s", self.service, error)

    def _close(self) -> None:
        """Ends the run if it is not the user's, and remembers it for what is logged later."""
        self._initialized = False
        if self._run is None:
            return
        self._resumes = self._resumes or self._identity
        try:
            if self._is_ours:
                with signals_kept():
                    self._close_in_time()
        finally:
            self._run = None
            if LEFT_OPEN.get(type(self)) is self:
                del LEFT_OPEN[type(self)]

    def _close_in_time(self) -> None:
        """Calls `close_run`, and returns after `CLOSE_SECONDS` even if the client is not done."""
        if not self.closes_in_thread:
            self.close_run()
            return
        call = BackgroundCall(self.close_run)
        if not call.is_done_within(CLOSE_SECONDS):
            self._closing = call.thread
            logger.warning(
                "%s did not end its run within %g s. The training ends without waiting for it: the client goes on in "
                "the background until the process ends.",
                self.service,
                CLOSE_SECONDS,
            )

    def _is_still_closing(self) -> bool:
        """Waits for the end of an earlier run, which would be taken for the script's own. True after a timeout."""
        if self._closing is None:
            return False
        self._closing.join(CLOSE_SECONDS)
        if not self._closing.is_alive():
            self._closing = None
            return False
        logger.warning("%s is still ending the run of the training before: this one is not recorded.", self.service)
        return True


class BackgroundCall:
    """A call in a daemon thread, in the context of the caller; what it changes in the context is changed here too.

    Args:
        call: the function.
    """

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._error: BaseException | None = None
        self._context = contextvars.copy_context()
        self.thread = threading.Thread(target=self._context.run, args=(self._work,), name="paceline-close", daemon=True)
        self.thread.start()

    def _work(self) -> None:
        try:
            self._call()
        except BaseException as error:
            self._error = error

    def is_done_within(self, seconds: float) -> bool:
        """Waits for the call. Returns: False after a timeout. Raises: the exception of the call."""
        self.thread.join(seconds)
        if self.thread.is_alive():
            return False
        if self._error is not None:
            raise self._error
        for variable, value in self._context.items():
            if variable not in contextvars.copy_context() or variable.get() is not value:
                variable.set(value)
        return True


def require_installed(modules: tuple[str, ...], extra: str) -> None:
    """Raises ImportError, which names the extra, unless one of the alternative packages is installed."""
    if modules and not any(is_installed(module) for module in modules):
        require(modules[0], extra)


def name_of(args: TrainingArguments, state: TrainerState) -> str | None:
    """Returns the name of a run: that of the trial in a hyperparameter search, else `run_name`."""
    if state.is_hyper_param_search and state.trial_name is not None:
        return state.trial_name
    return run_name_of(args)


def settings_with_size(args: TrainingArguments, model: Any) -> dict[str, Any]:
    """Returns `settings_of` with the number of the model's parameters."""
    settings = settings_of(args, model)
    count = num_parameters(model)
    return settings if count is None else {**settings, "model/num_parameters": count}


def checkpoint_of(args: TrainingArguments, state: TrainerState) -> Path:
    """Returns the folder of the checkpoint of the current step."""
    return output_folder(args) / f"checkpoint-{state.global_step}"


@contextmanager
def signals_kept() -> Iterator[None]:
    """Restores the handlers of the signals that stop a run, which some clients replace by their own.

    Without it, a signal would end the run at once, before its last checkpoint.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (*PREEMPTION_SIGNALS, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
