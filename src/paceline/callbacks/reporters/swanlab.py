"""Reporter for SwanLab, online or (SWANLAB_MODE=offline or local) in a folder: metrics, settings and checkpoints."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from paceline.args.training import TrainingArguments
from paceline.callbacks.reporters.base import OF_THE_WHOLE_RUN, changed_project, grouped, is_set
from paceline.callbacks.reporters.service import ServiceReporter
from paceline.core.media import Media
from paceline.core.optional import require
from paceline.core.state import TrainerState


class SwanLabCallback(ServiceReporter):
    """Logs rows under `train/`, `eval/` and `test/` by step, and the settings as the config.

    Metrics of the whole run are under `single_value/`. The run stays open after the training: the script may log to
    it, and the client ends it at exit.

    Environment:
        SWANLAB_PROJECT: the project; by default `args.project` if that was changed, else the working directory's name.
        SWANLAB_MODE: "online", "local", "offline" or "disabled".
        SWANLAB_LOG_MODEL: a true value saves every checkpoint with the run.
        SWANLAB_RUN_ID, SWANLAB_RESUME: the run to continue, and "must", "allow" or "never".
        SWANLAB_TAGS: the tags of the run, instead of the model's; read by the client.
        SWANLAB_API_KEY, SWANLAB_LOG_DIR, SWANLAB_WEB_HOST, SWANLAB_API_HOST, ...: read by the client.

    Raises:
        ImportError: swanlab is not installed.
    """

    service = "SwanLab"
    extra = "swanlab"
    requires = ("swanlab",)
    ends_with_training = False

    def __init__(self) -> None:
        super().__init__()
        self.uploads_checkpoints = is_set("SWANLAB_LOG_MODEL")

    @property
    def _swanlab(self) -> Any:
        return require("swanlab", self.extra)

    def active_run(self) -> Any:
        return self._swanlab.get_run() if self._swanlab.has_run() else None

    def open_run(self, args: TrainingArguments, name: str | None, run_id: str | None) -> Any:
        chosen: dict[str, Any] = {"name": name, "project": os.environ.get("SWANLAB_PROJECT") or changed_project(args)}
        given = os.environ.get("SWANLAB_RUN_ID") or run_id
        if given:
            chosen.update(id=given, resume=os.environ.get("SWANLAB_RESUME") or "allow")
        if "SWANLAB_TAGS" not in os.environ:  # which the client reads
            chosen["tags"] = list(self._tags)
        folder = os.environ.get("SWANLAB_LOG_DIR")
        if folder:
            chosen["log_dir"] = folder
        return self._swanlab.init(**{key: value for key, value in chosen.items() if value is not None})

    def id_of(self) -> str | None:
        return str(self._run.id)

    def log_settings(self, settings: dict[str, Any]) -> None:
        self._run.config.update(settings)

    def log_row(self, row: dict[str, float], state: TrainerState) -> None:
        whole = {f"single_value/{name}": row.pop(name) for name in OF_THE_WHOLE_RUN if name in row}
        values = {**grouped(row), **whole, "train/global_step": state.global_step}
        self._run.log(values, step=state.global_step)

    def log_media(self, media: Media, state: TrainerState) -> None:
        kinds = self._swanlab
        value = kinds.Image(str(media.path)) if media.is_figure else kinds.Text(media.as_markdown())
        self._run.log({media.name: value}, step=media.step)

    def log_card(self, text: str, state: TrainerState) -> None:
        self._run.log({"model_card": self._swanlab.Text(text)}, step=state.global_step)

    def upload(self, folder: Path, args: TrainingArguments, state: TrainerState) -> None:
        self._run.save(str(folder.absolute() / "**"), base_path=str(folder.absolute().parent), policy="now")

    def close_run(self) -> None:
        self._run.finish()
