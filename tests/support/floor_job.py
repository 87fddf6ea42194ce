"""Losses whose divisors have a floor, as one of several processes: a gradient, eval_loss, and what was warned of."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from small_models import RecordGradient, make_trainer, tagging
from torch import Tensor, nn
from torch.nn import functional

DATA = [sample for sample in tagging(40) if bool((sample["labels"] != -100).any())][:12]


class Head(nn.Module):
    """Logits over token ids; `make_loss` makes what is returned of them."""

    def __init__(self, zeros: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(11, 12), nn.Linear(12, 11)
        if zeros:
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(torch.tanh(self.embedding(input_ids)))
        return {"loss": self.make_loss(logits, labels), "logits": logits}

    def make_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(logits.mT, labels)


FLOORS: dict[str, Callable[[Tensor], Any]] = {
    "clamp": lambda number: number.clamp(min=20),
    "clamp, large": lambda number: number.clamp(min=45),
    "clamp, small": lambda number: number.clamp(min=5),
    "max": lambda number: max(int(number), 20),
    "clamp, and epsilon": lambda number: number.clamp(min=20) + 1e-8,
    "epsilon": lambda number: number + 1e-8,
    "one more": lambda number: number + 1,
    "clamp, beyond all": lambda number: number.clamp(min=1000),
}


class Floored(Head):
    """A mean over the targets that the module counts, or over the count that it is given."""

    takes_count = False

    def __init__(self, floor: str) -> None:
        super().__init__()
        self.divisor = FLOORS[floor]

    def make_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        total = functional.cross_entropy(logits.mT, labels, reduction="sum")
        return total / self.divisor((labels != -100).sum())


class FlooredCount(Floored):
    def forward(self, input_ids: Tensor, labels: Tensor, num_items_in_batch: Any = None) -> dict[str, Tensor]:  # type: ignore[override]
        logits = super().forward(input_ids, labels)["logits"]
        number = (labels != -100).sum() if num_items_in_batch is None else num_items_in_batch
        total = functional.cross_entropy(logits.mT, labels, reduction="sum")
        return {"loss": total / self.divisor(torch.as_tensor(number)), "logits": logits}


MAKERS: dict[str, type[Floored]] = {"own count": Floored, "given count": FlooredCount}
PARTS = [(3, 2), (1, 6)]  # samples of a micro-batch, and micro-batches of an update, on each of two processes


def run(folder: Path, maker: str, floor: str, parts: tuple[int, int], texts: list[str]) -> dict[str, Any]:
    """Makes one update of all the data, as one of two processes."""
    texts.clear()
    trainer = make_trainer(
        folder,
        MAKERS[maker](floor).double(),
        DATA,
        cls=RecordGradient,
        per_device_train_batch_size=parts[0],
        gradient_accumulation_steps=parts[1],
        max_grad_norm=0,
        max_steps=1,
        learning_rate=0.0,
        parallel="ddp",
    )
    trainer.train()
    has_warned = any("loss_weight" in text for text in texts)
    texts.clear()
    # another Trainer: one that has warned does not do so again
    model = MAKERS[maker](floor).double()
    again = make_trainer(folder, model, eval_dataset=DATA, per_device_eval_batch_size=parts[0], parallel="ddp")
    loss = again.evaluate()["eval_loss"]
    warned_again = any("loss_weight" in text for text in texts)
    return {"gradient": trainer.gradients[0], "warned": has_warned, "eval_loss": loss, "eval_warned": warned_again}


class Texts(logging.Handler):
    """Keeps the texts of log records."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def main() -> None:
    folder = Path(sys.argv[1])
    handler = Texts()
    logging.getLogger("paceline").addHandler(handler)
    cases = [(maker, floor, parts) for maker in MAKERS for floor in FLOORS for parts in PARTS]
    found = {case: run(folder / "out", *case, handler.texts) for case in cases}
    torch.save(found, folder / f"{os.environ['RANK']}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
