"""Documents of packed rows on several processes, by every attention: `python isolation_job.py FOLDER MESH...`.

MESH as `parallel` takes it: "ddp", "fsdp", "cp=2". Each process writes what it found into `FOLDER/RANK.pt`: by mesh and
attention, a `Result`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict

import torch
from ragged import TakesAttentionMask, TakesBounds, llama, pad, texts
from small_models import losses, make_trainer
from torch import Tensor, nn

from paceline import TrainerCallback
from paceline.args.errors import UnsupportedOption

LENGTHS = (4, 11, 3, 6)  # tokens of the documents of a row; not divisible by the number of processes
MODELS: dict[str, Callable[[], nn.Module]] = {
    "eager": lambda: llama("eager"),
    "sdpa": llama,
    "flex_attention": lambda: llama("flex_attention", hidden_size=64),
    "cu_seqlens": TakesBounds,
    "attention_mask": TakesAttentionMask,
}
ONLY_FORWARD = {"flex_attention"}  # torch has no backward pass of it on a CPU


class Result(TypedDict):
    """The findings of one model on one mesh.

    Attributes:
        way: how the documents are kept apart.
        leak: the largest change of an output of other documents when the first one is changed.
        change: the largest change of an output of the first document.
        losses, norms: of each optimizer step.
        error: why the run was refused; "" if it was not.
    """

    way: str
    leak: float
    change: float
    losses: list[float]
    norms: list[float]
    error: str


class Ended(Exception):
    """Raised when nothing else is to be found."""


def rows() -> tuple[Tensor, Tensor]:
    """Returns token ids and positions of two rows of packed documents, of the same lengths in another order."""
    ids = torch.randint(3, 60, (2, sum(LENGTHS)), generator=torch.Generator().manual_seed(3))
    orders = (LENGTHS, LENGTHS[::-1])
    return ids, torch.stack([torch.cat([torch.arange(each) for each in order]) for order in orders])


class Perturb(TrainerCallback):
    """Changes the first document of a row before the first step and after it, and compares the outputs."""

    def __init__(self, ends: bool) -> None:
        self.ends = ends
        self.leak = self.change = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.compare(model)
        if self.ends:
            raise Ended

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 1:
            self.compare(model)

    def compare(self, model: nn.Module) -> None:
        ids, positions = rows()
        changed = ids.clone()
        changed[0, : LENGTHS[0]] += 1
        model.eval()
        with torch.no_grad():
            before = model(input_ids=ids, position_ids=positions)["logits"]
            after = model(input_ids=changed, position_ids=positions)["logits"]
        model.train()
        assert before.shape[:2] == ids.shape
        difference = (after - before).abs().amax(-1)
        self.change = max(self.change, float(difference[0, : LENGTHS[0]].max()))
        difference[0, : LENGTHS[0]] = 0
        self.leak = max(self.leak, float(difference.max()))


def run(folder: Path, model: nn.Module, packing: str | None, ends: bool = False, **options: Any) -> Result:
    """Trains two optimizer steps of eight samples.

    Args:
        ends: end before the first step.
    """
    callback = Perturb(ends)
    trainer = make_trainer(
        folder, model, texts(), data_collator=pad, packing=packing, callbacks=[callback] if packing else [],
        max_steps=2, gradient_accumulation_steps=2, learning_rate=0.01, ddp_timeout=60, **options,
    )  # fmt: skip
    error = ""
    try:
        trainer.train()
    except UnsupportedOption as refused:
        error = str(refused)
    except Ended:
        pass
    return Result(
        way=trainer._packing.isolation.way.name if trainer._packing is not None else "",
        leak=callback.leak,
        change=callback.change,
        losses=losses(trainer),
        norms=[row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row],
        error=error,
    )


def run_all(folder: Path, parallel: str | None) -> dict[str, Result]:
    """Runs all models; the last one is trained again, as the processes have it then."""
    options: dict[str, Any] = {"per_device_train_batch_size": 2 if parallel in ("ddp", "fsdp") else 4}
    options |= {"parallel": parallel} if parallel else {}
    results, model = {}, nn.Module()
    with torch.compiler.set_stance("force_eager"):  # compiling flex attention takes minutes; its masks are the same
        for name, make in MODELS.items():
            model = make()
            results[name] = run(folder / name, model, "pack", ends=name in ONLY_FORWARD, **options)
        results["again"] = run(folder / "again", model, "flatten", **options)
    return results


if __name__ == "__main__":
    torch.set_num_threads(1)
    place = Path(sys.argv[1])
    torch.save({mesh: run_all(place / mesh, mesh) for mesh in sys.argv[2:]}, place / f"{os.environ['RANK']}.pt")
