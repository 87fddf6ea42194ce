"""Options of several processes, each in a short training: `python shared_options.py FOLDER`. See `shared_job`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from shared_job import found, split, train
from small_models import classification
from torch import Tensor, nn
from torch.nn import functional

from paceline import EvalPrediction
from paceline.core.streaming import Accuracy


class Blocks(nn.Module):
    """Repeated blocks, and parameters that no forward pass uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)])
        self.head, self.unused = nn.Linear(8, 4), nn.Linear(3, 3)

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        x = self.head(x)
        return functional.cross_entropy(x, labels), x


class BatchAccuracy:
    """As `compute_metrics` with `batch_eval_metrics`."""

    def __init__(self) -> None:
        self.hits = self.number = 0

    def __call__(self, prediction: EvalPrediction, compute_result: bool = False) -> dict[str, float]:
        self.hits += int((prediction.predictions.argmax(-1) == prediction.label_ids).sum())
        self.number += len(prediction.predictions)
        return {"accuracy": self.hits / self.number, "number": float(self.number)} if compute_result else {}


EVALUATED = {"eval_dataset": classification(27, seed=5), "eval_strategy": "epoch", "num_train_epochs": 1}
OPTIONS: dict[str, dict[str, Any]] = {
    "static graph": {"ddp_static_graph": True, "gradient_accumulation_steps": 1},
    "fp16 exchange": {"ddp_comm_hook": "fp16"},
    "bf16 exchange": {"ddp_comm_hook": "bf16"},
    "bf16": {"bf16": True},
    "fp16": {"fp16": True},
    "checkpointing": {"activation_checkpointing": True},
    "rebalanced": {"train_sampling_strategy": "batch_rebalance"},
    "metrics by batch": {"batch_eval_metrics": True, "compute_metrics": BatchAccuracy, **EVALUATED},
    "streaming metrics": {"compute_metrics": Accuracy, **EVALUATED},
    "late exchange in bf16": {"auto_find_batch_size": True, "ddp_comm_hook": "bf16"},
    "compiled": {"torch_compile": True, "torch_compile_backend": "eager"},
    "offloaded shards": {"fsdp": "full_shard offload"},
    "shards in bf16": {"fsdp": True, "bf16": True},
    "shards in fp16": {"fsdp": True, "fp16": True},
    "checkpointed shards": {"fsdp": True, "activation_checkpointing": True},
    "shards by size": {"fsdp": True, "fsdp_config": {"min_num_params": 50}},
    "shards kept whole": {"fsdp": "shard_grad_op"},
    "shards that rewind": {"fsdp": True, "nonfinite_policy": "rollback"},
    "shards of Adafactor": {"fsdp": True, "optim": "adafactor", "save_strategy": "epoch"},
}


def run(folder: Path, size: int, name: str) -> dict[str, Any]:
    """Train with one of the options; without shards on one process."""
    options = dict(OPTIONS[name])
    if size == 1:
        options.pop("fsdp", None)
        options.pop("fsdp_config", None)
    if "compute_metrics" in options:
        options["compute_metrics"] = options["compute_metrics"]()
    data = [{**sample, "length": 3 + index % 5} for index, sample in enumerate(classification(53))]
    shape = split(size, int(options.pop("gradient_accumulation_steps", 2)))
    trainer = train(folder / name, Blocks(), data, **shape, per_device_eval_batch_size=8 // size, **options)
    if "save_strategy" in options:  # the same ends when resumed
        first = min((folder / name).glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
        resumed = train(folder / f"{name} again", Blocks(), data, **shape, resume_from_checkpoint=str(first), **options)
        assert torch.equal(found(resumed)["weights"], found(trainer)["weights"])
    rows = [row for row in trainer.state.log_history if "eval_loss" in row]
    names = ("eval_loss", "eval_accuracy", "eval_accuracy_low", "eval_number")
    return found(trainer, evaluation={key: rows[-1][key] for key in names if key in rows[-1]} if rows else {})


if __name__ == "__main__":
    torch.set_num_threads(1)
    place = Path(sys.argv[1])
    results = {name: run(place, int(os.environ["WORLD_SIZE"]), name) for name in OPTIONS}
    torch.save(results, place / f"{os.environ['RANK']}.pt")
