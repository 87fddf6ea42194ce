"""The files of the model alone: written by `save_model`, in a checkpoint or outside of one, and read back."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from paceline.checkpoint.layout import MODEL_FOLDER, is_sharded
from paceline.core.optional import LateModule
from paceline.pytorch.checkpoint import files
from paceline.pytorch.checkpoint.adapters import has_adapters
from paceline.pytorch.checkpoint.background import writes_itself_safely
from paceline.pytorch.checkpoint.files import DEFAULT_SHARD_BYTES
from paceline.pytorch.checkpoint.fqn_state import load_model_in_place, model_state, read_any_weights
from paceline.pytorch.checkpoint.frozen_cache import FrozenPart
from paceline.pytorch.checkpoint.saves import Job, Saves
from paceline.pytorch.checkpoint.weights import DTYPES
from paceline.pytorch.distributed.collectives import gather_objects, portable
from paceline.pytorch.distributed.strategy import SingleDevice
from paceline.pytorch.distributed.tensor_parts import is_dtensor, whole
from paceline.pytorch.distributed.world import World

if TYPE_CHECKING:
    from paceline.pytorch.checkpoint import streaming
else:
    streaming = LateModule("paceline.pytorch.checkpoint.streaming")


@dataclass(eq=False, kw_only=True)
class ModelFiles:
    """Writes a model, its processing class, and the arguments for people to read.

    Args:
        model: the model, with or without the strategy's wrapper.
        strategy: places its tensors.
        world: the processes.
        saves: the state of the run's saves; one of its own outside of a run.
        should_save: this process writes files.
        processing_class: the tokenizer or processor saved beside the model, or None.
        describe_arguments: returns the arguments as plain values.
        as_given: while entered, the model has the configuration that it was given with.
    """

    model: nn.Module
    strategy: SingleDevice
    world: World
    saves: Saves
    should_save: bool
    processing_class: object
    describe_arguments: Callable[[], Mapping[str, Any]]
    as_given: Callable[[], AbstractContextManager[Any]]

    def __post_init__(self) -> None:
        self.model = self.strategy.unwrap(self.model)

    def whole_weights(self) -> dict[str, Tensor] | None:
        """Returns the model's weights gathered from shards: for the checkpoint being written, or now; None if not
        sharded.

        Gathering takes all processes.
        """
        saves, strategy = self.saves, self.strategy
        if saves.job is not None and saves.job.in_shards:
            return None  # every process writes its own
        if saves.whole is not None:
            return dict(saves.whole["model"])
        needs_copy = strategy.is_sharded or strategy.is_spmd
        return strategy.full_weights(self.model) if needs_copy else None

    def write(self, folder: Path, state_dict: Mapping[str, Tensor] | None) -> None:
        """Writes everything; the body of `_save`.

        Args:
            folder: of the checkpoint being taken, or any other.
            state_dict: replaces the model's own state.
        """
        job = self.saves.job
        if job is not None and job.temporary != folder:
            job = None
        if job is None or not job.is_in_memory:
            folder.mkdir(parents=True, exist_ok=True)
        with self.as_given():
            if job is not None and job.in_shards:
                save_description(self.model, folder)
            elif job is None or state_dict is not None:
                files.save_model(self.model, folder, state_dict=state_dict)
            else:
                self._write_own_state(folder, job)
        self.write_beside(folder)

    def _write_own_state(self, folder: Path, job: Job) -> None:
        """Writes the model's own state into the checkpoint being taken, or copies it to be written later."""
        if not callable(getattr(self.model, "save_pretrained", None)):
            # held in memory it is whole: the file it would link to may be deleted before it is written
            frozen = FrozenPart() if job.is_in_memory else self.saves.frozen
            job.known.update(files.store_weights(self.model, folder, frozen, job.copy))
        elif job.copy is None:
            files.save_model(self.model, folder)
        else:
            job.copy.add_model(self.model, folder)

    def write_beside(self, folder: Path) -> None:
        """Writes the processing class, and the arguments for people to read."""
        if hasattr(self.processing_class, "save_pretrained"):
            job = self.saves.job
            if job is not None and job.is_in_memory and job.temporary == folder:
                job.hold(self.processing_class)
            else:
                self.processing_class.save_pretrained(str(folder))
        self.saves.put(files.showable_arguments(self.describe_arguments()), folder, files.TRAINING_ARGS_NAME)

    def stream(self, folder: Path) -> bool:
        """Writes a sharded model, one tensor in memory at a time; all processes take part.

        Returns: False, with nothing done, if the model must be gathered: its library writes other names than the model
            has, or it has adapters.
        Raises: on all processes, the error of the writing one.
        """
        if not self._can_stream():
            return False
        error = None
        found = model_state(self.model)
        forms = {name: (value.shape, value.dtype) for name, value in found.tensors.items() if value.dtype in DTYPES}
        extra = {**found.extra, **{name: whole(value) for name, value in found.tensors.items() if name not in forms}}
        left = streaming.reading_order(forms, DEFAULT_SHARD_BYTES)

        def read(name: str) -> Tensor:
            left.remove(name)
            tensor: Tensor = whole(found.tensors[name])
            return tensor

        if self.should_save:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                save_description(self.model, folder)
                source = streaming.Source(str(folder), forms, read, found.tied, extra)
                streaming.write_stream(source, folder, max_shard_bytes=DEFAULT_SHARD_BYTES)
                self.write_beside(folder)
            except Exception as refusal:
                error = portable(refusal)
        for name in list(left):  # processes that do not write only take part; one whose disk refused does so to the end
            read(name)
        error = next((each for each in gather_objects(self.world, error) if each is not None), None)
        if error is not None:
            raise error
        return True

    def _can_stream(self) -> bool:
        """True if the model is sharded, and writing it is writing its tensors under their names."""
        if not self.strategy.is_sharded or has_adapters(self.model):
            return False
        if not any(is_dtensor(parameter) for parameter in self.model.parameters()):
            return False
        return not callable(getattr(self.model, "save_pretrained", None)) or writes_names_as_they_are(self.model)


def save_description(model: nn.Module, folder: Path) -> None:
    """Writes the configuration files that let `from_pretrained` find the model's class, as its library writes them."""
    config: Any = getattr(model, "config", None)
    generation: Any = getattr(model, "generation_config", None)
    if callable(getattr(config, "save_pretrained", None)):
        named = copy.copy(config)
        named.architectures = [type(model).__name__.removeprefix("FSDP")]
        named.save_pretrained(os.fspath(folder))
    if callable(getattr(generation, "save_pretrained", None)):
        generation.save_pretrained(os.fspath(folder))


def writes_names_as_they_are(model: Any) -> bool:
    """True if a library's `save_pretrained` stores each tensor under the name that it has in the model."""
    if not writes_itself_safely(model) or getattr(model, "_keys_to_ignore_on_save", None):
        return False
    mapping = getattr(sys.modules.get("transformers.conversion_mapping"), "get_model_conversion_mapping", None)
    try:
        return mapping is not None and not mapping(model, add_legacy=False)
    except (TypeError, ValueError, AttributeError):
        return False


def load_weights(strategy: SingleDevice, model: nn.Module, folder: str) -> list[str]:
    """Loads weights in any form, the body of `_load_from_checkpoint`; returns a sentence for each finding."""
    if strategy.awaits_weights(model):
        return []
    if is_sharded(Path(folder, MODEL_FOLDER)) and load_model_in_place(files.without_compile(model), Path(folder)):
        return []
    has_part = strategy.holds_part_of(model)
    weights = read_any_weights(Path(folder), has_part)
    if weights is None or not has_part:
        return files.load_model(model, folder, weights)
    missing, unexpected = strategy.load_full(model, weights)
    findings = ((missing, "are missing"), (unexpected, "are not known"))
    return [f"{folder}: {', '.join(names)} {what}" for names, what in findings if names]
