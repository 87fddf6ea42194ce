"""Looks at a loss that only the last stage of a pipeline computes."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from paceline.pytorch.distributed.pipeline import Pipelined
from paceline.pytorch.evaluation.distributed import PipelineEvaluation, warn_of_repeats

DATA: Any = list(range(8))


def test_a_loader_that_each_process_reads_as_a_whole_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    split = DataLoader(DATA, sampler=DistributedSampler(DATA, 2, 0))
    for loader, num_shares in ((DataLoader(DATA), 1), (split, 2), ([[0], [1]], 2)):
        warn_of_repeats(loader, num_shares)
    assert not caplog.text
    warn_of_repeats(DataLoader(DATA), 2)
    assert "each of the 2 processes reads all of it" in caplog.text
    assert "accelerator.prepare" in caplog.text


@pytest.mark.parametrize("told", [(1.5, torch.float64), None])
def test_every_stage_learns_the_loss_of_the_last(told: Any) -> None:
    forwarded: list[Any] = []
    strategy: Any = SimpleNamespace(
        is_last=False,
        looking=nullcontext,
        forward=lambda batch, finish: forwarded.append(batch),
        share_from_last=lambda value: (told, None),
    )
    strategy.from_last = partial(Pipelined.from_last, strategy)
    stage = PipelineEvaluation.__new__(PipelineEvaluation)
    stage.strategy = strategy
    loss = stage._loss_of("batch", None)
    assert forwarded == ["batch"]
    assert loss is None if told is None else (loss is not None and (float(loss), loss.dtype) == told)


def test_an_error_of_the_last_stage_is_raised_on_every_stage() -> None:
    error = RuntimeError("no count")
    strategy: Any = SimpleNamespace(
        is_last=False,
        looking=nullcontext,
        forward=lambda batch, finish: None,
        share_from_last=lambda value: (None, error),
    )
    with pytest.raises(RuntimeError, match="no count"):
        Pipelined.from_last(strategy, "batch", lambda: None)
