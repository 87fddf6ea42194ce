"""Training phases: `Phase`, the forms of the option `phases`, and the rules between phases and other options."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from paceline.args.choices import SchedulerType
from paceline.args.errors import UnsupportedOption, did_you_mean, parse_json, wrong_value
from paceline.args.metric_names import is_maximized, seems_lower_better
from paceline.args.sections import Options
from paceline.args.sharding import is_xla_asked

STEPS, FRACTION, OWN_STEPS, OWN_EPOCHS, METRIC, PLATEAU, END = (
    "steps",
    "fraction",
    "own steps",
    "own epochs",
    "metric",
    "plateau",
    "end",
)
COMPARISON = re.compile(r"\s*([\w/.\-]+?)\s*(>=|<=|>|<)\s*([-+]?[\d.]+(?:[eE][-+]?\d+)?)\s*")
DURATION = re.compile(r"\s*([\d_.]+(?:[eE]\d+)?)\s*(steps?|epochs?)\s*")
PLATEAU_OF = re.compile(r"\s*plateau\s+of\s+([\w/.\-]+)\s*")
UNTIL_FORMS = (
    "expected the number of an optimizer step (500), a fraction of the run (0.3), '500 steps' or '2 epochs' of the "
    "phase itself, 'eval_accuracy >= 0.9', or 'plateau of eval_loss'"
)
OBJECTS = ("train_dataset", "data_collator", "loss", "callbacks")
METRIC_SCHEDULES = (SchedulerType.REDUCE_ON_PLATEAU.value, SchedulerType.GREEDY.value)


@dataclass(frozen=True)
class Until:
    """The parsed end of a phase.

    Attributes:
        kind: "steps" and "fraction" count from the start of the run, "own steps" and "own epochs" from that of the
            phase; "metric" and "plateau" watch an evaluation metric; "end" is the end of the run.
        number: the number of steps or epochs, the fraction, or the value that the metric has to reach.
        metric: name of the watched metric.
        comparison: ">=", "<=", ">" or "<" between metric and number.
    """

    kind: str
    number: float = 0.0
    metric: str = ""
    comparison: str = ""

    @property
    def is_measured(self) -> bool:
        """True if evaluations decide when the phase ends."""
        return self.kind in (METRIC, PLATEAU)

    def is_reached(self, value: float) -> bool:
        """True if a value of the metric satisfies the comparison; a NaN does not."""
        return {
            ">=": value >= self.number,
            "<=": value <= self.number,
            ">": value > self.number,
            "<": value < self.number,
        }[self.comparison]

    def rises(self, options: Options, given: bool | None = None) -> bool:
        """True if larger values of the metric are better.

        This is `greater_is_better` of the phase, or of the arguments if it is about this metric. Other metrics are
        maximized, except those whose names end in "loss".

        Args:
            options: the arguments.
            given: `greater_is_better` of the phase.
        """
        if given is not None:
            return given
        best_metric = str(options.metric_for_best_model or "")
        if options.greater_is_better is not None and best_metric.removeprefix("eval_") == self.metric.removeprefix(
            "eval_"
        ):
            return bool(options.greater_is_better)
        return is_maximized(self.metric)

    def is_better(self, value: float, best: float | None, least: float, rises: bool) -> bool:
        """True if a value improves on the best so far by more than `least`.

        Args:
            value: the value of the metric.
            best: so far; None: there is none.
            least: the change that counts.
            rises: larger values are better.
        """
        if math.isnan(value):
            return False
        if best is None:
            return True
        return value > best + least if rises else value < best - least


@dataclass(frozen=True)
class Phase:
    """One phase of a training run: what is trained, with which settings, and until when.

    A phase starts a new epoch of its data. Settings that are left at None are those of the training arguments.

    Args:
        name: name in the log, the progress display and the checkpoints.
        until: the end of the phase: an int is the optimizer step of the run after which it ends, a float below 1 a
            fraction of the run; "500 steps" and "2 epochs" count from the start of the phase; "eval_accuracy >= 0.9"
            waits for a metric of an evaluation; "plateau of eval_loss" for `patience` evaluations without an
            improvement. None, for the last phase only: the end of the run.
        freeze: patterns of parameter names that are not trained (`*` stands for any text).
        train: patterns of names that are trained although `freeze` matches them.
        learning_rate: a number, or a dict of patterns and numbers, of which the first match counts.
        layer_decay: multiplies the rate of each block by this factor for every block between it and the output.
        lr_scheduler_type, lr_scheduler_kwargs, warmup_steps: the schedule, over the length of the phase.
        weight_decay: the weight decay of the parameters that have one.
        train_dataset: the training data of the phase.
        data_collator: makes its batches, for instance with augmentations.
        loss: `compute_loss_func` of the phase: `(outputs, labels, num_items_in_batch=None) -> loss`.
        per_device_train_batch_size, gradient_accumulation_steps: the batch size.
        callbacks: receive events during the phase only, `on_train_begin` at its start and `on_train_end` at its end.
        patience: evaluations in a row without an improvement that make a plateau.
        min_delta: change of the metric that counts as an improvement.
        greater_is_better: the direction of the metric of a plateau. None: that of the arguments if it is
            `metric_for_best_model`; a name that ends in "loss" is minimized, others are maximized, and
            names such as `eval_wer` or `eval_perplexity` are refused without a direction.
        max_steps: largest length of a phase that ends by a metric, in optimizer steps, and the length of its schedule.

    Raises:
        ValueError: a value is invalid; the message names phase and setting.
    """

    name: str
    until: int | float | str | None = None
    freeze: Sequence[str] = ()
    train: Sequence[str] = ()
    learning_rate: float | Mapping[str, float] | None = None
    layer_decay: float | None = None
    lr_scheduler_type: str | None = None
    lr_scheduler_kwargs: Mapping[str, Any] | None = None
    warmup_steps: float | None = None
    weight_decay: float | None = None
    train_dataset: Any = None
    data_collator: Any = None
    loss: Any = None
    per_device_train_batch_size: int | None = None
    gradient_accumulation_steps: int | None = None
    callbacks: Sequence[Any] = ()
    patience: int = 3
    min_delta: float = 0.0
    greater_is_better: bool | None = None
    max_steps: int | None = None
    end: Until = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            raise wrong_value("phases: name", self.name, "expected a text that names the phase")
        object.__setattr__(self, "end", self.read_until())
        self._check_patterns()
        self._check_rates()
        self._check_numbers()
        self._check_length()
        if isinstance(self.callbacks, str) or not isinstance(self.callbacks, Sequence):
            raise self.wrong("callbacks", "expected a list of callbacks")
        for callback in self.callbacks:
            self.check_callback(callback)
        if not (self.loss is None or isinstance(self.loss, str) or callable(self.loss)):
            raise self.wrong("loss", "expected a function (outputs, labels, num_items_in_batch=None) -> loss")

    def wrong(self, setting: str, expected: str) -> ValueError:
        """Returns the error for an invalid setting."""
        return wrong_value(f"phases[{self.name!r}].{setting}", getattr(self, setting), expected)

    def check_callback(self, callback: object) -> None:
        """Raises ValueError if an object listens to no event; a text names one that is not loaded yet."""
        if isinstance(callback, str) or any(name.startswith("on_") for name in dir(callback)):
            return
        name = getattr(callback, "__qualname__", repr(callback))
        raise wrong_value(
            f"phases[{self.name!r}].callbacks",
            name,
            "expected a callback or its class, with methods such as on_step_end(args, state, control, **kwargs)",
        )

    def read_until(self) -> Until:
        """Parses `until`."""
        value = self.until
        if value is None:
            return Until(END)
        if isinstance(value, bool):
            raise self.wrong("until", UNTIL_FORMS)
        if isinstance(value, int) and value >= 1:
            return Until(STEPS, value)
        if isinstance(value, float) and 0 < value < 1:
            return Until(FRACTION, value)
        if isinstance(value, float) and value >= 1 and value.is_integer():
            raise self.wrong("until", "a float is a fraction of the run below 1, and an int an optimizer step")
        return self._read_text(value) if isinstance(value, str) else self._refuse_until()

    def _refuse_until(self) -> Until:
        raise self.wrong("until", UNTIL_FORMS)

    def _read_text(self, text: str) -> Until:
        if found := DURATION.fullmatch(text):
            number, is_epochs = float(found[1].replace("_", "")), found[2].startswith("epoch")
            if number > 0 and (is_epochs or number.is_integer()):
                return Until(OWN_EPOCHS if is_epochs else OWN_STEPS, number)
        if found := COMPARISON.fullmatch(text):
            return Until(METRIC, float(found[3]), found[1], found[2])
        if found := PLATEAU_OF.fullmatch(text):
            return Until(PLATEAU, metric=found[1])
        return self._refuse_until()

    def _check_patterns(self) -> None:
        for setting in ("freeze", "train"):
            patterns = getattr(self, setting)
            if isinstance(patterns, str) or not all(isinstance(each, str) and each for each in patterns):
                raise self.wrong(setting, "expected a list of patterns of parameter names, such as ['encoder.*']")
        if self.train and not self.freeze:
            raise self.wrong("train", "it makes exceptions from freeze: set freeze=['*'] too, or leave it out")

    def _check_rates(self) -> None:
        rate = self.learning_rate
        rates = list(rate.values()) if isinstance(rate, Mapping) else [0.0 if rate is None else rate]
        if not all(is_amount(each) for each in rates) or not rates:
            raise self.wrong("learning_rate", "expected a number of at least 0, or a dict of patterns and such numbers")
        if self.layer_decay is not None and not (is_amount(self.layer_decay) and 0 < self.layer_decay <= 1):
            raise self.wrong("layer_decay", "expected a factor above 0 and at most 1")
        kinds = [member.value for member in SchedulerType]
        kind = getattr(self.lr_scheduler_type, "value", self.lr_scheduler_type)
        if kind is not None and kind not in kinds:
            raise self.wrong("lr_scheduler_type", f"expected one of {', '.join(kinds)}")
        if kind in METRIC_SCHEDULES:
            raise self.wrong("lr_scheduler_type", "a schedule that follows evaluations is not supported in a phase")

    def _check_numbers(self) -> None:
        for setting in ("warmup_steps", "weight_decay", "min_delta"):
            value = getattr(self, setting)
            if value is not None and not is_amount(value):
                raise self.wrong(setting, "expected a number of at least 0")
        for setting in ("per_device_train_batch_size", "gradient_accumulation_steps", "patience", "max_steps"):
            value = getattr(self, setting)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise self.wrong(setting, "expected a whole number of at least 1")

    def _check_length(self) -> None:
        if self.max_steps is not None and not self.end.is_measured:
            raise self.wrong("max_steps", "it bounds a phase that ends by a metric: leave it out")
        if (self.patience != 3 or self.min_delta != 0) and self.end.kind != PLATEAU:
            raise wrong_value(
                f"phases[{self.name!r}].patience, min_delta",
                (self.patience, self.min_delta),
                "they define a plateau: set until='plateau of METRIC', or leave them out",
            )
        if self.greater_is_better is not None and self.end.kind != PLATEAU:
            raise self.wrong(
                "greater_is_better", "it is about a plateau: set until='plateau of METRIC', or leave it out"
            )
        if not (self.greater_is_better is None or isinstance(self.greater_is_better, bool)):
            raise self.wrong("greater_is_better", "expected True or False")

    @property
    def changes_batch(self) -> bool:
        """True if the phase has a batch size of its own."""
        return self.per_device_train_batch_size is not None or self.gradient_accumulation_steps is not None

    @property
    def changes_data(self) -> bool:
        """True if the phase needs a loader of its own."""
        return self.changes_batch or self.train_dataset is not None or self.data_collator is not None

    def options(self) -> dict[str, Any]:
        """Returns the training arguments that the phase replaces."""
        names = ("per_device_train_batch_size", "gradient_accumulation_steps", "lr_scheduler_type", "warmup_steps")
        found = {name: getattr(self, name) for name in (*names, "lr_scheduler_kwargs")}
        if self.lr_scheduler_type is not None and self.lr_scheduler_kwargs is None:
            found["lr_scheduler_kwargs"] = {}  # those of the arguments are for another schedule
        return {name: value for name, value in found.items() if value is not None}

    def to_dict(self) -> dict[str, Any]:
        """Returns the settings that differ from their defaults, in JSON types; objects become descriptions."""
        found: dict[str, Any] = {"name": self.name}
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name in ("name", "end") or value is None or value == () or value == item.default:
                continue
            found[item.name] = describe(value) if item.name in OBJECTS else plain(value)
        return found


def is_amount(value: object) -> bool:
    """True for a finite number of at least 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def plain(value: object) -> Any:
    """Returns a setting in JSON types."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return getattr(value, "value", value)


def describe(value: object) -> Any:
    """Returns a reference as it is, and the class of any other object in angle brackets, which cannot be read again."""
    if isinstance(value, list | tuple) and all(isinstance(each, str) or callable(each) for each in value):
        return [describe(each) for each in value]
    if isinstance(value, str):
        return value
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"<{named.__module__}.{named.__qualname__}>"


# ---- reading the option


def keep_phases(name: str, value: object) -> list[Phase] | None:
    """Converts a list of phases, of dicts with their settings, or JSON of that.

    Raises:
        ValueError: an unknown setting, an invalid value, or an object that a file cannot hold.
    """
    parsed = parse_json(name, value) if isinstance(value, str) and value.strip().startswith("[") else value
    if parsed is None or (isinstance(parsed, str) and parsed.strip().lower() in ("", "none")):
        return None
    if not isinstance(parsed, list | tuple):
        raise wrong_value(name, value, "expected a list such as [Phase('head', until=500, freeze=['encoder.*']), ...]")
    return [read_phase(name, index, each) for index, each in enumerate(parsed)] or None


def read_phase(name: str, index: int, value: object) -> Phase:
    """Converts one entry of `phases`."""
    if isinstance(value, Phase):
        return value
    where = f"{name}[{index}]"
    if not isinstance(value, Mapping):
        raise wrong_value(where, value, "expected a Phase, or a dict of its settings")
    known = [item.name for item in fields(Phase) if item.init]
    for key in value:
        if key not in known:
            raise wrong_value(where, key, "a phase has no such setting", did_you_mean(str(key), known))
    if "name" not in value:
        raise wrong_value(where, dict(value), "a phase needs a name")
    for key in OBJECTS:
        texts = value.get(key)
        for text in texts if isinstance(texts, list) else [texts]:
            if isinstance(text, str) and (text.startswith("<") or ":" not in text):
                raise wrong_value(f"{where}.{key}", text, "pass the object again, or name it as package.module:name")
    return Phase(**value)


# ---- rules


def check_phases(options: Options) -> None:
    """Checks the phases among themselves and against other options.

    Raises:
        ValueError: two phases contradict each other, or an option.
        UnsupportedOption: phases are not supported together with an option.
    """
    phases: list[Phase] | None = options.phases  # type: ignore[assignment]  # as `keep_phases` has converted it
    if not phases:
        return
    names = [phase.name for phase in phases]
    if len(set(names)) < len(names):
        raise ValueError(f"phases: the names {', '.join(names)} repeat: give each phase its own name.")
    check_ends(phases)
    if any(phase.end.is_measured for phase in phases) and options.eval_strategy == "no":
        found = next(phase for phase in phases if phase.end.is_measured)
        raise ValueError(
            f"phases[{found.name!r}].until={found.until!r} needs evaluations: set eval_strategy to 'steps' or 'epoch'."
        )
    check_directions(options, phases)
    check_length(options, phases)
    check_others(options, phases)


def check_directions(options: Options, phases: Sequence[Phase]) -> None:
    """Refuses to maximize a metric by default whose name says that smaller values are better."""
    for phase in phases:
        end = phase.end
        is_unclear = end.kind == PLATEAU and phase.greater_is_better is None and options.greater_is_better is None
        if is_unclear and seems_lower_better(end.metric):
            raise ValueError(
                f"phases[{phase.name!r}].until={phase.until!r}: a metric is maximized unless its name ends in 'loss', "
                f"and {end.metric!r} looks like one whose smaller values are better: set greater_is_better of the "
                "phase to False, or to True."
            )


def check_ends(phases: Sequence[Phase]) -> None:
    """Checks the order of the ends of phases, as far as it does not depend on the data."""
    for phase in phases[:-1]:
        if phase.end.kind == END:
            raise ValueError(
                f"phases[{phase.name!r}] has no until, and other phases follow it: say when it ends; only the last "
                "phase may last to the end of the run."
            )
    measured: Phase | None = None
    before: dict[str, tuple[float, str]] = {}
    for phase in phases:
        end = phase.end
        if measured is not None and end.kind in (STEPS, FRACTION):
            raise ValueError(
                f"phases[{phase.name!r}].until={phase.until!r} counts from the start of the run, and the phase "
                f"{measured.name!r} before it ends by a metric: count from its own start, as in until='500 steps'."
            )
        if end.kind in (STEPS, FRACTION):
            last, name = before.get(end.kind, (0.0, ""))
            if end.number <= last:
                raise ValueError(
                    f"phases[{phase.name!r}].until={phase.until!r} is not after the end of {name!r}: an int and a "
                    "fraction count from the start of the run; until='500 steps' counts from that of the phase."
                )
            before[end.kind] = end.number, phase.name
        measured = phase if end.is_measured else measured


def check_length(options: Options, phases: Sequence[Phase]) -> None:
    """Checks that phases and options give one length of the run."""
    last = phases[-1]
    if options.max_steps > 0:
        steps = [phase for phase in phases if phase.end.kind == STEPS]
        for phase in steps:
            is_last = phase is last
            if phase.end.number > options.max_steps or (is_last and phase.end.number != options.max_steps):
                raise ValueError(
                    f"phases[{phase.name!r}].until={phase.until!r} and max_steps={options.max_steps} contradict each "
                    "other: leave max_steps out, or let the last phase end with the run (until=None)."
                )
        if last.end.kind in (OWN_STEPS, OWN_EPOCHS):
            raise ValueError(
                f"phases[{last.name!r}].until={last.until!r} and max_steps={options.max_steps} are two ends of the "
                "run: leave one of them out."
            )
    elif last.end.kind in (STEPS, OWN_STEPS, OWN_EPOCHS):
        check_own_length(options, phases)
    elif any(phase.changes_batch or phase.train_dataset is not None for phase in phases):
        raise ValueError(
            f"num_train_epochs={options.num_train_epochs} is no length of a run whose phases have other data or batch "
            "sizes: set max_steps, or an until='N steps' or 'N epochs' for each phase."
        )
    if last.end.kind == FRACTION:
        raise ValueError(
            f"phases[{last.name!r}].until={last.until!r}: the last phase would end before the run does; leave until "
            "out."
        )


def check_own_length(options: Options, phases: Sequence[Phase]) -> None:
    """Checks a run that is as long as its phases."""
    if options.num_train_epochs != type(options).num_train_epochs:
        raise ValueError(
            f"num_train_epochs={options.num_train_epochs} and phases[{phases[-1].name!r}].until="
            f"{phases[-1].until!r} are two lengths of the run: leave one of them out."
        )
    for phase in phases:
        if phase.end.kind == FRACTION or (phase.end.is_measured and phase.max_steps is None):
            remedy = "set max_steps of the phase" if phase.end.is_measured else "give a number of steps"
            raise ValueError(
                f"phases[{phase.name!r}].until={phase.until!r}: the phases make up the length of the run, which then "
                f"is unknown; {remedy}, or set max_steps of the arguments and leave until of the last phase out."
            )


def check_others(options: Options, phases: Sequence[Phase]) -> None:
    """Refuses other options that phases are not supported with."""
    schedule = getattr(options.lr_scheduler_type, "value", options.lr_scheduler_type)
    has_data = any(phase.changes_data for phase in phases)
    is_mesh = isinstance(options.parallel, dict) or options.parallelism_config is not None
    excluded = {
        "auto_find_batch_size=True": (options.auto_find_batch_size, "set per_device_train_batch_size"),
        "nonfinite_policy='rollback'": (options.nonfinite_policy == "rollback", "set 'skip' or 'raise'"),
        f"lr_scheduler_type={schedule!r}": (schedule in METRIC_SCHEDULES, "choose a schedule of steps"),
        "optimizer_in_backward=True": (options.optimizer_in_backward, "leave it out"),
        f"label_smoothing_factor={options.label_smoothing_factor} and a loss of their own": (
            options.label_smoothing_factor > 0 and any(phase.loss is not None for phase in phases),
            "smooth the targets in that loss",
        ),
        "regularizers and other data or losses": (
            bool(options.regularizers) and (has_data or any(phase.loss is not None for phase in phases)),
            "leave regularizers out",
        ),
        "deepspeed": (bool(options.deepspeed), "set parallel='fsdp'"),
        "half_precision_backend='apex'": (options.half_precision_backend == "apex", "leave it out"),
        "ddp_static_graph=True": (bool(options.ddp_static_graph), "leave it out"),
        f"swa_lr={options.swa_lr}": (options.swa_lr is not None, "leave it out, or set learning_rate of a phase"),
        "a mesh of parallel processes": (is_mesh, "set parallel='ddp' or 'fsdp'"),
        "XLA devices": (is_xla_asked(options.parallel, options.fsdp, options.fsdp_config), "leave phases out"),
        "gradient_noise_scale=True": (options.gradient_noise_scale, "leave it out"),
        "batch_size_warmup": (options.batch_size_warmup is not None, "give a phase another batch size"),
        "sequence_length_warmup": (options.sequence_length_warmup is not None, "leave it out"),
        f"packing={options.packing!r} and phases with other data": (
            bool(options.packing) and has_data,
            "leave packing out",
        ),
        "swa_start without average_steps": (
            options.swa_start is not None and options.average_steps is None,
            "set average_steps, as the epochs of phases differ",
        ),
        "per_device_train_tokens and phases with other data": (
            options.per_device_train_tokens is not None and has_data,
            "leave per_device_train_tokens out",
        ),
    }
    for name, (is_set, remedy) in excluded.items():
        if is_set:
            raise UnsupportedOption(f"phases with {name} are not supported: {remedy}.")
