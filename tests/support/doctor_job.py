"""Diagnoses of runs on several processes: `python doctor_job.py FOLDER`. Each process writes `found-RANK.json`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from ragged import TakesAttentionMask, pad, texts
from small_models import Classifier, Tagger, classification, make_trainer, tagging, weights
from torch import Tensor, nn

from paceline import Trainer

RANK = int(os.environ.get("RANK", "0"))


class Forgets(Classifier):
    """The second process leaves a part of its gradient out."""

    def begin(self, x: Tensor) -> Tensor:
        hidden = super().begin(x)
        return hidden.detach() if RANK == 1 else hidden


class Doubled(Trainer):
    """Scales the loss by the number of processes, as for a sum over them."""

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        loss = loss * self.world.world_size
        return (loss, outputs) if return_outputs else loss


class CutWrongly(Classifier):
    """The processes that share a split layer weigh its output differently."""

    def logits(self, x: Tensor) -> Tensor:
        found = super().logits(x)
        return found * (1.5 if RANK == 1 else 1.0)


RAGGED = {"gradient_accumulation_steps": 2, "loss_weight": "shifted_tokens"}
PACKED = {"packing": "pack", "data_collator": pad}
FEW = {"per_device_train_batch_size": 4, "learning_rate": 1e-2}
Case = tuple[Callable[[], nn.Module], Callable[[], Any], dict[str, Any]]
CASES: dict[str, Case] = {
    "ddp": (lambda: Classifier(dropout=0.2), lambda: classification(48), {}),
    "ddp, accumulation, ragged": (lambda: Tagger(shifted=True), lambda: tagging(48), RAGGED),
    "fsdp, accumulation, ragged": (
        lambda: Tagger(shifted=True),
        lambda: tagging(48),
        {**RAGGED, "fsdp": True},
    ),
    "fsdp, packed": (TakesAttentionMask, texts, {**PACKED, "fsdp": True}),
    "cp, packed": (TakesAttentionMask, texts, {**PACKED, "parallel": {"cp": 2}}),
    "tp": (Classifier, lambda: classification(48), {"parallel": {"tp": 2}}),
    "wrong: one process forgets": (Forgets, lambda: classification(48), {}),
    "wrong: loss scaled": (Classifier, lambda: classification(48), {"cls": Doubled, "fsdp": True}),
    "wrong: a part scaled": (CutWrongly, lambda: classification(48), {"parallel": {"tp": 2}}),
}


def main(folder: Path) -> None:
    found = {}
    for name, (model, data, options) in CASES.items():
        trainer = make_trainer(folder, model(), data(), **{**FEW, **options})
        before, state = weights(trainer.model).clone(), torch.get_rng_state()
        diagnosis = trainer.doctor()
        found[name] = {
            "errors": [f"{each.check}: {each.seen}" for each in diagnosis.findings if each.severity == "error"],
            "checks": list(diagnosis.checks),
            "is_unchanged": torch.equal(before, weights(trainer.model)) and torch.equal(state, torch.get_rng_state()),
            "text": str(diagnosis),
        }
    (folder / f"found-{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
