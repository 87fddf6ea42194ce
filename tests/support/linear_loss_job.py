"""A language model trained by one of several processes, whose loss may be computed without logits.

    python linear_loss_job.py FOLDER [CASE...]

Each process writes its numbers by case into `FOLDER/RANK.pt`; without names, those of the cases without DeepSpeed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from small_models import RecordGradient, losses, make_trainer
from torch import Tensor, nn
from torch.nn import functional

from paceline import Trainer, TrainerCallback
from paceline.pytorch.model import linear_loss

CLASSES, LENGTH, STEPS = 29, 6, 5
METRICS = ("mean_token_accuracy", "entropy", "perplexity", "z_loss")


class LanguageModel(nn.Module):
    """A causal model with the forward of those of transformers, and a tied head.

    Attributes:
        kept: the logits of the last pass, if `keeps_logits`; read by `Reads` after the optimizer step.
        reads_from: the first pass whose logits are read in the forward pass.
    """

    def __init__(
        self,
        keeps_logits: bool = False,
        reads_from: float = float("inf"),
        dropout: float = 0.0,
        is_tied: bool = True,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.body = nn.Embedding(CLASSES, 8), nn.Linear(8, 8)
        self.head, self.drop = nn.Linear(8, CLASSES, bias=False), nn.Dropout(dropout)
        if is_tied:
            self.head.weight = self.embedding.weight
        self.keeps_logits, self.reads_from = keeps_logits, reads_from
        self.kept: Any = None
        self.step = 0  # optimizer steps so far, set by `Reads`

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(self.drop(torch.tanh(self.body(self.embedding(input_ids)))))
        if self.training and self.keeps_logits:
            self.kept = logits
        if self.step >= self.reads_from:
            logits = logits + 0.1 * logits.square()
        if labels is None:
            return {"logits": logits}
        left = logits.float()[..., :-1, :].contiguous().view(-1, CLASSES)
        return {"loss": functional.cross_entropy(left, labels[..., 1:].reshape(-1)), "logits": logits}


class Reads(TrainerCallback):
    """Reads logits that the model kept, after the optimizer step, and counts the steps of the model."""

    def __init__(self, model: LanguageModel) -> None:
        self.model, self.sums = model, []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.model.step = state.global_step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.model.kept is not None:
            self.sums.append(float(self.model.kept.detach().sum()))


def texts(number: int = 40) -> list[dict[str, Tensor]]:
    """Texts with 2 to `LENGTH` targets each."""
    found = []
    for index in range(number):
        ids = torch.randint(0, CLASSES, (LENGTH,), generator=torch.Generator().manual_seed(index))
        labels = ids.clone()
        labels[: index % 4] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def train(folder: Path, model: LanguageModel, cls: Any = RecordGradient, **options: Any) -> Any:
    """Trains for `STEPS` steps; options of the constructor and of the arguments may be mixed."""
    reads = Reads(model)
    callbacks = [reads, *options.pop("callbacks", [])]
    resume = options.pop("resume", None)
    defaults = {"max_steps": STEPS, "learning_rate": 0.05, "eval_dataset": texts(9), "report_to": "none"}
    trainer = make_trainer(folder, model, texts(), cls=cls, callbacks=callbacks, **{**defaults, **options})
    trainer.train(resume_from_checkpoint=resume)
    trainer.kept_sums = reads.sums  # type: ignore[attr-defined]
    return trainer


def rows_of(trainer: Any) -> list[dict[str, float]]:
    """Returns the metrics of the log rows that have any."""
    found = [{name: row[name] for name in METRICS if name in row} for row in trainer.state.log_history]
    return [row for row in found if row]


def numbers(trainer: Any) -> dict[str, Any]:
    """Returns the numbers of a run, and the result of the check of its loss."""
    part = trainer.objective.linear_loss
    evaluated = trainer.evaluate()
    return {
        "losses": losses(trainer),
        "weights": torch.cat([each.full_tensor().flatten() if hasattr(each, "full_tensor") else each.flatten()
                              for each in trainer.model.state_dict().values()]),
        "eval_loss": evaluated["eval_loss"],
        "evaluated": {name: evaluated[f"eval_{name}"] for name in METRICS if f"eval_{name}" in evaluated},
        "by_chunks": None if part is None else part.is_right,
        "rows": rows_of(trainer),
    }  # fmt: skip


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    linear_loss.CHUNK_BYTES = 1  # no logits are small
    plain: dict[str, Any] = {"parallel": "ddp", "max_grad_norm": 0.5}
    cases: dict[str, tuple[LanguageModel, dict[str, Any]]] = {
        "logits": (LanguageModel(), {**plain, "linear_cross_entropy": False}),
        "chunks": (LanguageModel(), plain),
        "unused parameters": (LanguageModel(), {**plain, "ddp_find_unused_parameters": True}),
        "smoothed logits": (
            LanguageModel(),
            {**plain, "label_smoothing_factor": 0.1, "linear_cross_entropy": False},
        ),
        "smoothed": (LanguageModel(), {**plain, "label_smoothing_factor": 0.1}),
        "one rank keeps them": (LanguageModel(keeps_logits=rank == 1), plain),
        "fsdp": (LanguageModel(), {"parallel": "fsdp", "max_grad_norm": 0.5}),
        "terms": (LanguageModel(), {**plain, "log_token_metrics": True, "z_loss_weight": 0.01}),
        "terms, fsdp": (LanguageModel(), {"parallel": "fsdp", "max_grad_norm": 0.5, "log_token_metrics": True}),
    }
    names = sys.argv[2:] or [*cases]
    zero = {"zero_optimization": {"stage": 2}, "gradient_clipping": "auto", "zero_force_ds_cpu_optimizer": False}
    cases["terms, deepspeed"] = (LanguageModel(), {**cases["terms"][1], "parallel": None, "deepspeed": zero})
    found = {name: numbers(train(folder / name, cases[name][0], Trainer, **cases[name][1])) for name in names}
    torch.save(found, folder / f"{rank}.pt")


if __name__ == "__main__":
    main()
