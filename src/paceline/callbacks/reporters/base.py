"""Base classes and helpers of reporters. A reporter never stops the run."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from paceline.args.places import output_folder
from paceline.args.secrets import mask_text, masked
from paceline.args.training import TrainingArguments
from paceline.callbacks.printer import FOR_TRACKERS
from paceline.core import metrics, record
from paceline.core.events import TrainerCallback
from paceline.core.retry_writer import RetryWriter, set_aside
from paceline.core.state import TrainerControl, TrainerState

logger = logging.getLogger(__name__)

CARD_FILE = "README.md"  # the name of a model card on the hub and in artifacts
CARD_MARK = "<!-- paceline: model card -->"  # of descriptions that a later training may replace
# metrics of the whole run, which services keep beside the rows of steps
OF_THE_WHOLE_RUN = ("train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss", "total_flos")

MakeCard = Callable[[], str]  # returns the model card, in Markdown


class Reporter(TrainerCallback):
    """Base class of callbacks that send logs to a tracker or file.

    An exception is logged once, and training continues. `requires` names alternative packages, one of which is needed.
    """

    may_fail = True
    requires: tuple[str, ...] = ()

    @classmethod
    def is_ready(cls) -> bool:
        """True if `report_to="all"` takes this reporter once its package is installed."""
        return True


class CardReporter(Reporter):
    """Base class of reporters that record the model card."""

    def on_model_card(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        make_card: MakeCard,
        model: Any = None,
        **kwargs: Any,
    ) -> None:
        """Records the model card, on the main process."""
        if state.is_world_process_zero:
            self.record_card(make_card, args, state, model)

    def record_card(self, make_card: MakeCard, args: TrainingArguments, state: TrainerState, model: Any) -> None:
        """Records the model card, if this reporter has a place for it now.

        Args:
            make_card: returns the card.
            args: the arguments of the training.
            state: the state of the training.
            model: the model.
        """
        raise NotImplementedError


class FileReporter(Reporter):
    """Base class of reporters that append rows to a file of the output folder; a failed write is retried later.

    A resumed run first removes the rows after its checkpoint; a new run renames the file of an earlier one.
    """

    file_name: str

    def __init__(self) -> None:
        self._outbox = RetryWriter()

    def row(self, logs: dict[str, Any], state: TrainerState) -> dict[str, Any]:
        """Returns one row of the file: step and epoch first, then the metrics."""
        return {"step": state.global_step, "epoch": state.epoch, **logs}

    def append(self, path: Path, row: dict[str, Any]) -> None:
        """Appends a row. Raises OSError, with the file unchanged."""
        raise NotImplementedError

    def truncate(self, path: Path, last_step: int) -> None:
        """Removes the rows after `last_step`, if there is a file. Raises OSError, with the file unchanged."""
        raise NotImplementedError

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._outbox = RetryWriter()
        if not state.is_world_process_zero:
            return
        path = output_folder(args) / self.file_name
        is_new = state.global_step == 0 and not state.log_history  # not resumed within its first evaluation
        begin = partial(set_aside, path) if is_new else partial(self.truncate, path, state.global_step)
        self._outbox.put(path, begin)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero or not logs:
            return
        path = output_folder(args) / self.file_name
        row = masked(metrics.jsonable(self.row(logs, state)))
        self._outbox.retry()
        self._outbox.put(path, partial(self.append, path, row))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._outbox.close()


def grouped(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Renames metrics for trackers' groups: `eval_x` becomes `eval/x`, `test_x` becomes `test/x`, others `train/x`.

    Times of activities, the use of resources and compilations keep their groups: `time/x`, `resource/x`, `compile/x`.
    """
    names = {}
    for name, value in logs.items():
        if name.startswith(FOR_TRACKERS):
            names[name] = value
            continue
        split, _, rest = name.partition("_")
        names[f"{split}/{rest}" if split in ("eval", "test") and rest else f"train/{name}"] = value
    return names


def settings_of(args: TrainingArguments, model: Any) -> dict[str, Any]:
    """Returns the settings of a run for trackers: model configuration and arguments (which win), in plain types.

    Tokens and passwords are masked, by the options' names and by their format.
    """
    config = getattr(model, "config", None)
    settings: dict[str, Any] = {}
    adapters = getattr(model, "peft_config", None)
    if adapters:
        settings["peft_config"] = {name: as_mapping(adapter) for name, adapter in as_mapping(adapters).items()}
    settings.update(as_mapping(config))
    settings.update(args.to_dict())
    plain: dict[str, Any] = record.jsonable(settings)
    return plain


def changed_project(args: TrainingArguments) -> str | None:
    """Returns `args.project` unless it is the default."""
    project = getattr(args, "project", None)
    return None if project in (None, "huggingface") else str(project)


def run_name_of(args: TrainingArguments) -> str | None:
    """Returns `run_name` with secrets masked."""
    name = getattr(args, "run_name", None)
    return None if name is None else mask_text(str(name))


def as_mapping(config: Any) -> dict[str, Any]:
    """Returns a configuration as a dict; an empty one for None."""
    described = config.to_dict() if hasattr(config, "to_dict") else config
    return dict(described) if isinstance(described, Mapping) else {}


def flat(settings: Mapping[str, Any], separator: str = ".", prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields nested settings one by one, under `outer.inner`."""
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, separator, f"{prefix}{name}{separator}")
        else:
            yield f"{prefix}{name}", value


class NumberFilter:
    """Selects the numbers of a row of logs; warns once per name of what a service does not accept.

    Args:
        service: the name of the service, for the warning.
    """

    def __init__(self, service: str) -> None:
        self._service = service
        self._left_out: set[str] = set()

    def numbers(self, logs: Mapping[str, Any]) -> dict[str, float]:
        """Returns the entries that are numbers, as plain floats and ints."""
        plain = {name: metrics.jsonable(value) for name, value in logs.items()}
        numbers = {name: value for name, value in plain.items() if isinstance(value, (bool, int, float))}
        new = [name for name in plain if name not in numbers and name not in self._left_out]
        if new:
            self._left_out.update(new)
            logger.warning("%s accepts only numbers, so these logs are not sent: %s.", self._service, ", ".join(new))
        return numbers


def as_description(card: str, present: str | None) -> str | None:
    """Returns a model card as the description of a run; None if the user has set one, which is kept.

    Args:
        card: the model card.
        present: the current description.
    """
    return None if present and CARD_MARK not in present else f"{card}\n{CARD_MARK}\n"


def tags_of(model: Any) -> tuple[str, ...]:
    """Returns the tags of a run: "paceline", and those that the model's card gets, `model.model_tags`."""
    own = getattr(model, "model_tags", None)
    listed = [own] if isinstance(own, str) else own or ()
    return tuple(dict.fromkeys(mask_text(str(tag)) for tag in ("paceline", *listed)))


def num_parameters(model: Any) -> int | None:
    """Returns the number of elements of all parameters; None for an object without parameters."""
    parameters = getattr(model, "parameters", None)
    return sum(parameter.numel() for parameter in parameters()) if callable(parameters) else None


def is_set(variable: str) -> bool:
    """True if an environment variable has a true value."""
    return os.environ.get(variable, "").strip().lower() in ("1", "true", "yes", "on", "y")
