"""Trains in a task of Flyte on this machine: four steps, and six of a second Trainer that resumes what Flyte has kept.

Argument: a folder. The last line is JSON: the losses of both trainings by step, and the decks by name.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import flytekit
from flytekit.core.checkpointer import SyncCheckpoint
from small_models import Classifier, classification, make_trainer


def trainer_of(folder: Path, **options: Any) -> Any:
    """A Trainer that saves at every second step."""
    defaults: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "logging_steps": 1, "report_to": "flyte"}
    return make_trainer(folder, Classifier(), classification(16), **{**defaults, **options})


@flytekit.task(enable_deck=True)
def train(folder: str) -> str:
    """Trains twice; returns what is found as JSON."""
    first = trainer_of(Path(folder, "out"), max_steps=4)
    first.train()
    context = flytekit.current_context()
    # as in a task that the platform starts again, which is told where the last one has kept its checkpoint
    kept = SyncCheckpoint(str(Path(folder, "next")), context.checkpoint._checkpoint_dest)
    second = trainer_of(Path(folder, "second"), max_steps=6)
    second.train(resume_from_checkpoint=kept.restore())
    losses = [[row["loss"] for row in each.state.log_history if "loss" in row] for each in (first, second)]
    return json.dumps({"losses": losses, "decks": {deck.name: deck.html for deck in context.decks}})


if __name__ == "__main__":
    print(train(folder=sys.argv[1]))
