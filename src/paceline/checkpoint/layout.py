"""Names in checkpoints: their items, and the files and folders of sharded ones."""

from __future__ import annotations

import os
from pathlib import Path

MODEL = "model"
OPTIMIZER = "optimizer"
SCHEDULER = "scheduler"
PRECISION = "precision"
CALLBACKS = "callbacks"
LOSS = "loss"
RNG = "rng"
DATA = "data"
PROGRESS = "progress"
NOISE_SCALE = "noise_scale"
AVERAGES = "averages"
REGULARIZERS = "regularizers"
DISTILLATION = "distillation"
DATA_MAP = "data_map"
SOURCE_LOSS = "source_loss"
TOKEN_TERMS = "token_terms"

METADATA_NAME = ".metadata"  # the index of a folder of torch.distributed.checkpoint
MODEL_FOLDER = "pytorch_model_fsdp_0"  # accelerate's name, as is the next one
OPTIMIZER_FOLDER = "optimizer_0"
NOTES_NAME = "sharded.json"  # metadata that torch.distributed.checkpoint's folders cannot hold
FULL_MODEL_NAME = "pytorch_model_fsdp.bin"  # accelerate's file of the full model
FULL_OPTIMIZER_NAME = "optimizer.bin"  # accelerate's file of the optimizer state by parameter name


def is_sharded(folder: str | os.PathLike[str]) -> bool:
    """True if torch.distributed.checkpoint wrote `folder`."""
    return Path(folder, METADATA_NAME).is_file()
