"""A checkpoint holds the inputs that a step was traced with: a resumed run has the same graphs and the same bits."""

import contextlib
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tf_models import Linear, losses, make_data, make_reader, make_rows, make_trainer, pad_rows, values, weights

from paceline import TFTrainer, TrainerCallback
from paceline.checkpoint.folders import list_checkpoints
from paceline.tensorflow import traces
from paceline.tensorflow.framework import tf
from paceline.tensorflow.traces import blank, describe


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


@pytest.mark.slow
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
def test_a_step_in_parts_is_traced_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, Any] = {"gradient_accumulation_steps": 2, "max_steps": 2}
    whole = make(tmp_path / "whole", **options)
    whole.train()
    make(tmp_path / "parts", callbacks=[Stop(1)], **options).train()
    rest = make(tmp_path / "parts", **options)
    rest.train()
    check_same(rest, whole)
    assert rest.engine is not None
    assert {call["function"] for call in rest.engine.traces()["calls"]} == {"accumulate"}
    assert "could not be traced" not in caplog.text


class OfAnyKeys(Linear):
    """Reads one of the features, whatever the names of the others."""

    def __call__(self, features: Any) -> Any:
        return super().__call__(features["x"])


@pytest.mark.slow
def test_batches_of_ever_other_keys_leave_a_bounded_record(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorFlow compiles for each of them; a checkpoint names the first."""
    monkeypatch.setattr(traces, "MAX_TRACES", 2)
    numbers = itertools.count()

    def collate(rows: list[Any]) -> Any:
        x = np.stack([row for row, _ in rows])
        return {"x": x, f"extra_{next(numbers)}": x}, np.array([label for _, label in rows])

    rows = list(zip(*make_data(16), strict=True))
    trainer = make_trainer(tmp_path, OfAnyKeys(), rows, data_collator=collate, callbacks=[Stop(4)])
    trainer.train()
    assert trainer.engine is not None
    assert trainer.engine.num_traces >= 4
    [checkpoint] = list_checkpoints(tmp_path)
    calls = json.loads((checkpoint / "progress.json").read_text())["traces"]["calls"]
    names = [tuple(name for name, _ in call["batch"]["tuple"][0]["dict"]) for call in calls]
    assert len(set(names)) == len(names) == 2
    assert caplog.text.count("compiled for 2 structures") == 1


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
    assert caplog.text.count("could not be traced as in the run before") == 1
    caplog.clear()
    make(copy.parent, max_steps=3, per_device_train_batch_size=8).train(resume_from_checkpoint=str(copy))
    assert "could not be traced" not in caplog.text  # batches of another size are other batches


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"strategy": "mirrored"}, marks=pytest.mark.nightly),
        {"strategy": "mirrored", "gradient_accumulation_steps": 2, "optim": "adamw_torch"},
        {"callbacks": [Listener], "gradient_accumulation_steps": 2},
        pytest.param({"xla": True}, marks=pytest.mark.nightly),
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
