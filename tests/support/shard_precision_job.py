"""Trainings of a sharded model with number formats of its own: `python shard_precision_job.py FOLDER`.

On one process the same casts are made by hand. See `shared_job`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import mesh_job
import torch
from shared_job import found, split, train, whole
from shared_options import Blocks
from small_models import classification, make_trainer
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.func import functional_call
from torch.nn import functional

from paceline import Trainer

WIDE = {"param_dtype": "bf16", "reduce_dtype": "fp32"}
EVALUATED = {"eval_dataset": classification(27, seed=5), "eval_strategy": "epoch"}
POLICIES: dict[str, dict[str, Any]] = {
    "exchanged in float32": {"policy": WIDE},
    "of torch": {"policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)},
    "all in bf16": {"policy": "bf16"},
    "with autocast": {"policy": WIDE, "bf16": True},
    "with loss scaling": {"policy": "fp16", "fp16": True},
    "offloaded": {"policy": WIDE, "fsdp": "full_shard offload"},
    "checkpointed": {"policy": WIDE, "activation_checkpointing": True},
    "one unit": {"policy": {**WIDE, "cast_forward_inputs": False}, "auto_wrap_policy": "NO_WRAP", "bf16": True},
}
FULL_EVALS: dict[str, dict[str, Any]] = {
    "bf16": {"bf16_full_eval": True},
    "fp16": {"fp16_full_eval": True},
    "offloaded": {"bf16_full_eval": True, "fsdp": "full_shard offload"},
    "tp": {"bf16_full_eval": True, "parallel": {"tp": 2}, "model": mesh_job.Reader},
    "cp": {"bf16_full_eval": True, "parallel": {"cp": 2}, "model": mesh_job.Reader},
}


class ByHand(nn.Module):
    """Computes with copies of a model's parameters, and widens what it returns."""

    def __init__(self, inner: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner, self.dtype = inner, dtype

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        copies = {name: parameter.to(self.dtype) for name, parameter in self.inner.named_parameters()}
        loss, logits = functional_call(self.inner, copies, (x.to(self.dtype), labels))
        return loss.float(), logits.float()


class Measured(nn.Module):
    """A regression that notes in which formats it is called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(8, 1)
        self.seen: set[tuple[torch.dtype, ...]] = set()

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        predicted = self.head(x).sum(-1)
        self.seen.add((x.dtype, labels.dtype, self.head.weight.dtype, predicted.dtype))
        return functional.mse_loss(predicted.float(), labels), predicted


def formats(trainer: Trainer) -> dict[str, Any]:
    """The dtypes of what stays: parameters, gradients' sums in the shards, state of the optimizer."""
    state = [value for entry in trainer.optimizer.state.values() for value in entry.values()]
    return {
        "kept": {tensor.dtype for tensor in (*trainer.model.parameters(), *state)},
        "plan": trainer._plan().describe(),
    }


def run(folder: Path, size: int, name: str, **more: Any) -> dict[str, Any]:
    """Train under one of the policies, in two micro-batches on each of two processes."""
    options = {**POLICIES[name], **EVALUATED, **more}
    policy, wrap = options.pop("policy"), options.pop("auto_wrap_policy", None)
    model: nn.Module = Blocks()
    if size == 1:
        options = {name: value for name, value in options.items() if name not in ("fsdp", "activation_checkpointing")}
        model = ByHand(model, torch.float16 if policy == "fp16" else torch.bfloat16)
    else:
        options = {"fsdp": True, **options, "fsdp_config": {"mixed_precision_policy": policy, "auto_wrap_policy": wrap}}
    shape = split(size, 4 // size)
    trainer = train(folder / name, model, classification(53), **shape, per_device_eval_batch_size=8 // size, **options)
    return found(trainer, **(formats(trainer) if size > 1 else {}))


def resume(folder: Path, size: int) -> dict[str, Any]:
    """Go on from a checkpoint in the middle: the weights are those of the whole run."""
    begun = run(folder, size, "all in bf16", save_strategy="steps", save_steps=2)
    start = str(folder / "all in bf16" / "checkpoint-2")
    shape = {**split(size, 4 // size), "per_device_eval_batch_size": 8 // size, "num_train_epochs": 2}
    options = {"fsdp": True, "fsdp_config": {"mixed_precision_policy": "bf16"}, **EVALUATED, **shape}
    trainer = make_trainer(folder / "resumed", Blocks(), classification(53), learning_rate=0.01, **options)
    trainer.train(resume_from_checkpoint=start)
    return {"begun": begun["weights"], "resumed": found(trainer)["weights"], "checkpoint": start}


def measured(folder: Path, size: int) -> dict[str, Any]:
    """Returns the inputs of a regression, in training and before it."""
    data = [{"x": sample["x"], "labels": torch.tensor(1000.3)} for sample in classification(8)]
    options = {"fsdp": True, "fsdp_config": {"mixed_precision_policy": {**WIDE, "output_dtype": "bf16"}}}
    model = Measured()
    trainer = make_trainer(folder / "measured", model, data, eval_dataset=data, **options)
    before = trainer.evaluate()["eval_loss"]
    evaluated, model.seen = model.seen, set()
    trainer.train()
    return {"evaluated": evaluated, "trained": model.seen, "loss": before}


def full_eval(folder: Path, size: int, name: str) -> dict[str, Any]:
    """Evaluate a trained model in 16 bits; whether its float32 weights are the same afterwards, bit for bit."""
    options = {"fsdp": True, "model": Blocks, "num_train_epochs": 1, "learning_rate": 1e-3, **FULL_EVALS[name]}
    is_text = options["model"] is mesh_job.Reader
    model = options.pop("model")()
    if size == 1 or "parallel" in options:
        del options["fsdp"]
    if size == 1:
        options.pop("parallel", None)
    data, options["eval_dataset"] = classification(24), classification(24, seed=5)
    if is_text:
        options["loss_weight"] = "shifted_tokens"  # in 16 bits a look at the loss tells too little
        data, options["eval_dataset"] = (mesh_job.texts(number, seed=number) for number in (24, 12))
    shape = split(size if "parallel" not in options else 1)
    batch = 4 // (size if "fsdp" in options else 1)
    trainer = train(folder / f"eval {name}", model, data, **shape, per_device_eval_batch_size=batch, **options)

    def local() -> list[Tensor]:
        own: list[Any] = [*trainer.model.parameters(), *trainer.model.buffers()]
        return [(tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach().clone() for tensor in own]

    before = local()
    output = trainer.predict(options["eval_dataset"])
    predictions: Any = output.predictions
    after = local()
    return {
        "loss": trainer.evaluate()["eval_loss"],
        "predictions": predictions[0] if isinstance(predictions, tuple) else predictions,
        "is_same": all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(before, after, strict=True)),
        "weights": torch.cat([whole(parameter).detach().flatten() for parameter in trainer.model.parameters()]),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    place, number = Path(sys.argv[1]), int(os.environ["WORLD_SIZE"])
    results: dict[str, Any] = {name: run(place, number, name) for name in POLICIES}
    results |= {f"eval {name}": full_eval(place, number, name) for name in FULL_EVALS}
    results |= {"resume": resume(place, number), "measured": measured(place, number)}
    torch.save(results, place / f"{os.environ['RANK']}.pt")
