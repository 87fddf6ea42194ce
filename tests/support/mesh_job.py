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

from paceline.args.errors import UnsupportedOption
from paceline.args.mesh import Mesh, fill_mesh, read_parallel

SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 4}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}


def llama(**options: Any) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, **options))


def qwen(**options: Any) -> torch.nn.Module:
    """Its heads are normalized one by one, with weights that all of them share."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, **HEADS, **options))


def mistral() -> torch.nn.Module:
    """Each token attends to the last four."""
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**SIZES, **HEADS, sliding_window=4))


def gemma() -> torch.nn.Module:
    """Each token attends to the last three in the first layer, and to all in the second."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    layers = ["sliding_attention", "full_attention"]
    return Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, **HEADS, sliding_window=3, layer_types=layers))


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


class OwnMean(Reader):
    """Divides by the number of its targets by itself: without any, that is no number."""

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, position_ids: Tensor | None = None,
        shift_labels: Tensor | None = None,
    ) -> Any:  # fmt: skip
        logits = super().forward(input_ids, None, position_ids)["logits"]
        if shift_labels is None:
            assert labels is not None
            shift_labels = functional.pad(labels, (0, 1), value=-100)[:, 1:]
        is_target = shift_labels != -100
        losses = -logits.log_softmax(-1).gather(-1, shift_labels.clamp(min=0)[..., None])[..., 0]
        return {"loss": (losses * is_target).sum() / is_target.sum(), "logits": logits}


class Convolved(Reader):
    """Its tokens meet the two before them outside of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.near = nn.Conv1d(16, 16, 3)
        self.words.register_forward_hook(self._mix)

    def _mix(self, module: nn.Module, args: Any, x: Tensor) -> Tensor:
        return x + self.near(functional.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2)


class SumOfLosses(Reader):
    """Its loss is no mean over targets."""

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, position_ids: Tensor | None = None,
        shift_labels: Tensor | None = None,
    ) -> Any:  # fmt: skip
        outputs = super().forward(input_ids, labels, position_ids, shift_labels)
        given = shift_labels if shift_labels is not None else labels[:, 1:] if labels is not None else None
        if given is not None:
            outputs["loss"] = outputs["loss"] * (given != -100).sum()
        return outputs


def opt() -> torch.nn.Module:
    """Counts its places from the first token that is there."""
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 2, "word_embed_proj_dim": 16}
    # the gradient of a key's bias is rounding only, which AdamW makes as large as any
    options = {"num_attention_heads": 4, "max_position_embeddings": 64, "dropout": 0.0, "enable_bias": False}
    return OPTForCausalLM(OPTConfig(**sizes, **options))


def padded_on_the_left(number: int, width: int = 9, seed: int = 1) -> list[dict[str, Tensor]]:
    """As `texts`, turned round; the first token that is there is a target too."""
    return [{name: value.flip(0) for name, value in text.items()} for text in texts(number, width, seed)]


def with_prompts(number: int, width: int = 9, seed: int = 1) -> list[dict[str, Tensor]]:
    """Texts of which the last tokens only are targets: the first part of a sequence has none."""
    samples = texts(number, width, seed)
    for sample in samples:
        sample["labels"] = torch.where(torch.arange(width) < width - 3, -100, sample["input_ids"])
    return samples


def of_one_length(number: int, width: int = 9, seed: int = 1) -> list[dict[str, Tensor]]:
    """Without padding, and without a mask."""
    return [{"input_ids": text["input_ids"], "labels": text["labels"]} for text in texts(number, width, seed)]


def packed(number: int, width: int = 9, seed: int = 1) -> list[dict[str, Tensor]]:
    """Two texts in a row, the second from the fifth token on."""
    places = torch.cat([torch.arange(5), torch.arange(width - 5)])
    return [{**text, "position_ids": places} for text in of_one_length(number, width, seed)]


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
    "smoothed": llama,
    "smoothed own module": Reader,
    "padded on the left": llama,
    "targets at the end": OwnMean,
}
DATA: dict[str, Any] = {
    "opt": padded_on_the_left,
    "padded on the left": padded_on_the_left,
    "targets at the end": with_prompts,
    "full": of_one_length,
    "packed": packed,
    "windows": of_one_length,
    "windows of packed": packed,
    "windows of some layers": padded_on_the_left,
}
# of sequences, only
IN_PARTS = {
    "opt": opt, "full": llama, "packed": llama,
    "windows": mistral, "windows of packed": mistral, "windows of some layers": gemma,
}  # fmt: skip
REFUSED = {"convolved": Convolved, "sum of losses": SumOfLosses}
FEW = ("tied llama", "own module", "targets at the end")  # on every mesh
LONG = ("tied llama",)  # enough updates to tell whether weights stay the same


def own_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """Made outside of the model, of all its outputs."""
    left, right = outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return functional.cross_entropy(left, right, reduction="sum") / num_items_in_batch


def data_of(name: str) -> Any:
    """Returns the function that makes the texts of a scenario."""
    return DATA.get(name, texts)


def options_of(folder: Path, name: str, parts: int) -> dict[str, Any]:
    texts = data_of(name)
    return {
        **split(parts, 2, 12),
        "eval_dataset": texts(11, seed=3),
        "eval_strategy": "epoch",
        "per_device_eval_batch_size": 6 // parts,
        "max_grad_norm": 0.5,
        "num_train_epochs": 7 if name in LONG else 2,
        "include_num_input_tokens_seen": "all",
        "label_smoothing_factor": 0.1 if name.startswith("smoothed") else 0.0,
        "compute_loss_func": own_loss if name == "own loss" else None,
    }


def run(folder: Path, name: str, mesh: Mesh, parallel: Any = None, **options: Any) -> Result:
    """Train a model, evaluate it, predict with it."""
    given = {**options_of(folder, name, mesh.data_size), **options}
    if parallel is not None:
        given["parallel"] = parallel
    texts, model = data_of(name), {**MODELS, **IN_PARTS}[name]()
    trainer = train(folder / name.replace(" ", "-"), model, texts(29), **given)
    assert (trainer.get_cp_size(), trainer.get_sp_size(), trainer.get_tp_size()) == (mesh.cp, mesh.sp, mesh.tp)
    output = trainer.predict(texts(7, seed=4))
    return found(
        trainer, predictions=output.predictions, labels=output.label_ids, test_loss=[output.metrics["test_loss"]]
    )


def refusal_of(folder: Path, model: nn.Module, parallel: Any) -> str:
    """Returns the error of a model; "" if there is none."""
    trainer = make_trainer(folder, model, texts(8), per_device_train_batch_size=4, max_steps=1, parallel=parallel)
    try:
        trainer.train()
    except UnsupportedOption as error:
        return str(error)
    return ""


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
        names = FEW
        if size == 2 and max(mesh.num_parts, mesh.tp) > 1:
            names = (*MODELS, *(IN_PARTS if mesh.num_parts == 2 else ()))
        if mesh.sp == 4:
            names = ("tied llama",)  # with fewer heads of keys than processes; the others have two heads in all
        results: dict[str, Any] = {name: run(folder / said, name, mesh, sizes) for name in names}
        if size == 2 and mesh.num_parts == 2:
            results["refused"] = {name: refusal_of(folder / name, make(), sizes) for name, make in REFUSED.items()}
        torch.save(results, folder / f"{said}-{rank}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
