"""A language model that FSDP shards, with and without logits: `python sharded_loss_job.py FOLDER`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from linear_loss_job import LanguageModel, numbers, texts, train
from torch import Tensor, nn
from torch.nn import functional

from paceline import Trainer, TrainerCallback
from paceline.pytorch.model import linear_loss

FSDP: dict[str, Any] = {"parallel": "fsdp", "max_grad_norm": 0.5}
BF16 = {"mixed_precision_policy": {"param_dtype": "bfloat16", "reduce_dtype": "float32", "output_dtype": "float32"}}
UNIT = {"fsdp_config": {"min_num_params": 200}}  # the head


class Block(nn.Linear):
    """A unit."""


class Nested(LanguageModel):
    """With units inside of the model."""

    _no_split_modules = ("Block",)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.body = nn.Sequential(self.body, Block(8, 8), Block(8, 8))


class EmbeddingIsUnit(Nested):
    """Its plan makes a unit of the embedding that the head is tied to, as that of BERT does."""

    _no_split_modules = ("Block", "Embedding")


class StopAt(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == 2


class ReadsKept(Trainer):
    """Adds a term of logits that the model keeps."""

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **options: Any) -> Any:
        found = super().compute_loss(model, inputs, return_outputs, **options)
        if return_outputs or not model.training:
            return found
        return found + 0.1 * self.model.kept.square().mean()  # type: ignore[union-attr, operator]


def own_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    left, right = outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return functional.cross_entropy(left, right, reduction="sum") / num_items_in_batch


def lora() -> Any:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(target_modules=["body.0", "head"], r=3, lora_alpha=5)
    model: Any = get_peft_model(Nested(is_tied=False), config)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


# name -> the model, its Trainer and its options
CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "tied, accumulated": (Nested, Trainer, {"gradient_accumulation_steps": 2, "max_steps": 3}),
    "tied to a unit": (EmbeddingIsUnit, Trainer, {}),
    "untied": (lambda: Nested(is_tied=False, dropout=0.2), Trainer, {}),
    "gathered until the backward pass": (Nested, Trainer, {"fsdp": "shard_grad_op"}),
    "bf16 parameters": (Nested, Trainer, {"fsdp_config": BF16}),
    "lora": (lora, Trainer, {}),
    "kept": (lambda: Nested(keeps_logits=True), ReadsKept, {}),
    "smoothed": (Nested, Trainer, {"label_smoothing_factor": 0.1}),
    "smoothed, bf16 parameters": (Nested, Trainer, {"label_smoothing_factor": 0.1, "fsdp_config": BF16}),
    "own loss": (Nested, Trainer, {"compute_loss_func": own_loss}),
    "a unit": (lambda: Nested(is_tied=False), Trainer, {**UNIT, "gradient_accumulation_steps": 2}),
    "a unit, kept": (lambda: Nested(is_tied=False, keeps_logits=True), ReadsKept, UNIT),
}


def run(folder: Path, name: str, option: bool | str) -> dict[str, Any]:
    make, kind, options = CASES[name]
    return numbers(train(folder / name, make(), kind, linear_cross_entropy=option, **{**FSDP, **options}))


def resumed(folder: Path) -> dict[str, Any]:
    options = {**FSDP, "save_strategy": "steps", "save_steps": 1, "max_steps": 4}
    whole = train(folder / "one", Nested(dropout=0.1), Trainer, **options)
    train(folder / "two", Nested(dropout=0.1), Trainer, callbacks=[StopAt()], **options)
    last = str(folder / "two" / "checkpoint-2")
    again = train(folder / "two", Nested(dropout=0.1), Trainer, resume=last, **options)
    return {"whole": numbers(whole), "resumed": numbers(again)}


def refused(folder: Path) -> dict[str, str]:
    """Returns the message of the error about logits that are read after the forward."""
    found = {}
    trainer = train(folder / "read", Nested(), Trainer, linear_cross_entropy=True, **FSDP)
    batch: dict[str, Tensor] = {name: torch.stack([text[name] for text in texts(4)]) for name in texts(1)[0]}
    _, outputs = trainer.compute_loss(trainer.model, batch, return_outputs=True)
    try:
        outputs["logits"].sum()
    except RuntimeError as error:
        found["read"] = str(error)
    return found


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    linear_loss.CHUNK_BYTES = 1  # no logits are small
    if int(os.environ["WORLD_SIZE"]) == 4:
        hybrid = {**FSDP, "fsdp_config": {"replicate": 2}}
        found: Any = {"hybrid": [numbers(train(folder, Nested(), Trainer, linear_cross_entropy=option, **hybrid))
                                 for option in (False, "auto")]}  # fmt: skip
    else:
        found = {name: [run(folder, name, option) for option in (False, "auto")] for name in CASES}
        found = {"cases": found, "resume": resumed(folder), "refused": refused(folder)}
    torch.save(found, folder / f"{rank}.pt")


if __name__ == "__main__":
    main()
