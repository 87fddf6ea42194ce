"""Checkpoints written behind the training: when it waits, what it is told, what a disk that refuses does to it."""

from __future__ import annotations

import errno
import gc
import json
import logging
import os
import shutil
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_models import Classifier, classification, make_trainer, scored, weights

from paceline import Trainer, TrainerCallback
from paceline.checkpoint import folders
from paceline.core import retry_writer
from paceline.core.journal import read_rows
from paceline.pytorch.checkpoint import background, checkpointer, tensors
from paceline.pytorch.checkpoint.checkpointer import Checkpointer
from paceline.pytorch.checkpoint.saves import Job

DATA = classification(32)


def steps_of(folder: Path) -> list[int]:
    return [int(path.name.split("-")[1]) for path in folders.list_checkpoints(folder)]


def good(folder: Path) -> list[int]:
    return [int(path.name.split("-")[1]) for path in folders.list_checkpoints(folder) if not folders.verify(path)]


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def make(folder: Path, model: Any = None, **options: Any) -> Trainer:
    defaults = {"save_strategy": "steps", "save_steps": 2, "logging_steps": 100}
    return make_trainer(folder, model or Classifier(), DATA, **{**defaults, **options})


class Each(TrainerCallback):
    """Calls a function after each step."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.function(state.global_step)


class LauncherConfig(TrainerCallback):
    reads_checkpoint = False

    def __init__(self) -> None:
        self.told: list[tuple[int, threading.Thread]] = []

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.told.append((state.global_step, threading.current_thread()))


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Publishing waits until this is set."""
    event = threading.Event()
    publish = folders.publish

    def wait(*args: Any) -> None:
        assert event.wait(20)
        publish(*args)

    monkeypatch.setattr(folders, "publish", wait)
    yield event
    event.set()


# ---- behind the training


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path, gate: threading.Event) -> None:
    seen: dict[int, list[int]] = {}
    told = LauncherConfig()

    def look(step: int) -> None:
        seen[step] = steps_of(tmp_path)
        if step == 6:
            gate.set()

    trainer = make(tmp_path, save_steps=5, callbacks=[Each(look), told])
    trainer.train()
    assert seen[6] == []
    assert steps_of(tmp_path) == good(tmp_path) == [5, 8]
    assert [thread for _, thread in told.told] == [threading.main_thread()] * 2
    assert told.told[0][0] > 5
    assert not hidden(tmp_path)


def test_what_is_written_is_the_moment_of_the_save(tmp_path: Path, gate: threading.Event) -> None:
    taken = {}

    class Note(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any, optimizer: Any, **kwargs: Any) -> None:
            if state.global_step == 5:
                taken["weights"] = weights(model).clone()
                taken["moments"] = [entry["exp_avg"].clone() for entry in optimizer.state.values()]
            if state.global_step == 7:
                gate.set()

    make(tmp_path, save_steps=5, callbacks=[Note()]).train()
    fresh = Classifier(seed=5)
    trainer = make(tmp_path / "other", fresh)
    trainer._load_from_checkpoint(str(tmp_path / "checkpoint-5"))
    assert torch.equal(weights(fresh), taken["weights"])
    saved = torch.load(tmp_path / "checkpoint-5" / "optimizer.pt", weights_only=True)
    moments = [entry["exp_avg"] for entry in saved["state"].values()]
    assert all(map(torch.equal, moments, taken["moments"]))


def test_the_state_that_is_written_is_the_moment_of_the_save(tmp_path: Path, gate: threading.Event) -> None:
    """A callback may hand out its own dict, which grows while the checkpoint is written; log rows may change."""

    class Keeps(TrainerCallback):
        def __init__(self) -> None:
            self.seen: dict[str, list[int]] = {"steps": []}

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.seen["steps"].append(state.global_step)
            self.seen[f"step {state.global_step}"] = []
            if state.global_step == 7:
                state.log_history[0]["loss"] = "changed"
                gate.set()

        def state(self) -> dict[str, Any]:
            return {"args": {}, "attributes": {"seen": self.seen}}

    make(tmp_path, save_steps=5, logging_steps=1, callbacks=[Keeps()]).train()
    written = json.loads((tmp_path / "checkpoint-5" / "trainer_state.json").read_text())
    seen = written["stateful_callbacks"]["Keeps"]["attributes"]["seen"]
    assert seen.pop("steps") == [1, 2, 3, 4, 5]
    assert list(seen) == [f"step {step}" for step in range(1, 6)]
    assert [row["step"] for row in written["log_history"]] == [1, 2, 3, 4, 5]
    assert isinstance(written["log_history"][0]["loss"], float)


def test_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    under_way, most = 0, 0
    publish = folders.publish

    def count(*args: Any) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        publish(*args)
        under_way -= 1

    monkeypatch.setattr(folders, "publish", count)
    make(tmp_path, save_steps=1).train()
    assert most == 1
    assert good(tmp_path) == list(range(1, 9))


class OwnSave(Trainer):
    def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        assert Path(output_dir, "model.safetensors").is_file()
        Path(output_dir, "mine.txt").write_text("here")


class OwnCheckpoint(Trainer):
    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        assert Path(self.args.output_dir, f"checkpoint-{self.state.global_step}").is_dir()


class OwnModel(Trainer):
    def save_model(self, output_dir: Any = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call)
        Path(output_dir, f"model of {self.state.global_step}").write_text("here")


class AddsFile(TrainerCallback):
    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        Path(args.output_dir, f"checkpoint-{state.global_step}", "adapter.txt").write_text("here")


class SavesItself(Classifier):
    def save_pretrained(self, folder: str) -> None:
        torch.save(self.state_dict(), Path(folder, "pytorch_model.bin"))


@pytest.mark.parametrize(
    ("options", "reason", "file"),
    [
        ({"cls": OwnSave}, "OwnSave has its own _save", "mine.txt"),
        ({"cls": OwnCheckpoint}, "OwnCheckpoint has its own _save_checkpoint", "model.safetensors"),
        ({"cls": OwnModel}, "OwnModel has its own save_model", "model.safetensors"),
        ({"callbacks": [AddsFile()]}, "AddsFile listens to on_save", "adapter.txt"),
        ({"model": SavesItself()}, "SavesItself has its own save_pretrained", "pytorch_model.bin"),
        ({"save_in_background": False}, None, "model.safetensors"),
    ],
)
def test_what_makes_training_wait(
    tmp_path: Path, options: dict[str, Any], reason: str | None, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "paceline")
    make(tmp_path, callbacks=options.pop("callbacks", None), **options).train()
    assert good(tmp_path) == [2, 4, 6, 8]
    assert all((path / file).is_file() for path in folders.list_checkpoints(tmp_path))
    said = [record.message for record in caplog.records if "Training waits" in record.message]
    assert len(said) == (0 if reason is None else 1)  # once
    assert reason is None or reason in said[0]


def test_an_adapter_callback_writes_into_the_checkpoint(tmp_path: Path) -> None:
    """As the callbacks do that projects with adapters carry along: the adapter in a folder of its own, at on_save."""
    peft = pytest.importorskip("peft")

    class SavesAdapter(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            checkpoint = Path(args.output_dir, f"checkpoint-{state.global_step}")
            kwargs["model"].save_pretrained(str(checkpoint / "adapter_model"))
            (checkpoint / "pytorch_model.bin").unlink(missing_ok=True)

    def adapted() -> Any:
        return peft.get_peft_model(Classifier(), peft.LoraConfig(target_modules=["first", "second"], r=2))

    models = [adapted() for _ in range(3)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    options = {"callbacks": [SavesAdapter()], "learning_rate": 0.1}
    make(tmp_path / "whole", models[0], **options).train()
    make(tmp_path / "parts", models[1], **options, max_steps=4, lr_scheduler_type="constant").train()
    assert good(tmp_path / "parts") == [2, 4]
    for checkpoint in folders.list_checkpoints(tmp_path / "parts"):
        loaded = peft.PeftModel.from_pretrained(Classifier(), str(checkpoint / "adapter_model"))
        assert loaded.peft_config["default"].r == 2
    last = tmp_path / "parts" / "checkpoint-4" / "adapter_model"
    state = peft.PeftModel.from_pretrained(Classifier(), str(last)).state_dict()
    assert all(torch.equal(value, models[1].state_dict()[name]) for name, value in state.items() if "lora" in name)
    shutil.rmtree(tmp_path / "whole" / "checkpoint-8")
    resumed = make(tmp_path / "whole", models[2], **options)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 8
    assert torch.equal(weights(models[2]), weights(models[0]))


def test_training_waits_when_memory_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "paceline")
    monkeypatch.setattr(checkpointer, "available_host_memory", lambda: 100)
    make(tmp_path).train()
    assert good(tmp_path) == [2, 4, 6, 8]
    assert "of host memory, and 100 bytes are available" in caplog.text


def test_memory_of_the_copies_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_SMALL_BYTES", -1)  # copies of small tensors are made anew
    buffers = background.HostBuffers()
    tensor = torch.randn(4, 5)
    tied = {"a": tensor, "b": tensor, "c": tensor.clone(), "turned": torch.randn(3, 2).T}
    copies = {name: buffers.copy(value) for name, value in tied.items()}
    buffers.finish()
    assert copies["a"] is copies["b"]
    assert copies["c"] is not copies["a"]
    assert all(torch.equal(copies[name], tied[name]) for name in tied)
    assert copies["turned"].stride() == tied["turned"].stride()
    held = buffers.num_bytes
    buffers.give_back()
    again = buffers.copy(tensor)
    assert again.data_ptr() in {copies["a"].data_ptr(), copies["c"].data_ptr()}
    assert buffers.num_bytes == held
    buffers.finish()
    buffers.give_back()
    assert buffers.num_bytes == 80  # what the last copy did not need is gone


def test_transformers_models_are_written_behind_the_training(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=20,
        tie_word_embeddings=True, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    ids = torch.randint(0, 20, (16, 6))
    data = [{"input_ids": row, "labels": row} for row in ids]
    threads = []
    save = transformers.LlamaForCausalLM.save_pretrained

    trainer = make_trainer(tmp_path, model, data, save_strategy="steps", save_steps=2, logging_steps=100)
    kept = model.config.use_cache

    def note(*args: Any, **kwargs: Any) -> None:
        threads.append(threading.current_thread())
        save(*args, **kwargs)

    note.__module__ = save.__module__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.PreTrainedModel, "save_pretrained", note)
        trainer.train()
    assert threads
    assert threading.main_thread() not in threads
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-4")
    assert loaded.config.use_cache == kept
    assert all(map(torch.equal, loaded.parameters(), model.parameters()))


def test_a_model_that_cannot_be_copied(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    transformers = pytest.importorskip("transformers")
    caplog.set_level(logging.INFO, "paceline")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=20
    )
    model = transformers.LlamaForCausalLM(config)
    model.lock = threading.Lock()
    data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 20, (8, 6))]
    make_trainer(tmp_path, model, data, save_strategy="steps", save_steps=1, logging_steps=100).train()
    assert good(tmp_path) == [1, 2]
    assert "cannot be copied" in caplog.text
    assert not hidden(tmp_path)


# ---- what does not train


class WithBase(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.base = torch.nn.Linear(600, 600)
        self.base.requires_grad_(False)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Any, labels: Any = None) -> Any:
        self.calls += 1
        return super().forward(x, labels)


def shard(folder: Path, step: int) -> os.stat_result:
    return (folder / f"checkpoint-{step}" / "model-00002-of-00002.safetensors").stat()


@pytest.mark.parametrize("in_background", [True, False])
def test_frozen_weights_are_stored_once(tmp_path: Path, in_background: bool) -> None:
    model = WithBase()
    make(tmp_path, model, save_in_background=in_background, save_total_limit=2).train()
    assert good(tmp_path) == [6, 8]
    assert shard(tmp_path, 6).st_ino == shard(tmp_path, 8).st_ino
    fresh = WithBase()
    torch.nn.init.zeros_(fresh.base.weight)
    make(tmp_path / "other", fresh)._load_from_checkpoint(str(tmp_path / "checkpoint-8"))
    assert all(map(torch.equal, fresh.state_dict().values(), model.state_dict().values()))


def one_value(weight: torch.Tensor) -> None:
    weight.data[300, 7] += 1.0  # unseen by autograd's counter of versions


def two_rows(weight: torch.Tensor) -> None:
    """Of a permutation matrix: the sums of rows and columns stay as they are."""
    weight.data[[3, 5]] = weight.data[[5, 3]]


@pytest.mark.parametrize("edit", [one_value, two_rows])
def test_frozen_weights_that_were_changed_are_written_anew(tmp_path: Path, edit: Any) -> None:
    model = WithBase()
    torch.nn.init.eye_(model.base.weight)

    def change(step: int) -> None:
        if step == 5:
            edit(model.base.weight)

    make(tmp_path, model, callbacks=[Each(change)]).train()
    assert good(tmp_path) == [2, 4, 6, 8]
    assert shard(tmp_path, 2).st_ino == shard(tmp_path, 4).st_ino != shard(tmp_path, 6).st_ino
    assert shard(tmp_path, 6).st_ino == shard(tmp_path, 8).st_ino


def test_without_links_the_file_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    make(tmp_path, WithBase()).train()
    assert good(tmp_path) == [2, 4, 6, 8]
    assert shard(tmp_path, 2).st_ino != shard(tmp_path, 4).st_ino


def test_a_damaged_source_is_not_linked_on(tmp_path: Path) -> None:
    def damage(step: int) -> None:
        path = tmp_path / "checkpoint-2" / "model-00002-of-00002.safetensors"
        if step == 4 and path.is_file():
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(content)

    make(tmp_path, WithBase(), callbacks=[Each(damage)], save_in_background=False).train()
    assert good(tmp_path) == [4, 6, 8]


# ---- a disk that refuses


class Disk:
    """Refuses to write files while it is full, as a file system would, in the middle of one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int = errno.ENOSPC) -> None:
        self.is_full = False
        self.number = number
        save_file = tensors.save_plain

        def refuse(state: Any, path: Any) -> None:
            if self.is_full:
                Path(path).write_bytes(b"half")
                raise OSError(self.number, os.strerror(self.number), str(path))
            save_file(state, path)

        monkeypatch.setattr(background, "save_plain", refuse)
        monkeypatch.setattr(tensors, "save_plain", refuse)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("in_background", [True, False])
def test_a_full_disk_costs_that_checkpoint_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, in_background: bool, caplog: pytest.LogCaptureFixture
) -> None:
    disk = Disk(monkeypatch, number)

    def fill(step: int) -> None:
        if trainer.run is not None:
            trainer.run.saves.writer.join()
        disk.is_full = step in (3, 4, 5)

    trainer = make(tmp_path, callbacks=[Each(fill)], save_in_background=in_background, save_total_limit=2)
    trainer.train()
    assert trainer.state.global_step == 8
    assert good(tmp_path) == [6, 8]
    assert f"checkpoint-4 could not be written: [Errno {number}]" in caplog.text
    assert "Training continues" in caplog.text
    assert not hidden(tmp_path)
    assert torch.equal(weights(trainer.model), weights(reference(tmp_path).model))


@pytest.fixture
def _silence() -> Iterator[None]:
    """Logs nothing: the records that pytest keeps hold the errors, which hold the frames, which hold the copies."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.slow
@pytest.mark.usefixtures("_silence")
@pytest.mark.parametrize(
    ("number", "is_best"), [pytest.param(errno.ENOSPC, True, marks=pytest.mark.nightly), (None, False)]
)
def test_saves_that_fail_hold_no_more_memory_than_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_best: bool, number: int | None
) -> None:
    """Seven in a row, of the disk or of a bug; one that holds the best model is kept, one at a time, until the end."""
    disk, shape, alive = Disk(monkeypatch, number or errno.ENOSPC), (16, 8), []
    disk.is_full = True
    gc.collect()
    older = [each for each in gc.get_objects() if type(each) is torch.Tensor and each.shape == shape]  # of other tests
    if number is None:
        monkeypatch.setattr(Job, "run", lambda self: (_ for _ in ()).throw(ValueError("a bug")))

    def count(step: int) -> None:
        if step not in (3, 8):
            return
        trainer.run.saves.writer.join()
        states = trainer.optimizer.state.values()
        own = {id(each) for each in older} | {id(value) for entry in states for value in entry.values()}
        gc.collect()
        tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor and each.shape == shape]
        grads = [parameter.grad for parameter in trainer.model.parameters()]
        own |= {id(gradient) for gradient in grads}
        alive.append(len([each for each in tensors if id(each) not in own]))

    scores = iter(range(100))
    options: dict[str, Any] = {}
    if is_best:
        options = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": DATA[:4], "greater_is_better": True}
        options |= {"compute_metrics": lambda _: {"score": next(scores)}, "metric_for_best_model": "score"}
        options |= {"load_best_model_at_end": True}
    trainer = make(tmp_path, callbacks=[Each(count)], save_steps=1, **options)
    trainer.train()
    assert trainer.state.global_step == 8
    one = 0 if number is None else 3  # the copies of one save: a weight, and two of the optimizer's
    assert max(alive) <= one, alive
    assert good(tmp_path) == []


def reference(tmp_path: Path) -> Trainer:
    trainer = make(tmp_path / "undisturbed", save_strategy="no")
    trainer.train()
    return trainer


def test_room_is_asked_for_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=0, used=0, free=5000))
    monkeypatch.setattr(folders, "begin", lambda final: pytest.fail("a folder was made"))
    make(tmp_path).train()
    assert "5 kB are free" in caplog.text
    assert "The run ends without checkpoint-2, checkpoint-4" in caplog.text


def test_a_disk_that_is_gone_is_not_written_past(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def unmount(step: int) -> None:
        if step == 3:
            assert trainer.run is not None
            trainer.run.saves.writer.join()
            trainer.run.saves.place_of(tmp_path).device += 1  # the folder is there; the file system is another

    trainer = make(tmp_path, callbacks=[Each(unmount)])
    trainer.train()
    assert good(tmp_path) == [2]
    assert "is its disk mounted?" in caplog.text


def test_a_folder_that_may_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mkdir = os.mkdir

    def refuse(path: Any, *args: Any) -> None:
        if "checkpoint-4" in str(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        mkdir(path, *args)

    monkeypatch.setattr(os, "mkdir", refuse)
    make(tmp_path).train()
    assert good(tmp_path) == [2, 6, 8]
    assert "checkpoint-4 could not be written: [Errno 13] Permission denied" in caplog.text


def best_run(tmp_path: Path, disk: Disk, full: Any, values: list[float], **options: Any) -> Trainer:
    def fill(step: int) -> None:
        if trainer.run is not None:
            trainer.run.saves.writer.join()
        disk.is_full = full(step)

    trainer = make(
        tmp_path,
        callbacks=[Each(fill)],
        **scored(values, DATA[:4]),
        **options,
    )
    trainer.train()
    return trainer


def test_the_best_before_stays_when_a_better_one_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"save_in_background": False}
    trainer = best_run(tmp_path, Disk(monkeypatch), lambda step: step >= 6, [0.5, 0.4, 0.9, 0.1], **options)
    assert Path(trainer.state.best_model_checkpoint or "").name == "checkpoint-2"
    assert good(tmp_path) == [2, 4]


def test_a_best_model_that_is_the_present_one_stays_when_it_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"save_in_background": False}
    trainer = best_run(tmp_path, Disk(monkeypatch), lambda step: step >= 8, [0.5, 0.4, 0.3, 0.9], **options)
    assert "The best model, of step 8, is the present one: no checkpoint is loaded." in caplog.text
    saved = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    assert any(not torch.equal(weight, saved[name]) for name, weight in trainer.model.state_dict().items())


def test_a_lost_best_model_is_told_when_another_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"save_in_background": False}
    best_run(tmp_path, Disk(monkeypatch), lambda step: step == 6, [0.5, 0.4, 0.9, 0.1], **options)
    assert "The best model, of step 6, could not be written:" in caplog.text


def test_a_best_model_that_could_not_be_written_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = best_run(tmp_path, Disk(monkeypatch), lambda step: step == 4, [0.5, 0.9, 0.4, 0.1])
    assert "tried again with the next save" in caplog.text
    assert Path(trainer.state.best_model_checkpoint or "").name == "checkpoint-4"
    assert good(tmp_path) == [4, 8]
    assert not hidden(tmp_path)


def test_a_best_model_is_written_at_the_end_at_the_latest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    finish = Checkpointer.finish

    def free(self: Checkpointer, output_dir: Path) -> None:
        self.saves.writer.join()
        disk.is_full = False
        finish(self, output_dir)

    monkeypatch.setattr(Checkpointer, "finish", free)
    trainer = best_run(tmp_path, disk, lambda step: step >= 4, [0.5, 0.4, 0.6, 0.9])
    assert Path(trainer.state.best_model_checkpoint or "").name in ("checkpoint-6", "checkpoint-8")
    assert good(tmp_path)


def test_an_error_that_is_not_the_disks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Behind the training it is told; the next save is made in front, where it ends the run if it is still there."""

    def fail(self: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(background.HostCopy, "write", fail)
    make(tmp_path).train()
    assert "checkpoint-2 could not be written: a bug" in caplog.text
    assert good(tmp_path) == [4, 6, 8]


# ---- which stay


def test_policies_compose(tmp_path: Path) -> None:
    scores = iter([0.1, 0.9, 0.3, 0.8, 0.2, 0.4, 0.5, 0.6])
    make(
        tmp_path,
        save_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        eval_dataset=DATA[:4],
        compute_metrics=lambda p: {"score": next(scores)},
        keep_best=2,
        keep_best_metric="score",
        keep_every_steps=3,
        save_total_limit=2,
    ).train()
    assert steps_of(tmp_path) == [2, 3, 4, 6, 7, 8]


def test_a_limit_on_the_size_of_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A write that the system itself refuses, in the middle of a file."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(step: int) -> None:
        assert trainer.run is not None
        trainer.run.saves.writer.join()
        is_limited = step in (3, 4, 5)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000 if is_limited else before[0], before[1]))

    model = WithBase()
    model.base.requires_grad_(True)
    trainer = make(tmp_path, model, callbacks=[Each(limit)])
    try:
        trainer.train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert good(tmp_path) == [2, 6, 8]
    assert "checkpoint-4 could not be written: [Errno 27] File too large" in caplog.text
    assert not hidden(tmp_path)


def test_the_journal_catches_up_when_the_disk_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "journal.bin"
    aside = tmp_path / "aside"

    def refuse(step: int) -> None:
        if step == 3:
            path.rename(aside)
            path.mkdir()  # nothing can be written there
        if step == 6:
            path.rmdir()
            aside.rename(path)
            with path.open("ab") as file:
                file.write(b"half a row")

    make(tmp_path, logging_steps=1, callbacks=[Each(refuse)]).train()
    assert [row.step for row in read_rows(path)] == list(range(1, 9))
    assert caplog.text.count("journal.bin could not be written") == 1


def test_a_run_resumes_on_a_disk_that_takes_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither run.json can be written nor the journal cut, until step 6."""
    make(tmp_path, max_steps=4).train()
    is_full = True

    def refuse(function: Any, *args: Any) -> Any:
        if is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return function(*args)

    def free(step: int) -> None:
        nonlocal is_full
        is_full = step < 6

    shutil.rmtree(tmp_path / "checkpoint-4")
    monkeypatch.setattr(os, "truncate", partial(refuse, os.truncate))
    monkeypatch.setattr("paceline.core.record.replace_whole", partial(refuse, retry_writer.replace_whole))
    trainer = make(tmp_path, logging_steps=1, callbacks=[Each(free)])
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 8
    assert [row.step for row in read_rows(tmp_path / "journal.bin")] == list(range(1, 9))
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["extra"]["resumed_at_step"] == 2
    assert [entry["extra"]["resumed_at_step"] for entry in record["history"]] == [0]
    for name in ("run.json", "journal.bin"):
        assert caplog.text.count(f"{name} could not be written") == 1


@pytest.mark.parametrize("kind", ["gone", "damaged"])
def test_a_best_checkpoint_that_cannot_be_loaded_at_the_end(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    scores = iter([0.9, 0.1, 0.2, 0.3])

    def spoil(step: int) -> None:
        if step == 7 and kind == "gone":
            shutil.rmtree(tmp_path / "checkpoint-2")
        elif step == 7:
            (tmp_path / "checkpoint-2" / "model.safetensors").write_bytes(b"nothing")

    trainer = make(
        tmp_path,
        callbacks=[Each(spoil)],
        eval_strategy="steps",
        eval_steps=2,
        eval_dataset=DATA[:4],
        compute_metrics=lambda p: {"score": next(scores)},
        metric_for_best_model="score",
        load_best_model_at_end=True,
    )
    trainer.train()
    assert "The best model was not loaded, the final weights are kept" in caplog.text
    assert torch.equal(weights(trainer.model), weights(reference(tmp_path).model))
