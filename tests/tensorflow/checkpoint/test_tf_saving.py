"""Checkpoints of TensorFlow: exact resume, fallback, rotation, the best model, saved models, kills."""

import dataclasses
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tf_crash_job
from tf_models import Linear, losses, make_data, make_model, make_trainer, values, weights

from paceline import TFTrainer, TrainerCallback
from paceline.checkpoint import lock
from paceline.checkpoint.folders import list_checkpoints, verify
from paceline.core import log_text
from paceline.core.lineage import run_in
from paceline.core.state import TrainerState
from paceline.tensorflow.checkpoint.model_files import load_model, save_model
from paceline.tensorflow.checkpoint.variables import CheckpointError
from paceline.tensorflow.framework import keras, tf

DATA = make_data(26)


class Counting(TrainerCallback):
    """Has a state, and stops a run after so many updates."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.steps, self.stop_at = 0, stop_at

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps += 1
        control.should_training_stop = self.steps == self.stop_at
        control.should_save |= self.steps == self.stop_at

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


def generator() -> Any:
    return iter([(x, int(y)) for x, y in zip(*DATA, strict=True)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("arrays", {"gradient_accumulation_steps": 2, "lr_scheduler_type": "cosine", "warmup_steps": 2}),
        pytest.param("tensors", {}, marks=pytest.mark.slow),
        pytest.param("shuffled", {"train_sampling_strategy": "sequential"}, marks=pytest.mark.slow),
        ("generator", {"max_steps": 11}),
    ],
)
def test_a_resumed_run_is_the_same_to_the_bit(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    """Dropout, shuffling, the optimizer, the log in progress; stopped in the middle of an epoch and of a log."""
    options = {"num_train_epochs": 2, "logging_steps": 4, **options}

    def make(folder: Path, **more: Any) -> TFTrainer:
        tensors = tf.data.Dataset.from_tensor_slices(DATA)
        shuffled = tensors.shuffle(26, seed=7)  # in another order in each epoch
        data = {"arrays": DATA, "tensors": tensors, "shuffled": shuffled, "generator": generator}[kind]
        return make_trainer(folder, make_model(dropout=0.3), data, **options, **more)

    whole = make(tmp_path / "whole", callbacks=[Counting()])
    whole.train()
    make(tmp_path / "parts", callbacks=[Counting(stop_at=9 if kind == "shuffled" else 5)]).train()
    counting = Counting()
    rest = make(tmp_path / "parts", callbacks=[counting])
    output = rest.train()
    assert output.global_step == whole.state.global_step == counting.steps
    assert np.array_equal(weights(rest.model), weights(whole.model))
    assert values(rest.state.log_history)[:-1] == values(whole.state.log_history)[:-1]


@pytest.mark.slow
def test_changed_arguments_in_a_resumed_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Ratio intervals follow the new length; a rate that is a variable is that of the checkpoint, which is said."""
    options: dict[str, Any] = {
        "save_strategy": "steps", "save_steps": 0.25, "logging_steps": 0.25, "eval_strategy": "epoch",
        "eval_dataset": make_data(4), "lr_scheduler_type": "reduce_lr_on_plateau",
    }  # fmt: skip
    run = {"num_train_epochs": 4, "callbacks": [Counting(stop_at=12)], "learning_rate": 0.05, **options}
    make_trainer(tmp_path, make_model(), make_data(24), **run).train(resume_from_checkpoint=False)
    again = {"num_train_epochs": 8, "learning_rate": 0.5, "weight_decay": 0.1, **options}
    trainer = make_trainer(tmp_path, make_model(), make_data(24), **again)
    trainer.train(resume_from_checkpoint=True)
    assert (trainer.state.max_steps, trainer.state.save_steps, trainer.state.logging_steps) == (48, 12, 12)
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["step"] for row in rows] == [6, 12, 24, 36, 48]
    assert rows[2]["learning_rate"] < 0.06
    assert "keep the checkpoint's values of learning_rate. To change them" in caplog.text


@pytest.mark.slow
def test_an_order_that_cannot_be_gone_back_to_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tf.random.set_seed(None)
    data = tf.data.Dataset.from_tensor_slices(DATA).shuffle(26)
    options: dict[str, Any] = {"train_sampling_strategy": "sequential", "num_train_epochs": 2}
    make_trainer(tmp_path, make_model(), data, callbacks=[Counting(stop_at=3)], **options).train()
    assert "without a seed" not in caplog.text
    make_trainer(tmp_path, make_model(), data, **options).train()
    assert caplog.text.count("without a seed") == 1


@pytest.mark.slow
def test_damaged_checkpoints_are_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_trainer(tmp_path, make_model(), DATA, save_strategy="steps", save_steps=2, save_total_limit=2)
    trainer.train()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-6", "checkpoint-7"]
    data = next((tmp_path / "checkpoint-7").glob("variables.data*"))
    data.write_bytes(data.read_bytes()[:-1])
    again = make_trainer(tmp_path, make_model(seed=1), DATA, max_steps=8)
    again.train()
    assert "checkpoint-7 is skipped" in caplog.text
    assert "Resuming from" in caplog.text
    assert [row["step"] for row in again.state.log_history if "loss" in row] == [1, 2, 3, 4, 5, 6, 7, 8]
    with pytest.raises(ValueError, match="Can't resume from"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-7"))
    fresh = make_trainer(tmp_path, make_model(), DATA)
    fresh.train(resume_from_checkpoint=False)
    assert losses(fresh) == losses(trainer)
    with pytest.raises(CheckpointError, match="does not fit this model"):
        make_trainer(tmp_path, Linear(), DATA).train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))


@pytest.mark.slow
def test_the_best_model_is_loaded(tmp_path: Path) -> None:
    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "best"}
    trainer = make_trainer(
        tmp_path,
        make_model(),
        DATA,
        eval_dataset=make_data(12, seed=3),
        load_best_model_at_end=True,
        save_total_limit=1,
        learning_rate=0.4,
        optim="sgd",
        lr_scheduler_type="constant",
        **options,
    )
    trainer.train()
    evaluations = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
    assert trainer.state.best_metric == min(evaluations)
    assert trainer.evaluate(make_data(12, seed=3))["eval_loss"] == min(evaluations)


def test_what_decides_the_best_is_asked_for_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`args\.metric_for_best_model` must be provided when using 'best'"):
        make_trainer(tmp_path, make_model(), DATA, save_strategy="best", eval_strategy="steps", eval_dataset=DATA)


class SavesItself(TFTrainer):
    """Has its own `_save_checkpoint`, which returns nothing."""

    def _save_checkpoint(self) -> None:  # type: ignore[override]
        folder = Path(str(self.args.output_dir), f"checkpoint-{self.state.global_step}")
        folder.mkdir(exist_ok=True)
        self.state.save_to_json(str(folder / "trainer_state.json"))


@pytest.mark.slow
def test_a_checkpoint_that_user_code_wrote_over_another_runs_is_this_runs(tmp_path: Path) -> None:
    saved: list[int] = []

    class Note(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            saved.append(state.global_step)

    options: dict[str, Any] = {"kind": SavesItself, "save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    for _ in range(2):
        trainer = make_trainer(tmp_path, make_model(), DATA, callbacks=[Note()], **options)
        trainer.train(resume_from_checkpoint=False)
    assert saved == [2, 2]
    assert trainer.run_mark is not None
    assert trainer.run_mark.unnamed == frozenset()
    assert run_in(tmp_path) == dataclasses.replace(trainer.run_mark, seconds=0.0)


@pytest.mark.slow
def test_a_state_that_json_would_change_is_refused_by_name(tmp_path: Path) -> None:
    class Odd(Counting):
        def state_dict(self) -> dict[str, Any]:
            return {"steps": self.steps, "seen": {3: 1}}

    with pytest.raises(TypeError, match="state of callback Odd cannot be saved"):
        make_trainer(tmp_path, make_model(), DATA, callbacks=[Odd()], save_strategy="epoch").train()


@pytest.mark.slow
def test_models_are_saved_as_they_allow(tmp_path: Path) -> None:
    keras_model = make_model()
    make_trainer(tmp_path / "keras", keras_model, None).save_model()
    loaded = keras.saving.load_model(tmp_path / "keras" / "model.keras")
    assert np.array_equal(loaded(DATA[0]), keras_model(DATA[0]))
    module = Linear()
    module.__call__ = tf.function(module.__call__, input_signature=[tf.TensorSpec([None, 8])])  # type: ignore[method-assign]
    make_trainer(tmp_path / "module", module, None).save_model()
    assert (tmp_path / "module" / "saved_model.pb").is_file()
    assert np.array_equal(tf.saved_model.load(str(tmp_path / "module")).__call__(DATA[0]), module(DATA[0]))

    class Own(Linear):
        def save_pretrained(self, folder: str) -> None:
            Path(folder, "own").write_text("saved")

    trainer = make_trainer(tmp_path / "own", Own(), DATA, save_strategy="epoch")
    trainer.train()
    trainer.save_model()
    assert (tmp_path / "own" / "own").read_text() == "saved"
    assert (tmp_path / "own" / "checkpoint-7" / "own").read_text() == "saved"
    assert verify(tmp_path / "own" / "checkpoint-7") == []


def test_the_weights_of_a_saved_model_are_read(tmp_path: Path) -> None:
    module, other = Linear(), Linear()
    module.weight.assign(tf.random.stateless_normal(module.weight.shape, [0, 1]))
    save_model(module, tmp_path)
    load_model(other, tmp_path)
    assert np.array_equal(other.weight, module.weight)
    with pytest.raises(CheckpointError, match="does not fit"):
        load_model(Linear(outputs=2), tmp_path)


@pytest.mark.slow
def test_only_the_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, Any] = {"save_only_model": True, "save_strategy": "steps", "save_steps": 4}
    trainer = make_trainer(tmp_path, make_model(), DATA, **options)
    trainer.train()
    shutil.rmtree(tmp_path / "checkpoint-7")
    again = make_trainer(tmp_path, make_model(seed=1), DATA, **options)
    again.train()
    assert "holds the model only" in caplog.text
    assert again.state.global_step == 7


# ---- kills


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs a limit of the size of files")
def test_files_written_before_the_save_are_kept(tmp_path: Path) -> None:
    class Writes(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "note.txt").write_text(str(state.global_step))
            control.should_save = True

    make_trainer(tmp_path, make_model(), DATA, max_steps=2, callbacks=[Writes()]).train()
    assert len(list_checkpoints(tmp_path)) == 2
    for folder in list_checkpoints(tmp_path):
        assert folder.name == f"checkpoint-{(folder / 'note.txt').read_text()}"
        assert verify(folder) == []


@pytest.mark.slow
def test_a_full_disk_costs_one_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The system refuses what TensorFlow writes: the run goes on, what is there stays whole, the next save is made."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    class Fill(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            limit = 500 if state.global_step == 3 else before[0]  # bytes; the variables take more
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))

    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}
    try:
        trainer = make_trainer(tmp_path, make_model(), DATA, callbacks=[Fill()], **options)
        trainer.train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    kept = list_checkpoints(tmp_path)
    assert sorted(path.name for path in kept) == ["checkpoint-2", "checkpoint-6"]
    assert [problem for path in kept for problem in verify(path)] == []
    assert "checkpoint-4 could not be written" in caplog.text
    assert "SaveV2" not in caplog.text
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


class Kills:
    """Starts runs from one server process, which has TensorFlow imported and no device opened, and kills them."""

    def __init__(self, folder: Path) -> None:
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["paceline.tensorflow.trainer"])
        self.expected = self.finish(folder)

    def start(self, folder: Path) -> Any:
        folder.mkdir(exist_ok=True)
        (folder / "started").unlink(missing_ok=True)
        process = self.context.Process(target=tf_crash_job.run, args=(folder,))
        process.start()
        while not (folder / "started").exists() and process.is_alive():
            time.sleep(0.002)
        return process

    def finish(self, folder: Path) -> dict[str, Any]:
        process = self.start(folder)
        process.join(300)
        assert process.exitcode == 0
        with np.load(folder / "result.npz") as result:
            return {name: result[name] for name in result.files}

    def kill_somewhere(self, folder: Path, choice: random.Random) -> bool:
        """At a random time. Returns whether the run was still going."""
        process = self.start(folder)
        process.join(choice.uniform(0, float(self.expected["seconds"])))
        process.kill()
        process.join(300)
        assert process.exitcode in (0, -signal.SIGKILL)
        return bool(process.exitcode != 0)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
@pytest.mark.nightly
def test_six_kills(tmp_path: Path) -> None:
    """Killed at random instants, each run ends where the undisturbed one does."""
    kills = Kills(tmp_path / "undisturbed")
    hits, number = 0, 0
    while hits < 6:
        folder, choice = tmp_path / str(number), random.Random(number)
        hits += sum(kills.kill_somewhere(folder, choice) for _ in range(4))
        found = kills.finish(folder)
        for name in ("weights", "losses", "step"):
            assert np.array_equal(found[name], kills.expected[name]), (number, name)
        assert [problem for path in list_checkpoints(folder) for problem in verify(path)] == []
        assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []
        number += 1


@pytest.mark.slow
def test_a_new_run_does_not_go_on_from_an_older_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And rotation counts its own checkpoints, whatever the clock says."""
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1}
    first = make_trainer(tmp_path, make_model(), DATA, save_strategy="steps", save_steps=6, max_steps=6)
    first.train()
    last = list_checkpoints(tmp_path)[-1]
    stopped = make_trainer(tmp_path, make_model(), DATA, callbacks=[Counting(1)], save_strategy="no")
    stopped.train(resume_from_checkpoint=False)
    assert f"{last.name} of another run" in caplog.text
    assert f"Training starts over; train(resume_from_checkpoint={str(last)!r}) resumes." in caplog.text
    shutil.rmtree(tmp_path / "checkpoint-1", ignore_errors=True)  # as if it had been killed
    with pytest.raises(ValueError, match=f"{last.name} .*of another"):
        make_trainer(tmp_path, make_model(), DATA).train(resume_from_checkpoint=True)
    again = make_trainer(tmp_path, make_model(), DATA, **saving, save_total_limit=1, max_steps=4)
    again.train()  # which goes on by itself, and finds nothing of the last run
    assert again.run_mark is not None
    assert first.run_mark is not None
    assert again.run_mark.run_id != first.run_mark.run_id
    assert last.is_dir()
    assert "checkpoint-3" not in {path.name for path in list_checkpoints(tmp_path)}
    longer = make_trainer(tmp_path, make_model(), DATA, **saving, max_steps=5)
    longer.train()
    assert longer.run_mark is not None
    assert longer.run_mark.run_id == again.run_mark.run_id
    assert [step for _, step in longer.run_mark.starts] == [0, 4]


def test_one_training_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "GRACE", 0.0)
    trainer = make_trainer(tmp_path, make_model(), DATA, max_steps=1)
    held = lock.acquire(tmp_path)
    assert held is not None
    started = lock._started(os.getppid())
    foreign = {**dataclasses.asdict(held.holder), "pid": os.getppid(), "started": started}
    (tmp_path / lock.LOCK_NAME).write_text(json.dumps(foreign))
    with pytest.raises(lock.FolderInUse, match="set another output_dir"):
        trainer.train()
    (tmp_path / lock.LOCK_NAME).unlink()
    trainer.train()
    assert not (tmp_path / lock.LOCK_NAME).exists()
    held.release()


class TerminateEvaluation(TrainerCallback):
    def __init__(self, step: int, batch: int) -> None:
        self.step, self.batch, self.num_batches = step, batch, 0

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.num_batches += state.global_step == self.step
        if self.num_batches == self.batch:
            signal.raise_signal(signal.SIGTERM)


class Drawing:
    """A metric that draws from the global generators at each batch."""

    def reset(self) -> None:
        self.total = 0.0

    def update(self, prediction: Any) -> None:
        self.total += random.random() + np.random.rand() + float(keras.random.uniform(())) + float(tf_uniform())

    def compute(self) -> dict[str, float]:
        return {"draws": self.total}


def tf_uniform() -> Any:
    return tf.random.get_global_generator().uniform(())


@pytest.mark.parametrize("batch", [2, 5])
def test_an_interrupted_evaluation_is_completed(tmp_path: Path, batch: int) -> None:
    """In the first and in the second of two datasets, with metrics that draw random numbers."""

    def train(folder: Path, *callbacks: Any) -> TFTrainer:
        options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
        trainer = make_trainer(
            folder, make_model(dropout=0.3), DATA, max_steps=6, metric_for_best_model="eval_first_draws", **options,
            eval_dataset={"first": make_data(12), "second": make_data(12)}, per_device_eval_batch_size=4,
            compute_metrics=Drawing(), callbacks=list(callbacks),
        )  # fmt: skip
        trainer.train()
        return trainer

    whole = train(tmp_path / "whole")
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        assert train(tmp_path / "parts", TerminateEvaluation(4, batch)).was_stopped
    finally:
        signal.signal(signal.SIGTERM, before)
    resumed = train(tmp_path / "parts")
    assert resumed.state.global_step == whole.state.global_step == 6
    assert values(resumed.state.log_history)[:-1] == values(whole.state.log_history)[:-1]
    assert resumed.state.best_global_step == whole.state.best_global_step
    assert np.array_equal(weights(resumed.model), weights(whole.model))


def test_the_blocks_of_a_long_log_are_shared_by_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_text, "CHUNK_ROWS", 2)
    monkeypatch.setattr(log_text, "CHUNKS_PER_BLOCK", 1)
    trainer = make_trainer(
        tmp_path / "whole", make_model(), DATA, max_steps=9, logging_steps=1, save_strategy="steps", save_steps=3
    )
    trainer.train()
    states = {}
    for step in (3, 6, 9):
        checkpoint = tmp_path / "whole" / f"checkpoint-{step}"
        assert verify(checkpoint) == []
        states[step] = TrainerState.load_from_json(checkpoint / "trainer_state.json").log_history
        assert states[step] == trainer.state.log_history[:step]
    assert sorted(path.name for path in (tmp_path / "whole/checkpoint-6/log_history").iterdir()) == [
        "index.json",
        "rows-1-2.json",
        "rows-3-4.json",
    ]
    assert not (tmp_path / "whole/checkpoint-9/log_history").exists()
    resumed = make_trainer(
        tmp_path / "resumed", make_model(), DATA, max_steps=9, logging_steps=1, save_strategy="steps", save_steps=1
    )
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-6"))
    assert resumed.state.log_history[:9] == states[9]
    first, second = (tmp_path / f"resumed/checkpoint-{step}/log_history/rows-1-2.json" for step in (7, 8))
    assert first.samefile(second)
