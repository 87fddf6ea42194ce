"""What the hub is told of a torch model: facts for its card, and what of a checkpoint is the model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paceline.args.plan import Plan
from paceline.checkpoint import files
from paceline.checkpoint.adapters import has_adapters
from paceline.checkpoint.named import FULL_OPTIMIZER_NAME, NOTES_NAME
from paceline.checkpoint.shards import MODEL_FOLDER, OPTIMIZER_FOLDER, is_sharded
from paceline.checkpoint.streaming import open_weights, write_stream
from paceline.core.folders import MANIFEST_NAME
from paceline.hub.card_text import settings_of
from paceline.hub.described import CardFacts, CheckpointForm, num_items
from paceline.progress import CALLBACKS_FILE, PROGRESS_FILE

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.trainer import Trainer


def whole_weights(checkpoint: Path, folder: Path) -> dict[str, Path]:
    """The weights of a checkpoint in shards as safetensors; of another none, they are there."""
    if not is_sharded(checkpoint / MODEL_FOLDER):
        return {}
    written = write_stream(open_weights(checkpoint), folder, max_shard_bytes=files.DEFAULT_SHARD_BYTES)
    return {name: folder / name for name in written}


def weights_when_pushed(checkpoint: Path, folder: Path) -> Callable[[], dict[str, Path]]:
    """The same, once it is called."""
    return partial(whole_weights, checkpoint, folder)


CHECKPOINT_FORM = CheckpointForm(
    resume_files=(
        files.OPTIMIZER_NAME,
        files.SCHEDULER_NAME,
        files.SCALER_NAME,
        files.TRAINER_STATE_NAME,
        "rng_state*.pth",
        CALLBACKS_FILE,
        PROGRESS_FILE,
        MANIFEST_NAME,
        f"{OPTIMIZER_FOLDER}/*",
        f"{MODEL_FOLDER}/*",  # which is pushed as safetensors
        NOTES_NAME,
        FULL_OPTIMIZER_NAME,
    ),
    model_files=weights_when_pushed,
)


def card_facts(trainer: Trainer) -> CardFacts:
    """What a card says of this Trainer's model."""
    model = trainer.strategy.unwrap(trainer.model)
    inner: Any = getattr(model, "get_base_model", None)
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    given, plan = trainer.eval_dataset, trainer._plan()
    return CardFacts(
        model=model,
        kind=type(inner() if has_adapters(model) and callable(inner) else model).__name__,
        origins=origins_of(model),
        library=library_of(model),
        num_parameters=sum(size for size, _ in sizes),
        num_trained=sum(size for size, is_trained in sizes if is_trained),
        shares=trainer.strategy.mesh.data_size,
        share_name="process",
        micro_batch_size=plan.micro_batch_size,
        samples_per_update=trainer.get_total_train_batch_size(trainer.args),
        precision=precision_of(plan),
        optimizer=optimizer_of(trainer),
        num_samples=num_items,
        evaluation_sets=given if isinstance(given, dict) else {} if given is None else {"": given},
    )


def precision_of(plan: Plan) -> str:
    """The formats of the numbers, in words."""
    formats = plan.shard_precision or ""
    words = ["mixed" if plan.precision != "full" or "16" in formats else "float32"]
    words += [plan.precision] if plan.precision != "full" else []
    return ", ".join(words) + (f" ({formats})" if formats else "")


def origins_of(model: torch.nn.Module) -> tuple[Any, ...]:
    """Names of what a model was made from."""
    if has_adapters(model):
        configs: Any = model.peft_config
        return tuple(getattr(config, "base_model_name_or_path", None) for config in configs.values())
    return (getattr(getattr(model, "config", None), "_name_or_path", None),)


def library_of(model: torch.nn.Module) -> str | None:
    """The library that loads the model again; None for a plain module."""
    if has_adapters(model):
        return "peft"
    top = {kind.__module__.partition(".")[0] for kind in type(model).__mro__}
    return "transformers" if "transformers" in top else None


def optimizer_of(trainer: Trainer) -> str:
    """The optimizer and its settings, in words."""
    made = trainer.optimizer
    while hasattr(made, "optimizer"):  # inside the wrappers of other libraries
        made = made.optimizer
    settings = made.defaults if isinstance(made, torch.optim.Optimizer) else None
    return settings_of(trainer.args, None if made is None else type(made).__name__, settings)
