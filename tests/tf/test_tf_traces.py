"""What an update was traced with goes into the checkpoint: a resumed run has the same graphs, and so the same bits."""

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tf_models import losses, make_reader, make_rows, make_trainer, pad_rows, values, weights

from paceline import TFTrainer, TrainerCallback
from paceline.core.folders import list_checkpoints
from paceline.tf.framework import tf
from paceline.tf.traces import blank, describe


class Stop(TrainerCallback):
    """Saves after an update, and ends the run."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            control.should_training_stop = control.should_save = True


class Listener(TrainerCallback):
    """Hears what happens inside an update, which is then made in parts."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        pass


def make(folder: Path, strategy: Any = None, seed: int = 0, size: int = 22, **options: Any) -> TFTrainer:
    with strategy.scope() if strategy is not None else contextlib.nullcontext():
        model = make_reader()
    options = {"optim": "sgd", "data_collator": pad_rows, "strategy": strategy, **options}
    return make_trainer(folder, model, make_rows(size, seed), **options)


def check_same(rest: TFTrainer, whole: TFTrainer) -> None:
    assert rest.engine is not None
    assert whole.engine is not None
    assert rest.state.global_step == whole.state.global_step
    assert np.array_equal(weights(rest.model), weights(whole.model))
    assert losses(rest) == losses(whole)
    assert values(rest.state.log_history)[:-1] == values(whole.state.log_history)[:-1]
    assert rest.engine.traces() == whole.engine.traces()


def test_a_batch_is_described_and_made_again() -> None:
    batch = ({"ids": np.ones((2, 3), np.int32), "more": [np.ones(2, np.float16), np.zeros(2)]}, (None, [1.0, 2.0]))
    description = json.loads(json.dumps(describe(batch)))
    again = blank(description)
    tf.nest.assert_same_structure(again[0], batch[0])
    assert describe(again) == description
    assert again[0]["ids"].dtype == tf.int32
    assert again[1][0] is None
    assert blank(describe(np.array(["a", "b"]))).dtype == tf.string


def test_batches_of_any_width_resume_to_the_bit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = make(tmp_path / "whole", seed=2, max_steps=5)
    whole.train()
    for step in (1, 3):  # resumed from a run that was resumed
        make(tmp_path / "parts", seed=2, max_steps=5, callbacks=[Stop(step)]).train()
    rest = make(tmp_path / "parts", seed=2, max_steps=5)
    rest.train()
    check_same(rest, whole)
    assert whole.engine is not None
    widths = [call["batch"]["tuple"][0]["shape"] for call in whole.engine.traces()["calls"]]
    assert 2 <= len(widths) <= 3
    assert widths[0] != widths[1]
    assert "traced" not in caplog.text


@pytest.mark.slow
def test_what_cannot_be_traced_again_is_said_and_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(tmp_path, max_steps=3, callbacks=[Stop(2)]).train()
    [checkpoint] = list_checkpoints(tmp_path)
    written = json.loads((checkpoint / "progress.json").read_text())
    for call in written["traces"]["calls"]:
        call["batch"]["tuple"][0]["shape"] = [4]
    (checkpoint / "manifest.json").unlink()
    (checkpoint / "progress.json").write_text(json.dumps(written))
    copy = shutil.copytree(tmp_path, tmp_path.parent / "copy") / checkpoint.name
    rest = make(tmp_path, max_steps=3)
    rest.train(resume_from_checkpoint=str(checkpoint))
    assert rest.state.global_step == 3
    assert caplog.text.count("could not be traced as it was") == 1
    caplog.clear()
    make(copy.parent, max_steps=3, per_device_train_batch_size=8).train(resume_from_checkpoint=str(copy))
    assert "could not be traced" not in caplog.text  # batches of another size are other batches


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "mirrored"},
        {"strategy": "mirrored", "gradient_accumulation_steps": 2, "optim": "adamw_torch"},
        {"callbacks": [Listener], "gradient_accumulation_steps": 2},
        {"xla": True},
        {"auto_find_batch_size": True, "per_device_train_batch_size": 8},
    ],
    ids=["replicas", "replicas, accumulated", "heard", "xla", "in parts"],
)
def test_runs_that_stop_anywhere_resume_to_the_bit(tmp_path: Path, mirrored: Any, options: dict[str, Any]) -> None:
    """Two epochs, each with a last batch that is not full, stopped again and again."""
    common: dict[str, Any] = {"num_train_epochs": 2, "seed": 1, **options}
    if "strategy" in common:
        common["strategy"] = mirrored
    whole = make(tmp_path / "whole", **common)
    whole.train()
    for step in range(1, whole.state.global_step, 3):
        make(tmp_path / "parts", **{**common, "callbacks": [*common.get("callbacks", []), Stop(step)]}).train()
    rest = make(tmp_path / "parts", **common)
    rest.train()
    check_same(rest, whole)
