"""Reporter for ClearML, online or (CLEARML_OFFLINE_MODE=1) in an archive: metrics, settings and checkpoints."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from paceline.args.training import TrainingArguments
from paceline.callbacks.reporters.base import (
    OF_THE_WHOLE_RUN,
    as_description,
    changed_project,
    flat,
    grouped,
    is_set,
)
from paceline.callbacks.reporters.service import ServiceReporter
from paceline.core.media import Media
from paceline.core.optional import require
from paceline.core.state import TrainerState

SECTION = "Transformers"  # of the settings in ClearML's user interface


class ClearMLCallback(ServiceReporter):
    """Reports scalars under the titles `train`, `eval` and `test` by step, and the settings as hyperparameters.

    Metrics of the whole run are single values. A task of the script is used, and left open.

    Environment:
        CLEARML_PROJECT: the project; by default `args.project` if that was changed, else "HuggingFace Transformers".
        CLEARML_TASK: the name of the task; by default `run_name`, else "Trainer".
        CLEARML_LOG_MODEL: a true value uploads every checkpoint as an output model.
        CLEARML_OFFLINE_MODE, CLEARML_API_HOST, ...: read by the client.

    Raises:
        ImportError: clearml is not installed.
    """

    service = "ClearML"
    extra = "clearml"
    requires = ("clearml",)

    def __init__(self) -> None:
        super().__init__()
        self.uploads_checkpoints = is_set("CLEARML_LOG_MODEL")

    @classmethod
    def is_ready(cls) -> bool:
        """True if a server is configured, or tasks are offline."""
        configuration = Path(os.environ.get("CLEARML_CONFIG_FILE") or "~/clearml.conf").expanduser()
        is_offline = is_set("CLEARML_OFFLINE_MODE")
        return is_offline or bool(os.environ.get("CLEARML_API_ACCESS_KEY")) or configuration.is_file()

    @property
    def _clearml(self) -> Any:
        return require("clearml", self.extra)

    def active_run(self) -> Any:
        return self._clearml.Task.current_task()

    def open_run(self, args: TrainingArguments, name: str | None, run_id: str | None) -> Any:
        task = self._clearml.Task
        if hasattr(task, "_report_subprocess_enabled"):
            # It forks a process that reports, which may hang at the end of the second task of a process.
            # The setting is `sdk.development.report_use_subprocess` of clearml.conf, which is not read offline.
            task._report_subprocess_enabled = False
        # continue_last_task=0 continues the task without an offset of its steps, whatever the client prints
        how = {"reuse_last_task_id": run_id, "continue_last_task": 0} if run_id else {"reuse_last_task_id": False}
        return task.init(
            project_name=os.environ.get("CLEARML_PROJECT") or changed_project(args) or "HuggingFace Transformers",
            task_name=os.environ.get("CLEARML_TASK") or name or "Trainer",
            auto_connect_frameworks={"tensorboard": False, "pytorch": False},
            output_uri=True if self.uploads_checkpoints else None,
            **how,
        )

    def id_of(self) -> str | None:
        return str(self._run.id)

    def log_settings(self, settings: dict[str, Any]) -> None:
        self._run.update_parameters({f"{SECTION}/{name}": value for name, value in flat(settings, "/")})

    def log_row(self, row: dict[str, float], state: TrainerState) -> None:
        reports = self._run.get_logger()
        for name in OF_THE_WHOLE_RUN:
            if name in row:
                reports.report_single_value(name=name, value=row.pop(name))
        for name, value in grouped(row).items():
            title, _, series = name.partition("/")
            reports.report_scalar(title=title, series=series, value=value, iteration=state.global_step)

    def log_media(self, media: Media, state: TrainerState) -> None:
        title, _, series = media.name.rpartition("/")
        place = {"title": title or media.name, "series": series, "iteration": media.step}
        if media.is_figure:
            self._run.get_logger().report_image(**place, local_path=str(media.path))
        else:
            table = [list(media.columns), *[list(row) for row in media.rows]]
            self._run.get_logger().report_table(**place, table_plot=table)

    def log_tags(self, tags: list[str]) -> None:
        self._run.add_tags(tags)

    def log_card(self, text: str, state: TrainerState) -> None:
        """Sets the description of the task, unless the script has one."""
        description = as_description(text, self._run.comment)
        if description is not None:
            self._run.set_comment(description)

    def upload(self, folder: Path, args: TrainingArguments, state: TrainerState) -> None:
        model = self._clearml.OutputModel(task=self._run, name=folder.name)
        model.update_weights_package(
            weights_path=str(folder), target_filename=folder.name, iteration=state.global_step, auto_delete_file=False
        )

    def close_run(self) -> None:
        self._run.close()
