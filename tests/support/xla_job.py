"""The trainings of `shared_job.py`, and some of their own, on XLA devices: each process is in one of XLA's two modes.

    PJRT_DEVICE=CPU CPU_NUM_DEVICES=2 python xla_job.py FILE LAYOUT...

Writes what it found into FILE: a dict by layout and scenario.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import invariance
import shared_job
import torch
from shared_job import found, split, train
from small_models import Tagger, tagging
from torch.utils._pytree import tree_map

from paceline import TrainerCallback
from paceline.core.optional import require

LAYOUTS: dict[str, dict[str, Any]] = {
    "single": {"parallel": "xla"},
    "data": {"parallel": "xla", "tpu_num_cores": 2},
    "fsdp": {
        "fsdp": "full_shard",
        "fsdp_config": {"xla": True, "xla_fsdp_v2": True, "transformer_layer_cls_to_wrap": ["Linear"]},
    },
    "checkpointed": {
        "fsdp": "full_shard",
        "fsdp_config": {
            "xla": True,
            "xla_fsdp_v2": True,
            "xla_fsdp_grad_ckpt": True,
            "transformer_layer_cls_to_wrap": ["Linear"],
        },
    },
}


# of shared_job's, and the layouts they run on, not each on all, for compiling takes most of the time; the
# others differ in how data is read, which is no matter of devices
SCENARIOS: dict[str, tuple[str, ...]] = {
    "plain": tuple(LAYOUTS),
    "accumulated": ("single", "data", "fsdp"),
    "scaled_by_the_model": ("single", "data", "fsdp"),
    "mean_over_samples": ("single",),
    "without_targets": ("single",),
    "predictions": ("single", "data", "fsdp"),
    "twenty_updates": tuple(LAYOUTS),
}
# of the page of the docs: what a layout is called there, and its devices
HEADING = "XLA devices"
LIMITS = {**invariance.LIMITS, "weights": 1e-6}
COLUMNS = {"single": ("xla", 1), "data": ("xla", 2), "fsdp": ("xla fsdp", 2), "checkpointed": ("xla fsdp+recompute", 2)}


class CountCompilations(TrainerCallback):
    """Notes after each update how many graphs were compiled, and how many operations ran on the host."""

    def __init__(self) -> None:
        self.compiled: list[int] = []
        self.on_host: list[int] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.use_cpu:
            return
        metrics = require("torch_xla.debug.metrics", "xla")
        self.compiled.append(int(metrics.counter_value("UncachedCompile") or 0))
        names = [name for name in metrics.counter_names() if name.startswith("aten::")]
        self.on_host.append(sum(int(metrics.counter_value(name)) for name in names))


def steady(folder: Path) -> dict[str, Any]:
    """Thirty updates of one shape, targets ragged, nothing logged before their end."""
    counter = CountCompilations()
    trainer = train(
        folder,
        Tagger(shifted=True),
        tagging(48),
        **split(1, 2),
        num_train_epochs=15,
        logging_steps=100,
        max_grad_norm=0.5,
        callbacks=[counter],
    )
    return found(trainer, compiled=counter.compiled, on_host=counter.on_host)


def resumed(folder: Path) -> dict[str, Any]:
    """A run with dropout, and the second half of it gone on with from its checkpoint in fresh objects."""
    options = {**split(1), "save_strategy": "steps", "save_steps": 3, "max_steps": 6}
    whole = found(train(folder / "whole", Tagger(shifted=True, dropout=0.3), tagging(53), **options))
    train(folder / "half", Tagger(shifted=True, dropout=0.3), tagging(53), callbacks=[StopAt(3)], **options)
    torch.manual_seed(99)
    options = {"learning_rate": 0.01, **shared_job.in_force, **options}
    trainer = shared_job.make_trainer(folder / "half", Tagger(shifted=True, dropout=0.3), tagging(53), **options)
    trainer.train(resume_from_checkpoint=True)
    return {"whole": whole, "resumed": found(trainer)}


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            control.should_training_stop = True


def placed(folder: Path) -> dict[str, Any]:
    """Returns the sharding of a trained model's parameters and optimizer state."""
    trainer = train(folder, Tagger(), tagging(24), **split(1), num_train_epochs=1)
    spec_of = require("torch_xla", "xla")._XLAC._get_xla_sharding_spec
    moments = [state["exp_avg"] for state in trainer.optimizer.state.values()]
    return {"weights": [spec_of(p) for p in trainer.model.parameters()], "moments": [spec_of(m) for m in moments]}


def halves(folder: Path) -> dict[str, Any]:
    """bf16 autocast."""
    return found(train(folder, Tagger(shifted=True), tagging(53), **split(1, 2), bf16=True))


def own_optimizer(folder: Path) -> dict[str, Any]:
    """torch_xla's own AdamW."""
    trainer = train(folder, Tagger(shifted=True), tagging(53), **split(1, 2), optim="adamw_torch_xla")
    return {**found(trainer), "optimizer": type(trainer.optimizer).__module__}


OWN = {"steady": steady, "resumed": resumed, "placed": placed, "halves": halves, "own optimizer": own_optimizer}


def main() -> None:
    file, layouts = Path(sys.argv[1]), sys.argv[2:]
    results: dict[str, dict[str, Any]] = {}
    for layout in layouts:
        shared_job.in_force.clear()
        shared_job.in_force.update(use_cpu=False, **LAYOUTS[layout])
        folder = file.parent / layout
        names = [name for name, layouts_of in SCENARIOS.items() if layout in layouts_of]
        results[layout] = {name: shared_job.SCENARIOS[name](folder / name, 1) for name in names}
        if layout != "checkpointed":
            results[layout] |= {name: run(folder / name) for name, run in OWN.items()}
    torch.save(tree_map(lambda value: value.cpu() if isinstance(value, torch.Tensor) else value, results), file)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
