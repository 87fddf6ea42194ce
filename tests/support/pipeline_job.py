"""Trainings of models in stages, for tests: alone, and on several processes as a pipeline.

    python pipeline_job.py FOLDER NAME...     NAME: a scenario, or from=CHECKPOINT

Each process writes what it found into `FOLDER/RANK.pt`: a dict by name.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from shared_job import split
from small_models import make_trainer, tagging
from torch import Tensor, nn
from torch.nn import functional

from paceline import Trainer, TrainerCallback
from paceline.pytorch.data.loading import split_batch

Result = dict[str, Any]


class Block(nn.Module):
    """A residual layer over `(batch, width, size)`."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(size, 2 * size), nn.Linear(2 * size, size)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.outer(torch.tanh(self.inner(x)))
        return result


class Deep(nn.Module):
    """Token ids through an embedding, some blocks and a head; the mean loss over ragged targets, shifted by one."""

    def __init__(self, num_blocks: int = 4, classes: int = 11, size: int = 12, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(classes, size)
        self.blocks = nn.ModuleList(Block(size) for _ in range(num_blocks))
        self.head = nn.Linear(size, classes, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return finish(self.head(x), labels)

    def pipeline_stages(self, num_stages: int) -> list[nn.Module]:
        each = -(-len(self.blocks) // num_stages)
        stages: list[nn.Module] = [nn.Sequential(*self.blocks[i * each : (i + 1) * each]) for i in range(num_stages)]
        stages[0] = First(self.embedding, stages[0])
        stages[-1] = Last(stages[-1], self.head)
        return stages


def finish(logits: Tensor, labels: Tensor | None) -> dict[str, Tensor]:
    if labels is None:
        return {"logits": logits}
    loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    return {"loss": loss, "logits": logits}


class First(nn.Module):
    def __init__(self, embedding: nn.Module, blocks: nn.Module) -> None:
        super().__init__()
        self.embedding, self.blocks = embedding, blocks

    def forward(self, input_ids: Tensor) -> Tensor:
        result: Tensor = self.blocks(self.embedding(input_ids))
        return result


class Last(nn.Module):
    def __init__(self, blocks: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.blocks, self.head = blocks, head

    def forward(self, hidden: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        return finish(self.head(self.blocks(hidden)), labels)


class RecordGradients(TrainerCallback):
    """Keeps the gradients of the first update that are on this process, by name."""

    def __init__(self) -> None:
        self.gradients: dict[str, Tensor] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 0:
            named = model.named_parameters()
            self.gradients = {name: p.grad.clone() for name, p in named if p.grad is not None}


class ThawsEmbedding(TrainerCallback):
    """Gives the embedding, which was frozen, to the optimizer after two updates."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 2:
            weight = model.embedding.weight.requires_grad_(True)
            kwargs["optimizer"].add_param_group({"params": [weight]})


class Ragged:
    """Pads the samples of a batch to the longest: the batches of an update have different shapes."""

    def __call__(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        width = max(max(int((sample["labels"] != -100).sum()) for sample in samples), 2)
        return {name: torch.stack([sample[name][:width] for sample in samples]) for name in ("input_ids", "labels")}


class OwnLoss(Trainer):
    """Makes the loss itself, from what the model returns without labels: a sum over what all processes count."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Tensor | None = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        losses = functional.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten(), reduction="sum")
        loss = losses / ((labels != -100).sum() if num_items_in_batch is None else num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


def by_function(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | None = None) -> Tensor:
    """The same as a function."""
    loss = functional.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten(), reduction="sum")
    return loss / ((labels != -100).sum() if num_items_in_batch is None else num_items_in_batch)


def by_count(outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
    """The same, which cannot be called without a count."""
    losses = functional.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten(), reduction="sum")
    return losses / int(num_items_in_batch)


def weights_in(folder: Path) -> dict[str, Tensor]:
    """Returns the content of a folder's model file; empty without one."""
    path = folder / "model.safetensors"
    return dict(load_file(path)) if path.exists() else {}


def cut(batches: Any, size: int) -> list[Any]:
    """The same samples in micro-batches of at most `size`."""
    return [part for batch in batches for part in split_batch(batch, size)]


def pipeline(size: int, **config: Any) -> dict[str, Any]:
    """The options of a pipeline, on several processes."""
    return {"parallel": {"dp_replicate": -1, "pp": 2}, "pipeline_config": config or None} if size > 1 else {}


def train(folder: Path, size: int, model: nn.Module, config: dict[str, Any], **options: Any) -> Result:
    """Ragged targets, clipping, a last partial batch, evaluation; what two runs are compared by."""
    own = {
        "eval_dataset": tagging(17, seed=3),
        "eval_strategy": "epoch",
        "per_device_eval_batch_size": 6,
        "max_grad_norm": 0.5,
        "learning_rate": 0.01,
        "num_train_epochs": 4,
        "include_num_input_tokens_seen": "all",
        "callbacks": [RecordGradients()],
        **split(1, 4),
        **pipeline(size, **config),
        **options,
    }
    resume = own.pop("resume", None)
    trainer = make_trainer(folder, model, own.pop("data", None) or tagging(53), **own)
    trainer.train(resume_from_checkpoint=resume)
    output = trainer.predict(tagging(23, seed=4))
    return found(trainer, predictions=output.predictions, labels=output.label_ids, test=output.metrics["test_loss"])


def found(trainer: Trainer, **more: Any) -> Result:
    rows = trainer.state.log_history
    names = ("loss", "grad_norm", "eval_loss", "learning_rate", "num_input_tokens_seen")
    callbacks = trainer.callback_handler.callbacks
    whole = trainer.strategy.full_weights(trainer.strategy.unwrap(trainer.model))
    return {
        "weights": {name: value.detach().clone() for name, value in whole.items()},
        **{name: [row[name] for row in rows if name in row] for name in names},
        "global_step": trainer.state.global_step,
        "epoch": trainer.state.epoch,
        "gradients": next((c.gradients for c in callbacks if isinstance(c, RecordGradients)), {}),
        **more,
    }


def decoder(tied: bool = False, layers: int = 3) -> Any:
    """A language model of transformers, from its configuration."""
    transformers = importlib.import_module("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.LlamaConfig(
        vocab_size=16, num_hidden_layers=layers, tie_word_embeddings=tied, attn_implementation="eager", **sizes
    )
    return transformers.LlamaForCausalLM(config)


def padded(number: int, seed: int = 1) -> list[dict[str, Tensor]]:
    """Token ids, of which those without a target at the end are padding."""
    samples = tagging(number, seed=seed)
    for sample in samples:
        length = max(int((sample["labels"] != -100).sum()), 1)
        sample["attention_mask"] = (torch.arange(len(sample["labels"])) < length).long()
    return samples


def thawed(folder: Path, size: int) -> Result:
    """The first stage and the last share a weight that is trained from the third update on."""
    model = Deep(tied=True)
    model.embedding.weight.requires_grad_(False)
    return train(folder, size, model, {}, callbacks=[RecordGradients(), ThawsEmbedding()])


def llama(folder: Path, size: int, **options: Any) -> Result:
    tied = bool(options.pop("tied", False))
    return train(folder, size, decoder(tied), {}, data=padded(53), eval_dataset=padded(17, seed=3), **options)


SCENARIOS: dict[str, Callable[[Path, int], Result]] = {
    "1f1b": lambda folder, size: train(folder, size, Deep(), {}),
    "gpipe": lambda folder, size: train(folder, size, Deep(), {"schedule": "gpipe"}),
    "interleaved": lambda folder, size: train(folder, size, Deep(), {"schedule": "interleaved_1f1b"}),
    "one batch": lambda folder, size: train(folder, size, Deep(), {}, **split(1)),
    "tied": lambda folder, size: train(folder, size, Deep(tied=True), {}),
    "thawed": thawed,
    "shapes": lambda folder, size: train(folder, size, Deep(), {}, data_collator=Ragged()),
    "own loss": lambda folder, size: train(folder, size, Deep(), {}, cls=OwnLoss),
    "function": lambda folder, size: train(folder, size, Deep(), {}, compute_loss_func=by_function),
    "function of the count": lambda folder, size: train(folder, size, Deep(), {}, compute_loss_func=by_count),
    "smoothed": lambda folder, size: train(folder, size, Deep(), {}, label_smoothing_factor=0.1),
    "smoothed in small batches": lambda folder, size: train(  # some of which have first targets only
        folder, size, Deep(), {}, label_smoothing_factor=0.1, num_train_epochs=1, **split(1, 1, 4)
    ),
    "skipping": lambda folder, size: train(folder, size, Deep(), {}, nonfinite_policy="skip"),
    "llama": llama,
    "llama tied": lambda folder, size: llama(folder, size, tied=True),
    "replicas": lambda folder, size: train(folder, size, Deep(), {}, **split(max(size // 2, 1), 2)),
}


class Dropped(Deep):
    """With dropout in front of the blocks, whose random numbers a resumed run goes on with."""

    def pipeline_stages(self, num_stages: int) -> list[nn.Module]:
        stages = super().pipeline_stages(num_stages)
        for stage in stages:
            stage.blocks = nn.Sequential(nn.Dropout(0.2), stage.blocks)
        return stages


def resumed(folder: Path, size: int) -> Result:
    """A run, and the same gone on with from its checkpoint in the middle; its best model, and what was saved."""
    if size == 1:
        return {}
    options = {"save_strategy": "steps", "save_steps": 5, "eval_strategy": "steps", "eval_steps": 5}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss"}
    whole = train(folder, size, Dropped(), {}, **options)
    checkpoint = str(folder / "checkpoint-5")
    again = train(folder / "again", size, Dropped(), {}, resume=checkpoint, **options)
    kept = train(folder / "best", size, Dropped(), {}, resume=None, **options, **best)
    best_of = {name: weights_in(folder / "best" / name) for name in ("checkpoint-5", "checkpoint-10")}
    return {"whole": whole, "again": again, "best": kept, **best_of}


def evaluated(folder: Path, size: int) -> Result:
    """A model that was never trained, and one that is trained twice."""
    options = {"eval_dataset": tagging(17, seed=3), **pipeline(size), **split(1, 4)}
    trainer = make_trainer(folder, Deep(), tagging(12), **options)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    trainer.train()
    trainer.save_model(str(folder / "saved"))
    saved = weights_in(folder / "saved")
    return found(trainer, before=before, after=trainer.evaluate()["eval_loss"], saved=saved)


def saved(folder: Path, size: int, **options: Any) -> Result:
    """A run that writes checkpoints."""
    return train(folder, size, Deep(), {}, save_strategy="steps", save_steps=5, **options)


def go_on(folder: Path, size: int, checkpoint: str) -> Result:
    """The same run from a checkpoint on."""
    return saved(folder, size, resume=checkpoint)


SCENARIOS |= {"resumed": resumed, "evaluated": evaluated, "saved": saved}


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    results = {}
    for name in names:
        checkpoint = name.partition("from=")[2]
        on = folder / f"on {len(results)}"
        results[name] = go_on(on, size, checkpoint) if checkpoint else SCENARIOS[name](folder / name, size)
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(results, folder / f"{rank}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
