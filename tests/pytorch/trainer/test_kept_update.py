"""The samples of an optimizer step after a run is resumed on another number of processes."""

import json
import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from paceline import TrainingArguments
from paceline.args.plan import resolve_update
from paceline.pytorch.checkpoint.resume_state import PROGRESS_FILE, resumed_batch_size


@pytest.mark.parametrize(
    ("options", "kept", "said"),
    [
        ({}, 24, "each optimizer step takes the same 24 samples"),
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
    found = partial(
        resumed_batch_size,
        data_size=2,
        global_batch_size=resolve_update(now, 2, None)[1],
        arguments=now.to_sanitized_dict(),
        reads_stream=False,
    )
    with caplog.at_level(logging.WARNING):
        assert found(tmp_path) == kept
    assert said in caplog.text
