"""Batch norm on DeepSpeed: `normed_under_zero.py FOLDER` writes what is saved, and the loss of an evaluation."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import ranks_job

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    options = {"deepspeed": {"zero_optimization": {"stage": 1}}, "dataloader_drop_last": True}
    trainer = ranks_job.trainer_in(
        folder, 2, ranks_job.Normed(), ranks_job.DATA, eval_dataset=ranks_job.DATA, **options
    )
    trainer.train()
    trainer.save_model(str(folder / "model"))
    (folder / f"loss-{ranks_job.RANK}.json").write_text(json.dumps(trainer.evaluate()["eval_loss"]))
