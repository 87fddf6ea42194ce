"""Runs whose output belongs to S3: a real server of that protocol on loopback, real processes, kills and outages."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import Classifier, classification, make_trainer, weights

from paceline.checkpoint import remote_sync as mirrors
from paceline.checkpoint.folders import step_of, verify
from paceline.checkpoint.stores import ObjectStore, StoreError, bring_named
from paceline.core.optional import is_installed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (is_installed("moto") and is_installed("s3fs")), reason="needs moto and s3fs"),
    # botocore's and moto's own use of what Python is about to drop
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

SUPPORT = Path(__file__).resolve().parent.parent / "support"
SECRET = "aVerySecretKeyOfTheTests"


class Server:
    """moto's server, which keeps what it holds while it is stopped."""

    def __init__(self) -> None:
        self.port = 0
        self.start()

    def start(self) -> None:
        from moto.server import ThreadedMotoServer

        self.server: Any = ThreadedMotoServer(ip_address="127.0.0.1", port=self.port, verbose=False)
        self.server.start()
        self.port = self.server.get_host_and_port()[1]

    def stop(self) -> None:
        self.server.stop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.stop()


@pytest.fixture
def url(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[str]:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    import boto3

    bucket = f"bucket-{abs(hash(request.node.name)) % 10**8}"
    boto3.client("s3").create_bucket(Bucket=bucket)
    yield f"s3://{bucket}/team/run"
    for thread in threading.enumerate():  # the server will be gone when the interpreter ends
        if isinstance(thread, mirrors.Follower):
            thread.remote_sync.close()


def start(url: str, folder: Path, seconds: float) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    environment = {
        **os.environ,
        "PYTHONPATH": f"{SUPPORT.parent.parent / 'src'}{os.pathsep}{SUPPORT}",
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    return subprocess.Popen(
        [sys.executable, str(SUPPORT / "store_job.py"), url, str(folder / "result.pt"), str(seconds)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=(folder / "log").open("w"),
        text=True,
    )


def finish(process: subprocess.Popen[str], folder: Path) -> tuple[dict[str, Any], str]:
    try:
        process.wait(240)
    finally:
        process.kill()
    log = (folder / "log").read_text()
    assert process.returncode == 0, log[-4000:]
    return torch.load(folder / "result.pt", weights_only=True), log


def test_a_killed_run_goes_on_from_the_store_on_another_machine(url: str, tmp_path: Path) -> None:
    undisturbed, _ = finish(start(f"{url}-whole", tmp_path / "whole", 0.0), tmp_path / "whole")

    process, store = start(url, tmp_path / "first", 0.3), ObjectStore(url)
    until = time.monotonic() + 120
    while not store.checkpoints() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    assert process.poll() is None, (tmp_path / "first" / "log").read_text()[-4000:]
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    reached = max(map(step_of, store.checkpoints()))
    store.write("checkpoint-1000/upload-is-incomplete.txt", b"as a kill leaves it")
    store.write("checkpoint-1000/model.safetensors", b"half")

    result, log = finish(start(url, tmp_path / "second", 0.0), tmp_path / "second")
    assert f"checkpoint-{reached} is resumed from {url}" in log
    assert "checkpoint-1000 was left incomplete" in log
    assert result["step"] == undisturbed["step"] == 24
    assert torch.equal(result["weights"], undisturbed["weights"])
    assert SECRET not in log
    assert SECRET not in (tmp_path / "first" / "log").read_text()

    kept = sorted(map(step_of, store.checkpoints()))
    assert len(kept) == 2
    assert kept[-1] == 24
    beside = set(store.files_beside())
    assert {"model.safetensors", "trainer_state.json", "run.json", "log.jsonl", "journal.bin"} <= beside
    rows = (store.read("log.jsonl") or b"").decode().splitlines()
    assert len(rows) > 24  # those of the first process too
    assert verify(bring_named(f"{url}/checkpoint-24", None, tmp_path)) == []


def test_a_store_that_is_away_for_a_while_loses_nothing(
    server: Server, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mirrors, "SECONDS_BETWEEN_LOOKS", 0.05)
    monkeypatch.setattr(mirrors, "FIRST_PAUSE", 0.1)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    steps: list[int] = []

    from paceline import TrainerCallback

    class Outage(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            steps.append(state.global_step)
            if state.global_step == 3:
                server.stop()
            if state.global_step == 6:
                until = time.monotonic() + 120
                while trainer.remote_sync.failure is None and time.monotonic() < until:
                    time.sleep(0.05)

        def on_train_end(self, *_: Any, **__: Any) -> None:
            server.start()

    trainer = make_trainer(
        url,  # type: ignore[arg-type]
        Classifier(),
        classification(32),
        callbacks=[Outage()],
        save_strategy="steps",
        save_steps=2,
    )
    with caplog.at_level(logging.INFO, logger="paceline"):
        trainer.train()
    assert steps == list(range(1, 9))
    assert trainer.remote_sync.failure is None
    assert sorted(map(step_of, ObjectStore(url).checkpoints())) == [2, 4, 6, 8]
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert sum("Training continues, the files are in" in words for words in said) == 1
    assert sum("can be reached again" in words for words in said) == 1
    assert SECRET not in caplog.text


def test_what_is_wrong_is_known_before_training(url: str, tmp_path: Path) -> None:
    missing = url.replace("/team", "-that-is-missing/team")
    with pytest.raises(StoreError, match="missing") as caught:
        make_trainer(missing, Classifier(), classification(8))  # type: ignore[arg-type]
    assert caught.value.is_lasting


def test_a_model_can_be_gone_on_with_by_url(url: str, tmp_path: Path) -> None:
    first = make_trainer(url, Classifier(), classification(32), save_strategy="epoch")  # type: ignore[arg-type]
    first.train()
    second = make_trainer(tmp_path / "local", Classifier(seed=3), classification(32), num_train_epochs=2)
    second.train(resume_from_checkpoint=f"{url}/checkpoint-8")
    whole = make_trainer(tmp_path / "whole", Classifier(), classification(32), save_strategy="epoch")
    whole.train()
    third = make_trainer(tmp_path / "whole", Classifier(seed=3), classification(32), num_train_epochs=2)
    third.train(resume_from_checkpoint=True)
    assert second.state.global_step == 16
    assert torch.equal(weights(second.model), weights(third.model))
