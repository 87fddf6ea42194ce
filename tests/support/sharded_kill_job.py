"""A sharded run that is killed at one call that changes a folder: `python sharded_kill_job.py FOLDER RANK CALL`.

RANK -1: it is not. Goes on from the newest good checkpoint, if there is one; writes `FOLDER/result-RANK.pt`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from crash_job import die_at
from small_models import Tagger, make_trainer, tagging

from paceline.checkpoint.folders import list_checkpoints


def main() -> None:
    folder, rank, call = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    trainer = make_trainer(
        folder / "run",
        Tagger(shifted=True, dropout=0.2),
        tagging(24),
        per_device_train_batch_size=2,
        max_steps=6,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=2,
        logging_strategy="no",
        report_to=[],
        fsdp=True,
        fsdp_config={"state_dict_type": "SHARDED_STATE_DICT"},
    )
    if int(os.environ["RANK"]) == rank:
        die_at(call)
    trainer.train(resume_from_checkpoint=True if list_checkpoints(folder / "run") else None)
    weights = torch.cat([parameter.full_tensor().flatten() for parameter in trainer.model.parameters()])
    torch.save(weights.detach(), folder / f"result-{os.environ['RANK']}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
