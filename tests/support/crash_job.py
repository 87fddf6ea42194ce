"""A run that is killed and taken up again: what each of its processes does. Imported by fresh processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from small_models import Classifier, classification, make_trainer, weights

from paceline import Trainer
from paceline.checkpoint.folders import list_checkpoints

DATA = classification(32)
TIMES = ("runtime", "per_second")


def make(folder: Path, **options: Any) -> Trainer:
    """Dropout, shuffling, accumulation, a schedule; evaluation, rotation, best model and save every other update."""
    defaults: dict[str, Any] = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 0.05,
        "lr_scheduler_type": "cosine",
        "eval_strategy": "steps",
        "eval_steps": 2,
        "eval_dataset": classification(16, seed=5),
        "save_strategy": "steps",
        "save_steps": 2,
        "save_total_limit": 2,
        "keep_best": 2,
        "load_best_model_at_end": True,
        "compute_metrics": accuracy,
        "metric_for_best_model": "accuracy",
    }
    return make_trainer(folder, WithBase(), DATA, **{**defaults, **options})


class WithBase(Classifier):
    """With weights that do not train, so that a shard is linked from checkpoint to checkpoint."""

    def __init__(self) -> None:
        super().__init__(dropout=0.2)
        self.base = torch.nn.Linear(600, 600)
        self.base.requires_grad_(False)


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def run(folder: Path, kill_at: int | None = None) -> None:
    """Train to the end, from the newest good checkpoint if there is one, and leave the result in `result.pt`.

    Args:
        kill_at: end with SIGKILL at this call of the functions that change folders, whichever thread makes it.
    """
    torch.set_num_threads(1)
    trainer = make(folder)
    if kill_at is not None:
        die_at(kill_at)
    (folder / "started").touch()
    try:
        trainer.train(resume_from_checkpoint=True)
    except ValueError as error:
        if "No valid checkpoint" not in str(error):
            raise
        assert not list_checkpoints(folder)
        trainer = make(folder)
        trainer.train()
    torch.save(result_of(trainer), folder / "result.tmp")
    os.replace(folder / "result.tmp", folder / "result.pt")


class FailingData(torch.utils.data.Dataset[dict[str, Any]]):
    """Fails at one sample: by an error, or by the death of the process that reads it."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return len(DATA)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 17:
            if self.kind == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("sample 17 cannot be read")
        return DATA[index]


def run_with_failing_data(folder: Path, kind: str) -> None:
    """Train with one worker until it fails; exit with 1, and leave the error in `error.txt`."""
    torch.set_num_threads(1)
    # The platform's own way to start workers: a spawned process would spawn them too, and a spawned worker aborts now
    # and then as its interpreter closes, beside a thread that still serves a batch.
    options = {"dataloader_multiprocessing_context": multiprocessing.get_all_start_methods()[0]}
    trainer = make(folder, dataloader_num_workers=1, save_steps=1, eval_steps=1, **options)
    trainer.train_dataset = FailingData(kind)
    try:
        trainer.train()
    except RuntimeError as error:
        (folder / "error.txt").write_text(str(error))
        raise SystemExit(1) from None


def result_of(trainer: Trainer) -> dict[str, Any]:
    state = trainer.state
    rows = [{k: v for k, v in row.items() if not k.endswith(TIMES)} for row in state.log_history[:-1]]
    best = Path(state.best_model_checkpoint or "").name
    kept = [path.name for path in list_checkpoints(trainer.args.output_dir or "")]
    last = torch.load(Path(trainer.args.output_dir or "", kept[-1], "optimizer.pt"), weights_only=True)
    return {
        "weights": weights(trainer.model),
        "optimizer": [entry["exp_avg"] for entry in last["state"].values()],
        "best": (state.best_metric, state.best_global_step, best),
        "step": state.global_step,
        "rows": rows,
        "kept": kept,
    }


def die_at(number: int) -> None:
    """Count the calls that change folders, and die at one of them."""
    lock, calls = threading.Lock(), 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            with lock:
                calls += 1
                if calls == number:
                    os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    for name in ("rename", "replace", "mkdir", "unlink", "rmdir", "link", "fsync"):
        setattr(os, name, counted(getattr(os, name)))
