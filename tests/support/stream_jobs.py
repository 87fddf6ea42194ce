"""A stream that is read on by another number of processes: `python stream_jobs.py FOLDER KIND MODE...`

KIND: `plain` (read again), `stateful` (keeps its place), `shared` (chooses its part), `shared_stateful`.
MODE: `begin` (stops at update 3), `on=CHECKPOINT` (stops at update 5), `end=CHECKPOINT`. In those that the variable
DISPATCH names, the first process reads for all.
Each process writes the samples that it trained on into `FOLDER/MODE-RANK.json`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from small_models import Classifier, classification, make_trainer
from torch.utils.data import IterableDataset, get_worker_info

from paceline import TrainerCallback

NUM_SAMPLES = 53
SAMPLES = classification(NUM_SAMPLES)


class Plain(IterableDataset[Any]):
    """Samples in their order; `id` tells them apart."""

    shares_itself = False

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        own, every = 0, 1
        if self.shares_itself:
            info = get_worker_info()
            own, every = (info.id, info.num_workers) if info is not None else (0, 1)
        start, self.at = self.at, 0
        for index in range(start, NUM_SAMPLES):
            if index % every == own:
                self.at = index + 1
                yield {**SAMPLES[index], "id": torch.tensor(index)}
        self.at = 0


class Stateful(Plain):
    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Shared(Plain):
    shares_itself = True


class SharedStateful(Stateful):
    shares_itself = True


KINDS = {"plain": Plain, "stateful": Stateful, "shared": Shared, "shared_stateful": SharedStateful}


class Noting(Classifier):
    """Notes which samples it was trained on."""

    def __init__(self) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor, labels: torch.Tensor, id: torch.Tensor) -> Any:
        return super().forward(x, labels)


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            control.should_save = control.should_training_stop = True


def run(folder: Path, kind: str, mode: str) -> None:
    name, _, checkpoint = mode.partition("=")
    model = Noting()
    stops = {"begin": [StopAt(3)], "on": [StopAt(5)], "end": []}[name]
    trainer = make_trainer(
        folder / kind,
        model,
        KINDS[kind](),
        per_device_train_batch_size=int(os.environ.get("BATCH_SIZE", "3")),
        max_steps=9,  # 53 samples, 6 an update
        logging_steps=100,
        report_to=["jsonl"],
        dataloader_num_workers=int(os.environ.get("WORKERS", "0")),
        callbacks=stops,
        accelerator_config={"dispatch_batches": name in os.environ.get("DISPATCH", "").split(",")},
    )
    batches: list[list[int]] = []
    base = trainer.get_batch_samples

    def noted(*arguments: Any, **options: Any) -> Any:
        window = base(*arguments, **options)
        batches.extend(batch["id"].tolist() for batch in window[0])
        return window

    trainer.get_batch_samples = noted  # type: ignore[method-assign]
    trainer.train(resume_from_checkpoint=checkpoint or None)
    rank = trainer.args.process_index
    (folder / f"{kind}-{name}-{rank}.json").write_text(json.dumps(batches))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for each in sys.argv[3:]:
        run(Path(sys.argv[1]), sys.argv[2], each)
