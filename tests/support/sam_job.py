"""A hand-written loop of SAM and ASAM, and runs with them and mixup on two processes, replicated and sharded."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Any

import torch
from small_models import classification, losses, make_trainer
from torch import Tensor, nn
from torch.nn import functional

from paceline import SAM, Mixup

DATA = classification(24)
UNEVEN = classification(22)  # the processes have micro-batches of different sizes at the end
OPTIONS: dict[str, Any] = {
    "optim": "sgd",
    "optim_args": "momentum=0.9",
    "learning_rate": 0.1,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0,
    "gradient_accumulation_steps": 2,
    "train_sampling_strategy": "sequential",
    "loss_weight": "samples",
}
CASES = {"sam": SAM(0.3), "asam": SAM(0.8, adaptive=True, eta=0.05)}
WAYS: dict[str, dict[str, Any]] = {
    "ddp": {"parallel": "ddp"},
    "fsdp": {"parallel": "fsdp"},
    "whole": {"fsdp": True, "fsdp_config": {"reshard_after_forward": False}},
}


class Normed(nn.Module):
    """A classifier with batch norm and dropout."""

    def __init__(self, seed: int = 0, dropout: float = 0.3, has_norm: bool = True) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList([nn.Linear(8, 16), nn.Linear(16, 4)])
        self.norm = nn.BatchNorm1d(16) if has_norm else nn.Identity()
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, labels: Any = None) -> dict[str, Tensor]:
        logits = self.layers[1](self.drop(torch.tanh(self.norm(self.layers[0](x)))))
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


def reference(model: nn.Module, data: Any, settings: Any, max_norm: float, batch_size: int = 4) -> list[float]:
    """Trains an epoch in windows of two batches, with SGD of momentum 0.9; returns the losses."""
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    batches = [
        {key: torch.stack([row[key] for row in data[start : start + batch_size]]) for key in data[0]}
        for start in range(0, len(data), batch_size)
    ]
    found = []
    model.train()
    for first in range(0, len(batches), 2):
        window = batches[first : first + 2]
        state = torch.get_rng_state()
        optimizer.zero_grad()
        total = 0.0
        for batch in window:
            loss = model(**batch)["loss"] / len(window)
            loss.backward()
            total += loss.item()
        found.append(total)
        before = [parameter.detach().clone() for parameter in parameters]
        buffers = [buffer.clone() for buffer in model.buffers()]
        with torch.no_grad():
            scale = [(each.abs() + settings.eta) if settings.adaptive else torch.ones_like(each) for each in parameters]
            scaled = [t * each.grad for t, each in zip(scale, parameters, strict=True)]
            norm = torch.cat([each.flatten() for each in scaled]).norm()
            for parameter, t, gradient in zip(parameters, scale, scaled, strict=True):
                parameter += settings.rho * t * gradient / norm
        optimizer.zero_grad()
        torch.set_rng_state(state)
        for batch in window:
            (model(**batch)["loss"] / len(window)).backward()
        with torch.no_grad():
            for parameter, value in zip([*parameters, *model.buffers()], [*before, *buffers], strict=True):
                parameter.copy_(value)
        nn.utils.clip_grad_norm_(parameters, max_norm if math.isfinite(max_norm) else 1e9)
        optimizer.step()
    return found


def train(folder: Path, model: nn.Module, data: Any, settings: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Trains; returns the weights, the losses, and the micro-batches of each optimizer step of this process."""
    trainer = make_trainer(folder, model, data, regularizers=[settings], **OPTIONS, **options)
    collect, windows = trainer.get_batch_samples, []

    def get_batch_samples(*arguments: Any) -> Any:
        batches, number = collect(*arguments)
        windows.append([dict(batch) for batch in batches])
        return batches, number

    trainer.get_batch_samples = get_batch_samples  # type: ignore[method-assign]
    trainer.train()
    whole = trainer.strategy.full_weights(trainer.model)
    return {
        "weights": torch.cat([value.flatten().cpu() for value in whole.values()]),
        "losses": losses(trainer),
        "windows": windows,
    }


def main() -> None:
    folder, found = Path(sys.argv[1]), {}
    for name, settings in CASES.items():
        for way, options in WAYS.items():
            model = Normed(dropout=0.0, has_norm=False)
            found[f"{name} {way}"] = train(folder / name / way, model, DATA, settings, options)
    for way, options in WAYS.items():
        model = Normed(dropout=0.0, has_norm=False)
        found[f"mixup {way}"] = train(folder / "mixup" / way, model, UNEVEN, Mixup(0.7), options)
    torch.save(found, folder / f"{os.environ['RANK']}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
