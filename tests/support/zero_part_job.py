"""Runs on ZeRO whose optimizer holds a part of the trainable parameters: `python zero_part_job.py FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from small_models import Classifier, classification, make_trainer


def main() -> None:
    for stage in (1, 2, 3):
        model = Classifier()
        make_trainer(
            Path(sys.argv[1]) / f"zero{stage}",
            model,
            classification(16),
            optimizers=(torch.optim.AdamW(model.second.parameters(), lr=0.01), None),
            max_steps=2,
            save_strategy="steps",
            save_steps=2,
            deepspeed={"zero_optimization": {"stage": stage}},
        ).train()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
