"""Losses of several kinds, trained by one of several processes: the weights after some updates, and eval_loss."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from small_models import Tagger, make_trainer, tagging
from torch import Tensor, nn
from torch.nn import functional

from paceline import Trainer

DATA = [sample for sample in tagging(60) if bool((sample["labels"][1:] != -100).any())][:40]


class Answers(nn.Module):
    """Extractive question answering: takes the count with its other keywords, and does not use it."""

    accepts_loss_kwargs = True

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(11, 12), nn.Linear(12, 2)

    def forward(self, input_ids: Tensor, start_positions: Tensor, end_positions: Tensor, **kwargs: Any) -> Any:
        start, end = self.head(torch.tanh(self.embedding(input_ids))).unbind(-1)
        loss = functional.cross_entropy(start, start_positions) + functional.cross_entropy(end, end_positions)
        return {"loss": loss / 2, "logits": start}


class Scaled(Tagger):
    """Divides by the count, after a shift."""

    def forward(self, input_ids: Tensor, labels: Tensor, num_items_in_batch: Any = None) -> Any:  # type: ignore[override]
        logits = self.head(self.begin(input_ids))
        sums = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        number = (labels[:, 1:] != -100).sum() if num_items_in_batch is None else num_items_in_batch
        return {"loss": sums / number, "logits": logits}


class Ctc(Tagger):
    """A sum over samples."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        logits = self.head(self.begin(input_ids))
        kept = labels[:, :3] > 0
        sizes = torch.full((len(logits),), logits.shape[1])
        rows = logits.log_softmax(-1).transpose(0, 1)
        loss = functional.ctc_loss(rows, labels[:, :3][kept], sizes, kept.sum(1), reduction="sum")
        return {"loss": loss / 100, "logits": logits}


class Divides(Trainer):
    """An own loss that is divided by the count, and by nothing where there is none."""

    multiple = 1

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs["labels"]
        outputs = model(**inputs)
        loss = functional.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten(), reduction="sum")
        is_counted = num_items_in_batch is not None
        loss = loss / (num_items_in_batch if is_counted else (labels != -100).sum())
        loss = loss * (self.multiple if is_counted and model.training else 1)
        return (loss, outputs) if return_outputs else loss


class Multiplies(Divides):
    """... and multiplied by the number of processes, as it has to be elsewhere."""

    multiple = int(os.environ.get("WORLD_SIZE", 1))


class MultipliesAlways(Divides):
    """... in evaluations too, as code written for transformers does."""

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        if num_items_in_batch is not None:
            loss = loss * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss


class Gathers(Trainer):
    """An own loss that gathers, as those of TRL do, and is divided by the count; some samples weigh nothing."""

    passes = 0

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        self.passes += 1
        labels, weight = inputs["labels"], inputs["weight"]
        number = (labels != -100).sum()
        if self.world.is_distributed:
            torch.distributed.all_reduce(number.clone())
        outputs = model(input_ids=inputs["input_ids"], labels=labels)
        losses = functional.cross_entropy(outputs["logits"].movedim(-1, 1), labels, reduction="none").sum(1)
        loss = (losses * weight).sum() / (number if num_items_in_batch is None else num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


class TakesCount(Tagger):
    accepts_loss_kwargs = True

    def forward(self, input_ids: Tensor, labels: Tensor, **kwargs: Any) -> Any:
        return super().forward(input_ids, labels)


def needs_count(outputs: Any, labels: Tensor, num_items_in_batch: Any) -> Tensor:
    """A `compute_loss_func` that cannot be called without a count."""
    logits = outputs["logits"].flatten(0, 1)
    return functional.cross_entropy(logits, labels.flatten(), reduction="sum") / num_items_in_batch


def answers() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    places = torch.randint(0, 7, (len(DATA), 2), generator=generator)
    pairs = zip(DATA, places, strict=True)
    return [{"input_ids": s["input_ids"], "start_positions": p[0], "end_positions": p[1]} for s, p in pairs]


def weighted() -> list[dict[str, Any]]:
    """The second process has none that weighs in its first micro-batch, and one more micro-batch in the last update."""
    return [{**row, "weight": float(index not in (2, 3))} for index, row in enumerate(DATA[:37])]


CASES: dict[str, Callable[[], tuple[nn.Module, Any, dict[str, Any]]]] = {
    "answers": lambda: (Answers(), answers(), {"label_names": ["start_positions", "end_positions"]}),
    "a sum": lambda: (Ctc(), DATA, {}),
    "divided by the count": lambda: (Scaled(), DATA, {}),
    "a mean over shifted targets": lambda: (Tagger(shifted=True), DATA, {}),
    "compute_loss divides": lambda: (TakesCount(), DATA, {"cls": Divides}),
    "compute_loss divides and multiplies": lambda: (TakesCount(), DATA, {"cls": Multiplies}),
    "compute_loss always multiplies": lambda: (TakesCount(), DATA, {"cls": MultipliesAlways}),
    "compute_loss_func needs the count": lambda: (TakesCount(), DATA, {"compute_loss_func": needs_count}),
    "compute_loss gathers": lambda: (
        TakesCount(),
        weighted(),
        {"cls": Gathers, "remove_unused_columns": False, "train_sampling_strategy": "sequential"},
    ),
}


def run(folder: Path, name: str, size: int, engine: str) -> dict[str, Any]:
    """Train eight samples an update, as one of `size` processes."""
    model, data, options = CASES[name]()
    trainer = make_trainer(
        folder / name,
        model.double(),
        data,
        eval_dataset=data[:17],  # in the last round one process of two has none
        per_device_train_batch_size=4 // size,
        per_device_eval_batch_size=4,
        gradient_accumulation_steps=2,
        optim="sgd",
        learning_rate=0.05,
        max_grad_norm=0,
        **({"parallel": engine} if size > 1 else {}),
        **options,
    )
    trainer.train()
    metrics = trainer.evaluate()
    weights = trainer.strategy.full_weights(trainer.model)
    return {
        "weights": torch.cat([weights[key].flatten() for key in sorted(weights)]),
        "loss": metrics["eval_loss"],
        "passes": getattr(trainer, "passes", 0),
    }


def main() -> None:
    folder, engine = Path(sys.argv[1]), sys.argv[2]
    size = int(os.environ["WORLD_SIZE"])
    found = {name: run(folder, name, size, engine) for name in CASES}
    torch.save(found, folder / f"{engine}-{os.environ['RANK']}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
