"""Pushes to a hub on loopback: what each strategy uploads, what failing ones do, and resuming from what was pushed."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_server import USER, Hub, point_to
from small_models import Classifier, classification, make_trainer, weights

from paceline import Trainer, TrainerCallback, TrainingArguments
from paceline.hub import pushes as pushing
from paceline.hub.repository import HubError

huggingface_hub = pytest.importorskip("huggingface_hub")
constants = pytest.importorskip("huggingface_hub.constants")

# of huggingface_hub, which sends large files in an older way of its HTTP client
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw bytes:DeprecationWarning")
DATA = classification(24)
TOKEN = "hf_" + "s3cret" * 5
STEPS = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}
MODEL = {"model.safetensors", "training_args.bin"}
RUN = {"README.md", "journal.bin", "run.json"}
CHECKPOINT = {
    *MODEL, "manifest.json", "optimizer.pt", "progress.json", "rng_state.pth", "scheduler.pt", "trainer_state.json",
}  # fmt: skip


def make(folder: Path, **options: Any) -> Trainer:
    return make_trainer(folder, Classifier(), DATA, **{"push_to_hub": True, "hub_token": TOKEN, **STEPS, **options})


def said(caplog: Any, text: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if text in record.getMessage()]


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


class LauncherConfig(TrainerCallback):
    reads_checkpoint = False

    def __init__(self) -> None:
        self.told: list[tuple[str, int, bool]] = []

    def on_push_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        self.told.append(("on_push_begin", state.global_step, is_main))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.told.append(("on_save", state.global_step, True))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.told.append(("on_train_end", state.global_step, True))


# ---- the strategies


def test_every_save_pushes_the_model_and_no_checkpoints(tmp_path: Path, hub: Hub) -> None:
    trainer = make(tmp_path / "mine", hub_always_push=True, save_in_background=False)
    assert trainer.hub_model_id == f"{USER}/mine"
    trainer.train()
    repository = hub[f"{USER}/mine"]
    assert repository.messages() == [f"Training in progress, step {step}" for step in (2, 4, 6)]
    assert set(repository.files) == MODEL | RUN
    for step, commit in zip((2, 4, 6), repository.branches["main"][1:], strict=True):
        saved = tmp_path / "mine" / f"checkpoint-{step}" / "model.safetensors"
        assert commit.files["model.safetensors"] == saved.read_bytes()
    assert hidden(tmp_path / "mine") == []
    assert repository.visibility is None


@pytest.mark.parametrize("in_background", [True, False])
def test_the_events_and_the_last_checkpoint(tmp_path: Path, hub: Hub, in_background: bool) -> None:
    told = LauncherConfig()
    trainer = make(tmp_path / "mine", save_in_background=in_background, callbacks=[told])
    trainer.train()
    kinds = [kind for kind, _, _ in told.told]
    assert kinds == ["on_push_begin", "on_save"] * 3 + ["on_train_end"]
    assert all(is_main for _, _, is_main in told.told)
    # one may have been left out for a newer one, never the last
    assert hub[f"{USER}/mine"].messages()[-1] == "Training in progress, step 6"
    saved = tmp_path / "mine" / "checkpoint-6" / "model.safetensors"
    assert hub[f"{USER}/mine"].files["model.safetensors"] == saved.read_bytes()


@pytest.mark.slow
def test_the_last_checkpoint_can_be_resumed_from(tmp_path: Path, hub: Hub) -> None:
    whole = make(tmp_path / "whole", push_to_hub=False, max_steps=8, save_strategy="no", lr_scheduler_type="constant")
    whole.train()
    options = {"hub_model_id": "team/model", "hub_strategy": "checkpoint", "lr_scheduler_type": "constant"}
    make(tmp_path / "first", **options, save_total_limit=1).train()
    repository = hub["team/model"]
    in_last = {name.partition("/")[2] for name in repository.files if name.startswith("last-checkpoint/")}
    assert in_last == CHECKPOINT
    assert {name for name in repository.files if "/" not in name} == MODEL | RUN
    fetched = huggingface_hub.snapshot_download("team/model", cache_dir=tmp_path / "cache", token=TOKEN)
    for index, place in enumerate((Path(fetched), tmp_path / "local")):
        if index:
            huggingface_hub.snapshot_download("team/model", local_dir=place, token=TOKEN)
        second = make(tmp_path / f"second-{index}", push_to_hub=False, max_steps=8, lr_scheduler_type="constant")
        second.train(resume_from_checkpoint=str(place / "last-checkpoint"))
        assert second.state.global_step == 8
        assert torch.equal(weights(whole.model), weights(second.model))


def test_what_an_earlier_last_checkpoint_held_is_gone(tmp_path: Path, hub: Hub) -> None:
    make(tmp_path, hub_model_id="team/model", hub_strategy="checkpoint").train()
    files = hub["team/model"].files
    files.update({"last-checkpoint/rng_state_1.pth": b"", "model-00001-of-00002.safetensors": b"", "notes.txt": b""})
    make(tmp_path, hub_model_id="team/model", hub_strategy="checkpoint").train()
    now = hub["team/model"].files
    assert {name for name in files if name not in now} == {
        "last-checkpoint/rng_state_1.pth", "model-00001-of-00002.safetensors",
    }  # fmt: skip


def test_all_checkpoints_are_pushed_though_they_are_rotated_away(tmp_path: Path, hub: Hub) -> None:
    gate = threading.Event()

    def wait(method: str, path: str) -> None:
        if "/preupload/" in path:
            gate.wait(30)

    hub.answer = wait

    class Open(TrainerCallback):
        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            gate.set()  # until now nothing was sent: the first two checkpoints are gone from the disk

    make(tmp_path, hub_model_id="a/b", hub_strategy="all_checkpoints", save_total_limit=1, callbacks=[Open()]).train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-6"]
    for step in (2, 4, 6):
        names = {name.partition("/")[2] for name in hub["a/b"].files if name.startswith(f"checkpoint-{step}/")}
        assert names == CHECKPOINT
    assert hidden(tmp_path) == []


def test_of_those_that_wait_only_the_newest_is_pushed(tmp_path: Path, hub: Hub, caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    gate = threading.Event()
    hub.answer = lambda method, path: gate.wait(30) and None if "/preupload/" in path else None

    class Open(TrainerCallback):
        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            assert not trainer.push_in_progress.is_done()
            gate.set()

    trainer = make(tmp_path, hub_model_id="a/b", save_in_background=False, callbacks=[Open()])
    trainer.train()
    assert hub["a/b"].messages() == ["Training in progress, step 2", "Training in progress, step 6"]
    assert said(caplog, "checkpoint-4 is skipped")
    assert said(caplog, "Waiting for the push of checkpoint-2 to a/b")
    assert trainer.push_in_progress.is_done()
    assert hidden(tmp_path) == []


def test_at_the_end_only_what_is_saved_then(tmp_path: Path, hub: Hub, caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    trainer = make(tmp_path / "mine", hub_strategy="end")
    trainer.train()
    repository = hub[f"{USER}/mine"]
    assert repository.messages() == []
    assert said(caplog, "Training pushed nothing (hub_strategy='end'")
    trainer.save_model()
    assert repository.messages() == ["Model save"]
    assert set(repository.files) == MODEL | RUN
    info = trainer.push_to_hub(commit_message="Mine", tags="digits")
    assert info.oid == repository.branches["main"][-1].sha
    assert repository.messages() == ["Model save", "Mine"]
    assert "digits" in huggingface_hub.ModelCard(repository.files["README.md"].decode()).data.tags


def test_messages_name_epochs_where_those_are_saved(tmp_path: Path, hub: Hub) -> None:
    make(tmp_path, hub_model_id="a/b", save_strategy="epoch", max_steps=-1, num_train_epochs=2).train()
    assert hub["a/b"].messages()[-1] == "Training in progress, epoch 2"


def test_what_is_private_and_where_it_goes(tmp_path: Path, hub: Hub) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True, disable_tqdm=True, max_steps=2, save_steps=2)
    args.set_push_to_hub("team/model", token=TOKEN, private_repo=True, revision="tries/one")
    trainer = Trainer(Classifier(), args, train_dataset=DATA)
    trainer.train()
    repository = hub["team/model"]
    assert repository.visibility == "private"
    assert repository.messages() == []
    assert repository.messages("tries/one") == ["Training in progress, step 2"]
    trainer.push_to_hub(revision="other")
    assert repository.messages("other") == ["End of training"]
    authorizations = {authorization for _, path, authorization in hub.requests if path.startswith("/api/models")}
    assert authorizations == {f"Bearer {TOKEN}"}


def test_nothing_pushed_holds_the_token_or_what_is_hidden(tmp_path: Path, hub: Hub) -> None:
    (tmp_path / "_temporary").mkdir(parents=True)
    (tmp_path / "_temporary" / "scratch.txt").write_text("no")
    (tmp_path / ".env").write_text(f"HF_TOKEN={TOKEN}")
    (tmp_path / "runs" / "checkpoint-3").mkdir(parents=True)
    (tmp_path / "runs" / "checkpoint-3" / "model.bin").write_text("no")
    (tmp_path / "runs" / "events.txt").write_text("yes")
    (tmp_path / "notes.txt").write_text("yes")
    trainer = make(tmp_path, hub_model_id="a/b", hub_strategy="all_checkpoints", report_to=["jsonl", "csv"])
    trainer.train()
    trainer.push_to_hub()
    names = {name for name in hub["a/b"].files if not name.startswith("checkpoint-")}
    assert names == MODEL | RUN | {"notes.txt", "runs/events.txt", "log.csv", "log.jsonl"}
    assert not any(TOKEN.encode() in content for content in hub["a/b"].files.values())


def test_push_behind(tmp_path: Path, hub: Hub) -> None:
    trainer = make(tmp_path, push_to_hub=False, hub_model_id="a/b", save_strategy="no", max_steps=1)
    trainer.train()
    assert hub.requests == []
    future = trainer.push_to_hub(blocking=False, private=True)
    assert future.result(30).oid == hub["a/b"].branches["main"][-1].sha
    assert hub["a/b"].visibility == "private"
    trainer._finish_current_push()
    assert trainer.push_in_progress.is_done()


# ---- what goes wrong


@pytest.mark.slow
def test_a_server_that_fails_stops_nothing_and_is_told_once(tmp_path: Path, hub: Hub, caplog: Any) -> None:
    hub.answer = lambda method, path: 500 if "/commit/" in path else None
    trainer = make(tmp_path, hub_model_id="a/b", hub_always_push=True)
    trainer.train()
    assert trainer.state.global_step == 6
    assert len(list(tmp_path.glob("checkpoint-*"))) == 3
    assert hub.calls("/commit/") == 3
    (sentence,) = said(caplog, "The push of")
    assert "checkpoint-2 to a/b failed" in sentence
    assert "500" in sentence
    assert "push_to_hub() pushes at any time" in sentence
    assert len(said(caplog, "The last push to a/b failed")) == 1
    trainer.save_model()  # does what it is for
    with pytest.raises(huggingface_hub.errors.HfHubHTTPError):
        trainer.push_to_hub()
    hub.answer = lambda method, path: None
    trainer.push_to_hub()
    assert hub["a/b"].messages() == ["End of training"]


def test_a_server_that_is_gone(tmp_path: Path, hub: Hub, caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make(tmp_path, hub_model_id="a/b")
    point_to("http://127.0.0.1:9", monkeypatch)
    trainer.train()
    assert trainer.state.global_step == 6
    assert len(said(caplog, "The push of checkpoint-2 to a/b failed")) == 1
    assert hidden(tmp_path) == []


def test_an_outage_that_ends(tmp_path: Path, hub: Hub, caplog: Any) -> None:
    hub.answer = lambda method, path: 500 if "/commit/" in path and hub.calls("/commit/") == 1 else None
    make(tmp_path, hub_model_id="a/b", hub_always_push=True).train()
    assert hub["a/b"].messages() == ["Training in progress, step 4", "Training in progress, step 6"]
    assert len(said(caplog, "failed")) == 1
    assert len(said(caplog, "checkpoint-4 could be pushed to a/b again")) == 1
    assert not said(caplog, "The last push")


def test_what_is_wrong_is_said_before_training(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.answer = lambda method, path: 401
    with pytest.raises(HubError, match=r"'a/b' could not be created or reached .*hf auth login.*hub_token"):
        make(tmp_path, hub_model_id="a/b")
    hub.answer = lambda method, path: 403 if "/branch/" in path else None
    with pytest.raises(HubError, match=r"hub_revision='mine': the branch could not be created in a/b"):
        make(tmp_path, hub_model_id="a/b", hub_revision="mine")
    with pytest.raises(HubError, match=r"'a/b/c' could not be created"):
        make(tmp_path, hub_model_id="a/b/c")
    point_to("http://127.0.0.1:9", monkeypatch)
    with pytest.raises(HubError, match=r"could not be created or reached \(ConnectError.* the network") as caught:
        make(tmp_path, hub_model_id="a/b")
    assert "Log in" not in str(caught.value)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match=r"HF_HUB_OFFLINE is set\. Unset it, or leave out push_to_hub"):
        make(tmp_path, hub_model_id="a/b")


def test_a_server_that_never_answers_does_not_hold_the_training(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.hub.repository.ANSWER_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        point_to(f"http://127.0.0.1:{server.getsockname()[1]}", monkeypatch)
        with pytest.raises(HubError, match=r"TimeoutError: no answer within 0.1 s\)\. Check the network"):
            make(tmp_path, hub_model_id="a/b")


def test_a_server_that_fails_is_no_matter_of_the_token(tmp_path: Path, hub: Hub) -> None:
    hub.answer = lambda method, path: 500
    with pytest.raises(HubError, match=r"The server failed: start again later") as caught:
        make(tmp_path, hub_model_id="a/b")
    assert "Log in" not in str(caught.value)


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r'pip install "paceline\[hub\]"'):
        make(tmp_path)
    make(tmp_path, push_to_hub=False).train()


def test_strategies_without_pushes_are_named(tmp_path: Path, caplog: Any) -> None:
    make(tmp_path, push_to_hub=False, hub_strategy="checkpoint", hub_model_id="a/b", max_steps=1)
    assert len(said(caplog, "hub_strategy='checkpoint' and hub_always_push=False")) == 1


def test_a_card_of_a_subclass_that_fails_stops_nothing(tmp_path: Path, hub: Hub, caplog: Any) -> None:
    class Own(Trainer):
        def create_model_card(self, *args: Any, **kwargs: Any) -> None:
            raise RuntimeError("no card today")

    trainer = make(tmp_path, hub_model_id="a/b", cls=Own)
    trainer.train()
    assert trainer.state.global_step == 6
    assert len(said(caplog, "no card today")) == 1


def test_an_error_in_training_waits_for_the_push(tmp_path: Path, hub: Hub) -> None:
    class Break(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                raise RuntimeError("broken")

    hub.answer = lambda method, path: time.sleep(0.05)
    trainer = make(tmp_path, hub_model_id="a/b", callbacks=[Break()], save_in_background=False)
    with pytest.raises(RuntimeError, match="broken"):
        trainer.train()
    assert hub["a/b"].messages() == ["Training in progress, step 2"]


def test_an_interrupt_while_waiting_leaves(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    hub.answer = lambda method, path: gate.wait(30) and None if "/preupload/" in path else None
    trainer = make(tmp_path, hub_model_id="a/b")

    def interrupt(self: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pushing.Pushes, "wait_until_done", interrupt)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert (tmp_path / "checkpoint-6").is_dir()
    monkeypatch.undo()
    gate.set()
    trainer.push_in_progress.wait_until_done()


def test_what_a_killed_run_left_is_cleared(tmp_path: Path, hub: Hub) -> None:
    for name in (".push-99999999-a1_b", f".push-{os.getpid()}-c"):  # in containers every run has the same id
        (tmp_path / name / "checkpoint").mkdir(parents=True)
    make(tmp_path, hub_model_id="a/b").train()
    assert hidden(tmp_path) == []


def test_methods_can_be_overridden(tmp_path: Path, hub: Hub) -> None:
    class Own(Trainer):
        calls: list[str] = []

        def init_hf_repo(self, *args: Any, **kwargs: Any) -> None:
            self.calls.append("init_hf_repo")
            super().init_hf_repo(*args, **kwargs)

        def create_model_card(self, *args: Any, **kwargs: Any) -> None:
            self.calls.append("create_model_card")
            super().create_model_card(*args, **kwargs)

        def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
            self.calls.append("save_model" if output_dir is None else "save of a checkpoint")
            super().save_model(output_dir, _internal_call)

        def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
            self.calls.append("push_to_hub")
            return super().push_to_hub(*args, **kwargs)

        def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
            self.calls.append(Path(checkpoint_folder).name)
            super()._push_from_checkpoint(checkpoint_folder)

        def _finish_current_push(self) -> None:
            self.calls.append("_finish_current_push")
            super()._finish_current_push()

    trainer = make(tmp_path, hub_model_id="a/b", cls=Own, max_steps=2, save_in_background=False)
    trainer.train()
    finish = "_finish_current_push"  # before the first push to a repository, and at the end
    training = ["save of a checkpoint", "checkpoint-2", finish, "create_model_card", finish]
    assert Own.calls == ["init_hf_repo", *training]
    Own.calls.clear()
    trainer.save_model()
    assert Own.calls == ["save_model", "push_to_hub", "save_model", "create_model_card", finish]
    # the second push changes the record of the run at most: the first, on a thread, may find how the run ended
    assert hub["a/b"].messages() in (pushed := ["Training in progress, step 2"], [*pushed, "Model save"])


def test_another_repository_can_be_assigned(tmp_path: Path, hub: Hub) -> None:
    trainer = make(tmp_path, hub_model_id="a/b", max_steps=2)
    trainer.train()
    pushes = trainer.push_in_progress
    assert pushes.repo_id == trainer.hub_model_id == "a/b"
    trainer.hub_model_id = huggingface_hub.HfApi(token=TOKEN).create_repo("a/c").repo_id
    trainer.push_to_hub(blocking=False).result(30)
    assert hub["a/c"].messages() == ["End of training"]
    assert trainer.push_in_progress.repo_id == "a/c"
    trainer.push_in_progress = pushes
    assert trainer.push_in_progress is pushes


def test_the_record_names_no_token(tmp_path: Path, hub: Hub) -> None:
    make(tmp_path, hub_model_id="a/b").train()
    assert json.loads(hub["a/b"].files["run.json"])["arguments"]["hub_token"] == "<HUB_TOKEN>"
    arguments = torch.load(io.BytesIO(hub["a/b"].files["training_args.bin"]), weights_only=True)
    assert arguments["hub_token"] == "<HUB_TOKEN>"
    assert re.search(r"hub_model_id", str(arguments))
