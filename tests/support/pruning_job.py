"""Pruning on two processes: replicated and sharded, resumed, with and without an average."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from optimizer_memory_job import SHARDS, StopAt, train, values

from paceline import Pruning


def pruning() -> Pruning:
    return Pruning(0.5, start=1, end=6, every=2)


def main() -> None:
    folder = Path(sys.argv[1])
    found: dict[str, Any] = {}
    for name, way in {"ddp": {"parallel": "ddp"}, "fsdp": SHARDS}.items():
        options = {**way, "save_strategy": "steps", "save_steps": 2, "ema_decay": 0.8}
        found[f"{name} straight"] = values(train(folder / f"one-{name}", callbacks=[pruning()], **options))
        train(folder / f"parts-{name}", callbacks=[pruning(), StopAt(4)], **options)
        again = train(folder / f"parts-{name}", callbacks=[pruning()], resume=True, **options)
        found[f"{name} resumed"] = values(again)
    torch.save(found, folder / f"{os.environ['RANK']}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
