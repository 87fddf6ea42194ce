"""A run of TensorFlow that is killed and taken up again: what each of its processes does."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
from tf_models import losses, make_data, make_model, make_trainer, weights


def run(folder: Path) -> None:
    """Train to the end, from the newest good checkpoint if there is one, and leave the result in `result.npz`."""
    trainer = make_trainer(
        folder,
        make_model(dropout=0.3),
        make_data(64),
        num_train_epochs=4,
        gradient_accumulation_steps=2,
        lr_scheduler_type="cosine",
        save_strategy="steps",
        save_steps=2,
        save_total_limit=2,
        eval_strategy="steps",
        eval_steps=8,
        eval_dataset=make_data(16, seed=1),
    )
    (folder / "started").touch()
    begin = time.monotonic()
    trainer.train()
    found = {"weights": weights(trainer.model), "losses": losses(trainer), "step": trainer.state.global_step}
    with open(folder / "result.tmp", "wb") as file:
        np.savez(file, seconds=time.monotonic() - begin, **found)
    os.replace(folder / "result.tmp", folder / "result.npz")
