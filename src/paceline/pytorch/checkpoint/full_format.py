"""Full checkpoints: one process writes the whole model and optimizer state, gathered from shards if sharded."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.checkpoint import folders
from paceline.checkpoint.layout import AVERAGES
from paceline.checkpoint.space import HEADER_BYTES
from paceline.pytorch.checkpoint.adapters import has_adapters
from paceline.pytorch.checkpoint.background import HostCopy, NotCopyable, size_of, without_collection
from paceline.pytorch.checkpoint.items import Contents, Fill, WhyAtOnce, further, tensors_in
from paceline.pytorch.checkpoint.saves import Job, Saves


class FullFormat:
    """The checkpoint format in which one process writes everything.

    Args:
        contents: what is saved.
        saves: the state of the run's saves.
    """

    all_write = False

    def __init__(self, contents: Contents, saves: Saves) -> None:
        self.contents = contents
        self.saves = saves

    def gather(self) -> dict[str, Any] | None:
        """Returns the whole model and optimizer state if they are sharded (collective); else None."""
        contents, strategy = self.contents, self.contents.strategy
        if not (strategy.is_sharded or strategy.is_spmd):
            return None
        with contents.evaluation_weights():
            model = strategy.full_weights(contents.model)
            optimizer = contents.saved_optimizer
            state = strategy.full_state(optimizer.state_dict()) if optimizer is not None else None
            averages = contents.items.get(AVERAGES) if not contents.save_only_model else None
            own = {AVERAGES: strategy.full_state(averages.state_dict())} if averages is not None else {}
            return {"model": model, "optimizer": state, **own}

    def take(self, folder: Path, is_best: bool, fill: Fill, why_at_once: WhyAtOnce) -> Job:
        """Collects the contents of the checkpoint: copies them to be written later, or writes them now.

        Raises: OSError, if there is no disk space, or the disk refuses.
        """
        saves, sizes = self.saves, self.sizes()
        place = saves.place_of(folder.parent)
        num_bytes = sizes[0] if saves.frozen.stored is not None else sum(sizes)  # stored frozen weights are linked
        reason = why_at_once(sum(sizes))
        # a best model is copied even without disk space, which may be available later
        can_wait = reason is None and is_best
        try:
            place.check(num_bytes)
        except OSError:
            if not can_wait:
                raise
        if reason:
            saves.say_once(f"Training waits for each checkpoint to be written: {reason}.")
        is_in_memory = False
        try:
            temporary = folders.begin(folder)
        except OSError:
            if not can_wait:
                raise
            temporary, is_in_memory = folders.staging_place(folder), True
        copy = HostCopy(saves.buffers) if reason is None else None
        job = Job(folder, temporary, place, num_bytes, copy, is_best=is_best, is_in_memory=is_in_memory)
        try:
            collection = nullcontext() if copy is None else without_collection()
            with saves.taking(job), self.contents.evaluation_weights(), collection:
                fill(job)
                saves.buffers.finish()
        except NotCopyable as error:
            job.drop()
            saves.write_in_front(str(error))
            return self.take(folder, is_best, fill, why_at_once)
        except BaseException:
            job.drop()
            saves.buffers.give_back()
            raise
        return job

    def sizes(self) -> tuple[int, int]:
        """Returns the file sizes in bytes of (trained weights and optimizer state, frozen weights)."""
        contents, model = self.contents, self.contents.model
        trained: list[Tensor] = []
        frozen: list[Tensor] = []
        for parameter in model.parameters():
            (trained if parameter.requires_grad else frozen).append(parameter)
        if has_adapters(model):  # adapters are saved without the base model
            frozen = []
        else:
            trained += model.buffers()
        if not contents.save_only_model:
            states: Mapping[Any, Any] = getattr(contents.optimizer, "state", {})
            entries = (entry for entry in states.values() if isinstance(entry, Mapping))
            trained += [value for entry in entries for value in entry.values() if isinstance(value, Tensor)]
            trained += tensors_in([item.state_dict() for item in further(contents.items).values()])
        return (size_of(trained) + HEADER_BYTES * len(trained), size_of(frozen) + HEADER_BYTES * len(frozen))
