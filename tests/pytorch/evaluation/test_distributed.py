"""Looks at a loss that only the last stage of a pipeline computes."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.pytorch.evaluation.distributed import PipelineEvaluation


@pytest.mark.parametrize("told", [(1.5, torch.float64), None])
def test_every_stage_learns_the_loss_of_the_last(told: Any) -> None:
    forwarded: list[Any] = []
    strategy = SimpleNamespace(
        is_last=False,
        looking=nullcontext,
        forward=lambda batch, labels: forwarded.append(batch),
        share_from_last=lambda value: told if value is None else value,
    )
    stage: Any = SimpleNamespace(strategy=strategy)
    loss = PipelineEvaluation._loss_of(stage, "batch", None)
    assert forwarded == ["batch"]
    assert loss is None if told is None else (loss is not None and (float(loss), loss.dtype) == told)
