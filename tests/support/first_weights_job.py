"""Models whose values only the first process has: `python first_weights_job.py FOLDER MODE...`.

Each process writes what it found to `FOLDER/MODE-RANK.pt`.
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from shared_job import found, split, train, whole
from small_models import Tagger, make_trainer, tagging
from torch import Tensor, nn
from torch.nn import functional

from paceline import TrainingArguments

FROM_FIRST = {"fsdp": True, "fsdp_config": {"cpu_ram_efficient_loading": True}}
WIDTH, NUM_LAYERS = 2048, 12  # of the large model: 16 MiB a layer


class Tied(nn.Module):
    """Repeated blocks, an embedding that is the head too, a persistent buffer and one that is not."""

    scale: Tensor
    shift: Tensor

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(11, 8)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)])
        self.head = nn.Linear(8, 11)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.rand(8) + 0.5)
        self.register_buffer("shift", torch.rand(8), persistent=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.embedding(input_ids) * self.scale + self.shift
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(hidden)
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def begin(folder: Path, model: nn.Module, size: int, **options: Any) -> dict[str, Any]:
    """Train; evaluated, clipped, with checkpoints. Returns what it came to."""
    options = {**split(size, 2), "max_grad_norm": 0.5, "save_strategy": "steps", "save_steps": 4, **options}
    options |= {"eval_dataset": tagging(17, seed=3), "eval_strategy": "epoch", "per_device_eval_batch_size": 6 // size}
    trainer = train(folder, model, tagging(53), **options)
    is_tied = getattr(model, "embedding", None) is None or model.head.weight is model.embedding.weight  # type: ignore[union-attr]
    return found(trainer, is_tied=is_tied)


def make(mode: str, rank: int) -> nn.Module:
    """The model, as this process has it before training."""
    if mode == "other values":
        return Tied(seed=rank)
    with torch.device("meta") if rank else nullcontext():
        return Tied(seed=0)


def evaluated(folder: Path, model: nn.Module, options: dict[str, Any]) -> dict[str, Any]:
    """Without training before it."""
    trainer = make_trainer(folder, model, tagging(8), eval_dataset=tagging(17, seed=3), **options)
    return {"eval_loss": trainer.evaluate()["eval_loss"]}


def resumed(folder: Path, model: nn.Module) -> dict[str, Any]:
    """Gone on with from the fourth update of the run "meta"; the checkpoint's values replace those of the model."""
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    options = {**split(2, 2), **FROM_FIRST, "learning_rate": 0.01, "num_train_epochs": 2, "max_grad_norm": 0.5}
    trainer = make_trainer(folder / "resumed", model, tagging(53), **options)
    trainer.train(resume_from_checkpoint=str(folder / "meta" / "checkpoint-4"))
    return {"weights": trainer.accelerator.get_state_dict(trainer.model), "step": trainer.state.global_step}


def pretrained(folder: Path, size: int) -> dict[str, Any]:
    """A model of transformers, loaded as docs/processes.md says."""
    import transformers

    options = FROM_FIRST if size > 1 else {}
    args = TrainingArguments(output_dir=str(folder / "joined"), use_cpu=True, report_to="none", **options)
    model: Any
    if args.process_index == 0:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder / "pretrained")
    else:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(
                transformers.AutoConfig.from_pretrained(folder / "pretrained")
            )
    where = {parameter.device.type for parameter in model.parameters()}
    result = begin(folder / "loaded", model, size, **options)
    return {**result, "devices": where, "frequencies": model.model.rotary_emb.inv_freq}


class Large(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def peak_of(name: str = "VmHWM") -> int:
    """Resident bytes of this process: at most since it was reset, or now (VmRSS)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(name)))


def memory(folder: Path, rank: int) -> dict[str, Any]:
    """Returns the additional resident bytes while a large model was made and sharded, and its values."""
    trainer = make_trainer(folder / "small", make("meta", rank), tagging(8), **FROM_FIRST)
    trainer.strategy.prepare(trainer.model, None)  # so that what happens once per process is over
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    before = peak_of("VmRSS")
    with torch.device("meta") if rank else nullcontext():
        model = Large()
    trainer.strategy.prepare(model, None)
    peak = peak_of() - before
    left = peak_of("VmRSS") - before
    return {"peak": peak, "left": left, "sums": [whole(parameter).sum() for parameter in model.parameters()]}


def refused(folder: Path, rank: int) -> dict[str, Any]:
    """Returns the errors of a first process without values, of different models, and of a missing option."""
    cases = {
        "empty": (lambda: make("meta", 1), FROM_FIRST),
        "different": (lambda: make("meta", rank).double() if rank else make("meta", 0), FROM_FIRST),
        "unasked": (lambda: make("meta", 1), {"fsdp": True}),
    }
    said = {}
    for name, (make_model, options) in cases.items():
        try:
            make_trainer(folder / name, make_model(), tagging(8), **options).train()  # type: ignore[arg-type]
        except ValueError as error:
            said[name] = str(error)
    return said


def alike(folder: Path, rank: int, engine: str) -> dict[str, Any]:
    """A model that each process made with another seed; nothing was asked for."""
    torch.manual_seed(rank)
    return begin(folder, Tagger(), 2 if engine == "fsdp" else 1, parallel=engine)


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    for mode in sys.argv[2:]:
        if mode in ("meta", "other values"):
            name = {"other values": "sync_module_states"}.get(mode, "cpu_ram_efficient_loading")
            options = {"fsdp": True, "fsdp_config": {name: True}}
            result = begin(folder / mode, make(mode, rank), 2, **options)
        elif mode in ("fsdp", "pipeline"):
            result = alike(folder / mode, rank, mode)
        elif mode == "offloaded":
            result = begin(folder / mode, make("meta", rank), 2, **{**FROM_FIRST, "fsdp": "full_shard offload"})
        elif mode == "evaluated":
            result = evaluated(folder / mode, make("meta", rank), FROM_FIRST)
        elif mode == "resumed":
            result = resumed(folder, make("meta", rank))
        elif mode == "pretrained":
            result = pretrained(folder, 2)
        else:
            result = {"memory": memory, "refused": refused}[mode](folder, rank)
        torch.save(result, folder / f"{mode}-{rank}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
