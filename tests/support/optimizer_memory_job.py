"""Trainings with `optimizer_in_backward`, `optimizer_state_dtype` and optimizers of other packages, on one process and
on several.

    python optimizer_memory_job.py FOLDER numbers|resume|packages

Each process writes what it found into `FOLDER/RANK.pt`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from small_models import make_trainer
from torch import Tensor, nn
from torch.nn import functional

from paceline import Trainer, TrainerCallback
from paceline.args.errors import UnsupportedOption

DEPTH, WIDTH = 6, 16


class Deep(nn.Module):
    """Layers of one size, and an embedding that is tied to the head."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        logits = self.head(hidden)
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Watch(TrainerCallback):
    """Records the peak of the gradients' bytes, each time that a gradient is complete."""

    def __init__(self) -> None:
        self.peak = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for parameter in model.parameters():
            # before the optimizer's hook, which drops the gradient
            hooks = parameter._post_accumulate_grad_hooks or {}
            earlier = dict(hooks)
            hooks.clear()
            parameter.register_post_accumulate_grad_hook(lambda _: self.look(model))
            parameter._post_accumulate_grad_hooks.update({1_000_000 + key: hook for key, hook in earlier.items()})

    def look(self, model: nn.Module) -> None:
        held = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        self.peak = max(self.peak, sum(gradient.numel() * gradient.element_size() for gradient in held))


def data(number: int = 32) -> list[dict[str, Tensor]]:
    ids = torch.randint(0, WIDTH, (number, 5), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": (row + 1) % WIDTH} for row in ids]


def train(folder: Path, model: nn.Module | None = None, resume: bool = False, **options: Any) -> Trainer:
    defaults: dict[str, Any] = {"max_grad_norm": 0, "learning_rate": 0.01, "weight_decay": 0.1, "warmup_steps": 2}
    model = Deep() if model is None else model
    trainer = make_trainer(folder, model, data(), **{**defaults, "num_train_epochs": 2, **options})
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def values(trainer: Trainer) -> Tensor:
    """Returns all weights, whole."""
    state = trainer.strategy.full_weights(trainer.model)
    return torch.cat([state[name].flatten() for name, _ in trainer.model.named_parameters()])


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= state.global_step == self.step


SHARDS: dict[str, Any] = {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": ["Sequential"]}}


def numbers(folder: Path) -> dict[str, Any]:
    """Steps inside the backward pass on shards, beside plain ones; and moments in bfloat16 of a replicated model."""
    found: dict[str, Any] = {}
    for is_inside in (True, False):
        watch = Watch()
        trainer = train(
            folder / f"{is_inside}", optimizer_in_backward=is_inside, callbacks=[watch], num_train_epochs=1, **SHARDS
        )
        found[f"inside {is_inside}"] = values(trainer)
        found[f"peak {is_inside}"] = watch.peak
    replica = train(folder / "ddp", parallel="ddp", optimizer_state_dtype="bfloat16", num_train_epochs=1)
    moments = next(iter(replica.optimizer.state.values()))["exp_avg_sq"]
    return {**found, "replica": values(replica), "moments": moments}


def resume(folder: Path) -> dict[str, Any]:
    """Checkpoints of moments in bfloat16 of shards, in the full and the sharded format."""
    found: dict[str, Any] = {}
    short = {**SHARDS, "optimizer_state_dtype": "bfloat16", "save_strategy": "steps", "save_steps": 2}
    for layout in ("full", "sharded"):
        options = {**short, "checkpoint_format": layout, "optimizer_in_backward": layout == "sharded"}
        trainer = train(folder / f"whole-{layout}", **options)
        found[f"whole {layout}"] = values(trainer)
        state = trainer.optimizer.state.values()
        found[f"dtypes {layout}"] = {str(entry[name].dtype) for entry in state for name in ("exp_avg", "exp_avg_sq")}
        train(folder / f"parts-{layout}", callbacks=[StopAt(4)], **options)
        found[f"parts {layout}"] = values(train(folder / f"parts-{layout}", resume=True, **options))
    return found


ON_SHARDS = ("grokadamw", "schedule_free_adamw", "stable_adamw")
WHOLE_ONLY = ("ademamix", "galore_adamw", "apollo_adamw")
SIMPLE: dict[str, Any] = {"num_train_epochs": 1, "lr_scheduler_type": "constant", "warmup_steps": 0}


def packages(folder: Path) -> dict[str, Any]:
    """Weights of whole and of resumed trainings on shards, or the refusal, by the name in `optim`."""
    found: dict[str, Any] = {}
    for name in ON_SHARDS:
        options = {**SHARDS, **SIMPLE, "optim": name}
        found[f"whole {name}"] = values(train(folder / f"whole-{name}", **options))
        saves = {"save_strategy": "steps", "save_steps": 2}
        train(folder / f"parts-{name}", callbacks=[StopAt(2)], **options, **saves)
        found[f"parts {name}"] = values(train(folder / f"parts-{name}", resume=True, **options))
    for name in WHOLE_ONLY:
        targets = ["layers"] if name.startswith(("galore", "apollo")) else None
        try:
            train(folder / name, optim=name, optim_target_modules=targets, **SIMPLE, **SHARDS)
        except UnsupportedOption as error:
            found[name] = str(error)
    return found


def main() -> None:
    folder, part = Path(sys.argv[1]), {"numbers": numbers, "resume": resume, "packages": packages}[sys.argv[2]]
    torch.save(part(folder), folder / f"{os.environ['RANK']}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
