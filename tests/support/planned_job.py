"""Peak memory of optimizer steps on several processes, by torch's allocator: `planned_job.py FOLDER [zero]`.

The first process writes, for each case and process, the bytes of the steps with the lowest and the highest peak into
`FOLDER/peaks.json`.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from small_models import make_trainer
from torch import Tensor, distributed, nn
from torch.nn import functional

from paceline import TrainerCallback


class Perceptron(nn.Module):
    """Wide enough for its tensors to outweigh what the framework allocates."""

    tp_plan = {"first": "colwise", "second": "rowwise"}

    def __init__(self, width: int = 1024) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(256, width), nn.Linear(width, 256)
        self.third, self.fourth = nn.Linear(256, width), nn.Linear(width, 10)

    def forward(self, x: Any, labels: Any) -> Any:
        hidden = self.second(torch.relu(self.first(x)))
        logits = self.fourth(torch.relu(self.third(hidden)))
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}

    def pipeline_stages(self, num_stages: int) -> list[nn.Module]:
        layers = [self.first, self.second, self.third, self.fourth]
        each = len(layers) // num_stages
        return [Part(layers[at : at + each], is_last=at + each == len(layers)) for at in range(0, len(layers), each)]


class Part(nn.Module):
    """Some layers of a `Perceptron`."""

    def __init__(self, layers: list[nn.Linear], is_last: bool) -> None:
        super().__init__()
        self.layers, self.is_last = nn.ModuleList(layers), is_last

    def forward(self, x: Tensor, labels: Any = None) -> Any:
        for layer in self.layers:
            x = layer(x) if layer.out_features in (10, 256) else torch.relu(layer(x))
        return {"loss": functional.cross_entropy(x, labels), "logits": x} if self.is_last else x


UNITS = {"fsdp_config": {"transformer_layer_cls_to_wrap": ["Linear"]}}
CASES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp, accumulation": {"gradient_accumulation_steps": 2},
    "fsdp": {"fsdp": True, **UNITS},
    "fsdp, SGD, large batch": {"fsdp": True, "optim": "sgd", "per_device_train_batch_size": 256, **UNITS},
    "fsdp, accumulation": {"fsdp": True, "gradient_accumulation_steps": 2, **UNITS},
    "tp": {"parallel": {"tp": 2}},
    **{
        f"pp, {schedule}": {
            "parallel": {"pp": 2},
            "pipeline_config": {"schedule": schedule},
            "per_device_train_batch_size": 128,
            "gradient_accumulation_steps": 4,
        }
        for schedule in ("1f1b", "gpipe", "interleaved_1f1b")
    },
    "pp, one batch": {"parallel": {"pp": 2}, "per_device_train_batch_size": 256},
    "pp, Llama": {"parallel": {"pp": 2}, "per_device_train_batch_size": 16},
    "pp, Llama, bf16": {"parallel": {"pp": 2}, "per_device_train_batch_size": 16, "bf16": True},
    "pp, Llama, checkpointing": {
        "parallel": {"pp": 2},
        "per_device_train_batch_size": 16,
        "gradient_checkpointing": True,
    },
    "pp, SGD, large batch": {"parallel": {"pp": 2}, "optim": "sgd", "per_device_train_batch_size": 1024},
}


def zero(stage: int, bucket: int) -> dict[str, Any]:
    """Returns the options of a ZeRO stage with buckets of so many elements."""
    return {"deepspeed": {"zero_optimization": {"stage": stage, "reduce_bucket_size": bucket}}}


ZERO: dict[str, dict[str, Any]] = {
    "ZeRO 0": zero(0, 300_000),
    "ZeRO 1": zero(1, 300_000),
    "ZeRO 1, accumulation": {**zero(1, 300_000), "gradient_accumulation_steps": 2},
    "ZeRO 2": zero(2, 300_000),
    "ZeRO 2, one bucket": zero(2, 2_000_000),
    "ZeRO 2, buckets below a parameter": zero(2, 100_000),
    "ZeRO 2, SGD, large batch": {**zero(2, 300_000), "optim": "sgd", "per_device_train_batch_size": 512},
    "ZeRO 2, accumulation": {**zero(2, 300_000), "gradient_accumulation_steps": 2},
    "ZeRO 2, Llama": {**zero(2, 50_000), "per_device_train_batch_size": 16},
    "ZeRO 2, bf16": {**zero(2, 300_000), "bf16": True},
    "ZeRO 2, bf16, accumulation, large batch": {
        **zero(2, 300_000),
        "bf16": True,
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 256,
    },
    "ZeRO 1, bf16": {**zero(1, 300_000), "bf16": True},
}


def classifier() -> tuple[nn.Module, list[Any]]:
    return Perceptron(), [{"x": torch.randn(256), "labels": index % 10} for index in range(2048)]


def language_model() -> tuple[nn.Module, list[Any]]:
    transformers = importlib.import_module("transformers")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=500))
    return model, [{"input_ids": (ids := torch.randint(0, 500, (64,))), "labels": ids} for _ in range(256)]


def build(folder: Path, name: str) -> Any:
    torch.manual_seed(0)
    model, data = language_model() if "Llama" in name else classifier()
    options = {"per_device_train_batch_size": 64, "max_steps": 8, "logging_strategy": "no"}
    options |= {**CASES, **ZERO}[name]
    return make_trainer(folder, model, data, loss_weight="samples", **options)


class Allocated(TrainerCallback):
    """Records what the allocator gives and takes back during each step from the third on.

    gloo frees a buffer after the other process has read it, so a step that waits holds more than it needs; the step
    with the lowest peak waited least, and the one with the highest may have waited for all that was sent.
    """

    def __init__(self) -> None:
        self.profilers: list[Any] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step >= 2:
            kinds = [torch.profiler.ProfilerActivity.CPU]
            self.profilers.append(torch.profiler.profile(activities=kinds, profile_memory=True))
            self.profilers[-1].__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= 3:
            self.profilers[-1].__exit__(None, None, None)


def held_before(trainer: Any, optimizer: Any) -> int:
    """Returns the bytes of parameters and optimizer state of this process, of buckets, buffers and master weights."""
    from paceline.pytorch.distributed.memory import count_memory

    memory = count_memory(trainer.model, optimizer)
    partitions = getattr(trainer.strategy, "_partitions", None)
    masters = sum(flat.nbytes for flat in partitions.flats()) if partitions is not None else 0
    buffers = sum(buffer.nbytes for buffer in receive_buffers(getattr(trainer.strategy, "_schedule", None)))
    has_buckets = type(trainer.strategy).__name__ == "DistributedData"
    replicas = memory.gradients if has_buckets else 0
    return memory.parameters + (memory.optimizer or 0) + replicas + buffers + masters


def receive_buffers(schedule: Any) -> list[Tensor]:
    """Returns the tensors that the schedule of a pipeline receives into, which exist from the first step on."""
    if schedule is None:
        return []
    stages = getattr(schedule, "_stages", None) or [schedule._stage]
    tables = [table for stage in stages for table in (stage.args_recv_info, stage.grad_recv_info)]
    found = [entry.buffer for table in tables for row in table.values() for entry in row]
    return [buffer for buffer in found if buffer is not None]


def rise(profiler: Any) -> int:
    """Returns how far the allocated bytes rise above those at the start."""
    level = highest = 0
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda each: each.start_ns()):
        if event.name() == "[memory]":
            level += event.nbytes()
            highest = max(highest, level)
    return highest


def main(folder: Path, names: Iterable[str]) -> None:
    peaks: dict[str, list[Any]] = {}
    for name in names:
        with tempfile.TemporaryDirectory() as scratch:
            trainer = build(Path(scratch), name)
            watch = Allocated()
            trainer.add_callback(watch)
            trainer.train()
            held, rises = held_before(trainer, trainer.optimizer), list(map(rise, watch.profilers))
            peaks[name] = [None] * distributed.get_world_size()
            distributed.all_gather_object(peaks[name], (held + min(rises), held + max(rises)))
    if os.environ.get("RANK", "0") == "0":
        (folder / "peaks.json").write_text(json.dumps(peaks))


if __name__ == "__main__":
    main(Path(sys.argv[1]), ZERO if "zero" in sys.argv else CASES)
