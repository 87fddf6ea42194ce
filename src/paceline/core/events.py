"""Events of a run: the callback interface and the handler that dispatches events.

The handler keeps a tuple of listening methods per event, so that an event without listeners costs one dictionary
look-up. The table is rebuilt when a callback is added or removed, and when training starts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, SupportsIndex, TypeVar

from paceline.args.training import TrainingArguments
from paceline.core.state import TrainerControl, TrainerState

logger = logging.getLogger(__name__)

EVENTS: tuple[str, ...] = (
    "on_init_end",
    "on_train_begin",
    "on_train_end",
    "on_epoch_begin",
    "on_epoch_end",
    "on_step_begin",
    "on_pre_optimizer_step",
    "on_optimizer_step",
    "on_substep_end",
    "on_step_end",
    "on_evaluate",
    "on_predict",
    "on_save",
    "on_log",
    "on_prediction_step",
    "on_push_begin",
)

WANTABLE = frozenset({"loss", "outputs", "inputs"})


class TrainerCallback:
    """Base class of callbacks. Override the events you need; the others cost nothing.

    ::

        on_init_end                                     the Trainer is built
        train():
            on_train_begin
            for each epoch:
                on_epoch_begin
                for each optimizer step:
                    on_step_begin
                    for each micro-batch:
                        forward, backward
                        on_substep_end                  after each but the last
                    clip the gradients
                    on_pre_optimizer_step               the gradients are final
                    optimizer step
                    on_optimizer_step                   the gradients are still there
                    schedule step, zero the gradients, global_step += 1
                    on_step_end
                    if control.should_log:              on_log
                    if control.should_evaluate:         on_prediction_step per batch, on_log, on_evaluate
                    if control.should_save:             on_save, once the checkpoint is on the disk
                on_epoch_end                            then log, evaluate, save as requested
            on_log                                      the numbers of the whole run
            on_train_end
        evaluate():  on_prediction_step per batch, on_within_evaluation, on_log, on_evaluate
        predict():   on_prediction_step per batch, on_predict
        push_to_hub():  on_push_begin

    Each event gets `args` (the TrainingArguments), `state` (TrainerState) and `control` (TrainerControl), then as
    keywords `model`, `processing_class` (also as `tokenizer`), `optimizer`, `lr_scheduler`, `train_dataloader` and
    `eval_dataloader`; `on_log` also `logs`, `on_evaluate` and `on_predict` also `metrics`. Name those you use and
    take the others with `**kwargs`. `logs` is the callback's own copy. `metrics` is shared: added entries are returned
    by the evaluation and can select the best model. Further events of paceline: `on_within_evaluation` (`metrics`,
    `evaluation`), `on_media` (`media`) and `on_model_card` (`make_card`, before `on_train_end`).

    Set flags of `control` to steer the run; returning another control replaces it.

    `wants` requests more keywords of `on_step_end`: "loss" (of the optimizer step; on the device, reading it
    synchronizes), "inputs" and "outputs" (lists, one entry per micro-batch).

    A callback with state defines `state_dict()` and `load_state_dict(state)` (numbers, text, lists, dicts and
    tensors), or derives from `ExportableState`. It is saved under `state_key`, by default the class's name.

    Attributes:
        wants: additional keywords of `on_step_end`; a subset of {"loss", "outputs", "inputs"}.
        state_key: the name under which the state is saved; None for the class's name.
        may_fail: True logs an exception in this callback and continues the run (reporters); False ends the run.
        reads_checkpoint: True if `on_save` reads or writes the checkpoint: training then waits until it is complete.
            False lets `on_save` be called some steps later.
        saves_on_signal: True writes a checkpoint when a signal stops the run, also with `save_strategy="no"`.
    """

    wants: frozenset[str] = frozenset()
    state_key: str | None = None
    may_fail: bool = False
    reads_checkpoint: bool = True
    saves_on_signal: bool = False

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """The Trainer is built."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """Training starts or resumes; after a resume `state.global_step` is not 0."""

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """Training is over."""

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """A pass over the data starts."""

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """A pass over the data is over."""

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """An optimizer step starts; its micro-batches have been drawn."""

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """The gradients are complete and clipped."""

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """The optimizer has stepped; the gradients are still there."""

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """The backward pass of a micro-batch is done. The last one of an accumulation window fires no such event."""

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """An optimizer step is done and counted. Flags of `control` are usually set here."""

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """An evaluation is over; `metrics` holds its results."""

    def on_predict(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: Any = None, **kwargs: Any
    ) -> TrainerControl | None:
        """A prediction is over; `metrics` holds its results."""

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """A checkpoint has been written."""

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """Metrics have been logged; `logs` holds them."""

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """A batch of an evaluation or prediction is done."""

    def on_push_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """A push to the hub is about to start."""


Listener = Callable[..., TrainerControl | None]
Method = TypeVar("Method", bound=Callable[..., Any])


def ignores_keywords(method: Method) -> Method:
    """Marks an event method that uses only args, state and control.

    If all listeners of an event are marked, they are called without keywords, which saves 0.5 us per call.
    """
    method.ignores_keywords = True  # type: ignore[attr-defined]
    return method


class _FaultBarrier:
    """Catches the exceptions of one `may_fail` callback in a run: logs the first, disables it after three in a row.

    A failed call that took longer than `PATIENCE` disables it at once: the client of a hanging service waits minutes.
    """

    LIMIT = 3
    PATIENCE = 45.0  # seconds

    def __init__(self, name: str) -> None:
        self.name = name
        self.in_a_row = 0
        self.is_reported = False

    def wrap(self, event: str, method: Listener) -> Listener:
        def guarded(
            args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
        ) -> TrainerControl | None:
            if self.in_a_row >= self.LIMIT:
                return None
            start = time.monotonic()
            try:
                result = method(args, state, control, **kwargs)
            except Exception as error:
                self.report(event, error)
                self.disable_slow(time.monotonic() - start)
                return None
            self.in_a_row = 0
            return result

        return guarded

    def report(self, event: str, error: Exception) -> None:
        self.in_a_row += 1
        if self.in_a_row == self.LIMIT:
            logger.warning(
                "%s is not called again in this run: it failed %d times in a row, last in %s (%s).",
                *(self.name, self.LIMIT, event, error),
            )
        elif not self.is_reported:
            self.is_reported = True
            if isinstance(error, ConnectionError):  # a server that is down; the traceback adds nothing
                logger.warning("%s failed in %s; the run goes on. %s", self.name, event, error)
            else:
                logger.warning("%s failed in %s; the run goes on.", self.name, event, exc_info=error)

    def disable_slow(self, seconds: float) -> None:
        """Disables the callback if its failed call took too long."""
        if seconds > self.PATIENCE and self.in_a_row < self.LIMIT:
            self.in_a_row = self.LIMIT
            logger.warning(
                "%s is not called again in this run: training waited %.0f seconds for its failure.", self.name, seconds
            )


class _Callbacks(list[Any]):
    """The list behind `callback_handler.callbacks`; every change to it rebuilds the dispatch table."""

    def __init__(self, items: Iterable[Any], changed: Callable[[], None]) -> None:
        super().__init__(items)
        self._changed = changed

    def append(self, item: Any) -> None:
        super().append(item)
        self._changed()

    def extend(self, items: Iterable[Any]) -> None:
        super().extend(items)
        self._changed()

    def insert(self, index: SupportsIndex, item: Any) -> None:
        super().insert(index, item)
        self._changed()

    def remove(self, item: Any) -> None:
        super().remove(item)
        self._changed()

    def pop(self, index: SupportsIndex = -1) -> Any:
        item = super().pop(index)
        self._changed()
        return item

    def clear(self) -> None:
        super().clear()
        self._changed()

    def sort(self, **kwargs: Any) -> None:
        super().sort(**kwargs)
        self._changed()

    def reverse(self) -> None:
        super().reverse()
        self._changed()

    def __setitem__(self, index: Any, item: Any) -> None:
        super().__setitem__(index, item)
        self._changed()

    def __delitem__(self, index: SupportsIndex | slice) -> None:
        super().__delitem__(index)
        self._changed()

    def __iadd__(self, items: Iterable[Any]) -> _Callbacks:  # type: ignore[misc]
        self.extend(items)
        return self


_CONTEXT = ("model", "processing_class", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader")


class CallbackHandler(TrainerCallback):
    """Calls the callbacks of a run, in the order in which they were added.

    Args:
        callbacks: instances, or classes to instantiate.
        model: passed to every event, as are the three below; each can be assigned later.
        processing_class: tokenizer or processor.
        optimizer: the optimizer.
        lr_scheduler: the learning-rate schedule.

    Attributes:
        table: the listening methods per event.
        kwargs: the keywords of every event; assigning to the attributes of these names updates them.
        wanted: the union of the callbacks' `wants`.
    """

    model: Any
    processing_class: Any
    optimizer: Any
    lr_scheduler: Any
    train_dataloader: Any
    eval_dataloader: Any

    def __init__(
        self,
        callbacks: Iterable[Any],
        model: Any = None,
        processing_class: Any = None,
        optimizer: Any = None,
        lr_scheduler: Any = None,
    ) -> None:
        self.kwargs: dict[str, Any] = dict.fromkeys((*_CONTEXT, "tokenizer"))
        self.table: dict[str, tuple[Listener, ...]] = {}
        self._keywords: dict[str, dict[str, Any]] = {}  # by event: `kwargs`, or an empty dict if no listener uses them
        self.wanted: frozenset[str] = frozenset()
        self._barriers: dict[int, _FaultBarrier] = {}
        self.callbacks: list[Any] = []
        if type(self).call_event is not CallbackHandler.call_event:
            # a subclass's own dispatch; through __setattr__ below, so that every event goes through it
            self.call_event = self.call_event  # type: ignore[method-assign]
        for callback in callbacks:
            self.add_callback(callback)
        self.model = model
        self.processing_class = processing_class
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.train_dataloader = None
        self.eval_dataloader = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "callbacks":
            super().__setattr__(name, _Callbacks(value, self.rebuild))
            self.rebuild()
            return
        super().__setattr__(name, value)
        if name == "call_event":  # user code replaced the dispatch on this object: every event goes through it
            super().__setattr__("fire", value)
        if name in _CONTEXT:
            self.kwargs[name] = value
            if name == "processing_class":
                self.kwargs["tokenizer"] = value

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "callbacks": list(self.callbacks), "table": {}, "_keywords": {}, "_barriers": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.callbacks = state["callbacks"]

    # ---- the list

    def add_callback(self, callback: Any) -> None:
        """Adds a callback, or an instance of a callback class. A second callback of the same class causes a warning."""
        added = callback() if isinstance(callback, type) else callback
        kind = _kind(added)
        if any(_kind(present) == kind for present in self.callbacks):
            logger.warning(
                "You are adding a %s to the callbacks of this Trainer, but there is already one. They are now: %s.",
                type(added).__name__,
                ", ".join([*(type(present).__name__ for present in self.callbacks), type(added).__name__]),
            )
        self.callbacks.append(added)

    def pop_callback(self, callback: Any) -> Any:
        """Removes and returns this callback, or the first one of this class; returns None if there is no such one."""
        for index, present in enumerate(self.callbacks):
            if isinstance(present, callback) if isinstance(callback, type) else present == callback:
                return self.callbacks.pop(index)
        return None

    def remove_callback(self, callback: Any) -> None:
        """Removes this callback, or the first one of this class.

        Raises:
            ValueError: this callback was not added. (A class without instances is no error.)
        """
        if self.pop_callback(callback) is None and not isinstance(callback, type):
            raise ValueError(f"{callback!r} is not among the callbacks: {self.callback_list}.")

    @property
    def callback_list(self) -> str:
        """The class names of the callbacks, one per line."""
        return "\n".join(type(callback).__name__ for callback in self.callbacks)

    # ---- dispatch

    def rebuild(self) -> None:
        """Rebuilds the dispatch table from the callbacks.

        Raises:
            ValueError: a callback's `wants` holds an unknown name.
        """
        wanted: set[str] = set()
        for callback in self.callbacks:
            wants = getattr(callback, "wants", ())
            if isinstance(wants, (frozenset, set, tuple, list)):
                unknown = set(wants) - WANTABLE
                if unknown:
                    raise ValueError(
                        f"{type(callback).__name__}.wants={sorted(unknown)}: "
                        f"a callback can ask for {', '.join(sorted(WANTABLE))}."
                    )
                wanted.update(wants)
        self.wanted = frozenset(wanted)
        events = dict.fromkeys((*EVENTS, *self.table))  # includes events that a subclass of the Trainer added
        self.table = {}
        for event in events:
            self._look_up(event)

    def _look_up(self, event: str) -> None:
        listeners = [self._listener(callback, event) for callback in self.callbacks if _overrides(callback, event)]
        self.table[event] = tuple(listeners)
        without = all(getattr(listener, "ignores_keywords", False) is True for listener in listeners)
        self._keywords[event] = {} if without else self.kwargs

    def _listener(self, callback: Any, event: str) -> Listener:
        method: Listener = getattr(callback, event)
        if getattr(callback, "may_fail", False) is not True:
            return method
        barrier = self._barriers.setdefault(id(callback), _FaultBarrier(type(callback).__name__))
        return barrier.wrap(event, method)

    def listening(self, event: str) -> list[Any]:
        """Returns the callbacks that override `event`."""
        return [callback for callback in self.callbacks if _overrides(callback, event)]

    def heard(self, event: str) -> bool:
        """True if any callback listens to `event`."""
        return bool(self.table[event])

    def fire(
        self, event: str, args: TrainingArguments, state: TrainerState, control: TrainerControl, **extra: Any
    ) -> TrainerControl:
        """Calls the listeners of `event` in order, and returns the control; one that they return replaces its flags."""
        listeners = self.table[event]
        if not listeners:
            return control
        kwargs = self._keywords[event]
        logs = None
        if extra:
            kwargs = {**self.kwargs, **extra}
            logs = extra.get("logs")
        for listener in listeners:
            if logs is not None:
                kwargs["logs"] = dict(logs)  # one copy per callback: some reporters remove keys
            result = listener(args, state, control, **kwargs)
            if result is not None and result is not control:
                control.adopt(result)
        return control

    def call_event(
        self, event: str, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Calls the method of this name on every callback that has one; custom events are allowed."""
        if event not in self.table:
            self._look_up(event)
        return CallbackHandler.fire(self, event, args, state, control, **kwargs)

    # ---- the events; some reset flags of the control first

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        return self.fire("on_init_end", args, state, control, **kwargs)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        self._barriers.clear()  # a reporter that was given up in another run gets another chance
        self.rebuild()  # methods may have been replaced on the instances
        if not any(base.__name__ == "DefaultFlowCallback" for cb in self.callbacks for base in type(cb).__mro__):
            logger.warning(
                "The Trainer will not work properly if you don't have a `DefaultFlowCallback`: nothing is logged, "
                "evaluated or saved unless another callback requests it. Use trainer.add_callback(DefaultFlowCallback)."
            )
        control.begin_training()
        return self.fire("on_train_begin", args, state, control, **kwargs)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        return self.fire("on_train_end", args, state, control, **kwargs)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        control.begin_epoch()
        return self.fire("on_epoch_begin", args, state, control, **kwargs)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        return self.fire("on_epoch_end", args, state, control, **kwargs)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        control.begin_step()
        return self.fire("on_step_begin", args, state, control, **kwargs)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        return self.fire("on_pre_optimizer_step", args, state, control, **kwargs)

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        return self.fire("on_optimizer_step", args, state, control, **kwargs)

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        return self.fire("on_substep_end", args, state, control, **kwargs)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        return self.fire("on_step_end", args, state, control, **kwargs)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: Any = None, **kwargs: Any
    ) -> TrainerControl:
        control.should_evaluate = False
        return self.fire("on_evaluate", args, state, control, metrics=metrics, **kwargs)

    def on_predict(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: Any = None, **kwargs: Any
    ) -> TrainerControl:
        return self.fire("on_predict", args, state, control, metrics=metrics, **kwargs)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        control.should_save = False
        return self.fire("on_save", args, state, control, **kwargs)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> TrainerControl:
        control.should_log = False
        return self.fire("on_log", args, state, control, logs={} if logs is None else logs, **kwargs)

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        return self.fire("on_prediction_step", args, state, control, **kwargs)

    def on_push_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        return self.fire("on_push_begin", args, state, control, **kwargs)


def _kind(callback: Any) -> tuple[str, str]:
    return type(callback).__module__, type(callback).__qualname__


def _overrides(callback: Any, event: str) -> bool:
    """True if the callback, or a class below the empty base, defines the method `event`."""
    if event in getattr(callback, "__dict__", ()):
        return True
    for cls in type(callback).__mro__:
        if event in cls.__dict__:
            is_their_base = cls.__name__ == "TrainerCallback" and cls.__module__ == "transformers.trainer_callback"
            return cls is not TrainerCallback and not is_their_base
    return callable(getattr(callback, event, None))


def close_run(handler: object, args: TrainingArguments, state: TrainerState, control: TrainerControl) -> None:
    """Calls `on_run_closed` of callbacks that define it, after the parts of a run are closed, even after an error."""
    call_own_event(handler, "on_run_closed", args, state, control)


def has_listener(handler: object, event: str) -> bool:
    """True if a callback has a method for an event that the Hugging Face Trainer does not have."""
    return any(hasattr(callback, event) for callback in getattr(handler, "callbacks", ()))


def call_own_event(
    handler: object, event: str, args: TrainingArguments, state: TrainerState, control: TrainerControl, **values: Any
) -> None:
    """Calls an event that the Hugging Face Trainer does not have, on the callbacks that define it.

    A `call_event` that a library has assigned to the handler (setfit) would look up the method on every callback.
    """
    if isinstance(handler, CallbackHandler):
        CallbackHandler.call_event(handler, event, args, state, control, **values)


def call_each(
    handler: object, event: str, args: TrainingArguments, state: TrainerState, control: TrainerControl, **values: Any
) -> None:
    """Calls an event like `call_own_event`; an exception of a callback is logged, and the next one is called."""
    if not isinstance(handler, CallbackHandler):
        return
    for callback in handler.listening(event):
        listener = _FaultBarrier(type(callback).__name__).wrap(event, handler._listener(callback, event))
        listener(args, state, control, **{**handler.kwargs, **values})
