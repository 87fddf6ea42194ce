"""Output of metrics: a printed table and JSON files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.args.secrets import mask_text, masked
from paceline.core.metrics import jsonable
from paceline.core.optional import LateModule

terminal = LateModule("paceline.core.terminal")


def print_metrics(split: str, metrics: dict[str, Any]) -> None:
    """Prints metrics one per line, names and values in columns."""
    width = max((len(name) for name in metrics), default=0)
    values = {name: mask_text(str(value)) for name, value in metrics.items()}
    value_width = max((len(value) for value in values.values()), default=0)
    lines = [f"  {name:<{width}} = {values[name]:>{value_width}}" for name in sorted(values)]
    terminal.show("\n".join([f"***** {split} metrics *****", *lines]))


def save_metrics(folder: Path, split: str, metrics: dict[str, Any], combined: bool) -> None:
    """Writes `{split}_results.json`; `combined` also merges into `all_results.json`, where later values win."""
    folder.mkdir(parents=True, exist_ok=True)
    values = masked(jsonable(metrics))
    (folder / f"{split}_results.json").write_text(json.dumps(values, indent=4, sort_keys=True), encoding="utf-8")
    if not combined:
        return
    path = folder / "all_results.json"
    earlier = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    path.write_text(json.dumps({**earlier, **values}, indent=4, sort_keys=True), encoding="utf-8")
