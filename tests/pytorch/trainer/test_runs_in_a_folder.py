"""Several runs in one output folder, and clocks that jump: which checkpoint is whose, and what stays."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import Classifier, classification, make_trainer, scored, weights

from paceline import Trainer, TrainerCallback
from paceline.checkpoint import lock
from paceline.checkpoint.folders import list_checkpoints
from paceline.checkpoint.lock import LOCK_NAME, FolderInUse
from paceline.core.journal import JOURNAL_FILE, SKIPPED_FILE, read_rows
from paceline.core.lineage import PROGRESS_FILE, RECORD_NAME, mark_of, run_in

DATA = classification(16)


class Killed(Exception):
    """Ends a run as a kill would, as far as its files go."""


class At(TrainerCallback):
    """Does something after an update."""

    def __init__(self, step: int, action: Any) -> None:
        self.step, self.action = step, action

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.action()


def kill() -> None:
    raise Killed


def make(folder: Path, *callbacks: TrainerCallback, **options: Any) -> Trainer:
    options = {"save_steps": 2, "num_train_epochs": 3, "logging_steps": 1, "report_to": "jsonl", **options}
    options.setdefault("save_strategy", "steps")
    return make_trainer(folder, Classifier(), DATA, callbacks=list(callbacks), **options)


def train_killed(folder: Path, step: int, resume: Any = None, **options: Any) -> Trainer:
    trainer = make(folder, At(step, kill), **options)
    with pytest.raises(Killed):
        trainer.train(resume_from_checkpoint=resume)
    return trainer


def steps_in(folder: Path) -> list[int]:
    return [int(path.name.split("-")[1]) for path in list_checkpoints(folder)]


# ---- clocks


@pytest.mark.parametrize("in_background", [True, False])
@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"save_total_limit": 2}, [10, 12]),
        ({"save_total_limit": 1}, [12]),
        ({"keep_every_steps": 4}, [4, 8, 12]),
        ({"keep_every_hours": 1.0}, [2, 12]),  # the first, and the newest
    ],
)
def test_a_clock_that_jumps_decides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], kept: list[int], in_background: bool
) -> None:
    """Back by a year, forward by two, back again: files have such times, and `time.time()` tells them."""
    now, jumps = [time.time()], itertools.cycle([-3e7, 6e7, -3e7])
    rename = os.rename

    def stamp(source: Any, target: Any) -> None:
        rename(source, target)
        for path in [Path(target), *Path(target).glob("*")]:
            os.utime(path, (now[0], now[0]))

    class Jump(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            now[0] += next(jumps)

    monkeypatch.setattr(time, "time", lambda: now[0])
    monkeypatch.setattr(os, "rename", stamp)
    output = make(tmp_path, Jump(), save_in_background=in_background, **options).train()
    assert steps_in(tmp_path) == kept
    assert 0 < output.metrics["train_runtime"] < 1000
    resumed = make(tmp_path, num_train_epochs=4, **options)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.run_mark is not None
    assert resumed.run_mark.starts[-1][1] == 12
    assert steps_in(tmp_path)[-1] == 16


# ---- runs


def test_a_new_run_does_not_resume_from_an_older_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A run to its end, a new one killed at step 1: the old checkpoint-12 would be trained no further."""
    first = make(tmp_path, save_steps=12)
    first.train()
    train_killed(tmp_path, 1)
    assert "holds checkpoint-12 of another run" in caplog.text
    last = tmp_path / "checkpoint-12"
    assert f"Training starts over; train(resume_from_checkpoint={str(last)!r}) resumes." in caplog.text
    with pytest.raises(ValueError, match=r"No valid checkpoint.*checkpoint-12 is of another.*resume_from_checkpoint="):
        make(tmp_path).train(resume_from_checkpoint=True)
    begun = make(tmp_path, At(3, kill))
    with pytest.raises(Killed):
        begun.train(resume_from_checkpoint="auto")
    assert begun.state.global_step == 3  # from the beginning, with a checkpoint of its own
    again = make(tmp_path, num_train_epochs=1)
    again.train(resume_from_checkpoint=True)
    assert again.run_mark is not None
    assert again.run_mark.starts[-1][1] == 2
    caplog.clear()
    named = make(tmp_path)
    named.train(resume_from_checkpoint=str(tmp_path / "checkpoint-12"))
    assert "does not belong to the run started or resumed last" in caplog.text
    assert "nothing is left to train" in caplog.text
    assert "starts over" not in caplog.text
    assert torch.equal(weights(named.model), weights(first.model))
    assert named.run_mark is not None
    assert first.run_mark is not None
    assert named.run_mark.run_id == first.run_mark.run_id


def test_the_header_says_that_a_run_is_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path, num_train_epochs=2, disable_tqdm=False).train(resume_from_checkpoint="auto")
    assert "resumed" not in capsys.readouterr().out
    make(tmp_path, disable_tqdm=False).train(resume_from_checkpoint="auto")
    assert "resumed    at step 8 of 12" in capsys.readouterr().out


def test_a_resumed_run_keeps_its_id_in_checkpoints_and_record(tmp_path: Path) -> None:
    first = train_killed(tmp_path, 5)
    second = make(tmp_path)
    second.train(resume_from_checkpoint=True)
    assert first.run_mark is not None
    marks = [mark_of(path) for path in list_checkpoints(tmp_path)]
    assert {mark.run_id for mark in [run_in(tmp_path), *marks] if mark is not None} == {first.run_mark.run_id}
    seconds = [mark.seconds for mark in marks if mark is not None and mark.seconds is not None]
    assert len(seconds) == 6
    assert seconds == sorted(seconds)
    assert json.loads((tmp_path / RECORD_NAME).read_text())["run"]["starts"][1][1] == 4


def test_rotation_leaves_other_runs_alone(tmp_path: Path) -> None:
    make(tmp_path, save_steps=6).train()
    train_killed(tmp_path, 9, save_total_limit=1)
    assert steps_in(tmp_path) == [8, 12]  # 6 was written over
    make(tmp_path, save_total_limit=1, num_train_epochs=4).train(resume_from_checkpoint=True)
    assert steps_in(tmp_path) == [16]  # 12 was written over, and rotated then


def test_a_run_that_goes_back_is_resumed_where_it_went(tmp_path: Path) -> None:
    make(tmp_path).train()
    train_killed(tmp_path, 5, resume=str(tmp_path / "checkpoint-4"))
    again = make(tmp_path, save_total_limit=2)
    again.train(resume_from_checkpoint=True)
    assert again.run_mark is not None
    assert [step for _, step in again.run_mark.starts] == [0, 4]  # of the start between nothing is left
    assert steps_in(tmp_path) == [10, 12]


def test_checkpoints_without_an_id_are_resumed_from_and_rotated(tmp_path: Path) -> None:
    train_killed(tmp_path, 5)
    (tmp_path / RECORD_NAME).unlink()
    for path in list_checkpoints(tmp_path):  # as another trainer writes them
        for name in (PROGRESS_FILE, "manifest.json"):
            (path / name).unlink()
    resumed = make(tmp_path, save_total_limit=2)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.run_mark is not None
    assert resumed.run_mark.starts[0][1] == 4
    assert steps_in(tmp_path) == [10, 12]


def test_the_best_model_is_never_another_runs(tmp_path: Path) -> None:
    """The best evaluation is at step 3, where only the older run has a checkpoint."""
    make(tmp_path, save_steps=3).train()
    scores = iter([0.1, 0.2, 0.9, *[0.3] * 9])
    trainer = make(
        tmp_path,
        save_steps=2,
        eval_strategy="steps",
        eval_steps=1,
        eval_dataset=DATA[:4],
        compute_metrics=lambda p: {"score": next(scores)},
        metric_for_best_model="score",
        greater_is_better=True,
    )
    trainer.train()
    assert trainer.state.best_global_step == 3
    assert (tmp_path / "checkpoint-3").is_dir()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")


def test_a_best_checkpoint_that_is_now_another_runs_is_forgotten(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 2, "eval_dataset": DATA[:4], "metric_for_best_model": "loss"}
    make(tmp_path, **options).train()
    path = tmp_path / "checkpoint-12" / "trainer_state.json"
    best = json.loads(path.read_text())["best_model_checkpoint"]
    other = dataclasses.replace(mark_of(Path(best)), starts=(("other", 0),))  # type: ignore[type-var]
    (Path(best) / PROGRESS_FILE).write_text(json.dumps({"run": other.to_json()}))  # type: ignore[union-attr]
    newest = tmp_path / "checkpoint-10" if best.endswith("-12") else tmp_path / "checkpoint-12"
    state = newest / "trainer_state.json"
    state.write_text(state.read_text().replace(json.loads(state.read_text())["best_model_checkpoint"], best))
    (newest / "manifest.json").unlink()
    trainer = make(tmp_path)
    trainer.train(resume_from_checkpoint=str(newest))
    assert "now belongs to another run" in caplog.text


# ---- one training at a time


def test_two_trainings_in_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "GRACE", 0.0)
    seen: list[bool] = []
    trainer = make(tmp_path, At(2, lambda: seen.append((tmp_path / LOCK_NAME).is_file())), save_strategy="no")
    trainer.train()
    assert seen == [True]
    assert not (tmp_path / LOCK_NAME).exists()
    holder = dataclasses.asdict(lock.acquire(tmp_path).holder)  # type: ignore[union-attr]
    foreign = {**holder, "pid": os.getppid(), "started": lock._started(os.getppid())}
    (tmp_path / LOCK_NAME).write_text(json.dumps(foreign))
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    with pytest.raises(FolderInUse, match=f"process {os.getppid()} on"):
        trainer.train()
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before
    assert trainer.evaluate(DATA)["eval_loss"] > 0
    assert len(trainer.predict(DATA).predictions) == len(DATA)
    make(tmp_path / "elsewhere", save_strategy="no").train()


def test_a_training_that_lost_its_folder_ends(tmp_path: Path) -> None:
    def lose() -> None:
        assert trainer.run is not None
        assert trainer.run.lock is not None
        trainer.run.lock.lost_to = "process 1 on another host"

    trainer = make(tmp_path, At(3, lose))
    with pytest.raises(FolderInUse, match="taken over by process 1 on another host"):
        trainer.train()
    assert steps_in(tmp_path) == [2]


def test_a_training_that_was_interrupted_or_failed_gives_the_folder_free(tmp_path: Path) -> None:
    killed = train_killed(tmp_path, 3)
    assert not (tmp_path / LOCK_NAME).exists()
    killed.callback_handler.pop_callback(At)
    killed.train()
    inner = make(tmp_path / "trial", save_strategy="no")
    make(tmp_path, At(2, inner.train)).train()
    assert inner.state.global_step == 12


# ---- files beside the checkpoints


def test_the_journal_of_an_earlier_run_is_set_aside(tmp_path: Path) -> None:
    for _ in range(2):
        make(tmp_path, save_strategy="no").train()
    assert [row.step for row in read_rows(tmp_path / JOURNAL_FILE)] == list(range(1, 13))
    assert [row.step for row in read_rows(tmp_path / "journal.1.bin")] == list(range(1, 13))


def test_a_skip_after_the_checkpoint_is_recorded_once(tmp_path: Path) -> None:
    """Killed after a rollback that no checkpoint has seen: the resumed run rolls back again, and says so once."""
    data = [dict(sample) for sample in DATA]
    for index in (1, 13):  # one before the checkpoint of step 2, one after
        data[index] = {**data[index], "x": torch.full_like(data[index]["x"], torch.inf)}

    def train(*callbacks: TrainerCallback, resume: bool = False) -> None:
        options = {"per_device_train_batch_size": 2, "train_sampling_strategy": "sequential", "num_train_epochs": 1}
        options |= {"nonfinite_policy": "rollback", "logging_steps": 1, "save_strategy": "steps", "save_steps": 2}
        make_trainer(tmp_path, Classifier(), data, callbacks=list(callbacks), **options).train(
            resume_from_checkpoint=resume
        )

    with pytest.raises(Killed):
        train(At(6, lambda: kill() if (tmp_path / SKIPPED_FILE).read_text().count("\n") == 2 else None))
    for path in list_checkpoints(tmp_path)[1:]:
        os.rename(path, path.with_name(f"gone-{path.name}"))
    with (tmp_path / SKIPPED_FILE).open("a") as file:
        file.write('{"epoch": 0, "fir')  # cut off
    train(resume=True)
    rows = [json.loads(line) for line in (tmp_path / SKIPPED_FILE).read_text().splitlines()]
    assert [row["sample_ids"] for row in rows] == [[0, 1], [12, 13]]


def test_nothing_measured_is_no_number(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Empty(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(())

    with caplog.at_level(logging.WARNING):
        output = make_trainer(tmp_path, Classifier(), Empty(), max_steps=3).train()
    assert output.global_step == 0
    assert output.training_loss != output.training_loss
    assert output.metrics["train_loss"] != output.metrics["train_loss"]


# ---- no room for a folder


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("until", [5, 99])
def test_a_best_model_survives_a_disk_without_inodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, until: int
) -> None:
    """No folder can be made for the checkpoint of step 4, nor (until=99) for any later one before the run ends."""
    mkdir = os.mkdir

    class Tokenizer:
        def save_pretrained(self, folder: str) -> None:
            Path(folder, "inner").mkdir()
            Path(folder, "inner", "words.txt").write_text("a b c")

    def refuse(path: Any, *args: Any, **kwargs: Any) -> None:
        step = trainer.state.global_step if trainer.run is not None else 0
        if ".checkpoint-" in str(path) and 4 <= step <= until and not is_over:
            raise OSError(number, os.strerror(number), str(path))
        mkdir(path, *args, **kwargs)

    is_over: list[int] = []
    trainer = make(
        tmp_path,
        At(12, lambda: is_over.append(1)),
        processing_class=Tokenizer(),
        **scored([0.5, 0.9, 0.4, 0.3, 0.2, 0.1], DATA[:4]),
    )
    monkeypatch.setattr(os, "mkdir", refuse)
    trainer.train()
    best = tmp_path / "checkpoint-4"
    assert trainer.state.best_model_checkpoint == str(best)
    assert (best / "inner" / "words.txt").read_text() == "a b c"
    assert steps_in(tmp_path) == [4, 12]
    loaded = make(tmp_path / "other")
    loaded._load_from_checkpoint(str(best))
    assert torch.equal(weights(loaded.model), weights(trainer.model))


# ---- checkpoints that user code writes


class SavesItself(Trainer):
    """Has its own `_save_checkpoint`, as copies of other trainers' code do."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(self.args.output_dir, f"checkpoint-{self.state.global_step}")
        self.save_model(str(folder), _internal_call=True)
        self._save_optimizer_and_scheduler(str(folder))
        self._save_rng_state(str(folder))
        self.state.save_to_json(str(folder / "trainer_state.json"))
        self._rotate_checkpoints(use_mtime=True, output_dir=self.args.output_dir)


def test_checkpoints_that_user_code_wrote_over_another_runs_are_this_runs(tmp_path: Path) -> None:
    first = make(tmp_path)
    first.__class__ = SavesItself
    first.train()
    second = make(tmp_path, At(5, kill))
    second.__class__ = SavesItself
    with pytest.raises(Killed):
        second.train()
    third = make(tmp_path)
    third.train(resume_from_checkpoint=True)
    assert third.run_mark is not None
    assert [step for _, step in third.run_mark.starts] == [0, 4]


def test_a_rotation_that_user_code_asks_for_goes_by_no_clock(tmp_path: Path) -> None:
    class Back(TrainerCallback):
        """Sets the clock back: what was written before is from the future."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            for path in list_checkpoints(tmp_path):
                os.utime(path, (2**32, 2**32 + state.global_step))

    trainer = make(tmp_path, Back(), save_total_limit=2)
    trainer.__class__ = SavesItself
    trainer.train()
    assert steps_in(tmp_path) == [10, 12]


# ---- a relative output_dir, and a process that changes its directory


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def moved_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Trainer, Path, Path]:
    """A run with `output_dir="out"` that leaves its directory after step 3 for good."""
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    after.mkdir()
    monkeypatch.chdir(before)
    move = At(3, lambda: monkeypatch.chdir(after))
    options = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, **options}
    trainer = make_trainer(
        Path("out"), Classifier(), DATA, eval_dataset=DATA[:4], callbacks=[move], save_strategy="steps", save_steps=2,
        max_steps=6, save_total_limit=2, logging_steps=1, report_to=["jsonl", "csv"], **options,
    )  # fmt: skip
    return trainer, before, after


@pytest.mark.parametrize("in_background", [True, False])
def test_a_run_whose_process_changes_its_directory_stays_in_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_background: bool
) -> None:
    trainer, before, after = moved_run(tmp_path, monkeypatch, save_in_background=in_background)
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    trainer.save_metrics("train", {"loss": 1.0})
    trainer.log_table("samples", ["a"], [["b"]])
    assert files_in(after) == set()
    out = before / "out"
    assert len(steps_in(out)) == 2
    assert len(read_rows(out / JOURNAL_FILE)) == 6
    assert sum("loss" in json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()) == 6
    assert {RECORD_NAME, "model.safetensors", "trainer_state.json", "train_results.json", "log.csv"} <= files_in(out)
    # texts that scripts compare are as the user gave them
    assert trainer.args.output_dir == "out"
    assert trainer.state.best_model_checkpoint == f"out/checkpoint-{trainer.state.best_global_step}"


def test_a_directory_left_for_a_moment_gets_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, before, after = moved_run(tmp_path, monkeypatch)
    trainer.add_callback(At(5, lambda: monkeypatch.chdir(before)))
    trainer.train()
    assert files_in(after) == set()
    assert steps_in(before / "out")[-1] == 6


def test_each_run_is_in_the_directory_where_it_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with transformers: a notebook that changes its directory between two calls trains in the new one."""
    trainer, before, after = moved_run(tmp_path, monkeypatch)
    trainer.train()
    trainer.train()
    assert steps_in(after / "out")[-1] == 6
    monkeypatch.chdir(before)
    trainer.args.max_steps = 8
    trainer.train(resume_from_checkpoint="out/checkpoint-6")
    assert steps_in(before / "out")[-1] == 8
    assert steps_in(after / "out")[-1] == 6
