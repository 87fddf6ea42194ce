"""Reporter for DVCLive: metrics and settings in files that DVC reads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from paceline.args.places import output_folder
from paceline.args.training import TrainingArguments
from paceline.callbacks.reporters.base import CARD_FILE, OF_THE_WHOLE_RUN, grouped, is_set
from paceline.callbacks.reporters.service import ServiceReporter
from paceline.callbacks.reporters.wandb import save_model
from paceline.core.media import Media
from paceline.core.optional import require
from paceline.core.state import TrainerState


class DVCLiveCallback(ServiceReporter):
    """Writes rows under `train/`, `eval/` and `test/` by step to the folder `dvclive`, and the settings to its params.

    Metrics of the whole run are in its `metrics.json` only. A resumed training appends to the folder. Each trial of a
    search has its own folder in it.

    Args:
        live: a `dvclive.Live` to use; by default one is created.
        log_model: True adds the model at the end of training as an artifact, "all" the output folder at every
            checkpoint. None reads HF_DVCLIVE_LOG_MODEL.
        **kwargs: further arguments of `dvclive.Live`.

    Environment:
        HF_DVCLIVE_LOG_MODEL: a true value or "all", as `log_model`.
        DVCLIVE_RESUME, DVC_EXP_NAME, ...: read by dvclive.

    Raises:
        ImportError: dvclive is not installed.
        TypeError: `live` is no `dvclive.Live`.
    """

    service = "DVCLive"
    extra = "dvclive"
    requires = ("dvclive",)
    closes_in_thread = False  # it writes files only

    def __init__(self, live: Any = None, log_model: bool | str | None = None, **kwargs: Any) -> None:
        super().__init__()
        if live is not None and not isinstance(live, self._dvclive.Live):
            raise TypeError(f"live={live!r} is invalid: expected a dvclive.Live.")
        self.live = live
        self._options = kwargs
        self._log_model = log_model_choice() if log_model is None else log_model
        self.uploads_checkpoints = self._log_model == "all"

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "live": None}

    @property
    def _dvclive(self) -> Any:
        return require("dvclive", self.extra)

    def active_run(self) -> Any:
        return self.live

    def open_run(self, args: TrainingArguments, name: str | None, run_id: str | None) -> Any:
        options = dict(self._options)
        if self._trial is not None:  # a new run empties its folder
            options["dir"] = str(Path(options.get("dir", "dvclive"), self._trial))
        if run_id is not None:
            options.update(dir=run_id, resume=True)
        if self._num_trainings and not self._is_training:
            options["save_dvc_exp"] = False  # an evaluation after the training belongs to the experiment that is saved
        return self._dvclive.Live(**options)

    def id_of(self) -> str | None:
        return str(self._run.dir)

    def log_settings(self, settings: dict[str, Any]) -> None:
        self._run.log_params(settings)

    def log_row(self, row: dict[str, float], state: TrainerState) -> None:
        self._run.step = state.global_step
        for name in OF_THE_WHOLE_RUN:
            if name in row:
                self._run.log_metric(name, row.pop(name), plot=False)
        for name, value in grouped(row).items():
            self._run.log_metric(name, value)
        self._run.sync()

    def log_media(self, media: Media, state: TrainerState) -> None:
        if media.is_figure:  # it has no tables of text
            self._run.step = media.step
            self._run.log_image(f"{media.path.stem}.png", str(media.path))

    def log_card(self, text: str, state: TrainerState) -> None:
        Path(self._run.dir, CARD_FILE).write_text(text, encoding="utf-8")

    def upload(self, folder: Path, args: TrainingArguments, state: TrainerState) -> None:
        self._run.log_artifact(str(output_folder(args)))

    def upload_at_end(self, args: TrainingArguments, state: TrainerState, model: Any, processor: Any) -> None:
        if self._log_model is not True or model is None:
            return
        folder = output_folder(args) / ("best" if args.load_best_model_at_end else "last")
        folder.mkdir(parents=True, exist_ok=True)
        save_model(model, processor, folder)
        if self._card:
            (folder / CARD_FILE).write_text(self._card, encoding="utf-8")
        self._run.log_artifact(str(folder), name=folder.name, type="model", labels=list(self._tags), copy=True)

    def close_run(self) -> None:
        self._run.end()


def log_model_choice() -> bool | str:
    """Returns HF_DVCLIVE_LOG_MODEL: True, False or "all"."""
    is_all = os.environ.get("HF_DVCLIVE_LOG_MODEL", "").strip().lower() == "all"
    return "all" if is_all else is_set("HF_DVCLIVE_LOG_MODEL")
