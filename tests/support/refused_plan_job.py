"""Two processes agree on shards, and the first fails on the way: both are told, and neither waits for the other.

python refused_plan_job.py FOLDER
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from paceline.pytorch.checkpoint import shards
from paceline.pytorch.distributed.world import World


def refuse(folder: Path) -> Any:
    raise KeyError("a writer that has no folder")


def main() -> None:
    distributed.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    world = World(torch.device("cpu"), 2, rank, rank)
    make_writer, shards.make_writer = shards.make_writer, refuse
    try:
        shards.Plans().make(world, {"part": {"weight": torch.ones(2)}})
    except Exception as error:
        Path(sys.argv[1], f"{rank}.txt").write_text(f"{type(error).__name__}: {error}")
    shards.make_writer = make_writer
    part = shards.Plans().make(world, {"part": {"weight": torch.ones(2)}})["part"]  # they meet again
    assert (part.metadata is not None) == (rank == 0)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
