"""A compiled and a plain training on several processes: `python compile_job.py FOLDER BACKEND ENGINE...`.

ENGINE+budget recomputes all activations of compiled blocks. Each process writes into `FOLDER/ENGINE-RANK.pt` what both
have found, and how much was compiled.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, ClassVar

import torch
from shared_job import ENGINES, Result, found
from small_models import make_trainer, tagging
from torch import Tensor, nn
from torch.nn import functional

from paceline.pytorch.model.compile_watch import CompileWatch

CLASSES = 11


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(12), nn.Linear(12, 24), nn.Linear(24, 12)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return result


class Layered(nn.Module):
    """A plain language model without attention: mean cross-entropy over the targets that are not -100."""

    tp_plan: ClassVar[dict[str, str]] = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}

    def __init__(self, num_layers: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(CLASSES, 12), nn.Linear(12, CLASSES)
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def run(folder: Path, engine: dict[str, Any], **options: Any) -> Result:
    """Trains three optimizer steps of two micro-batches on every process, and evaluates."""
    torch._dynamo.reset()
    watch = CompileWatch()
    trainer = make_trainer(
        folder,
        Layered(),
        tagging(48),
        eval_dataset=tagging(12, seed=5),
        max_steps=3,
        gradient_accumulation_steps=2,
        logging_steps=1,
        learning_rate=1e-2,
        eval_strategy="steps",
        eval_steps=3,
        **engine,
        **options,
    )
    trainer.train()
    watch.close()
    return {**found(trainer), "num_compilations": watch.num_compilations}


def main() -> None:
    folder, backend, rank = Path(sys.argv[1]), sys.argv[2], os.environ["RANK"]
    for name in sys.argv[3:]:
        engine, _, budget = name.partition("+")
        plain = run(folder / f"plain-{name}", ENGINES[engine])
        options: dict[str, Any] = {"torch_compile": True, "torch_compile_backend": backend}
        options |= {"activation_memory_budget": 0.0} if budget else {}
        compiled = run(folder / f"compiled-{name}", ENGINES[engine], **options)
        torch.save({"plain": plain, "compiled": compiled}, folder / f"{name}-{rank}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
