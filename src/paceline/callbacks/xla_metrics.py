"""Prints torch_xla's metrics at the end of each epoch: compilations, executions, operations that ran on the host."""

from __future__ import annotations

from typing import Any

from paceline.args.training import TrainingArguments
from paceline.core.events import TrainerCallback
from paceline.core.optional import require


class XlaMetricsCallback(TrainerCallback):
    """Prints torch_xla's report, for `debug="tpu_metrics_debug"`. Many compilations indicate varying shapes."""

    def on_epoch_end(self, args: TrainingArguments, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            print(require("torch_xla.debug.metrics", "xla").metrics_report(), flush=True)
