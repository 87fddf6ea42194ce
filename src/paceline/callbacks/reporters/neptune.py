"""Reporter for Neptune's client of version 1, online or (NEPTUNE_MODE=offline) in a folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from paceline.args.places import placed
from paceline.args.training import TrainingArguments
from paceline.callbacks.reporters.base import grouped
from paceline.callbacks.reporters.service import ServiceReporter
from paceline.core.media import Media
from paceline.core.optional import require
from paceline.core.state import TrainerState

LOG_CHECKPOINTS = (None, "same", "last", "best")


class NeptuneMissingConfiguration(Exception):
    """A run cannot be created, because project or token are missing."""


class NeptuneCallback(ServiceReporter):
    """Logs rows as series under `finetuning/train`, `eval` and `test` by step, and the settings as fields.

    Args:
        api_token: by default NEPTUNE_API_TOKEN.
        project: "workspace/project"; by default NEPTUNE_PROJECT.
        name: the name of the run; by default `run_name`.
        base_namespace: the root of what is logged.
        run: a run to use; it is left open.
        log_parameters: log the settings.
        log_checkpoints: "same" uploads every checkpoint, "last" the newest, "best" the best; None uploads none.
        **neptune_run_kwargs: further arguments of `neptune.init_run`.

    Environment:
        NEPTUNE_API_TOKEN, NEPTUNE_PROJECT, NEPTUNE_MODE, NEPTUNE_CUSTOM_RUN_ID: read by the client.

    Raises:
        ImportError: neptune is not installed.
        ValueError: an invalid `log_checkpoints`.
    """

    service = "Neptune"
    extra = "neptune"
    requires = ("neptune",)

    def __init__(
        self,
        *,
        api_token: str | None = None,
        project: str | None = None,
        name: str | None = None,
        base_namespace: str = "finetuning",
        run: Any = None,
        log_parameters: bool = True,
        log_checkpoints: str | None = None,
        **neptune_run_kwargs: Any,
    ) -> None:
        super().__init__()
        if log_checkpoints not in LOG_CHECKPOINTS:
            raise ValueError(
                f"log_checkpoints={log_checkpoints!r} is invalid: expected 'same', 'last', 'best' or None."
            )
        self._given = run
        self._options = {"api_token": api_token, "project": project, **neptune_run_kwargs}
        self._name = name
        self._base = base_namespace
        self._log_parameters = log_parameters
        self._log_checkpoints = log_checkpoints
        self._uploaded: str | None = None  # the newest checkpoint
        self.uploads_checkpoints = log_checkpoints in ("same", "last")

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_given": None}

    @classmethod
    def is_ready(cls) -> bool:
        """True if a project and a token are configured, or runs are offline."""
        is_offline = os.environ.get("NEPTUNE_MODE") == "offline"
        return is_offline or all(os.environ.get(name) for name in ("NEPTUNE_PROJECT", "NEPTUNE_API_TOKEN"))

    @property
    def ends_with_training(self) -> bool:  # type: ignore[override]
        """False offline, where a run cannot be continued: it stays open for what the script still logs."""
        return self._identity.get("run_id") is not None

    @property
    def run(self) -> Any:
        """The open run; None without one."""
        return self._run

    @classmethod
    def get_run(cls, trainer: Any) -> Any:
        """Returns the run of a Trainer's callback. Raises: LookupError, without such a callback."""
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, cls):
                return callback.run
        raise LookupError(f"This Trainer has no {cls.__name__}.")

    def active_run(self) -> Any:
        return self._given

    def open_run(self, args: TrainingArguments, name: str | None, run_id: str | None) -> Any:
        neptune = require("neptune", self.extra)
        errors = require("neptune.exceptions", self.extra)
        try:
            if run_id is not None:
                return neptune.init_run(with_id=run_id, **self._options)
            return neptune.init_run(name=self._name or name, **self._options)
        except (errors.NeptuneMissingProjectNameException, errors.NeptuneMissingApiTokenException) as error:
            raise NeptuneMissingConfiguration(
                "Neptune needs a project and a token: set NEPTUNE_PROJECT and NEPTUNE_API_TOKEN, or pass "
                "NeptuneCallback(project=..., api_token=...) in callbacks."
            ) from error

    def id_of(self) -> str | None:
        missing = require("neptune.exceptions", self.extra).MissingFieldException
        try:
            return str(self._run["sys/id"].fetch())
        except missing:  # offline, where the service has not given one
            return None

    def log_settings(self, settings: dict[str, Any]) -> None:
        if self._log_parameters:
            plain = require("neptune.utils", self.extra).stringify_unsupported(settings)
            self._run[f"{self._base}/trainer_parameters"] = plain

    def log_row(self, row: dict[str, float], state: TrainerState) -> None:
        for name, value in grouped(row).items():
            self._run[f"{self._base}/{name}"].append(value, step=state.global_step)

    def log_media(self, media: Media, state: TrainerState) -> None:
        place = self._run[f"{self._base}/{media.name}"]
        if media.is_figure:
            place.append(require("neptune.types", self.extra).File(str(media.path)), step=media.step)
        else:
            place.append(media.as_markdown(), step=media.step)

    def log_tags(self, tags: list[str]) -> None:
        self._run["sys/tags"].add(tags)

    def log_card(self, text: str, state: TrainerState) -> None:
        content = require("neptune.types", self.extra).File.from_content(text, extension="md")
        self._run[f"{self._base}/model_card"].upload(content)

    def upload(self, folder: Path, args: TrainingArguments, state: TrainerState) -> None:
        is_last = self._log_checkpoints == "last"
        files = self._run[f"{self._base}/checkpoints/last" if is_last else f"{self._base}/checkpoints"]
        files.upload_files(str(folder))
        if is_last and self._uploaded is not None:
            files.delete_files(self._uploaded)
        self._uploaded = str(folder)

    def upload_at_end(self, args: TrainingArguments, state: TrainerState, model: object, processor: object) -> None:
        if self._log_checkpoints == "best" and state.best_model_checkpoint:
            self._run[f"{self._base}/checkpoints/best"].upload_files(str(placed(args, state.best_model_checkpoint)))

    def close_run(self) -> None:
        self._run.stop()
