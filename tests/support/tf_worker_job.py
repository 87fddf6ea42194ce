"""One of several workers that train together, or the process that trains alone."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any


def train(folder: Path, kind: str, strategy: Any, batch_size: int) -> dict[str, Any]:
    """Train, with a checkpoint at the third of six updates, and tell what came of it."""
    from tf_models import Linear, losses, make_data, make_model, make_trainer, weights

    with strategy.scope() if strategy is not None else contextlib.nullcontext():
        model = Linear() if kind == "module" else make_model()
    trainer = make_trainer(
        folder,
        model,
        make_data(43),  # the last batch has parts of different size
        strategy=strategy,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=2,
        save_strategy="steps",
        save_steps=3,
        eval_strategy="epoch",
        eval_dataset=make_data(11, seed=1),
    )
    trainer.train()
    evaluated = next(row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row)
    return {"losses": losses(trainer), "weights": weights(trainer.model).tolist(), "eval_loss": evaluated}


if __name__ == "__main__":
    from paceline import TFTrainingArguments

    place, kind, index = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    # made first: TensorFlow wants to know of the other workers before it does anything
    strategy = TFTrainingArguments(str(place)).strategy
    found = train(place / "two", kind, strategy, batch_size=2)
    (place / f"worker-{index}.json").write_text(json.dumps(found))
