"""Trainings whose numbers do not depend on how many processes make them. Run by tests on one process and on several.

    python shared_job.py FOLDER ENGINE...

Each process writes what it found into `FOLDER/ENGINE-RANK.pt`: a dict by scenario.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from small_models import Classifier, Tagger, classification, make_trainer, tagging
from torch import Tensor, distributed
from torch.nn import functional
from torch.utils.data import DataLoader

from paceline import EvalPrediction, Trainer, TrainerCallback
from paceline.core.optional import is_installed, require

has_zero = is_installed("deepspeed") and any(word.startswith("zero") for word in sys.argv)
zero: Any = require("deepspeed.utils", "deepspeed") if has_zero else None

Result = dict[str, Any]
SCENARIOS: dict[str, Callable[[Path, int], Result]] = {}
GLOBAL_BATCH = 24
ENGINES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {"fsdp": True},
    "fsdp+offload": {"fsdp": "full_shard offload"},
    "hsdp": {"fsdp": "hybrid_shard", "fsdp_config": {"replicate": 2}},
    "gpipe": {"parallel": {"pp": 2}, "pipeline_config": {"schedule": "gpipe"}},
    "1f1b": {"parallel": {"pp": 2}},
    "interleaved-1f1b": {"parallel": {"pp": 2}, "pipeline_config": {"schedule": "interleaved_1f1b"}},
    "1f1b+ddp": {"parallel": {"dp_replicate": 2, "pp": 2}},
    "tp": {"parallel": {"tp": 2}},
    "tp+fsdp": {"parallel": {"dp_shard": 2, "tp": 2}},
    "tp+ddp": {"parallel": {"dp_replicate": 2, "tp": 2}},
    "tp+hsdp": {"parallel": {"dp_replicate": 2, "dp_shard": 2, "tp": 2}},
    **{f"zero{stage}": {"deepspeed": {"zero_optimization": {"stage": stage}}} for stage in (0, 1, 2, 3)},
}
in_force: dict[str, Any] = {}  # of these, on several processes


def scenario(run: Callable[[Path, int], Result]) -> Callable[[Path, int], Result]:
    SCENARIOS[run.__name__] = run
    return run


def whole(tensor: Any) -> Tensor:
    """A tensor of all shards; of a parameter that ZeRO holds, the one that is stepped."""
    if hasattr(tensor, "ds_id") or hasattr(tensor, "_hp_mapping"):
        return zero.safe_get_full_fp32_param(tensor)
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full


def gradient_of(parameter: Any) -> Tensor | None:
    """The gradient of all shards, averaged over the processes."""
    if hasattr(parameter, "ds_id"):
        return zero.safe_get_full_grad(parameter)
    if hasattr(parameter, "_hp_mapping"):
        return parameter.get_full_hp_grad()
    return None if parameter.grad is None else whole(parameter.grad)


class RecordGradient(TrainerCallback):
    """Keeps the gradient of the first update, and counts the steps of the schedule."""

    def __init__(self) -> None:
        self.gradient: Tensor | None = None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if self.gradient is None:
            gradients = {name: gradient_of(p) for name, p in model.named_parameters()}
            gradients = {name: gradient for name, gradient in gradients.items() if gradient is not None}
            if any(parameter.is_meta for parameter in model.parameters()):  # those of other stages are elsewhere
                gathered: list[Any] = [None] * distributed.get_world_size()
                distributed.all_gather_object(gathered, gradients)
                gradients = {name: gradient for each in gathered for name, gradient in each.items()}
            names = [name for name, _ in model.named_parameters() if name in gradients]
            self.gradient = torch.cat([gradients[name].flatten() for name in names])
            if args.deepspeed and args.deepspeed["zero_optimization"]["stage"] > 0:  # which clips with the step
                self.gradient *= min(1.0, args.max_grad_norm / (float(self.gradient.norm()) + 1e-6))


def found(trainer: Trainer, **more: Any) -> Result:
    """Returns the values by which two runs are compared."""
    rows = trainer.state.log_history
    if any(parameter.is_meta for parameter in trainer.model.parameters()):
        state = trainer.strategy.full_weights(trainer.model)
        parameters = [state[name].flatten() for name, _ in trainer.model.named_parameters()]
    else:
        parameters = [whole(parameter).detach().flatten() for parameter in trainer.model.parameters()]
    record = next((c for c in trainer.callback_handler.callbacks if isinstance(c, RecordGradient)), None)
    return {
        "weights": torch.cat(parameters),
        "gradient": record.gradient if record is not None else None,
        "loss": [row["loss"] for row in rows if "loss" in row],
        "grad_norm": [row["grad_norm"] for row in rows if "grad_norm" in row],
        "learning_rate": [row["learning_rate"] for row in rows if "learning_rate" in row],
        "eval_loss": [row["eval_loss"] for row in rows if "eval_loss" in row],
        "train_loss": rows[-1].get("train_loss"),
        "test_loss": [],
        "global_step": trainer.state.global_step,
        "epoch": trainer.state.epoch,
        "tokens": trainer.state.num_input_tokens_seen,
        "scheduler_steps": trainer.lr_scheduler.last_epoch,
        **more,
    }


def split(size: int, accumulation: int = 1, total: int = GLOBAL_BATCH) -> dict[str, Any]:
    """The same samples per update on any number of processes."""
    assert total % (size * accumulation) == 0
    return {"per_device_train_batch_size": total // size // accumulation, "gradient_accumulation_steps": accumulation}


def train(folder: Path, model: torch.nn.Module, data: Any, **options: Any) -> Trainer:
    defaults = {"learning_rate": 0.01, "num_train_epochs": 2, "callbacks": [RecordGradient()]}
    trainer = make_trainer(folder, model, data, **{**defaults, **in_force, **options})
    trainer.train()
    return trainer


def of_ragged(size: int) -> dict[str, Any]:
    """Clipping, evaluation, for ragged targets and a dataset whose length nothing divides."""
    return {
        "eval_dataset": tagging(17, seed=3),
        "eval_strategy": "epoch",
        "per_device_eval_batch_size": 6 // size if 6 % size == 0 else 2,
        "max_grad_norm": 0.5,
        "include_num_input_tokens_seen": "all",
    }


def ragged(folder: Path, size: int, accumulation: int = 1, **options: Any) -> Result:
    options = {**of_ragged(size), **options}
    return found(train(folder, Tagger(shifted=True), tagging(53), **split(size, accumulation), **options))


@scenario
def plain(folder: Path, size: int) -> Result:
    return ragged(folder, size)


@scenario
def accumulated(folder: Path, size: int) -> Result:
    return ragged(folder, size, accumulation=2)


@scenario
def split_batches(folder: Path, size: int) -> Result:
    """Batches of all processes together, which no number of processes divides."""
    options = {"per_device_train_batch_size": 11, "gradient_accumulation_steps": 2, "per_device_eval_batch_size": 7}
    options |= {"accelerator_config": {"split_batches": True}, "max_grad_norm": 0.5, "eval_strategy": "epoch"}
    model, evaluated = Tagger(shifted=True), tagging(17, seed=3)
    return found(train(folder, model, tagging(53), eval_dataset=evaluated, **options))


@scenario
def own_order(folder: Path, size: int) -> Result:
    return ragged(folder, size, train_sampling_strategy="group_by_length", length_column_name="none")


class CountsTokens(Tagger):
    """Divides by num_items_in_batch, as models of transformers do."""

    def forward(self, input_ids: Tensor, labels: Tensor, num_items_in_batch: Tensor | None = None) -> Any:
        return self.finish(self.begin(input_ids), labels, num_items_in_batch)

    def finish(self, hidden: Tensor, labels: Tensor, num_items_in_batch: Tensor | None = None) -> Any:
        logits = self.head(hidden)
        left, right = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        if num_items_in_batch is None:
            return {"loss": functional.cross_entropy(left, right), "logits": logits}
        return {"loss": functional.cross_entropy(left, right, reduction="sum") / num_items_in_batch, "logits": logits}


@scenario
def scaled_by_the_model(folder: Path, size: int) -> Result:
    model = CountsTokens(shifted=True)
    return found(train(folder, model, tagging(53), **split(size, 2), max_grad_norm=0.5))


@scenario
def mean_over_samples(folder: Path, size: int) -> Result:
    model = Tagger(shifted=True, per_sample=True)
    return found(train(folder, model, tagging(53), **split(size, 2)))


def empty(num_samples: int) -> Any:
    """Token ids of which most have no target at all."""
    samples = tagging(num_samples)
    for index, sample in enumerate(samples):
        if index % 4 or index // 12 == 1:
            sample["labels"][:] = -100
    return samples


@scenario
def without_targets(folder: Path, size: int) -> Result:
    """Some processes have no target in an update, and some updates have none anywhere."""
    data = empty(29)
    return found(train(folder, Tagger(), data, **split(size), train_sampling_strategy="sequential"))


@scenario
def fewer_samples_than_processes(folder: Path, size: int) -> Result:
    return found(train(folder, Classifier(), classification(1), **split(size), num_train_epochs=3))


@scenario
def dropped_last(folder: Path, size: int) -> Result:
    return found(train(folder, Classifier(), classification(53), **split(size, 2), dataloader_drop_last=True))


@scenario
def workers(folder: Path, size: int) -> Result:
    return found(train(folder, Classifier(), classification(53), **split(size), dataloader_num_workers=1))


class Numbers:
    """A stream without an index, a length or a place of its own."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __iter__(self) -> Any:
        return iter(self.samples)


@scenario
def stream(folder: Path, size: int, **more: Any) -> Result:
    """53 samples of which each is read once an epoch; the processes have different numbers of them at its end."""
    data = Numbers(tagging(53))
    options = {"max_steps": 12, "eval_dataset": Numbers(tagging(17, seed=3)), "eval_strategy": "steps", "eval_steps": 6}
    trainer = train(folder, Tagger(shifted=True), data, **split(size, 2), **options, **more)
    output = trainer.predict(Numbers(tagging(23, seed=4)))  # in the order of the stream
    return found(trainer, epoch=0, predictions=output.predictions, labels=output.label_ids)


@scenario
def dispatched(folder: Path, size: int) -> Result:
    """The first process reads the stream for all."""
    return stream(folder, size, accelerator_config={"dispatch_batches": True})


class OwnLoader(Trainer):
    """Makes its own loader and lets the accelerator prepare it, as scripts written for transformers do."""

    def get_train_dataloader(self) -> Any:
        loader = DataLoader(self.train_dataset, batch_size=self.args.train_batch_size, shuffle=True)
        return self.accelerator.prepare(loader)


@scenario
def own_loader(folder: Path, size: int) -> Result:
    return found(train(folder, Classifier(), classification(53), **split(size, 2), cls=OwnLoader))


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    predicted = np.asarray(prediction.predictions).argmax(-1)
    return {"accuracy": float((predicted == prediction.label_ids).mean()), "count": float(len(predicted))}


@scenario
def predictions(folder: Path, size: int) -> Result:
    """Ragged and nested outputs, one row per sample, in the order of the data."""
    options = {"per_device_eval_batch_size": 4, "compute_metrics": accuracy, "eval_dataset": classification(27, seed=5)}
    trainer = train(folder, Classifier(), classification(48), **split(size), **options)
    metrics = trainer.evaluate()
    output = trainer.predict(classification(23, seed=4))
    return found(
        trainer,
        predictions=output.predictions,
        labels=output.label_ids,
        accuracy=metrics["eval_accuracy"],
        count=metrics["eval_count"],
        test_loss=[output.metrics["test_loss"]],
    )


@scenario
def twenty_updates(folder: Path, size: int) -> Result:
    """Everything that is to be the same, for as long as the weights are to be."""
    options = {**of_ragged(size), "num_train_epochs": 7, "max_grad_norm": 0.3, "compute_metrics": accuracy}
    trainer = train(folder, Tagger(shifted=True), tagging(53), **split(size, 2), **options)
    output = trainer.predict(tagging(23, seed=4))
    return found(
        trainer,
        predictions=output.predictions,
        labels=output.label_ids,
        count=output.metrics["test_count"],
        test_loss=[output.metrics["test_loss"]],
    )


def main() -> None:
    folder, engines = Path(sys.argv[1]), sys.argv[2:]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for engine in engines:
        in_force.clear()
        in_force.update(ENGINES[engine])
        shares = any(axis in in_force.get("parallel", ()) for axis in ("tp", "pp"))
        parts = size // 2 if shares else size  # that read different data
        found = {name: run(folder / engine / name, parts) for name, run in SCENARIOS.items()}
        torch.save(found, folder / f"{engine}-{rank}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
