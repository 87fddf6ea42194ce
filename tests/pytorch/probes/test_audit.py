"""A look at a loss takes a few micro-batches of a window, from the first on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_models import Tagger, make_trainer, tagging

from paceline.pytorch.model.loss import LossNormalizer
from paceline.pytorch.probes.audit import MAX_PARTS, LossAudit
from paceline.pytorch.probes.loss import LossProbe


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The parts of each look; none finds anything."""
    seen: list[Any] = []

    def look(self: Any, normalizer: Any, parts: Any, num_items: Any) -> list[Any]:
        seen.append(parts)
        return []

    monkeypatch.setattr(LossProbe, "look", look)
    return seen


@pytest.mark.parametrize("accumulation", [2, 12])
def test_a_few_micro_batches_are_prepared(tmp_path: Path, looks: list[Any], accumulation: int) -> None:
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": accumulation, "max_steps": 1}
    make_trainer(tmp_path, Tagger(), tagging(24), **options).train()
    assert [len(parts) for parts in looks] == [min(accumulation, MAX_PARTS)]


def test_a_window_is_looked_at_ahead_from_its_first_micro_batch_on(looks: list[Any]) -> None:
    normalizer = LossNormalizer(["labels"])
    strategy: Any = SimpleNamespace()
    audit = LossAudit(
        strategy, normalizer, torch.nn.Linear(1, 1), torch.nn.Identity(), lambda batch: batch, False, bool
    )
    batches = [{"labels": torch.full((2, 3), number)} for number in range(8)]
    audit.observe_ahead(audit.model, lambda *given: None, batches, [normalizer.count(batch) for batch in batches], None)
    [parts] = looks
    assert [int(part.counts.labels[0, 0]) for part in parts] == list(range(MAX_PARTS))
    empty = [{"labels": torch.full((2, 3), -100)}]
    assert audit.observe_ahead(audit.model, lambda *given: None, empty, [normalizer.count(empty[0])], None) == []
    assert len(looks) == 1
