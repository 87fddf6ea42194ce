"""Folders of torch.distributed.checkpoint that one process writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from paceline.pytorch.checkpoint.shards import Plans
from paceline.pytorch.distributed.world import World

ALONE = World(torch.device("cpu"))


def write(folder: Path, state: dict[str, Any]) -> Path:
    """The state, as this process would write its part of it."""
    part = Plans().make(ALONE, {"part": state})["part"]
    part.copy(lambda tensor: tensor)
    part.write_index(folder, [part.write(folder)])
    return folder
