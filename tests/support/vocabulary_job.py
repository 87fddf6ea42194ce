"""A language model whose classes are split over processes: `python vocabulary_job.py FOLDER`, on two or four."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, ClassVar

import torch
from linear_loss_job import METRICS
from small_models import losses, make_trainer
from torch import Tensor, nn
from torch.nn import functional

from paceline.pytorch.model import linear_loss
from paceline.pytorch.model.lazy_logits import LazyLogits
from paceline.pytorch.model.linear_head import Head
from paceline.pytorch.model.tensor_parts import whole

CLASSES, LENGTH = 30, 6
made: list[int] = []  # rows of the logits that were computed


def own_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    left, right = outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return functional.cross_entropy(left, right, reduction="sum") / num_items_in_batch


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # options of the model and of the arguments
    "bias": ({}, {"gradient_accumulation_steps": 2}),
    "smoothed, tied": ({"smoothing": 0.1, "is_tied": True}, {}),
    "terms": ({}, {"log_token_metrics": True, "z_loss_weight": 0.01}),
    "autocast": ({}, {"bf16": True}),
    "soft-capped": ({"softcap": 2.0}, {"log_token_metrics": True, "z_loss_weight": 0.01}),
    "class weights": ({"class_weights": True}, {"z_loss_weight": 0.01}),
    "soft-capped, class weights, smoothed": ({"softcap": 2.0, "class_weights": True, "smoothing": 0.1}, {}),
}
HEAD_UNCUT: dict[str, Any] = {"tp_plan": {"body": "colwise_gather_output"}}
AUTO: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bias": CASES["bias"],
    "terms": CASES["terms"],
    "uncut": ({}, {"tp_plan": {"body": "colwise_gather_output"}}),
    "own loss": ({}, {"compute_loss_func": own_loss, "loss_weight": None}),
    "soft-capped": CASES["soft-capped"],
    "one process reads": ({"reads_alone": True}, {}),
    "one process keeps": ({"keeps": True}, {}),
    "one process is hooked": ({}, {"is_hooked": True}),
}
SHARDED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{name: AUTO[name] for name in ("terms", "uncut", "own loss", "one process keeps")},
    "tied": ({"is_tied": True}, {}),
    "a unit": ({}, {"fsdp_config": {"min_num_params": 250}}),  # the head
}


class LanguageModel(nn.Module):
    """A causal model with a scale, and a constant for each class, after its head."""

    tp_plan: ClassVar[dict[str, str]] = {"body": "colwise_gather_output", "head": "colwise_gather_output"}

    def __init__(
        self,
        smoothing: float = 0.0,
        is_tied: bool = False,
        softcap: float | None = None,
        class_weights: bool = False,
        reads_alone: bool = False,
        keeps: bool = False,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.body = nn.Embedding(CLASSES, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, CLASSES, bias=not is_tied)
        if is_tied:
            self.head.weight = self.embedding.weight
        self.smoothing, self.softcap, self.reads_alone, self.keeps = smoothing, softcap, reads_alone, keeps
        self.class_weights = torch.linspace(0.5, 2, CLASSES) if class_weights else None
        self.seen: list[float] = []
        self.kept: Any = None

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(torch.tanh(self.body(self.embedding(input_ids)))).float() * 2.0
        if self.training and self.reads_alone and os.environ["RANK"] == "1":
            self.seen.append(float(logits.detach().std()))
        logits = logits + torch.linspace(-1, 1, CLASSES)
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        if self.training and self.keeps and os.environ["RANK"] == "1":
            self.kept = logits
        left, right = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        options: dict[str, Any] = {"label_smoothing": self.smoothing, "weight": self.class_weights}
        return {"loss": functional.cross_entropy(left, right, **options), "logits": logits}


def texts(number: int = 24) -> list[dict[str, Tensor]]:
    found = []
    for index in range(number):
        ids = torch.randint(0, CLASSES, (LENGTH,), generator=torch.Generator().manual_seed(index))
        labels = ids.clone()
        labels[: index % 4] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def trainer_of(folder: Path, model: nn.Module, option: bool | str, **options: Any) -> Any:
    return make_trainer(
        folder, model, texts(), max_steps=3, learning_rate=0.05, logging_steps=1, max_grad_norm=0.5,
        eval_dataset=texts(9), linear_cross_entropy=option,
        **{"parallel": {"tp": 2}, "loss_weight": "shifted_tokens", **options},
    )  # fmt: skip


def train(folder: Path, case: tuple[Any, Any], option: bool | str, **changes: Any) -> dict[str, Any]:
    options = {**case[1], **changes}
    model = LanguageModel(**case[0])
    if options.pop("is_hooked", False) and os.environ["RANK"] == "1":
        model.register_forward_hook(lambda module, inputs, outputs: module.seen.append(float(outputs["logits"].std())))
    trainer = trainer_of(folder, model, option, **options)
    made.clear()
    trainer.train()
    part = trainer.objective.linear_loss
    evaluated = trainer.evaluate()
    return {
        "losses": losses(trainer),
        "weights": torch.cat([whole(parameter).detach().flatten() for parameter in trainer.model.parameters()]),
        "eval_loss": evaluated["eval_loss"],
        "rows": [
            {name: row[name] for name in row if name.removeprefix("eval_") in METRICS}
            for row in (*trainer.state.log_history, evaluated)
        ],
        "by_chunks": None if part is None else part.is_right,
        "num_logits": max(made, default=0),
        "seen": model.seen,
        "kept": None if model.kept is None else model.kept.detach() + 0,
    }


def read(folder: Path) -> dict[str, Any]:
    """Returns the logits that both processes read."""
    batch = {name: torch.stack([text[name] for text in texts(4)]) for name in ("input_ids", "labels")}
    found: dict[str, Any] = {}
    for option in (False, True):
        trainer = trainer_of(folder, LanguageModel(), option)
        trainer.train()
        _, outputs = trainer.compute_loss(trainer.model, batch, return_outputs=True)
        found[f"is_lazy {option}"] = isinstance(outputs["logits"], LazyLogits)
        outputs["logits"].square().mean().backward()
        gradients = [whole(each.grad).flatten() for each in trainer.model.parameters() if each.grad is not None]
        found[f"logits {option}"] = outputs["logits"].detach() + 0
        found[f"gradient {option}"] = torch.cat(gradients)
    return found


def count_logits() -> None:
    """Notes the rows of all logits in `made`."""
    forward, logits = nn.Linear.forward, Head.logits

    def run(module: Any, rows: Any) -> Any:
        if module.out_features == CLASSES:
            made.append(rows.numel() // rows.shape[-1])
        return forward(module, rows)

    def compute(head: Head, rows: Tensor) -> Tensor:
        made.append(rows.numel() // rows.shape[-1])
        return logits(head, rows)

    nn.Linear.forward, Head.logits = run, compute  # type: ignore[method-assign]


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    linear_loss.CHUNK_BYTES = 1  # no logits are small
    count_logits()
    if int(os.environ["WORLD_SIZE"]) == 4:
        mesh = {"parallel": {"tp": 2, "dp_shard": 2}}
        auto = {}
        for name, case in SHARDED.items():
            auto[name] = [train(folder, case, option, **mesh) for option in (False, "auto")]
        torch.save({"auto": auto}, folder / f"{rank}.pt")
        return
    found = {name: [train(folder, case, option) for option in (False, True)] for name, case in CASES.items()}
    auto = {name: [train(folder, case, option) for option in (False, "auto")] for name, case in AUTO.items()}
    torch.save({"cases": found, "auto": auto, "read": read(folder)}, folder / f"{rank}.pt")


if __name__ == "__main__":
    main()
