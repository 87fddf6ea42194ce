"""Token metrics and the z-loss where processes share sequences: see `mesh_job`.

    python terms_job.py FOLDER MESH...      MESH: as `parallel` takes it, "cp=2"

Each process writes what it found into `FOLDER/MESH-RANK.pt`: a dict by scenario.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from linear_loss_job import METRICS, rows_of
from mesh_job import Reader, llama, options_of, packed, padded_on_the_left, texts, with_prompts
from shared_job import Result, found, train
from torch import Tensor, nn
from torch.nn import functional

from paceline.args.mesh import Mesh, fill_mesh, read_parallel


class NamesItsHead(Reader):
    """With attention by a mode that ends with its forward, and a head that is known."""

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def own_loss(outputs: Any, labels: Tensor) -> Tensor:
    """Made outside of the model, of all its outputs."""
    return functional.cross_entropy(outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten())


MODELS: dict[str, Any] = {
    "padded on the left": (llama, padded_on_the_left),
    "targets at the end": (llama, with_prompts),  # the first shard has none
    "packed": (llama, packed),
    "own module": (Reader, with_prompts),
    "head": (NamesItsHead, texts),
    "own loss": (NamesItsHead, texts),
}


def run(folder: Path, name: str, mesh: Mesh, parallel: Any = None) -> Result:
    """Train a model, evaluate it; numbers and token metrics."""
    make, texts = MODELS[name]
    options = options_of(folder, name, mesh.data_size)
    options.update(log_token_metrics=True, z_loss_weight=0.01, logging_steps=2, eval_dataset=texts(11, seed=3))
    if name == "own loss":
        options.update(compute_loss_func=own_loss, loss_weight="shifted_tokens")
    if parallel is not None:
        options["parallel"] = parallel
    trainer = train(folder / name.replace(" ", "-"), make(), texts(29), **options)
    rows = [row for row in trainer.state.log_history if any(each.startswith("eval_") for each in row)]
    evaluated = [{each: row[f"eval_{each}"] for each in METRICS[:3]} for row in rows]
    return found(trainer, rows=rows_of(trainer), evaluated=evaluated)


def main() -> None:
    folder, rank, size = Path(sys.argv[1]), os.environ["RANK"], int(os.environ["WORLD_SIZE"])
    for said in sys.argv[2:]:
        sizes = read_parallel("parallel", said)
        assert isinstance(sizes, dict)
        mesh = fill_mesh(said, sizes, size)
        torch.save({name: run(folder / said, name, mesh, sizes) for name in MODELS}, folder / f"{said}-{rank}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
