"""Averages of the weights on two processes: replicated and sharded, resumed, and compared with one process's rule."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from optimizer_memory_job import SHARDS, StopAt, data, train, values


def main() -> None:
    folder = Path(sys.argv[1])
    found: dict[str, Any] = {}
    ways: dict[str, dict[str, Any]] = {
        "ddp": {"parallel": "ddp"},
        "fsdp": SHARDS,
        "whole": {"fsdp": True, "fsdp_config": {"reshard_after_forward": False}},
    }
    for name, way in ways.items():
        options = {**way, "save_strategy": "steps", "save_steps": 2}
        options |= {"ema_decay": 0.8}
        plain = train(folder / f"plain-{name}", **way)
        # evaluated after each step: training must not notice, also where gathered parameters outlive a forward pass
        evaluated = {**options, "eval_strategy": "steps", "eval_steps": 1, "eval_dataset": data()}
        trainer = train(folder / f"one-{name}", **evaluated)
        found[f"{name} straight"] = values(trainer)
        found[f"{name} plain"] = values(plain)
        train(folder / f"parts-{name}", callbacks=[StopAt(4)], **options)
        found[f"{name} resumed"] = values(train(folder / f"parts-{name}", resume=True, **options))
    torch.save(found, folder / f"{os.environ['RANK']}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
