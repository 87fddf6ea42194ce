"""Interrupted twice and resumed, a run is the undisturbed one, bit for bit, whatever it is made of.

The default cases change one thing at a time from a run that already has dropout, accumulation, shuffling and
augmentation; the slow ones are the full product.
"""

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers_models
from cases import slow_but
from small_models import Classifier, Tagger, classification, make_trainer, tagging, weights
from torch.utils.data import IterableDataset

from paceline import ShuffleBuffer, TrainerCallback
from paceline.core.journal import JOURNAL_FILE, read_rows

DATA = classification(26)  # in batches of 4: 7 micro-batches an epoch, the last of 2; 4 updates of two, the last of one
HELD_OUT = classification(10, seed=2)
TIMES = ("runtime", "per_second", "total_flos", "train_loss")


def noisy(sample: dict[str, Any]) -> dict[str, Any]:
    """A sample with noise from the three generators that augmentation draws on."""
    noise = torch.randn(8) + float(np.random.rand()) + random.random()
    return {"x": sample["x"] + 0.1 * noise, "labels": sample["labels"]}


class Augmented(torch.utils.data.Dataset[dict[str, Any]]):
    def __init__(self, samples: list[dict[str, Any]] = DATA) -> None:
        self.samples = samples
        self.lengths = [1 + 7 * index % 5 for index in range(len(samples))]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return noisy(self.samples[index])


def mostly_full(num_samples: int, first: int) -> list[dict[str, Any]]:
    """Token ids that are all targets, but for every sixth sample: what the loss is a mean over shows now and then."""
    samples = [sample for sample in tagging(2 * num_samples) if int((sample["labels"][1:] != -100).sum()) > 0]
    return [
        sample if index % 6 == first else {**sample, "labels": sample["input_ids"]}
        for index, sample in enumerate(samples[:num_samples])
    ]


MODELS: dict[str, Any] = {
    "classifier": lambda: Classifier(dropout=0.2),
    "tagger": lambda: Tagger(dropout=0.2),
    "tagger by samples": lambda: Tagger(per_sample=True, dropout=0.2),
    "gpt2": lambda: transformers_models.gpt2(dropout=0.2),
}


class WithLengths(Augmented):
    column_names = ("length",)

    def __getitem__(self, index: Any) -> Any:
        return self.lengths if index == "length" else super().__getitem__(index)


class Stream(IterableDataset[dict[str, Any]]):
    """Augmented samples in the order of the epoch, without a way back."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def order(self) -> list[int]:
        return random.Random(self.epoch).sample(range(len(DATA)), len(DATA))

    def sample(self, index: int) -> dict[str, Any]:
        return noisy(DATA[index])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for index in self.order():
            yield self.sample(index)


class StatefulStream(Stream):
    """The same, knowing its place."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        order = self.order()
        while self.next < len(order):
            self.next += 1
            yield self.sample(order[self.next - 1])
        self.next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


class PlainStream(StatefulStream):
    def sample(self, index: int) -> dict[str, Any]:
        return DATA[index]


class Average(TrainerCallback):
    """A moving average of the weights, which also draws random numbers and is read by nobody else."""

    def __init__(self, as_lists: bool = False) -> None:
        self.as_lists = as_lists
        self.value: torch.Tensor | None = None
        self.count = 0

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        now = weights(model)
        decay = 0.9 + 0.05 * random.random()
        self.value = now if self.value is None else self.value.lerp(now, 1 - decay)
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        value = self.value.tolist() if self.as_lists and self.value is not None else self.value
        return {"value": value, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        value = state["value"]
        self.value = torch.tensor(value) if isinstance(value, list) else value
        self.count = state["count"]


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


def make_data(kind: str) -> Any:
    made: dict[str, Any] = {
        "plain": DATA,
        "augmented": Augmented(),
        "lengths": WithLengths(),
        "stream": Stream(),
        "stateful": StatefulStream(),
        "tokens": mostly_full(26, first=5),
        "buffered": ShuffleBuffer(PlainStream(), 7, seed=1, transform=noisy),
    }
    return made[kind]


def run(folder: Path, *, data: str = "augmented", stop: int | None = None, resume: Any = None, **options: Any) -> Any:
    """Train; returns everything that must be the same in the end."""
    average = Average(as_lists=options.pop("as_lists", False))
    defaults: dict[str, Any] = {
        "save_strategy": "steps",
        "save_steps": 1,
        "num_train_epochs": 3,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "max_grad_norm": 0.5,
        "callbacks": [average, *([StopAt(stop)] if stop is not None else [])],
    }
    if data in ("stream", "stateful", "buffered"):
        defaults["max_steps"] = 12
    model = MODELS[options.pop("model", "classifier")]()
    trainer = make_trainer(folder, model, make_data(data), **{**defaults, **options})
    trainer.train(resume_from_checkpoint=resume)
    rows = [{key: value for key, value in row.items() if not key.endswith(TIMES)} for row in trainer.state.log_history]
    return {
        "weights": weights(trainer.model),
        "average": average.value,
        "updates seen": average.count,
        "optimizer": trainer.optimizer.state_dict(),
        "schedule": trainer.lr_scheduler.state_dict(),
        "steps": trainer.state.global_step,
        "epoch": trainer.state.epoch,
        "log": rows,
        "journal": read_rows(folder / JOURNAL_FILE),
        "best": (trainer.state.best_metric, trainer.state.best_global_step),
        "random": (random.random(), float(np.random.rand()), float(torch.rand(()))),
    }


def differences(first: Any, second: Any, where: str = "") -> list[str]:
    """Returns the places at which two nests differ; tensors are compared bit for bit."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return [] if torch.equal(first, second) else [where]
    if isinstance(first, dict) and isinstance(second, dict) and first.keys() == second.keys():
        return [found for key in first for found in differences(first[key], second[key], f"{where}/{key}")]
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        pairs = enumerate(zip(first, second, strict=True))
        return [found for i, (a, b) in pairs for found in differences(a, b, f"{where}/{i}")]
    return [] if first == second else [f"{where}: {first} and {second}"]


def check(folder: Path, stops: tuple[int, ...], **options: Any) -> None:
    """An undisturbed run, and one stopped after each of `stops`, end the same."""
    whole = run(folder / "whole", **options)
    assert whole["steps"] > max(stops)
    resume = None
    for stop in stops:
        run(folder / "parts", stop=stop, resume=resume, **options)
        resume = True
    assert differences(whole, run(folder / "parts", resume=True, **options)) == []


EVALUATION = {"eval_dataset": Augmented(HELD_OUT), "eval_strategy": "steps", "eval_steps": 2}
FOLLOWING = {**EVALUATION, "eval_steps": 1, "metric_for_best_model": "loss", "greater_is_better": False}
LENGTHS = {"data": "lengths", "remove_unused_columns": False}
WORKERS = {"dataloader_num_workers": 2}
PERSISTENT = {**WORKERS, "dataloader_persistent_workers": True}
TOKENS = {"data": "tokens", "train_sampling_strategy": "sequential"}
RAGGED = {**EVALUATION, "eval_dataset": mostly_full(10, first=0)}
SCHEDULES: dict[str, dict[str, Any]] = {
    "linear": {},
    "cosine_with_restarts": {"lr_scheduler_kwargs": {"num_cycles": 2}},
    "polynomial": {"lr_scheduler_kwargs": {"power": 2.0}},
    "constant": {"warmup_steps": 0},
    "constant_with_warmup": {},
    "inverse_sqrt": {},
    "cosine_with_min_lr": {"lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
    "cosine_warmup_with_min_lr": {"lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
    "warmup_stable_decay": {"lr_scheduler_kwargs": {"num_decay_steps": 4}},
    "reduce_lr_on_plateau": {**FOLLOWING, "lr_scheduler_kwargs": {"patience": 0}},
    "greedy": {**FOLLOWING, "lr_scheduler_kwargs": {"patience": 0}},
}
# 4 updates an epoch: 3 is in the middle, 4 at the end of one
CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "in the middle, twice": ((3, 6), {}),
    "at the ends of epochs": ((4, 8), {}),
    "the same epoch, twice": ((1, 2), {}),
    "plain data": ((3, 8), {"data": "plain"}),
    "no accumulation": ((3, 14), {"gradient_accumulation_steps": 1}),
    "much accumulation": ((1, 4), {"gradient_accumulation_steps": 5}),
    "one update an epoch": ((1, 2), {"gradient_accumulation_steps": 9}),
    "sequential": ((3, 4), {"train_sampling_strategy": "sequential"}),
    "by length": ((3, 8), {"train_sampling_strategy": "group_by_length", **LENGTHS}),
    "rebalanced": ((2, 5), {"train_sampling_strategy": "batch_rebalance", "dataloader_drop_last": True, **LENGTHS}),
    "no last batch": ((2, 3), {"dataloader_drop_last": True}),
    "other data seed": ((3, 8), {"data_seed": 7}),
    "workers": ((3, 8), WORKERS),
    "workers that live on": ((3, 8), PERSISTENT),
    "stream": ((3, 8), {"data": "stream"}),
    "stream, at ends": ((4, 8), {"data": "stream"}),
    "stream, workers": ((3, 8), {"data": "stream", **WORKERS}),
    "stream with a state": ((3, 8), {"data": "stateful"}),
    "stream with a state, at ends": ((4, 8), {"data": "stateful"}),
    "stream with a state, workers that live on": ((3, 8), {"data": "stateful", **PERSISTENT}),
    "shuffle buffer": ((3, 6), {"data": "buffered"}),
    "shuffle buffer, at ends": ((4, 8), {"data": "buffered"}),
    "shuffle buffer, workers": ((3, 8), {"data": "buffered", **WORKERS}),
    "evaluation in between": ((3, 8), EVALUATION),
    "evaluation in between, workers": ((4, 5), {**EVALUATION, **WORKERS}),
    "evaluation by epoch": ((4, 8), {**EVALUATION, "eval_strategy": "epoch"}),
    "evaluation first": ((1, 8), {**EVALUATION, "eval_on_start": True}),
    "the best model": ((3, 8), {**FOLLOWING, "load_best_model_at_end": True, "save_total_limit": 2}),
    "saved by epoch": ((6, 10), {"save_strategy": "epoch"}),  # goes on from 4 and 8
    "saved now and then": ((7, 10), {"save_steps": 3}),  # goes on from 6 and 9
    "logged now and then": ((3, 8), {"logging_steps": 5}),
    "logged by epoch": ((3, 8), {"logging_strategy": "epoch"}),
    "saved at once": ((3, 8), {"save_in_background": False}),
    "half precision": ((3, 8), {"bf16": True}),
    "half precision with a scaler": ((3, 8), {"fp16": True, "learning_rate": 1e-3}),
    "momentum": ((3, 8), {"optim": "sgd", "optim_args": "momentum=0.9"}),
    "muon": ((3, 8), {"optim": "muon"}),
    "adafactor": ((3, 8), {"optim": "adafactor"}),
    "a tagger": ((1, 4), {"model": "tagger", **TOKENS}),
    "a tagger, shuffled": ((1, 5), {"model": "tagger", "data": "tokens", "gradient_accumulation_steps": 4}),
    "a tagger by samples": ((1, 3), {"model": "tagger by samples", **TOKENS}),
    "a tagger by samples, much accumulation": (
        (1, 2),
        {"model": "tagger by samples", **TOKENS, "gradient_accumulation_steps": 4},
    ),
    "a tagger by samples, evaluation in between": ((1, 3), {"model": "tagger by samples", **TOKENS, **RAGGED}),
    "gpt2": ((1, 3), {"model": "gpt2", **TOKENS, "gradient_accumulation_steps": 4}),
    "gpt2, shuffled": ((2, 3), {"model": "gpt2", "data": "tokens", "gradient_accumulation_steps": 4}),
    "a state of lists": ((3, 8), {"as_lists": True}),
    "whole batches by steps": ((3, 8), {"max_steps": 10}),
    "a part of an epoch": ((3, 8), {"num_train_epochs": 2.5}),
    **{f"schedule {name}": ((3, 8), {"lr_scheduler_type": name, **more}) for name, more in SCHEDULES.items()},
}


FAST = (
    "in the middle, twice",
    "much accumulation",
    "by length",
    "workers",
    "stream",
    "the best model",
    "half precision with a scaler",
    "gpt2, shuffled",
)


@pytest.mark.parametrize("name", slow_but(FAST, CASES))
def test_twice_interrupted_is_bit_identical(tmp_path: Path, name: str) -> None:
    stops, options = CASES[name]
    check(tmp_path, stops, **options)


@pytest.mark.parametrize("options", [{**EVALUATION}, {"model": "tagger by samples", **TOKENS, **RAGGED}])
def test_saving_changes_nothing(tmp_path: Path, options: dict[str, Any]) -> None:
    without = run(tmp_path / "without", save_strategy="no", **options)
    assert differences(without, run(tmp_path / "with", **options)) == []


def test_evaluating_changes_nothing(tmp_path: Path) -> None:
    """Though it sees what the loss is a mean over before training does."""
    options = {"model": "tagger by samples", **TOKENS, "gradient_accumulation_steps": 4}
    with_it = run(tmp_path / "with", **options, **{**RAGGED, "eval_steps": 1, "eval_on_start": True})
    without = run(tmp_path / "without", **options)
    assert torch.equal(with_it["weights"], without["weights"])
    assert with_it["journal"] == without["journal"]


def test_training_again_begins_anew(tmp_path: Path) -> None:
    """Measurements of the first run do not change the order of the second, because a resumed run has none of them."""
    options: dict[str, Any] = {"gradient_accumulation_steps": 4, "train_sampling_strategy": "sequential"}
    trainer = make_trainer(tmp_path, MODELS["tagger by samples"](), make_data("tokens"), **options)
    found = []
    for _ in range(2):
        trainer.model.load_state_dict(MODELS["tagger by samples"]().state_dict())
        trainer.optimizer = trainer.lr_scheduler = None
        trainer.train()
        found.append(weights(trainer.model))
    assert torch.equal(*found)


PRODUCT = list(
    itertools.product(
        ("augmented", "stream", "stateful", "buffered"),
        ({}, WORKERS, PERSISTENT),
        (1, 2, 5),
        ("cosine_with_restarts", "reduce_lr_on_plateau"),
        ({}, EVALUATION),
        ("middle", "ends"),
    )
)


@pytest.mark.slow
@pytest.mark.timeout(120)
# 13 shares no factor with any axis: each value comes up
@pytest.mark.parametrize(
    "number", slow_but(range(0, len(PRODUCT), 39), range(0, len(PRODUCT), 13), pytest.mark.nightly)
)
def test_across_the_product(tmp_path: Path, number: int) -> None:
    data, workers, accumulation, schedule, evaluation, where = PRODUCT[number]
    per_epoch = -(-7 // accumulation)
    stops = (per_epoch - 1 or 1, per_epoch + 1) if where == "middle" else (per_epoch, 2 * per_epoch)
    options = {
        "data": data,
        "gradient_accumulation_steps": accumulation,
        "lr_scheduler_type": schedule,
        **({"max_steps": 3 * per_epoch} if data != "augmented" else {}),
        **workers,
        **evaluation,
        **SCHEDULES[schedule],
    }
    check(tmp_path, stops, **options)
