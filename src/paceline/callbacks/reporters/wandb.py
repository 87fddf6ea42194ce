"""Reporter for Weights & Biases, online or (WANDB_MODE=offline) in a folder: logs, settings and models."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.args.places import output_folder
from paceline.args.training import TrainingArguments
from paceline.callbacks.reporters.base import (
    CARD_FILE,
    OF_THE_WHOLE_RUN,
    CardReporter,
    MakeCard,
    as_description,
    grouped,
    is_set,
    num_parameters,
    run_name_of,
    settings_of,
    tags_of,
)
from paceline.core.metrics import jsonable
from paceline.core.optional import is_installed, require
from paceline.core.state import TrainerControl, TrainerState

if TYPE_CHECKING:
    from paceline.core.media import Media

LOG_MODEL_CHOICES = ("end", "checkpoint", "false")
MAX_TAG = 64  # characters, the service's limit
WATCH_CHOICES = ("all", "parameters", "gradients")


class WandbCallback(CardReporter):
    """Logs rows under `train/`, `eval/` and `test/` over `train/global_step`, and the settings as the config.

    An existing run (after `wandb.init`, or of a sweep) is used; otherwise one is created in the project WANDB_PROJECT
    or `args.project`, with the name `args.run_name`. A resumed training continues the run of its checkpoint, unless
    `run_name` or the project has changed, or WANDB_RUN_ID is set.

    Environment:
        WANDB_LOG_MODEL: "end" uploads the model after training, "checkpoint" every checkpoint too, "false" nothing.
        WANDB_WATCH: records "gradients", "parameters" or "all" as histograms; "false" none.
        WANDB_DISABLED: a true value disables this callback.
        WANDB_PROJECT: the project.
        WANDB_NAME, WANDB_MODE, WANDB_DIR, WANDB_ENTITY, ...: read by wandb itself.

    Raises:
        ImportError: wandb is not installed.
        ValueError: an invalid WANDB_LOG_MODEL.
    """

    requires = ("wandb",)

    def __init__(self) -> None:
        if not is_installed("wandb"):
            require("wandb", "wandb")  # raises with the extra to install
        self._log_model = log_model_choice()
        self._initialized = False
        self._owns_run = False
        self._trial: str | None = None  # that the run belongs to
        self._resumes: Mapping[str, Any] = {}
        self._card = ""  # of the training that ends

    @property
    def _wandb(self) -> Any:
        return require("wandb", "wandb")

    @property
    def reads_checkpoint(self) -> bool:  # type: ignore[override]
        """True if `on_save` needs the files."""
        return self._log_model == "checkpoint"

    def state_dict(self) -> dict[str, Any]:
        """Returns the ids of the run, for a resumed training."""
        run = self._wandb.run if self._initialized else None
        if run is None:
            return dict(self._resumes)
        return {"run_id": run.id, "project": run.project, "run_name": self._run_name}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the run to continue, if it still applies."""
        self._resumes = dict(state)

    def setup(self, args: TrainingArguments, state: TrainerState, model: Any, **kwargs: Any) -> None:
        """Creates or finds the run and logs the settings. May be overridden."""
        if is_set("WANDB_DISABLED") or not state.is_world_process_zero:
            self._initialized = True
            return
        self._run_name, self._trial = run_name_of(args), state.trial_name
        wandb = self._wandb
        self._owns_run = wandb.run is None
        if self._owns_run:
            wandb.init(**self._init_arguments(args, state))
        self._initialized = True
        count = num_parameters(model)
        wandb.config.update(settings_of(args, model), allow_val_change=True)
        if count is not None:
            wandb.config.update({"model/num_parameters": count}, allow_val_change=True)
        tags = [tag for tag in tags_of(model) if len(tag) <= MAX_TAG]
        wandb.run.tags = tuple(dict.fromkeys((*(wandb.run.tags or ()), *tags)))
        wandb.define_metric("train/global_step")
        wandb.define_metric("*", step_metric="train/global_step", step_sync=True)
        watched = os.environ.get("WANDB_WATCH", "false")
        if watched in WATCH_CHOICES and model is not None:
            wandb.watch(model, log=watched, log_freq=max(100, int(state.logging_steps)))

    def _init_arguments(self, args: TrainingArguments, state: TrainerState) -> dict[str, Any]:
        project = os.environ.get("WANDB_PROJECT") or getattr(args, "project", None) or "huggingface"
        chosen: dict[str, Any] = {"project": project}
        if state.is_hyper_param_search and state.trial_name is not None:
            chosen.update(name=state.trial_name, group=run_name_of(args) or args.output_dir)
        elif args.run_name is not None:
            chosen["name"] = run_name_of(args)
        before = self._resumes
        is_same = before.get("project") == project and before.get("run_name") == run_name_of(args)
        if is_same and before.get("run_id") and "WANDB_RUN_ID" not in os.environ:
            chosen.update(id=before["run_id"], resume="allow")
        return chosen

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        if self._initialized and (state.is_hyper_param_search or self._trial is not None):
            self._leave_trial()
            if state.global_step == 0:
                self._resumes = {}
        if not self._initialized:
            self.setup(args, state, model, **kwargs)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        logs: Any = None,
        **kwargs: Any,
    ) -> None:
        run = self._run(args, state, model)
        if run is None or not logs:
            return
        rows = {name: jsonable(value) for name, value in logs.items()}
        run.summary.update({name: rows.pop(name) for name in OF_THE_WHOLE_RUN if name in rows})
        run.log({**grouped(rows), "train/global_step": state.global_step})

    def on_media(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, media: Media, **kwargs: Any
    ) -> None:
        run = self._run(args, state, kwargs.get("model"))
        if run is None:
            return
        if media.is_figure:
            value = self._wandb.Image(str(media.path))
        else:
            value = self._wandb.Table(columns=list(media.columns), data=[list(row) for row in media.rows])
        run.log({media.name: value, "train/global_step": media.step})

    def on_predict(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: Any = None, **kwargs: Any
    ) -> None:
        run = self._run(args, state, kwargs.get("model"))
        if run is not None and metrics:
            run.log(grouped({name: jsonable(value) for name, value in metrics.items()}))

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        run = self._run(args, state, kwargs.get("model")) if self._log_model == "checkpoint" else None
        if run is None:
            return
        aliases = [f"epoch_{round(state.epoch or 0, 2)}", f"checkpoint_global_step_{state.global_step}"]
        self._upload(run, args, output_folder(args) / f"checkpoint-{state.global_step}", aliases)

    def record_card(self, make_card: MakeCard, args: TrainingArguments, state: TrainerState, model: Any) -> None:
        """Makes the model card the notes of the run, unless it has some; the artifact of the model gets it too."""
        run = self._run(args, state, model)
        if run is None:
            return
        self._card = make_card()
        description = as_description(self._card, run.notes)
        if description is not None:
            run.notes = description

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        processing_class: Any = None,
        **kwargs: Any,
    ) -> None:
        run = self._run(args, state, model) if self._log_model != "false" else None
        if run is None or model is None:
            return
        with tempfile.TemporaryDirectory() as folder:
            save_model(model, processing_class, Path(folder))
            if self._card:
                Path(folder, CARD_FILE).write_text(self._card, encoding="utf-8")
            best = {f"eval/{args.metric_for_best_model}": state.best_metric} if args.load_best_model_at_end else {}
            self._upload(run, args, Path(folder), ["final_model"], {"final_model": True, **best})

    def _run(self, args: TrainingArguments, state: TrainerState, model: Any) -> Any:
        """Returns the run to write to; None on other ranks and if disabled."""
        if self._initialized and self._trial is not None and not state.is_hyper_param_search:
            self._leave_trial()  # an evaluation after a search
            self._resumes = {}
        if not self._initialized:
            self.setup(args, state, model)
        is_off = is_set("WANDB_DISABLED") or not state.is_world_process_zero
        return None if is_off else self._wandb.run

    def _leave_trial(self) -> None:
        """Ends the run of a trial, unless it is that of a sweep, which belongs to its agent."""
        if self._owns_run:
            self._wandb.finish()
        self._initialized = False

    def _upload(
        self,
        run: Any,
        args: TrainingArguments,
        folder: Path,
        aliases: list[str],
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        numbers = {name: value for name, value in dict(run.summary).items() if not name.startswith("_")}
        known = {name: value for name, value in numbers.items() if type(value) in (int, float)}
        known["model/num_parameters"] = run.config.get("model/num_parameters")
        name = f"model-{run.id if args.run_name in (None, args.output_dir) else run.name}"
        artifact = self._wandb.Artifact(name=name, type="model", metadata={**known, **(metadata or {})})
        artifact.add_dir(str(folder))
        run.log_artifact(artifact, aliases=aliases)


def log_model_choice() -> str:
    """Returns WANDB_LOG_MODEL: "end", "checkpoint" or "false"."""
    value = os.environ.get("WANDB_LOG_MODEL", "false").strip().lower() or "false"
    if value not in LOG_MODEL_CHOICES:
        raise ValueError(f"WANDB_LOG_MODEL={value!r} is invalid: expected one of {', '.join(LOG_MODEL_CHOICES)}.")
    return value


def save_model(model: Any, processing_class: Any, folder: Path) -> None:
    """Saves a loadable model to a folder, with its processor and a text file of its structure."""
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(str(folder))
    else:
        require("safetensors.torch", "torch").save_model(model, str(folder / "model.safetensors"))
    if hasattr(processing_class, "save_pretrained"):
        processing_class.save_pretrained(str(folder))
    (folder / "model_architecture.txt").write_text(f"{model}\n", encoding="utf-8")
