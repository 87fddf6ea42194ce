"""Reporter for Flyte: checkpoints of a task, and its logs as a deck."""

from __future__ import annotations

import logging
import os
from typing import Any

from paceline.args.training import TrainingArguments
from paceline.callbacks.reporters.base import CardReporter, MakeCard
from paceline.callbacks.reporters.service import checkpoint_of, require_installed
from paceline.core.optional import is_installed, require
from paceline.core.state import TrainerControl, TrainerState

logger = logging.getLogger(__name__)

DECK = "Log History"
CARD_DECK = "Model Card"


class FlyteCallback(CardReporter):
    """Saves every checkpoint as that of the Flyte task, and shows the history of logs as a deck at the end.

    An interrupted task continues with `trainer.train(resume_from_checkpoint=current_context().checkpoint.restore())`.

    Args:
        save_log_history: show the logs as a deck; it needs flytekitplugins-deck-standard and pandas.
        sync_checkpoints: save the checkpoints.

    Raises:
        ImportError: flytekit is not installed.
        RuntimeError: this is no Flyte task.
    """

    requires = ("flytekit",)

    def __init__(self, save_log_history: bool = True, sync_checkpoints: bool = True) -> None:
        require_installed(self.requires, "flyte")
        try:
            self.cp = require("flytekit", "flyte").current_context().checkpoint
        except (AssertionError, AttributeError, NotImplementedError) as error:
            raise RuntimeError(
                f'report_to="flyte" works in a Flyte task only, and there is no checkpoint here ({error}): leave it '
                "out, or call the Trainer in a function with @task."
            ) from error
        if save_log_history and not (is_installed("flytekitplugins.deck") and is_installed("pandas")):
            logger.warning(
                "The deck of logs needs flytekitplugins-deck-standard and pandas, so there is none: "
                'pip install "paceline[flyte]", or set FlyteCallback(save_log_history=False).'
            )
            save_log_history = False
        self.save_log_history = save_log_history
        self.sync_checkpoints = sync_checkpoints

    @classmethod
    def is_ready(cls) -> bool:
        """True in the container of a Flyte task."""
        return "FLYTE_INTERNAL_EXECUTION_ID" in os.environ

    @property
    def reads_checkpoint(self) -> bool:  # type: ignore[override]
        """True if `on_save` needs the files."""
        return self.sync_checkpoints

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.sync_checkpoints and state.is_world_process_zero:
            self.cp.save(str(checkpoint_of(args, state)))

    def record_card(self, make_card: MakeCard, args: TrainingArguments, state: TrainerState, model: Any) -> None:
        """Shows the model card as a deck."""
        if self.save_log_history:
            renderer = require("flytekit.deck", "flyte").MarkdownRenderer()
            require("flytekit", "flyte").Deck(CARD_DECK, renderer.to_html(make_card()))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.save_log_history and state.is_world_process_zero:
            table = require("pandas", "flyte").DataFrame(state.log_history)
            renderer = require("flytekitplugins.deck.renderer", "flyte").TableRenderer()
            require("flytekit", "flyte").Deck(DECK, renderer.to_html(table))
