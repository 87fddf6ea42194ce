"""Memory that runs out on one of several processes: `python memory_job.py FOLDER [more]`.

Each scenario is a short training. With `size` 1 it is the same training on one process, to compare with.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, ClassVar

import torch
from small_models import classification, losses, make_trainer
from torch import Tensor, nn

from paceline import Trainer
from paceline.pytorch.distributed.memory_gate import Gated
from paceline.pytorch.model.tensor_parts import whole

RANK = int(os.environ.get("RANK", "0"))
PLACES = ("forward", "second unit", "backward", "second backward", "gather")
MESHES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {"fsdp": True},
    "kept": {"fsdp": True, "fsdp_config": {"reshard_after_forward": False}},
    "tp": {"parallel": {"tp": 2}},
}
Case = tuple[str, str, int]  # mesh, place, first pass
FEW: list[Case] = [("fsdp", "second backward", 6), ("tp", "backward", 5)]
MORE: list[Case] = [
    *(("fsdp", place, number) for place, number in zip(PLACES, (5, 6, 5, 5, 6), strict=True)),
    ("kept", "second backward", 6),
    ("tp", "second unit", 6),
]
FEW_SEARCHES = [("fsdp", "second backward")]
MORE_SEARCHES = [("ddp", "backward"), ("tp", "second unit")]


class Blocks(nn.Module):
    """Two blocks, which are units of FSDP, and a head."""

    _no_split_modules: ClassVar[list[str]] = ["Block"]
    tp_plan: ClassVar[dict[str, str]] = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return logits if labels is None else (nn.functional.cross_entropy(logits, labels), logits)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Shortage:
    """Memory for `room` samples on the second process, in some of its training passes, which ends in one place.

    Args:
        model: its blocks fail.
        place: one of `PLACES`.
        first, last: numbers of the passes that fail, if they have more samples.
    """

    def __init__(self, model: Any, place: str, first: int, last: int, room: int = 1) -> None:
        self.place, self.passes, self.failing, self.room = place, 0, range(first, last), room
        self.is_short = False
        self.num_failures = 0
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        for number, block in enumerate(model.blocks):
            block.register_forward_hook(lambda module, args, output, number=number: self._end(number, output))
        if place == "gather":
            self._allocate, Gated.allocate = Gated.allocate, self._fail_to_allocate  # type: ignore[method-assign]

    def _begin(self, module: nn.Module, args: Any, keywords: dict[str, Any]) -> None:
        self.passes += module.training
        is_large = len(keywords["x"]) > self.room
        self.is_short = RANK == 1 and module.training and is_large and self.passes in self.failing
        if self.is_short and self.place == "forward":
            self.fail()

    def _end(self, number: int, output: Tensor) -> None:
        if not self.is_short:
            return
        if self.place == "second unit" and number == 1:
            self.fail()
        if self.place == ("second backward", "backward")[number]:
            output.register_hook(lambda gradient: self.fail())

    def _fail_to_allocate(self, *sizes: Any, **options: Any) -> Tensor:
        if self.is_short:
            self.fail()
        return self._allocate(None, *sizes, **options)

    def close(self) -> None:
        """Memory does not run out any more."""
        self.failing = range(0)
        if self.place == "gather":
            Gated.allocate = self._allocate  # type: ignore[method-assign]

    def fail(self) -> None:
        self.num_failures += 1
        self.is_short = False
        raise torch.OutOfMemoryError("out of memory on one process")


def run(
    folder: Path, size: int, mesh: str, place: str, *, first: int = 5, last: int = 10**9, **options: Any
) -> dict[str, Any]:
    """Eight samples in each optimizer step: two micro-batches of four, over all processes that read data."""
    model = Blocks()
    shortage = Shortage(model, place, first, last)
    trainer = trainer_in(folder, size, mesh, model, auto_find_batch_size=True, **options)
    trainer.train()
    shortage.close()
    return {
        "weights": weights_of(trainer),
        "loss": losses(trainer),
        "step": trainer.state.global_step,
        "micro_batch": trainer.state.train_batch_size,
        "failures": shortage.num_failures,
    }


def trainer_in(folder: Path, size: int, mesh: str, model: nn.Module, **options: Any) -> Trainer:
    readers = 1 if mesh == "tp" else size
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": 4 // readers,
        "gradient_accumulation_steps": 2,
        "learning_rate": 0.05,
        "train_sampling_strategy": "sequential",
        "ddp_timeout": 60,
        **(MESHES[mesh] if size > 1 else {}),
    }
    return make_trainer(folder, model, classification(38), **{**defaults, **options})


def weights_of(trainer: Trainer) -> Tensor:
    return torch.cat([whole(parameter).detach().flatten() for parameter in trainer.model.parameters()])


def search(folder: Path, mesh: str, place: str) -> dict[str, Any]:
    """Returns the result of a search, and True if a run after it is the same as without it."""
    alone = trainer_in(folder / "alone", 2, mesh, Blocks())
    alone.train()
    model = Blocks()
    shortage = Shortage(model, place, 1, 10**9, room=2)
    trainer = trainer_in(folder / "searched", 2, mesh, model)
    found = trainer.find_batch_size(highest=4)
    shortage.close()
    trainer.train()
    return {
        "sizes": [trial.size for trial in found.trials],
        "largest": found.largest,
        "rates": [trial.samples_per_second for trial in found.trials],
        "is_alike": torch.equal(weights_of(trainer), weights_of(alone)) and losses(trainer) == losses(alone),
    }


class ShortOfState(torch.optim.SGD):
    """Runs out of memory in its second step, on the second process."""

    num_steps = 0

    def step(self, closure: Any = None) -> Any:
        self.num_steps += 1
        if RANK == 1 and self.num_steps == 2:
            raise torch.OutOfMemoryError("out of memory on one process")
        return super().step(closure)


def lost_update(folder: Path) -> None:
    """Ends with an error on both processes: that of the first names the second."""
    options = {"optimizer_cls_and_kwargs": (ShortOfState, {"lr": 0.1}), "auto_find_batch_size": True}
    trainer_in(folder, 2, "fsdp", Blocks(), **options).train()


if __name__ == "__main__":
    torch.set_num_threads(1)
    place, size = Path(sys.argv[1]), int(os.environ["WORLD_SIZE"])
    is_long = sys.argv[2:] == ["more"]
    results: dict[Any, Any] = {}
    for mesh, at, first in MORE if is_long else FEW:
        results[mesh, at, first] = run(place / f"{mesh}-{at}-{first}", size, mesh, at, first=first)
    for name, at in MORE_SEARCHES if is_long else FEW_SEARCHES:
        results[name] = search(place / "search" / name, name, at)
    if is_long:
        results["again"] = run(place / "again", size, "fsdp", "second unit", last=20, max_steps=110)
    torch.save(results, place / f"{RANK}.pt")
    if is_long:
        lost_update(place / "lost")
