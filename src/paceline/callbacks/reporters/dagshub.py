"""Reporter for DagsHub: MLflow's metrics on a DagsHub repository, and its files."""

from __future__ import annotations

import os
import urllib.parse
from pathlib import PurePosixPath
from typing import Any

from paceline.args.places import output_folder
from paceline.args.training import TrainingArguments
from paceline.callbacks.reporters.base import is_set
from paceline.callbacks.reporters.mlflow import MLflowCallback
from paceline.callbacks.reporters.service import require_installed
from paceline.core.optional import is_installed, require
from paceline.core.state import TrainerControl, TrainerState

ARTIFACTS = "artifacts"  # folder of the repository


class DagsHubCallback(MLflowCallback):
    """Logs to the MLflow server of a DagsHub repository, as `MLflowCallback` does.

    Environment:
        MLFLOW_TRACKING_URI: `https://dagshub.com/OWNER/REPOSITORY.mlflow`; `dagshub.init()` sets it.
        HF_DAGSHUB_LOG_ARTIFACTS: a true value uploads the output folder to the repository at the end of training.
        BRANCH: the branch of the repository; by default "main".
        MLFLOW_...: as in `MLflowCallback`.

    Raises:
        ImportError: dagshub or mlflow is not installed.
        ValueError: MLFLOW_TRACKING_URI is missing, or names no repository.
    """

    requires = ("dagshub",)

    def __init__(self) -> None:
        require_installed(self.requires, "dagshub")
        super().__init__()
        self._uploads_folder = is_set("HF_DAGSHUB_LOG_ARTIFACTS")
        self.owner, self.name = repository_of(os.environ.get("MLFLOW_TRACKING_URI", ""))

    @classmethod
    def is_ready(cls) -> bool:
        """True if MLflow's server is that of a repository."""
        return is_installed("mlflow") and "dagshub" in os.environ.get("MLFLOW_TRACKING_URI", "")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        super().on_train_end(args, state, control, **kwargs)
        if not self._uploads_folder or not state.is_world_process_zero:
            return
        branch = os.environ.get("BRANCH") or "main"
        repository = require("dagshub.upload", "dagshub").Repo(owner=self.owner, name=self.name, branch=branch)
        repository.directory(ARTIFACTS).add_dir(str(output_folder(args)))


def repository_of(uri: str) -> tuple[str, str]:
    """Returns owner and name of the repository of a tracking server.

    Raises:
        ValueError: the address names none.
    """
    parts = PurePosixPath(urllib.parse.urlsplit(uri).path).parts
    if len(parts) < 3:
        raise ValueError(
            f"MLFLOW_TRACKING_URI={uri!r} names no DagsHub repository: call dagshub.init(), or set it to "
            "https://dagshub.com/OWNER/REPOSITORY.mlflow."
        )
    return parts[-2], parts[-1].removesuffix(".mlflow")
