"""A run whose output belongs to an object store, in a process of its own: `store_job.py URL RESULT SECONDS_A_STEP`."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path
from typing import Any

import torch
from small_models import Classifier, classification, make_trainer, weights

from paceline import TrainerCallback


class Slow(TrainerCallback):
    """Takes its time, so that there is some to be killed in."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_step_end(self, *_: Any, **__: Any) -> None:
        time.sleep(self.seconds)


def main() -> None:
    url, result, seconds = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
    logging.basicConfig(level="DEBUG", stream=sys.stderr)
    torch.set_num_threads(1)
    trainer = make_trainer(
        url,  # type: ignore[arg-type]
        Classifier(dropout=0.2),
        classification(96),
        callbacks=[Slow(seconds)],
        eval_dataset=classification(16, seed=5),
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        save_total_limit=2,
        load_best_model_at_end=True,
        resume_from_checkpoint="auto",
        report_to=["jsonl"],
    )
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    torch.save({"weights": weights(trainer.model), "step": trainer.state.global_step}, result)


if __name__ == "__main__":
    main()
