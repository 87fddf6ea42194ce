"""Reporter for Trackio: metrics and settings in a local database, or in a Space of the hub."""

from __future__ import annotations

import logging
import re
import secrets
from typing import Any

from paceline.args.training import TrainingArguments
from paceline.callbacks.reporters.base import grouped
from paceline.callbacks.reporters.service import ServiceReporter
from paceline.core.media import Media
from paceline.core.optional import require
from paceline.core.state import TrainerControl, TrainerState

logger = logging.getLogger(__name__)

SPACE_URL = "https://huggingface.co/spaces/{space_id}"


class TrackioCallback(ServiceReporter):
    """Logs rows under `train/`, `eval/` and `test/` by step, and the settings as the config.

    The project is `args.project`, the run `args.run_name`. With `trackio_space_id` rows go to that Space, whose data is
    in `trackio_bucket_id`; the end of training exports a static copy to `trackio_static_space_id`. Without a Space, a
    push to the hub exports the local project. `trackio_static_space_id=False` exports nothing. The model gets the tags
    of its model card, `trackio` and `trackio:URL`, where there is a Space.

    Environment:
        TRACKIO_SPACE_ID, TRACKIO_SERVER_URL, TRACKIO_DIR, ...: read by trackio.

    Raises:
        ImportError: trackio is not installed.
    """

    service = "Trackio"
    extra = "trackio"
    requires = ("trackio",)

    def __init__(self) -> None:
        super().__init__()
        self._space_id: str | None = None
        self._static_space_id: str | None = None

    @property
    def _trackio(self) -> Any:
        return require("trackio", self.extra)

    @property
    def _context(self) -> Any:
        return require("trackio.context_vars", self.extra)

    def active_run(self) -> Any:
        return self._context.current_run.get()

    def open_run(self, args: TrainingArguments, name: str | None, run_id: str | None) -> Any:
        run = self._trackio.init(
            project=args.project,
            name=run_id or name,
            space_id=args.trackio_space_id,
            bucket_id=args.trackio_bucket_id,
            resume="allow" if run_id else "never",
            private=args.hub_private_repo,
        )
        # complete, where the options name it without its owner or an environment variable does
        self._space_id = self._context.current_space_id.get()
        return run

    def id_of(self) -> str | None:
        return str(self._run.name)

    def log_settings(self, settings: dict[str, Any]) -> None:
        # names that start with _ are reserved
        self._run.config.update({name.lstrip("_"): value for name, value in settings.items()})

    def log_row(self, row: dict[str, float], state: TrainerState) -> None:
        self._run.log({**grouped(row), "train/global_step": state.global_step}, step=state.global_step)

    def log_media(self, media: Media, state: TrainerState) -> None:
        if media.is_figure:
            value = self._trackio.Image(str(media.path))
        else:
            frame = require("pandas", self.extra).DataFrame([list(row) for row in media.rows], columns=media.columns)
            value = self._trackio.Table(dataframe=frame)
        self._run.log({media.name: value}, step=media.step)

    def log_card(self, text: str, state: TrainerState) -> None:
        self._run.log({"model_card": self._trackio.Markdown(text)}, step=state.global_step)

    def close_run(self) -> None:
        self._trackio.finish()

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        processing_class: Any = None,
        **kwargs: Any,
    ) -> None:
        super().on_train_end(args, state, control, model=model, processing_class=processing_class, **kwargs)
        if self._space_id is None or exports_nothing(args) or not state.is_world_process_zero:
            return
        self._static_space_id = self._trackio.freeze(
            space_id=self._space_id,
            project=args.project,
            new_space_id=self._static_target(args),
            private=args.hub_private_repo,
        )
        self._tag(model)

    def on_push_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        has_project = self._context.current_project.get() is not None
        if self._space_id or exports_nothing(args) or not state.is_world_process_zero:
            return
        if not has_project:
            return
        self._static_space_id = self._trackio.sync(
            project=args.project,
            sdk="static",
            space_id=self._static_target(args),
            private=args.hub_private_repo,
            bucket_id=args.trackio_bucket_id,
            force=True,
        )
        self._tag(model)

    def _static_target(self, args: TrainingArguments) -> str:
        """Returns the static Space to export to; without one in the options, a name made of the project's."""
        chosen = self._static_space_id or args.trackio_static_space_id
        return str(chosen) if chosen else static_space_name(args.project)

    def _tag(self, model: Any) -> None:
        """Adds the tags by which the hub shows the Space on the model's page; replaces those of an earlier one."""
        space_id = self._static_space_id or self._space_id
        if model is None or space_id is None:
            return
        kept = [tag for tag in getattr(model, "model_tags", None) or [] if not str(tag).startswith("trackio:https://")]
        added = ["trackio", f"trackio:{SPACE_URL.format(space_id=space_id)}"]
        model.model_tags = [*kept, *(tag for tag in added if tag not in kept)]


def exports_nothing(args: TrainingArguments) -> bool:
    """True if `trackio_static_space_id` is False; None exports to a Space with a name made of the project's."""
    chosen: Any = args.trackio_static_space_id
    return chosen is False


def static_space_name(project: str) -> str:
    """Returns a name for a static Space: the project's, in the characters of the hub, with a random suffix."""
    name = re.sub(r"-+", "-", re.sub(r"[^a-z0-9._-]", "-", project.strip().lower())).strip("-_.")
    base = (name or "trackio-project")[:81].rstrip("-")
    return f"{base}-static-{secrets.token_hex(3)}"
