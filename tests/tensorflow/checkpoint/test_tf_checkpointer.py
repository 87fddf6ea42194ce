"""The parts that save and restore, by themselves: no Trainer is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tf_models import make_data, make_model

from paceline import TFTrainingArguments
from paceline.args.plan import Plan, resolve
from paceline.checkpoint.folders import verify
from paceline.checkpoint.retention import Retention
from paceline.core.events import CallbackHandler
from paceline.core.state import TrainerControl, TrainerState
from paceline.tensorflow.checkpoint.resume_state import read_progress, restore_position
from paceline.tensorflow.checkpoint.saving import Checkpointer, requested_actions
from paceline.tensorflow.checkpoint.variables import CheckpointError, changing_variables, values_of
from paceline.tensorflow.data.feed import TFFeed
from paceline.tensorflow.data.sources import make_source
from paceline.tensorflow.framework import keras
from paceline.tensorflow.randomness import seed_everything


def make(folder: Path, **options: Any) -> Checkpointer:
    seed_everything(0)
    model, optimizer = make_model(), keras.optimizers.AdamW()
    optimizer.build(model.trainable_variables)
    arguments = {"save_only_model": options.get("is_model_only", False)}
    return Checkpointer(
        folder=folder,
        model=model,
        optimizer=optimizer,
        schedule=None,
        processing_class=None,
        callback_handler=CallbackHandler([]),
        arguments=arguments,
        retention=Retention(),
        **options,
    )


@pytest.mark.parametrize("is_model_only", [False, True])
def test_what_is_saved_is_restored(tmp_path: Path, is_model_only: bool) -> None:
    checkpointer = make(tmp_path, is_model_only=is_model_only)
    variables = changing_variables(checkpointer.model, checkpointer.optimizer)
    before = values_of(variables)
    state = TrainerState(global_step=3, best_global_step=3)
    saved = checkpointer.save(state, TrainerControl(should_evaluate=True), None, None)
    assert saved is not None
    assert saved.folder == tmp_path / "checkpoint-3"
    assert verify(saved.folder) == []
    assert saved.best_model_checkpoint == str(saved.folder)
    assert state == TrainerState(global_step=3, best_global_step=3)  # it is the caller's
    for variable, value in zip(variables, before, strict=True):
        variable.assign(value + 1)
    checkpointer.restore(saved.folder, read_progress(saved.folder))
    num_restored = sum(map(np.array_equal, values_of(variables), before))
    assert num_restored == (len(checkpointer.model.variables) if is_model_only else len(variables))
    written = TrainerState.load_from_json(str(saved.folder / "trainer_state.json"))
    assert requested_actions(written) == {"should_evaluate": True, "should_epoch_stop": False}


def test_a_process_that_writes_nothing_leaves_nothing(tmp_path: Path) -> None:
    checkpointer = make(tmp_path, is_writer=False, process_index=1)
    saved = checkpointer.save(TrainerState(global_step=3), TrainerControl(), None, None)
    assert saved is not None
    assert list(tmp_path.iterdir()) == []


def restore(tmp_path: Path, progress: dict[str, Any], step: int) -> tuple[Plan, int]:
    """The plan of a run of 40 samples in 2 epochs, 8 to an optimizer step, after 16 samples in 4 batches."""
    args = TFTrainingArguments(str(tmp_path), num_train_epochs=2, per_device_train_batch_size=4, warmup_ratio=0.5)
    args.gradient_accumulation_steps = 2
    source = make_source(make_data(40), batch_size=4, seed=0)
    return restore_position(
        TFFeed(source, accumulation=2, label_names=None),
        resolve(args, world_size=1, micro_batches_per_epoch=10, samples_per_epoch=40),
        tmp_path / "checkpoint-2",
        {"feed": {"epoch": 0, "consumed": 16, "batches": 4}, **progress},
        global_step=step,
        arguments=args.to_sanitized_dict(),
        warmup_steps=args.get_warmup_steps,
    )


def test_what_is_left_of_a_run_is_planned(tmp_path: Path) -> None:
    plan, max_steps = restore(tmp_path, {"arguments": {"gradient_accumulation_steps": 1}}, step=4)
    assert (plan.max_steps, max_steps, plan.warmup_steps) == (12, 12, 6)
    same = {
        "num_train_epochs": 2,
        "max_steps": -1,
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 4,
    }
    length = {"planned": 11, "max_steps": 10}
    plan, max_steps = restore(tmp_path, {"arguments": same, "length": length}, step=2)
    assert (plan.max_steps, max_steps) == (11, 10)
    with pytest.raises(CheckpointError, match=r"checkpoint-2.*length of the run cannot be 1"):
        restore(tmp_path, {"arguments": same, "length": {"planned": 1, "max_steps": 10}}, step=2)
    with pytest.raises(CheckpointError, match="whole numbers"):
        restore(tmp_path, {"feed": {"epoch": 0, "consumed": "16", "batches": 4}}, step=2)
