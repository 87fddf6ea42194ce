"""What the loop calls back on a Trainer, bound from the instance as it is when training starts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from paceline.core.contracts import Hooks
from paceline.core.journal import NOT_COMPUTED, keep_journal
from paceline.counting import counter
from paceline.model.objective import adapted
from paceline.snapshot import rewind, take_snapshot

if TYPE_CHECKING:
    from paceline.trainer import Trainer
    from paceline.training import Run


def bind_hooks(trainer: Trainer, run: Run) -> Hooks:
    """What the loop calls back on this Trainer."""

    is_own = not type(trainer)._maybe_log_save_evaluate.__module__.startswith("paceline.")

    def act() -> None:
        loop = run.loop
        assert loop is not None
        if is_own and (bad := loop.collect()) is not None:  # an own one may log by itself: what it is given is read
            loop.rewind(bad)
            return
        past = loop.unlogged
        trainer._maybe_log_save_evaluate(
            torch.tensor(past.loss_sum, dtype=torch.float64),
            past.grad_norm if past.grad_norm != NOT_COMPUTED else None,
            trainer.model_wrapped,
            run.trial,
            trainer.state.epoch,
            run.ignore_keys,
            loop.start_time,
            learning_rate=past.learning_rate,
        )
        if is_own:
            trainer._share_control()

    def enter(stage: str) -> None:
        if run.exchange is not None:
            run.exchange.watchdog.enter(stage)

    def evaluate(skip_scheduler: bool) -> dict[str, float]:
        enter("evaluating")
        return trainer._evaluate(run.trial, run.ignore_keys, skip_scheduler=skip_scheduler)

    def save() -> bool:
        enter("saving a checkpoint")
        run.saves.is_published = True  # of an own `_save_checkpoint` nothing else is known
        trainer._save_checkpoint(trainer.model_wrapped, run.trial)
        return run.saves.is_published

    folder = Path(trainer._get_output_dir(run.trial)) if trainer.args.should_save else None
    return Hooks(
        log=adapted(trainer.log, 2),
        act=act,
        evaluate=evaluate,
        save=save,
        record=keep_journal(run.outbox, folder, trainer.state.global_step),
        snapshot=partial(take_snapshot, trainer, run.feed),
        rewind=partial(rewind, trainer, run.feed, run.outbox, folder),
        count=counter(trainer, run.exchange),
    )
