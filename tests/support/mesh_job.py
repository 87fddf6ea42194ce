"""Language models of transformers, and modules with attention of their own, in a mesh: see `shared_job`.

    python mesh_job.py FOLDER MESH...       MESH: as `parallel` takes it, "tp=2"; or with a checkpoint, or "start":
                                            "tp=2@FOLDER", "tp=2@start"

Each process writes what it found into `FOLDER/MESH-RANK.pt`: a dict by scenario; of a run that begins, or goes on from
a checkpoint, into `FOLDER/MESH@start-RANK.pt` and `FOLDER/MESH@from-RANK.pt`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, ClassVar

import torch
from shared_job import Result, found, split, train
from small_models import make_trainer
from torch import Tensor, nn
from torch.nn import functional

from paceline.args.mesh import Mesh, fill_mesh, read_parallel

SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 4}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}


def llama(**options: Any) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, **options))


def qwen(**options: Any) -> torch.nn.Module:
    """Its heads are normalised one by one, with weights that all of them share."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, **HEADS, **options))


class Reader(nn.Module):
    """A causal language model of plain modules: targets come shifted, positions come from outside."""

    tp_plan: ClassVar[dict[str, str]] = {"qkv": "replicate", "head": "colwise_gather_output"}

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        size = SIZES["vocab_size"]
        self.words, self.places = nn.Embedding(size, 16), nn.Embedding(32, 16)
        self.qkv, self.head = nn.Linear(16, 48, bias=False), nn.Linear(16, size)

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, position_ids: Tensor | None = None,
        shift_labels: Tensor | None = None,
    ) -> Any:  # fmt: skip
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None]
        x = self.words(input_ids) + self.places(position_ids)
        query, key, value = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        logits = self.head(x + seen.transpose(1, 2).flatten(-2))
        if labels is None and shift_labels is None:
            return {"logits": logits}
        if shift_labels is None:
            shift_labels = functional.pad(labels, (0, 1), value=-100)[:, 1:]
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), shift_labels.flatten()), "logits": logits}


def texts(number: int, width: int = 9, seed: int = 1) -> list[dict[str, Tensor]]:
    """Token ids with padding on the right, which is no target, and some other tokens that are none."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for _ in range(number):
        length = int(torch.randint(2, width + 1, (1,), generator=generator))
        ids = torch.randint(1, SIZES["vocab_size"], (width,), generator=generator)
        mask = (torch.arange(width) < length).long()
        labels = torch.where(mask.bool() & (torch.rand(width, generator=generator) < 0.8), ids, -100)
        samples.append({"input_ids": ids * mask, "attention_mask": mask, "labels": labels})
    return samples


MODELS: dict[str, Any] = {
    "llama": llama,
    "tied llama": lambda: llama(tie_word_embeddings=True),
    "qwen": qwen,
    "own module": Reader,
    "own loss": Reader,
}
FEW = ["tied llama", "own module"]


def own_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """Made outside of the model, of all its outputs."""
    left, right = outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return functional.cross_entropy(left, right, reduction="sum") / num_items_in_batch


def options_of(folder: Path, name: str, parts: int) -> dict[str, Any]:
    return {
        **split(parts, 2, 12),
        "eval_dataset": texts(11, seed=3),
        "eval_strategy": "epoch",
        "per_device_eval_batch_size": 6 // parts,
        "max_grad_norm": 0.5,
        "include_num_input_tokens_seen": "all",
        "compute_loss_func": own_loss if name == "own loss" else None,
    }


def run(folder: Path, name: str, mesh: Mesh, parallel: Any = None, **options: Any) -> Result:
    """Train a model, evaluate it, predict with it."""
    given = {**options_of(folder, name, mesh.data_size), **options}
    if parallel is not None:
        given["parallel"] = parallel
    trainer = train(folder / name.replace(" ", "-"), MODELS[name](), texts(29), **given)
    output = trainer.predict(texts(7, seed=4))
    return found(
        trainer, predictions=output.predictions, labels=output.label_ids, test_loss=[output.metrics["test_loss"]]
    )


def go_on(folder: Path, mesh: Mesh, parallel: Any, checkpoint: Path | None, **options: Any) -> Result:
    """Train with checkpoints, or from one on; weights and what is logged after it."""
    given = {**split(mesh.data_size, 2, 12), "save_strategy": "steps", "save_steps": 2, "parallel": parallel, **options}
    trainer = make_trainer(folder, MODELS["tied llama"](), texts(29), num_train_epochs=2, learning_rate=0.01, **given)
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint is not None else None)
    trainer.save_model(str(folder / "model"))
    return found(trainer)


def main() -> None:
    folder, rank, size = Path(sys.argv[1]), os.environ["RANK"], int(os.environ["WORLD_SIZE"])
    for word in sys.argv[2:]:
        said, _, checkpoint = word.partition("@")
        sizes = read_parallel("parallel", said)
        assert isinstance(sizes, dict)
        mesh = fill_mesh(said, sizes, size)
        if checkpoint:
            name = f"{said}@{'from' if checkpoint != 'start' else checkpoint}"
            result = go_on(folder / name, mesh, sizes, None if checkpoint == "start" else Path(checkpoint))
            torch.save(result, folder / f"{name}-{rank}.pt")
            continue
        names = list(MODELS) if size == 2 else FEW
        torch.save({name: run(folder / said, name, mesh, sizes) for name in names}, folder / f"{said}-{rank}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
