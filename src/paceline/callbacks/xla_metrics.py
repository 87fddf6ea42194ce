"""What torch_xla counted, at the end of each epoch: compilations, executions, operations that ran on the host."""

from __future__ import annotations

from typing import Any

from paceline.core.events import TrainerCallback
from paceline.core.optional import require


class XlaMetricsCallback(TrainerCallback):
    """`debug="tpu_metrics_debug"`: prints torch_xla's report. Many compilations tell of shapes that change."""

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            print(require("torch_xla.debug.metrics", "xla").metrics_report(), flush=True)
