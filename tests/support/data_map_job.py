"""Data maps of two processes, replicated and sharded: one run, and one that is interrupted and resumed."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import torch

SOURCE = Path(__file__).resolve().parent.parent / "pytorch" / "step_parts" / "test_data_map.py"
WAYS: dict[str, dict[str, Any]] = {"ddp": {"parallel": "ddp"}, "fsdp": {"parallel": "fsdp"}}


def main() -> None:
    folder = Path(sys.argv[1])
    spec = importlib.util.spec_from_file_location("test_data_map", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    cases: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(cases)
    found = {}
    for name, way in WAYS.items():
        straight = cases.run(folder / name, **way)
        cases.run(folder / f"{name}-two", stop=4, **way)
        resumed = cases.run(folder / f"{name}-two", resume=True, **way)
        found[name] = [each.data_map.result.sums for each in (straight, resumed)]
    torch.save(
        {name: [dict(sums) for sums in pair] for name, pair in found.items()}, folder / f"{os.environ['RANK']}.pt"
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
