"""Output of metrics: a printed table and JSON files."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from paceline.args.secrets import mask_text, masked
from paceline.core.metrics import jsonable
from paceline.core.optional import LateModule
from paceline.core.retry_writer import replace_whole, set_aside

logger = logging.getLogger(__name__)
terminal = LateModule("paceline.core.terminal")

ALL_RESULTS = "all_results.json"


def print_metrics(split: str, metrics: dict[str, Any]) -> None:
    """Prints metrics one per line, names and values in columns."""
    width = max((len(name) for name in metrics), default=0)
    values = {name: mask_text(str(value)) for name, value in metrics.items()}
    value_width = max((len(value) for value in values.values()), default=0)
    lines = [f"  {name:<{width}} = {values[name]:>{value_width}}" for name in sorted(values)]
    terminal.show("\n".join([f"***** {split} metrics *****", *lines]))


def save_metrics(folder: Path, split: str, metrics: dict[str, Any], combined: bool) -> None:
    """Writes `{split}_results.json`; `combined` also merges into `all_results.json`, where later values win.

    Both are replaced atomically. Raises: OSError, if writing fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    values = masked(jsonable(metrics))
    _write(folder / f"{split}_results.json", values)
    if combined:
        _write(folder / ALL_RESULTS, {**read_results(folder), **values})


def read_results(folder: Path) -> dict[str, Any]:
    """Returns the metrics in `all_results.json`; empty without the file.

    A damaged file is renamed, with a warning: it must not end a run that has trained.
    """
    path = folder / ALL_RESULTS
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        values = None
    if isinstance(values, dict):
        return values
    kept = set_aside(path)
    logger.warning("%s could not be read%s: it is begun anew.", path, f" and is kept as {kept.name}" if kept else "")
    return {}


def _write(path: Path, values: dict[str, Any]) -> None:
    replace_whole(path, json.dumps(values, indent=4, sort_keys=True))
