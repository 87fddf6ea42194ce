"""Checkpoints as accelerate writes them under FSDP 2: `python accelerate_fsdp_job.py FOLDER`, on several processes.

accelerate shards nothing on a CPU (its Trainer then trains with DDP, whatever `fsdp` says), so the model is sharded by
torch here; the files are written by accelerate's own functions. Beside them: what one process would have.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import FullyShardedDataParallelPlugin, PartialState
from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer
from small_models import Tagger, tagging
from torch import distributed
from torch.distributed.fsdp import fully_shard

from paceline.core.state import TrainerState

RATE, DECAY = 0.01, 0.1


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Two groups, as transformers makes them: the bias does not decay."""
    decayed = [parameter for name, parameter in model.named_parameters() if "bias" not in name]
    rest = [parameter for name, parameter in model.named_parameters() if "bias" in name]
    groups: list[dict[str, Any]] = [{"params": decayed, "weight_decay": DECAY}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=RATE)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One update, alike on all processes."""
    batch = tagging(6)
    inputs = {name: torch.stack([sample[name] for sample in batch]) for name in batch[0]}
    model(**inputs)["loss"].backward()
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    folder = Path(sys.argv[1])
    distributed.init_process_group("gloo")
    PartialState(cpu=True)  # its loggers need it
    model: Any = Tagger(shifted=True)
    fully_shard(model.embedding)
    fully_shard(model)
    optimizer = make_optimizer(model)
    step(model, optimizer)
    for kind in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):
        checkpoint = folder / kind / "checkpoint-1"
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind)
        world = distributed.get_world_size()
        accelerator = SimpleNamespace(process_index=distributed.get_rank(), num_processes=world, is_main_process=True)
        save_fsdp_model(plugin, accelerator, model, str(checkpoint))
        save_fsdp_optimizer(plugin, accelerator, optimizer, model, str(checkpoint))
        if distributed.get_rank() == 0:
            TrainerState(global_step=1, max_steps=4, epoch=0.25).save_to_json(checkpoint / "trainer_state.json")
    step(model, optimizer)
    weights = torch.cat([parameter.full_tensor().flatten() for parameter in model.parameters()])
    if distributed.get_rank() == 0:
        torch.save(weights.detach(), folder / "next.pt")
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ.setdefault("ACCELERATE_USE_FSDP", "true")
    main()
