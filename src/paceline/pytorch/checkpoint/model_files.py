"""The files of the model alone, which `save_model` writes inside or outside of a checkpoint, and their loading."""

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
from paceline.pytorch.checkpoint.safetensors_file import DTYPES
from paceline.pytorch.checkpoint.saves import Job, Saves
from paceline.pytorch.distributed.collectives import gather_objects, portable
from paceline.pytorch.distributed.strategy import SingleDevice
from paceline.pytorch.distributed.world import World
from paceline.pytorch.model.tensor_parts import is_dtensor, whole

if TYPE_CHECKING:
    from paceline.pytorch.checkpoint import streaming
else:
    streaming = LateModule("paceline.pytorch.checkpoint.streaming")


@dataclass(eq=False, kw_only=True)
class ModelFiles:
    """Writes a model, its processing class, and the arguments in readable form.

    Args:
        model: the model, with or without the strategy's wrapper.
        strategy: places the model's tensors.
        world: the processes.
        saves: the state of the run's saves; a separate one outside of a run.
        should_save: this process writes files.
        processing_class: the tokenizer or processor saved with the model, or None.
        describe_arguments: returns the arguments as plain values.
        as_given: returns a context in which the model has its original configuration.
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
        """Returns the model's weights gathered from shards, taken from the checkpoint in progress or gathered now.

        Returns None if the model is not sharded, or in a sharded checkpoint. Gathering is collective.
        """
        saves, strategy = self.saves, self.strategy
        if saves.job is not None and saves.job.in_shards:
            return None  # every process writes its own shards
        if saves.whole is not None:
            return dict(saves.whole["model"])
        needs_copy = strategy.is_sharded or strategy.is_spmd
        return strategy.full_weights(self.model) if needs_copy else None

    def write(self, folder: Path, state_dict: Mapping[str, Tensor] | None) -> None:
        """Writes the model, the processing class and the arguments; the body of `_save`.

        Args:
            folder: the hidden folder of the checkpoint in progress, or any other folder.
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
        """Writes the model's own state into the checkpoint in progress, or copies it to be written later."""
        if not callable(getattr(self.model, "save_pretrained", None)):
            # a job in memory holds frozen weights too: the file to link may be deleted before the job is written
            frozen = FrozenPart() if job.is_in_memory else self.saves.frozen
            job.known.update(files.store_weights(self.model, folder, frozen, job.copy))
        elif job.copy is None:
            files.save_model(self.model, folder)
        else:
            job.copy.add_model(self.model, folder)

    def write_beside(self, folder: Path) -> None:
        """Writes the processing class, and the arguments in readable form."""
        if hasattr(self.processing_class, "save_pretrained"):
            job = self.saves.job
            if job is not None and job.is_in_memory and job.temporary == folder:
                job.hold(self.processing_class)
            else:
                self.processing_class.save_pretrained(str(folder))
        self.saves.put(files.showable_arguments(self.describe_arguments()), folder, files.TRAINING_ARGS_NAME)

    def stream(self, folder: Path) -> bool:
        """Writes a sharded model, gathering one tensor at a time. Collective.

        Returns: False, with nothing done, if the model is not sharded or must be gathered whole: its library stores
            other names than the model has, or it has adapters.
        Raises: the error of the writing process, on all processes.
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
        for name in list(left):  # collectives of processes that do not write, or whose writing failed
            read(name)
        error = next((each for each in gather_objects(self.world, error) if each is not None), None)
        if error is not None:
            raise error
        return True

    def _can_stream(self) -> bool:
        """True if the model is sharded, and its files hold its tensors under the names that they have in the model."""
        if not self.strategy.is_sharded or has_adapters(self.model):
            return False
        if not any(is_dtensor(parameter) for parameter in self.model.parameters()):
            return False
        return not callable(getattr(self.model, "save_pretrained", None)) or writes_names_as_they_are(self.model)


def save_description(model: nn.Module, folder: Path) -> None:
    """Writes the configuration files as the model's library does, so that `from_pretrained` finds the model's class."""
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
    """Loads weights in any format; returns one sentence per problem. The body of `_load_from_checkpoint`."""
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
