"""Logs as lines on the standard output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.core.events import TrainerCallback
from paceline.core.state import TrainerControl, TrainerState


class PrinterCallback(TrainerCallback):
    """Prints each row of logs, once per machine; used where progress bars are switched off."""

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        if state.is_local_process_zero and logs:
            print(readable_logs(logs), flush=True)


def readable_logs(logs: Mapping[str, Any], max_str_len: int | None = None) -> dict[str, Any]:
    """The row for people: floats to 4 significant digits, no `total_flos`, long strings named by their length."""
    readable: dict[str, Any] = {}
    for name, value in logs.items():
        if name == "total_flos":
            continue
        if isinstance(value, float):
            readable[name] = f"{value:.4g}"
        elif isinstance(value, str) and max_str_len is not None and len(value) > max_str_len:
            readable[name] = f"<{len(value)} characters; shown in full with max_str_len={len(value)}>"
        else:
            readable[name] = value
    return readable
