"""Collects the facts of a torch model for its model card, and names the checkpoint files that make up the model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paceline.args.plan import Plan
from paceline.checkpoint.folders import MANIFEST_NAME
from paceline.checkpoint.layout import FULL_OPTIMIZER_NAME, MODEL_FOLDER, NOTES_NAME, OPTIMIZER_FOLDER, is_sharded
from paceline.core.lineage import PROGRESS_FILE
from paceline.core.log_text import BLOCK_FOLDER
from paceline.core.optional import LateModule
from paceline.hub.described import CardFacts, CheckpointForm, OptimizerFacts, num_items
from paceline.pytorch.checkpoint import files
from paceline.pytorch.checkpoint.adapters import has_adapters
from paceline.pytorch.checkpoint.resume_state import CALLBACKS_FILE

if TYPE_CHECKING:
    from paceline.pytorch.checkpoint import streaming
else:
    streaming = LateModule("paceline.pytorch.checkpoint.streaming")


def whole_weights(checkpoint: Path, folder: Path) -> dict[str, Path]:
    """Writes the weights of a sharded checkpoint as safetensors, and returns the files by name.

    Returns an empty dict for a checkpoint that is not sharded: it contains safetensors already.
    """
    if not is_sharded(checkpoint / MODEL_FOLDER):
        return {}
    weights = streaming.open_weights(checkpoint)
    written = streaming.write_stream(weights, folder, max_shard_bytes=files.DEFAULT_SHARD_BYTES)
    return {name: folder / name for name in written}


def weights_when_pushed(checkpoint: Path, folder: Path) -> Callable[[], dict[str, Path]]:
    """Returns a function that calls `whole_weights` when the checkpoint is pushed."""
    return partial(whole_weights, checkpoint, folder)


CHECKPOINT_FORM = CheckpointForm(
    resume_files=(
        files.OPTIMIZER_NAME,
        files.SCHEDULER_NAME,
        files.SCALER_NAME,
        files.TRAINER_STATE_NAME,
        f"{BLOCK_FOLDER}/*",
        "rng_state*.pth",
        CALLBACKS_FILE,
        PROGRESS_FILE,
        MANIFEST_NAME,
        f"{OPTIMIZER_FOLDER}/*",
        f"{MODEL_FOLDER}/*",  # these weights are pushed as safetensors instead
        NOTES_NAME,
        FULL_OPTIMIZER_NAME,
    ),
    model_files=weights_when_pushed,
)


def card_facts(
    model: torch.nn.Module,
    *,
    plan: Plan,
    num_shares: int,
    global_batch_size: int,
    optimizer: OptimizerFacts,
    eval_dataset: object,
) -> CardFacts:
    """Returns the facts for a model's card.

    Args:
        model: the model without wrappers.
        plan: the plan of its training.
        num_shares: number of data-parallel ranks.
        global_batch_size: in samples.
        optimizer: the name and settings of the optimizer.
        eval_dataset: a dataset, a dict of several by name, or None.
    """
    inner: Any = getattr(model, "get_base_model", None)
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    evaluation_sets = {} if eval_dataset is None else {"": eval_dataset}
    return CardFacts(
        model=model,
        kind=type(inner() if has_adapters(model) and callable(inner) else model).__name__,
        origins=origins_of(model),
        library=library_of(model),
        num_parameters=sum(size for size, _ in sizes),
        num_trained=sum(size for size, is_trained in sizes if is_trained),
        shares=num_shares,
        share_name="process",
        micro_batch_size=plan.micro_batch_size,
        global_batch_size=global_batch_size,
        precision=precision_of(plan),
        optimizer=optimizer,
        num_samples=num_items,
        evaluation_sets=eval_dataset if isinstance(eval_dataset, dict) else evaluation_sets,
    )


def precision_of(plan: Plan) -> str:
    """Returns the precision as text for the model card."""
    formats = plan.shard_precision or ""
    words = ["mixed" if plan.precision != "full" or "16" in formats else "float32"]
    words += [plan.precision] if plan.precision != "full" else []
    return ", ".join(words) + (f" ({formats})" if formats else "")


def origins_of(model: torch.nn.Module) -> tuple[Any, ...]:
    """Returns the names of the base models that a model was initialized from; None for an unknown one."""
    if has_adapters(model):
        configs: Any = model.peft_config
        return tuple(getattr(config, "base_model_name_or_path", None) for config in configs.values())
    return (getattr(getattr(model, "config", None), "_name_or_path", None),)


def library_of(model: torch.nn.Module) -> str | None:
    """Returns the library that loads the model; None for a plain module."""
    if has_adapters(model):
        return "peft"
    top = {kind.__module__.partition(".")[0] for kind in type(model).__mro__}
    return "transformers" if "transformers" in top else None


def optimizer_of(made: object) -> OptimizerFacts:
    """Returns the name and the settings of an optimizer; both are None if there is none yet."""
    while hasattr(made, "optimizer"):  # unwrap the wrappers of other libraries
        made = made.optimizer
    settings = made.defaults if isinstance(made, torch.optim.Optimizer) else None
    return OptimizerFacts(None if made is None else type(made).__name__, settings)
