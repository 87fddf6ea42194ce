"""Prints logs as lines on the standard output."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from paceline.args.secrets import masked
from paceline.args.training import TrainingArguments
from paceline.core.events import TrainerCallback
from paceline.core.ledger import COMPILE_PREFIX, RESOURCE_PREFIX
from paceline.core.ledger import PREFIX as TIME_PREFIX
from paceline.core.optional import LateModule
from paceline.core.state import TrainerControl, TrainerState

terminal = LateModule("paceline.core.terminal")

# prefixes of entries for trackers, which a terminal does not show
FOR_TRACKERS = (TIME_PREFIX, RESOURCE_PREFIX, COMPILE_PREFIX)


class PrinterCallback(TrainerCallback):
    """Prints each row of logs, once per machine; used if progress bars are disabled."""

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        if state.is_local_process_zero and logs:
            with suppress(OSError):  # a closed pipe or a full disk behind the output does not end the training
                terminal.show(str(readable_row(logs, state.global_step)))


def readable_logs(logs: Mapping[str, Any], max_str_len: int | None = None) -> dict[str, Any]:
    """Returns a row for display: floats have 4 digits, long texts are replaced by their length, secrets are masked.

    `total_flos`, the times of activities and the use of resources are left out.
    """
    readable: dict[str, Any] = {}
    for name, value in logs.items():
        if name == "total_flos" or name.startswith(FOR_TRACKERS):
            continue
        if isinstance(value, float):
            readable[name] = float(f"{value:.4g}")
        elif isinstance(value, str) and max_str_len is not None and len(value) > max_str_len:
            readable[name] = f"<{len(value)} characters; shown in full with max_str_len={len(value)}>"
        else:
            readable[name] = value
    shown: dict[str, Any] = masked(readable)
    return shown


def readable_row(logs: Mapping[str, Any], step: int, max_str_len: int | None = None) -> dict[str, Any]:
    """Returns a row for display as `readable_logs` does, with its optimizer step."""
    row = readable_logs(logs, max_str_len)
    row.setdefault("step", step)
    return row
