"""Writes the report of a run when it ends."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any

from paceline.args.training import TrainingArguments
from paceline.core.events import TrainerCallback
from paceline.core.state import TrainerControl, TrainerState


class ReportCallback(TrainerCallback):
    """Writes `report.html` to the output folder at the end of a training: curves, evaluations, configuration.

    This is a default callback; `trainer.remove_callback(ReportCallback)` disables it. `paceline report RUN` writes the
    report at any time, also for an interrupted run.
    """

    may_fail = True
    reads_checkpoint = False

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero:
            return
        values = {field.name: getattr(state, field.name, None) for field in dataclasses.fields(state)}
        values["metric_for_best_model"] = args.metric_for_best_model
        # imported late: the page is not needed before the end of a run
        write = importlib.import_module("paceline.report.write")
        write.write_report([Path(str(args.output_dir))], rows=values.pop("log_history"), state=values)
