"""A run on two processes whose losses are split by source, and the losses of each sample by hand."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from small_models import Tagger, make_trainer, tagging
from torch.nn import functional
from torch.utils.data import IterableDataset

from paceline import MixedDataset, MixedStream, Trainer

WAYS: dict[str, dict[str, Any]] = {"ddp": {"parallel": "ddp"}, "fsdp": {"parallel": "fsdp"}}
OPTIONS: dict[str, Any] = {
    "gradient_accumulation_steps": 2,
    "logging_steps": 3,
    "num_train_epochs": 2,
    "learning_rate": 0.1,
    "loss_by_source": "source",
    "per_device_train_batch_size": 3,
}


class Rows(IterableDataset[Any]):
    """A stream of samples."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)


def mixture(is_stream: bool = False) -> Any:
    sources: dict[str, Any] = {"web": tagging(30, seed=1), "books": tagging(9, seed=2)}
    weights = {"web": 0.7, "books": 0.3}
    if is_stream:
        streams = {name: Rows(rows) for name, rows in sources.items()}
        return MixedStream(streams, weights, source_column="source", stop="all_exhausted")
    return MixedDataset(sources, weights, source_column="source", size=40)


class Watched(Trainer):
    """Computes the losses of its samples by hand, from the weights before each optimizer step."""

    places: dict[Any, str]
    found: list[tuple[int, str, float, int]]

    def get_batch_samples(self, *arguments: Any) -> Any:
        batches, number = super().get_batch_samples(*arguments)
        for batch in batches:
            assert set(batch) == {"input_ids", "labels"}
        return batches, number

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        current = self.run.engine.current if self.run is not None else None
        if torch.is_grad_enabled() and current is not None and not current.is_dummy:
            logits, labels = outputs["logits"].detach(), inputs["labels"]
            losses = functional.cross_entropy(logits.movedim(-1, 1), labels, reduction="none")
            for ids, row, target in zip(inputs["input_ids"], losses, labels, strict=True):
                place = self.places[tuple(ids.tolist())]
                self.found.append((self.state.global_step, place, float(row.sum()), int((target != -100).sum())))
        return (loss, outputs) if return_outputs else loss


def run(folder: Path, data: Any, resume: bool = False, **options: Any) -> Any:
    trainer: Any = make_trainer(folder, Tagger(), data, cls=Watched, **{**OPTIONS, **options})
    rows = {"web": tagging(30, seed=1), "books": tagging(9, seed=2)}
    trainer.places = {tuple(row["input_ids"].tolist()): name for name, own in rows.items() for row in own}
    trainer.found = []
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def logged(trainer: Any) -> list[dict[str, float]]:
    keep = ("loss", "step")
    return [
        {key: value for key, value in row.items() if key.startswith("loss/") or key in keep}
        for row in trainer.state.log_history
        if "loss" in row
    ]


def main() -> None:
    folder, found = Path(sys.argv[1]), {}
    for name, way in WAYS.items():
        trainer = run(folder / name, mixture(), **way)
        found[name] = (logged(trainer), trainer.found)
    trainer = run(folder / "dispatched", mixture(), parallel="ddp", accelerator_config={"dispatch_batches": True})
    found["dispatched"] = (logged(trainer), trainer.found)
    trainer = run(folder / "stream", mixture(True), parallel="ddp", max_steps=6)
    found["stream"] = (logged(trainer), trainer.found)
    torch.save(found, folder / f"{os.environ['RANK']}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
