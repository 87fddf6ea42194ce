"""Reporter for CodeCarbon: energy and CO2 emissions of a training, in `<output_dir>/emissions.csv`."""

from __future__ import annotations

import os
from typing import Any

from paceline.args.places import output_folder
from paceline.args.training import TrainingArguments
from paceline.callbacks.reporters.base import Reporter, changed_project
from paceline.callbacks.reporters.service import require_installed, signals_kept
from paceline.core.optional import require
from paceline.core.state import TrainerControl, TrainerState


class CodeCarbonCallback(Reporter):
    """Measures the emissions of a training on each node, and adds a row to `emissions.csv` when it ends.

    Each start of a run adds a row: the emissions of a run are their sum. A training that an error ends adds none.

    Environment:
        CODECARBON_COUNTRY_ISO_CODE: the country, which is then not looked up over the network.
        CODECARBON_PROJECT_NAME: the project; by default `args.project` if that was changed.
        CODECARBON_...: every other option of the tracker; read by codecarbon, as is `.codecarbon.config`.

    Raises:
        ImportError: codecarbon is not installed.
    """

    requires = ("codecarbon",)

    def __init__(self) -> None:
        require_installed(self.requires, "codecarbon")
        self.tracker: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "tracker": None}  # it holds threads, which cannot be copied

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not state.is_local_process_zero:
            return
        self._stop()  # of a training that an error ended
        codecarbon: Any = require("codecarbon", "codecarbon")
        folder = output_folder(args)
        folder.mkdir(parents=True, exist_ok=True)
        options = {"output_dir": str(folder)}
        project = None if "CODECARBON_PROJECT_NAME" in os.environ else changed_project(args)
        if project is not None:
            options["project_name"] = project
        is_known = bool(os.environ.get("CODECARBON_COUNTRY_ISO_CODE"))
        kind = codecarbon.OfflineEmissionsTracker if is_known else codecarbon.EmissionsTracker
        with signals_kept():
            self.tracker = kind(**options)
            self.tracker.start()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        tracker, self.tracker = self.tracker, None
        if tracker is not None:
            with signals_kept():
                tracker.stop()
