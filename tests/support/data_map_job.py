"""A data map on two processes, at once and resumed within an epoch."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import torch

SOURCE = Path(__file__).resolve().parent.parent / "pytorch" / "trainer" / "test_data_map.py"


def main() -> None:
    folder = Path(sys.argv[1])
    spec = importlib.util.spec_from_file_location("test_data_map", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    cases: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(cases)
    options = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 1}
    straight = cases.run(folder / "one", **options)
    cases.run(folder / "two", stop=7, **options)
    resumed = cases.run(folder / "two", resume=True, **options)
    found = {
        name: {key: torch.from_numpy(value) for key, value in trainer.data_map.result.sums.items()}
        for name, trainer in (("straight", straight), ("resumed", resumed))
    }
    torch.save(found, folder / f"{os.environ['RANK']}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
