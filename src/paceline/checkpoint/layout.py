"""File and folder names of sharded checkpoints."""

from __future__ import annotations

import os
from pathlib import Path

METADATA_NAME = ".metadata"  # the index of a folder of torch.distributed.checkpoint
MODEL_FOLDER = "pytorch_model_fsdp_0"  # both as accelerate names them
OPTIMIZER_FOLDER = "optimizer_0"
NOTES_NAME = "sharded.json"  # metadata that the folders of tensors cannot hold
FULL_MODEL_NAME = "pytorch_model_fsdp.bin"  # of accelerate: the full model, and the optimizer state by parameter name
FULL_OPTIMIZER_NAME = "optimizer.bin"


def is_sharded(folder: str | os.PathLike[str]) -> bool:
    """True if torch.distributed.checkpoint wrote `folder`."""
    return Path(folder, METADATA_NAME).is_file()
