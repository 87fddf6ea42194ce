"""Reporter for Comet, online or (COMET_START_ONLINE=0) in an archive: metrics, settings and files."""

from __future__ import annotations

import logging
import os
from typing import Any

from paceline.args.places import output_folder
from paceline.args.training import TrainingArguments
from paceline.callbacks.reporters.base import CARD_FILE, changed_project, grouped, is_set
from paceline.callbacks.reporters.service import ServiceReporter
from paceline.core.media import Media
from paceline.core.optional import is_installed, require
from paceline.core.state import TrainerState

logger = logging.getLogger(__name__)

MODES = ("get", "create", "get_or_create")


class CometCallback(ServiceReporter):
    """Logs rows under `train/`, `eval/` and `test/` by step, and the settings as parameters.

    The experiment stays open after the training: the script may log to it, and the client ends it at exit.

    Environment:
        COMET_API_KEY, COMET_PROJECT_NAME, COMET_WORKSPACE, COMET_START_ONLINE, COMET_OFFLINE_DIRECTORY, ...: read by
            the client. Without COMET_PROJECT_NAME, `args.project` is the project if it was changed.
        COMET_EXPERIMENT_KEY: the experiment to continue.
        COMET_MODE: "get", "create" or "get_or_create" (default).
        COMET_LOG_ASSETS: a true value uploads the output folder at the end of training.

    Raises:
        ImportError: comet_ml is not installed.
        ValueError: an invalid COMET_MODE.
    """

    service, extra = "Comet", "comet"
    requires = ("comet_ml",)
    ends_with_training = False

    def __init__(self) -> None:
        super().__init__()
        self._log_assets = is_set("COMET_LOG_ASSETS")
        self._mode = os.environ.get("COMET_MODE", "").strip().lower() or None
        if self._mode is not None and self._mode not in MODES:
            raise ValueError(f"COMET_MODE={self._mode!r} is invalid: expected one of {', '.join(MODES)}; or unset it.")

    @classmethod
    def is_ready(cls) -> bool:
        """True if an API key is configured, or experiments are offline."""
        if not is_installed("comet_ml"):
            return False
        setting_of = require("comet_ml", cls.extra).get_config
        return bool(setting_of("comet.api_key")) or setting_of("comet.start.online") is False

    @property
    def _comet(self) -> Any:
        return require("comet_ml", self.extra)

    def active_run(self) -> Any:
        experiment = self._comet.get_running_experiment()  # also one that has ended
        return None if getattr(experiment, "ended", False) is True else experiment

    def open_run(self, args: TrainingArguments, name: str | None, run_id: str | None) -> Any:
        given = os.environ.get("COMET_EXPERIMENT_KEY")
        chosen: dict[str, Any] = {"mode": self._mode}
        if run_id and not given and self._mode != "create":
            chosen["experiment_key"] = run_id
        project = None if "COMET_PROJECT_NAME" in os.environ else changed_project(args)
        if project is not None:
            chosen["project_name"] = project
        return self._comet.start(**chosen, experiment_config=self._comet.ExperimentConfig(name=name))

    def id_of(self) -> str | None:
        key: str | None = self._run.get_key()
        return key

    def log_settings(self, settings: dict[str, Any]) -> None:
        self._run.log_other("Created from", "paceline")
        self._run.log_parameters(settings)

    def log_row(self, row: dict[str, float], state: TrainerState) -> None:
        self._run.log_metrics(grouped(row), step=state.global_step, epoch=state.epoch)

    def log_media(self, media: Media, state: TrainerState) -> None:
        if media.is_figure:
            self._run.log_image(str(media.path), name=media.name, step=media.step)
            return
        name = f"{media.path.stem}.csv"
        self._run.log_table(name, tabular_data=[list(row) for row in media.rows], headers=list(media.columns))

    def log_tags(self, tags: list[str]) -> None:
        self._run.add_tags(tags)

    def log_card(self, text: str, state: TrainerState) -> None:
        self._run.log_asset_data(text, name=CARD_FILE, overwrite=True, step=state.global_step)

    def upload_at_end(self, args: TrainingArguments, state: TrainerState, model: object, processor: object) -> None:
        if self._log_assets:
            self._run.log_asset_folder(
                str(output_folder(args)), step=state.global_step, log_file_name=True, recursive=True
            )

    def close_run(self) -> None:
        self._run.end()
