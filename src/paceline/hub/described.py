"""What the hub modules ask of a framework: facts for a card, and how its checkpoints are pushed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class CardFacts:
    """What a card says that each framework knows in its own way.

    Attributes:
        model: without wrappers.
        kind: name of the class that tells the model's task.
        origins: names that may be those of models of the hub which this one was made from.
        library: that loads the model again, by its name on the hub; None for a plain module.
        num_parameters, num_trained: numbers in all parameters, and in those that are trained.
        shares: how many share an update.
        share_name: what each of these is.
        micro_batch_size: samples that each of them takes at once.
        samples_per_update: that all of them take in one update.
        precision: in words.
        optimizer: its name and settings, in words.
        num_samples: of a data set; None of a stream.
        evaluation_sets: by name; one alone under "".
    """

    model: Any
    kind: str
    origins: tuple[Any, ...]
    library: str | None
    num_parameters: int
    num_trained: int
    shares: int
    share_name: str
    micro_batch_size: int
    samples_per_update: int
    precision: str
    optimizer: str
    num_samples: Callable[[Any], int | None]
    evaluation_sets: Mapping[str, Any]


@dataclass(frozen=True)
class CheckpointForm:
    """How the checkpoints of a framework are pushed.

    Attributes:
        resume_files: patterns of the files that only a resume reads; the others are the model.
        model_files: `(held checkpoint, empty folder) -> function`, called on the main thread at once; the function, on
            the thread that pushes, returns further files of the model, by their path in the repository.
    """

    resume_files: tuple[str, ...]
    model_files: Callable[[Path, Path], Callable[[], dict[str, Path]]]


def num_items(dataset: Any) -> int | None:
    """The length of a data set that has one."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None
