"""Errors and events on one of two processes only, and resumes on both: `python ranks_job.py FOLDER`.

Each scenario is a short training. With `size` 1 it is the same training on one process, to compare with.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from ragged import llama, pad, texts
from small_models import Classifier, Tagger, WithHead, classification, losses, make_trainer, tagging, weights
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import IterableDataset

from paceline import Trainer, TrainerCallback
from paceline.core.journal import read_rows
from paceline.core.nonfinite import NonFiniteError
from paceline.pytorch.model.tensor_parts import whole
from paceline.pytorch.optim.short_moments import local

RANK = int(os.environ.get("RANK", "0"))
DATA = classification(38)
POISON = 13  # in the first epoch's order; read by the second process
SCENARIOS: dict[str, Callable[[Path, int], dict[str, Any]]] = {}


def scenario(run: Callable[[Path, int], dict[str, Any]]) -> Callable[[Path, int], dict[str, Any]]:
    SCENARIOS[run.__name__] = run
    return run


def trainer_in(folder: Path, size: int, model: Any, data: Any, **options: Any) -> Trainer:
    """Eight samples in each update: two micro-batches of four, over all processes."""
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": 4 // size,
        "gradient_accumulation_steps": 2,
        "learning_rate": 0.01,
        "train_sampling_strategy": "sequential",
        "ddp_timeout": 60,
    }
    return make_trainer(folder, model, data, **{**defaults, **options})


def found(trainer: Trainer, **more: Any) -> dict[str, Any]:
    return {
        "weights": weights(trainer.model),
        "loss": losses(trainer),
        "step": trainer.state.global_step,
        "tokens": int(trainer.state.num_input_tokens_seen),
        **more,
    }


# ---- memory that runs out on one process


class Narrow(Classifier):
    """On the second process there is memory for one sample, from its sixth pass on, for `lasts` passes."""

    num_passes, lasts = 0, 10**9

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        self.num_passes += self.training
        if len(x) > 1 and RANK == 1 and self.training and 6 <= self.num_passes < 6 + self.lasts:
            raise torch.OutOfMemoryError("out of memory on one process")
        return super().forward(x, labels)


@scenario
def memory(folder: Path, size: int) -> dict[str, Any]:
    """In the second micro-batch of the third update."""
    trainer = trainer_in(folder, size, Narrow(), DATA, auto_find_batch_size=True)
    trainer.train()
    return found(trainer, micro_batch=trainer.state.train_batch_size)


@scenario
def memory_again(folder: Path, size: int) -> dict[str, Any]:
    """Both processes try the larger micro-batch again after 100 steps."""
    model = Narrow()
    model.lasts = 20
    trainer = trainer_in(folder, size, model, DATA, auto_find_batch_size=True, max_steps=110)
    trainer.train()
    return found(trainer, is_original=trainer.state.train_batch_size == 4 // size)


# ---- a loss or gradient that is not finite, on one process


class Poisoned(Classifier):
    """For one sample the loss is infinite, and the gradient is what it would be without; or both are NaN."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        loss, logits = super().forward(x.clamp(max=10), labels)
        is_bad = self.training and bool((x == 100).any())
        factor, added = {"inf": (1.0, float("inf")), "nan": (float("nan"), 0.0)}[self.kind]
        return (loss * factor + added if is_bad else loss), logits


def poisoned() -> list[dict[str, Tensor]]:
    return [{**row, "x": torch.full((8,), 100.0)} if index == POISON else row for index, row in enumerate(DATA)]


def with_poison(kind: str, policy: str, name: str) -> None:
    def run(folder: Path, size: int) -> dict[str, Any]:
        options = {"nonfinite_policy": policy, "logging_steps": 3, "include_num_input_tokens_seen": False}
        trainer = trainer_in(folder, size, Poisoned(kind), poisoned(), **options)
        error = ""
        try:
            trainer.train()
        except NonFiniteError as raised:
            error = str(raised)
        skipped = folder / "skipped_samples.jsonl"
        if trainer.world.is_distributed:
            torch.distributed.barrier()
        return found(trainer, error=error, skipped=skipped.read_text() if skipped.exists() else "")

    run.__name__ = name
    scenario(run)


for each_kind in ("inf", "nan"):
    for each_policy in ("skip", "raise", "rollback"):
        with_poison(each_kind, each_policy, f"{each_kind}_{each_policy}")


class Overflowing(Classifier):
    """One number of one gradient is infinite in the third update, on the last process."""

    num_passes = 0

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        loss, logits = super().forward(x, labels)
        self.num_passes += self.training
        if self.training and self.num_passes == 5 and int(os.environ.get("WORLD_SIZE", "1")) == RANK + 1:
            logits.register_hook(lambda gradient: gradient + float("inf"))
        return loss, logits


@scenario
def fp16_overflow(folder: Path, size: int) -> dict[str, Any]:
    """The update is left out on both, and the scale halves on both."""
    trainer = trainer_in(folder, size, Overflowing(), DATA, fp16=True, num_train_epochs=2, lr_scheduler_type="linear")
    trainer.train()
    (scaler,) = trainer.strategy.stateful().values()
    return found(trainer, scaler=scaler.state_dict(), rate=trainer.lr_scheduler.last_epoch)


class OverflowingShard(Classifier):
    """One number of one gradient is infinite in the third update, which one process alone holds."""

    num_passes = 0

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        loss, logits = super().forward(x, labels)
        self.num_passes += self.training
        one = self.second.bias[0] * 1
        if self.training and self.num_passes == 5 and one.requires_grad:
            one.register_hook(lambda gradient: gradient + float("inf"))
        return loss + one * 0, logits


@scenario
def fp16_overflow_of_a_shard(folder: Path, size: int) -> dict[str, Any]:
    """Of a sharded model: the processes do not see it by their own gradients."""
    options: dict[str, Any] = {"fp16": True, "num_train_epochs": 2, "fsdp": size > 1}
    trainer = trainer_in(folder, size, OverflowingShard(), DATA, **options)
    trainer.train()
    (scaler,) = trainer.strategy.stateful().values()
    parameters = [whole(parameter).detach().flatten() for parameter in trainer.model.parameters()]
    rate = trainer.lr_scheduler.last_epoch
    return {"weights": torch.cat(parameters), "loss": losses(trainer), "scaler": scaler.state_dict(), "rate": rate}


class OverflowingPart(Classifier):
    """One number of one gradient is infinite in the third update, in the part of a matrix that one process holds."""

    tp_plan: ClassVar[dict[str, str]] = {"second": "colwise_gather_output"}  # the first parameter is whole
    num_passes = 0

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        loss, logits = super().forward(x, labels)
        self.num_passes += self.training
        one = local(self.second.bias)[0] * 1
        if RANK == 0 and self.training and self.num_passes == 5 and one.requires_grad:
            one.register_hook(lambda gradient: gradient + float("inf"))
        return loss + one * 0, logits


@scenario
def fp16_overflow_of_a_part(folder: Path, size: int) -> dict[str, Any]:
    """With tensor parallelism: both processes read the same data, and one of them holds the number."""
    options: dict[str, Any] = {"fp16": True, "num_train_epochs": 2, "parallel": {"tp": 2} if size > 1 else None}
    trainer = trainer_in(folder, 1, OverflowingPart(), DATA, **options)
    trainer.train()
    (scaler,) = trainer.strategy.stateful().values()
    parameters = [whole(parameter).detach().flatten() for parameter in trainer.model.parameters()]
    rate = trainer.lr_scheduler.last_epoch
    return {"weights": torch.cat(parameters), "loss": losses(trainer), "scaler": scaler.state_dict(), "rate": rate}


# ---- parameters that join a training, and those beside the model


class Joins(TrainerCallback):
    """Thaws the first layer before the third update, or adds a head, whose values each process draws itself."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step != 2:
            return
        if hasattr(model, "extra"):
            torch.manual_seed(RANK)
            model.extra = nn.Linear(8, 4)
        layer = getattr(model, "extra", model.first).requires_grad_(True)
        kwargs["optimizer"].add_param_group({"params": list(layer.parameters())})


def joined_later(model: type[Classifier], name: str) -> None:
    def run(folder: Path, size: int) -> dict[str, Any]:
        trained = model()
        trained.first.requires_grad_(model is WithHead)
        trainer = trainer_in(folder, size, trained, DATA, callbacks=[Joins()], num_train_epochs=2)
        trainer.train()
        return found(trainer)

    run.__name__ = name
    scenario(run)


joined_later(Classifier, "thawed")
joined_later(WithHead, "head_added")


def with_temperature(name: str, **options: Any) -> None:
    def run(folder: Path, size: int) -> dict[str, Any]:
        model, temperature = Classifier(), nn.Parameter(torch.ones(()))

        def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
            return functional.cross_entropy(outputs * temperature, labels)

        options["optimizers"] = (torch.optim.SGD([*model.parameters(), temperature], lr=0.5), None)
        trainer = trainer_in(folder, size, model, DATA, compute_loss_func=loss, **options)
        trainer.train()
        result = found(trainer)
        return {**result, "weights": torch.cat([result["weights"], temperature.detach()[None]])}

    run.__name__ = name
    scenario(run)


with_temperature("beside_the_model")
with_temperature("beside_the_model_and_reduced_late", auto_find_batch_size=True)


# ---- what one process sees of the loss, and the other does not


def told_apart(per_sample: bool, name: str) -> None:
    def run(folder: Path, size: int) -> dict[str, Any]:
        """All samples are full, of which nothing can be told, but those that the second process reads last."""
        ragged = [row for row in tagging(60) if 0 < int((row["labels"] != -100).sum()) < 7]
        full = [{**row, "labels": row["input_ids"]} for row in ragged]
        # of each micro-batch of four, the second process has the last two
        data = [row for start in range(0, 24, 4) for row in (*full[start : start + 2], *ragged[start + 2 : start + 4])]
        trainer = trainer_in(
            folder, size, Tagger(per_sample=per_sample), data,
            eval_dataset=tagging(9, seed=3), eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=2,
            include_num_input_tokens_seen="all",
        )  # fmt: skip
        trainer.train()
        evals = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
        return found(trainer, evals=evals)

    run.__name__ = name
    scenario(run)


told_apart(False, "targets_seen_by_one")
told_apart(True, "samples_seen_by_one")


class ByMask(Tagger):
    """Its loss and gradient are NaN for a micro-batch without a target."""

    def finish(self, hidden: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(hidden)
        kept = labels[:, 1:] != -100
        own = logits[:, :-1].log_softmax(-1).gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0]
        return {"loss": -(own * kept).sum() / kept.sum(), "logits": logits}


def not_counted(name: str, places: tuple[int, ...], **shards: Any) -> None:
    def run(folder: Path, size: int) -> dict[str, Any]:
        """Some samples have a target until the first probe shows that targets are shifted."""
        data = [row for row in tagging(60) if bool((row["labels"][1:] != -100).any())][:24]
        only_first = torch.full((7,), -100).index_fill(0, torch.tensor([0]), 3)
        data = [{**row, "labels": only_first} if index in places else row for index, row in enumerate(data)]
        options: dict[str, Any] = {"nonfinite_policy": "raise", **(shards if size > 1 else {})}
        trainer = trainer_in(folder, size, ByMask(shifted=True), data, **options)
        trainer.train()
        parameters = [whole(parameter).detach().flatten() for parameter in trainer.model.parameters()]
        return {"weights": torch.cat(parameters), "loss": losses(trainer), "step": trainer.state.global_step}

    run.__name__ = name
    scenario(run)


# of each micro-batch of four, the second process has the last two; in the window there are two
not_counted("first_micro_batch_not_counted", (2, 3))
not_counted("second_micro_batch_not_counted", (6, 7))
not_counted("window_of_one_process_not_counted", (2, 3, 6, 7))
not_counted("sharded_window_of_one_process_not_counted", (2, 3, 6, 7), fsdp=True)


# ---- batches without padding


@scenario
def packed(folder: Path, size: int) -> dict[str, Any]:
    """Texts of several lengths, of which each process packs its own."""
    options: dict[str, Any] = {"data_collator": pad, "packing": "pack"}
    trainer = trainer_in(folder, size, llama(), texts(), **options)
    trainer.train()
    return found(trainer)


@scenario
def flattened(folder: Path, size: int) -> dict[str, Any]:
    """Two processes train on rows without padding, one on padded batches: the numbers are the same."""
    options: dict[str, Any] = {"data_collator": pad, "packing": "flatten" if size > 1 else None}
    trainer = trainer_in(folder, size, llama(), texts(), **options)
    trainer.train()
    return found(trainer)


# ---- going on


class Remembering(Classifier):
    """Keeps which samples it was trained on: their first feature."""

    def __init__(self) -> None:
        super().__init__(dropout=0.1)
        self.seen: list[float] = []

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        if self.training:
            self.seen += x[:, 0].tolist()
        return super().forward(x, labels)


class Stream(IterableDataset[Any]):
    """Without a state of its own."""

    def __iter__(self) -> Iterator[Any]:
        yield from DATA[:24]


def numbers(seen: list[float]) -> list[int]:
    known = {float(row["x"][0]): index for index, row in enumerate(DATA)}
    return [known[value] for value in seen]


RESUMES: dict[str, dict[str, Any]] = {
    "plain": {},
    "drop_last": {"dataloader_drop_last": True},
    "accumulated": {"gradient_accumulation_steps": 2, "dataloader_drop_last": True},
    "shuffled": {"train_sampling_strategy": "random"},
}


def resume_options(name: str) -> dict[str, Any]:
    options = {"save_strategy": "steps", "save_steps": 1, "num_train_epochs": 2, "gradient_accumulation_steps": 1}
    return {**options, **RESUMES[name]}


def prepare_resumes(folder: Path) -> None:
    """Runs of one process in micro-batches of three, which end inside the slots of two processes."""
    for name in RESUMES:
        options = {**resume_options(name), "per_device_train_batch_size": 3}
        trainer_in(folder / name, 1, Remembering(), DATA, **options).train()


def resumed_inside_a_slot(folder: Path, checkpoints: Path) -> dict[str, Any]:
    """In micro-batches of four for each of two processes, from a checkpoint after 3 updates of one process."""
    results = {}
    for name in RESUMES:
        trainer = trainer_in(
            folder / name, 1, Remembering(), DATA, **{**resume_options(name), "per_device_train_batch_size": 4}
        )
        trainer.train(resume_from_checkpoint=str(checkpoints / name / "checkpoint-3"))
        rows = [tuple(row[:4]) for row in read_rows(folder / name / "journal.bin")] if RANK == 0 else []
        results[name] = {"rows": rows, "seen": numbers(trainer.model.seen)}
    return results


def resumed_at_a_streams_end(folder: Path) -> dict[str, Any]:
    """24 samples in updates of eight: from each checkpoint around the end of the first epoch."""

    def make(name: str, save: str = "steps") -> Trainer:
        options = {"save_strategy": save, "save_steps": 1, "max_steps": 6}
        options |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
        return trainer_in(folder / name, 1, Remembering(), Stream(), **options)

    whole = make("whole")
    whole.train()
    results = {"whole": found(whole, epoch=whole.state.epoch)}
    for step in (2, 3, 4):
        trainer = make(f"from {step}")
        trainer.train(resume_from_checkpoint=str(folder / "whole" / f"checkpoint-{step}"))
        results[f"from {step}"] = found(trainer, epoch=trainer.state.epoch)
    make("epochs", "epoch").train()  # the checkpoint knows that the epoch has ended
    trainer = make("after the end")
    trainer.train(resume_from_checkpoint=str(folder / "epochs" / "checkpoint-3"))
    results["after the end"] = found(trainer)
    return results


class Normed(Classifier):
    """Has statistics, which each process computes of its own batches."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(self.first, nn.BatchNorm1d(16))  # type: ignore[assignment]


def evaluated_and_saved(folder: Path) -> dict[str, Any]:
    """A sharded model: the loss of an evaluation, and what is saved."""
    trainer = trainer_in(folder, 2, Normed(), DATA, eval_dataset=DATA, fsdp=True, dataloader_drop_last=True)
    trainer.train()
    trainer.save_model(str(folder / "model"))
    return {"loss": trainer.evaluate()["eval_loss"], "folder": folder / "model"}


class Masked(Classifier):
    """Keeps what dropout has left out in training."""

    tp_plan: ClassVar[dict[str, str]] = {"second": "rowwise_split_input"}  # dropout sees whole activations

    def __init__(self) -> None:
        super().__init__(dropout=0.5)
        self.masks: list[Tensor] = []
        self.drop.register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, args: Any, output: Tensor) -> None:
        if self.training:
            self.masks.append(output.detach() == 0)


def masks_on_another_mesh(folder: Path) -> dict[str, list[Tensor]]:
    """The masks of dropout of runs that go on from one with tensor parallelism, by the kind of their processes."""
    options = {"save_strategy": "steps", "save_steps": 1, "gradient_accumulation_steps": 1}
    model, tensor_parallel = Masked(), {"tp": 2}
    trainer_in(folder / "before", 2, model, DATA, max_steps=1, parallel=tensor_parallel, **options).train()
    found = {}
    for name, parallel in (("tp", tensor_parallel), ("ddp", None)):
        trainer = trainer_in(folder / name, 2, Masked(), DATA, max_steps=2, parallel=parallel, **options)
        trainer.train(resume_from_checkpoint=str(folder / "before" / "checkpoint-1"))
        found[name] = trainer.model.masks
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    place, size = Path(sys.argv[1]), int(os.environ["WORLD_SIZE"])
    results = {name: run(place / name, size) for name, run in SCENARIOS.items()}
    results["slots"] = resumed_inside_a_slot(place / "slots", place / "checkpoints")
    results["normed"] = evaluated_and_saved(place / "normed")
    results["masks"] = masks_on_another_mesh(place / "masks")
    results["ends"] = resumed_at_a_streams_end(place / "ends")
    torch.save(results, place / f"{RANK}.pt")
