"""Which samples an update keeps where a run goes on on another number of processes."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline import TrainingArguments
from paceline.progress import PROGRESS_FILE, kept_update_size


@pytest.mark.parametrize(
    ("options", "kept", "said"),
    [
        ({}, 24, "each update takes the same 24 samples"),
        ({"per_device_train_batch_size": 4}, None, "per_device_train_batch_size=4 was set"),
        ({"accelerator_config": {"split_batches": True}}, None, "'split_batches': True} was set"),
    ],
)
def test_batch_arguments_that_were_changed_win(
    options: dict[str, Any], kept: int | None, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = TrainingArguments(str(tmp_path), per_device_train_batch_size=6, use_cpu=True)
    now = TrainingArguments(str(tmp_path), **{"per_device_train_batch_size": 6, "use_cpu": True, **options})
    progress = {"data_size": 4, "update_size": 24, "arguments": before.to_sanitized_dict()}
    (tmp_path / PROGRESS_FILE).write_text(json.dumps(progress))
    strategy = SimpleNamespace(mesh=SimpleNamespace(data_size=2))
    trainer: Any = SimpleNamespace(strategy=strategy, args=now, train_dataset=[])
    with caplog.at_level(logging.WARNING):
        assert kept_update_size(trainer, tmp_path) == kept
    assert said in caplog.text
