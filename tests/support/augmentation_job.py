"""One of several processes that predict with augmentation; saves what it was returned."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from small_models import Classifier

from paceline import Trainer, TrainingArguments
from paceline.predictions.augmentation import TestTimeAugmentation

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    rows = torch.randn(13, 8, generator=torch.Generator().manual_seed(0))
    data = [{"x": row, "labels": torch.tensor(index % 4)} for index, row in enumerate(rows)]
    args = TrainingArguments(
        str(folder / "run"), report_to="none", disable_tqdm=True, per_device_eval_batch_size=4, use_cpu=True
    )
    trainer = Trainer(
        Classifier(),
        args,
        compute_metrics=lambda each: {"accuracy": float((each.predictions.argmax(-1) == each.label_ids).mean())},
    )
    transforms = [lambda batch: {**batch, "x": -batch["x"]}, lambda batch: {**batch, "x": batch["x"] / 2}]
    output = trainer.predict(data, augmentation=TestTimeAugmentation(transforms))
    found = {
        "predictions": output.predictions,
        "agreement": output.agreement,
        "spread": output.spread,
        "accuracy": output.metrics["test_accuracy"],
    }
    torch.save(found, folder / f"{trainer.args.process_index}.pt")
