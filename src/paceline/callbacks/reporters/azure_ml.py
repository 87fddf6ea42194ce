"""Reporter for Azure ML's own client: metrics of the run that a job belongs to."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from paceline.args.training import TrainingArguments
from paceline.callbacks.reporters.base import NumberFilter, Reporter
from paceline.callbacks.reporters.service import require_installed
from paceline.core.optional import is_installed, require
from paceline.core.state import TrainerControl, TrainerState


class AzureMLCallback(Reporter):
    """Logs the numbers of each row, under their own names and by step, to the run of the Azure ML job.

    It needs azureml-core. In a job with azureml-mlflow, `report_to="mlflow"` reaches the same run, with settings and
    checkpoints too.

    Args:
        azureml_run: the run; by default `Run.get_context()`, which outside a job prints what it is given.

    Raises:
        ImportError: azureml-core is not installed.
    """

    requires = ("azureml.core",)

    def __init__(self, azureml_run: Any = None) -> None:
        require_installed(self.requires, "azure-ml")
        self.azureml_run = azureml_run
        self._filter = NumberFilter("Azure ML")

    @classmethod
    def is_ready(cls) -> bool:
        """True unless MLflow is installed, whose reporter reaches the same run."""
        return not is_installed("mlflow")

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "azureml_run": None}  # clients hold threads, which cannot be copied

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if not logs or not state.is_world_process_zero:
            return
        if self.azureml_run is None:
            self.azureml_run = require("azureml.core.run", "azure-ml").Run.get_context()
        log = self.azureml_run.log
        step = {"step": state.global_step} if "step" in inspect.signature(log).parameters else {}  # none outside a job
        for name, value in self._filter.numbers(logs).items():
            log(name, value, description=name, **step)
