"""Weights & Biases and MLflow for real: a folder of W&B that is read back, and a server of MLflow on this machine.

`make test-slow` installs both.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from search_jobs import make_search, searched
from small_models import Classifier, classification, make_trainer

from paceline import TrainerCallback

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # theirs are many, and change with each release
]

BLOCK = 32 * 1024


def needs(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f'{module} is not installed: pip install "paceline[trackers]"') from error


# ---- reading what W&B wrote offline


def read_records(path: Path) -> list[Any]:
    """The records of a .wandb file: a LevelDB log of protocol buffers after a header of 7 bytes."""
    kind = importlib.import_module("wandb.proto.wandb_internal_pb2").Record
    data, offset, part, records = path.read_bytes(), 7, b"", []
    while offset + 7 <= len(data):
        left = BLOCK - offset % BLOCK
        if left < 7:
            offset += left
            continue
        _, length, place = struct.unpack("<IHB", data[offset : offset + 7])
        if offset + 7 + length > len(data):
            break  # still being written
        part += data[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if place in (1, 4):  # whole, or the last part
            records.append(kind.FromString(part))
            part = b""
    return records


def read_run(path: Path) -> dict[str, Any]:
    run: dict[str, Any] = {"history": [], "summary": {}, "config": {}, "artifacts": [], "text": ""}
    for record in read_records(path):
        which = record.WhichOneof("record_type")
        if which == "run":
            run.update(id=record.run.run_id, project=record.run.project, name=record.run.display_name)
            run.update(tags=list(record.run.tags), notes=record.run.notes)
            run["began"] = record.run.start_time.ToNanoseconds()
            run["config"].update({item.key: json.loads(item.value_json) for item in record.run.config.update})
        elif which == "config":
            run["config"].update({item.key: json.loads(item.value_json) for item in record.config.update})
        elif which == "history":
            row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            run["history"].append({name: value for name, value in row.items() if not name.startswith("_")})
        elif which == "summary":
            run["summary"].update(
                {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.summary.update}
            )
        elif which == "artifact" or (which == "request" and record.request.HasField("log_artifact")):
            run["artifacts"].append(record.artifact if which == "artifact" else record.request.log_artifact.artifact)
    return run


@pytest.fixture
def wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "logs"))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "logs").mkdir()
    module = needs("wandb")
    yield module
    module.finish()
    module.teardown()  # it keeps what the environment said at its first use


def written_runs(tmp_path: Path) -> list[dict[str, Any]]:
    """Returns the runs that W&B wrote, in the order of their start."""
    paths = list((tmp_path / "logs").rglob("*.wandb"))
    for path in paths:  # W&B's process writes on behind `finish`
        for _ in range(600):
            if any(record.WhichOneof("record_type") == "exit" for record in read_records(path)):
                break
            time.sleep(0.05)
    return sorted(map(read_run, paths), key=itemgetter("began"))  # names of one second differ in a random part only


def train(folder: Path, report_to: str, resume: Any = None, model: Any = None, **changes: Any) -> Any:
    options: dict[str, Any] = {"max_steps": 4, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 2}
    trainer = make_trainer(
        folder,
        model or Classifier(),
        classification(),
        eval_dataset=classification(8),
        save_strategy="steps" if "save_steps" in changes else "no",
        report_to=report_to,
        **{**options, **changes},
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def test_wandb_run_read_back(tmp_path: Path, wandb: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "letters")
    monkeypatch.setenv("WANDB_WATCH", "gradients")
    trainer = train(tmp_path / "out", "wandb", run_name="first", hub_token="hf_abcdefghijklmnopqrstuvwxyz")
    trainer.predict(classification(8))
    trainer.log_figure("eval/picture", np.eye(8))
    trainer.log_table("eval/samples", ["text", "label"], [["a", 1]])
    wandb.finish()
    (run,) = written_runs(tmp_path)
    assert {"eval/picture", "eval/samples"} <= {name for row in run["history"] for name in row}
    sent = {path.name.split("_")[0] for path in (tmp_path / "logs").rglob("media/*/eval/*")}
    assert sent == {"picture", "samples"}
    assert (run["project"], run["name"]) == ("letters", "first")
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    logged = [(row["train/global_step"], row["train/loss"]) for row in run["history"] if "train/loss" in row]
    assert logged == list(enumerate(losses, start=1))
    evaluated = [(row["train/global_step"], row["eval/loss"]) for row in run["history"] if "eval/loss" in row]
    assert evaluated == [(r["step"], r["eval_loss"]) for r in trainer.state.log_history if "eval_loss" in r]
    assert any("test/loss" in row for row in run["history"])
    assert run["summary"]["train_loss"] == pytest.approx(sum(losses) / 4)
    assert not any("train/train_loss" in row for row in run["history"])
    assert run["config"]["model/num_parameters"] == trainer.get_num_trainable_parameters()
    assert run["config"]["max_steps"] == 4
    assert run["tags"] == ["paceline"]
    assert run["notes"].startswith("# out\n\n`Classifier`, trained: the model after 4 optimizer steps.")
    everything = b"".join(path.read_bytes() for path in (tmp_path / "logs").rglob("*") if path.is_file())
    assert b"hf_abcdefghijklmnopqrstuvwxyz" not in everything


def test_wandb_resumed_training_is_the_same_run(tmp_path: Path, wandb: Any) -> None:
    train(tmp_path / "out", "wandb", run_name="mine", save_steps=2)
    wandb.finish()
    resume = str(tmp_path / "out" / "checkpoint-2")
    train(tmp_path / "out", "wandb", resume, run_name="mine")
    wandb.finish()
    train(tmp_path / "out", "wandb", resume, run_name="another")
    wandb.finish()
    train(tmp_path / "out", "wandb", resume, run_name="mine", project="elsewhere")
    wandb.finish()
    first, second, third, fourth = (run["id"] for run in written_runs(tmp_path))
    assert first == second
    assert len({first, third, fourth}) == 3


@pytest.mark.parametrize("choice", ["end", "checkpoint"])
def test_wandb_uploads_the_model(tmp_path: Path, wandb: Any, monkeypatch: pytest.MonkeyPatch, choice: str) -> None:
    monkeypatch.setenv("WANDB_LOG_MODEL", choice)
    train(tmp_path / "out", "wandb", save_steps=2)
    wandb.finish()
    (run,) = written_runs(tmp_path)
    aliases = [set(artifact.aliases) for artifact in run["artifacts"]]  # W&B gives them in no order
    files = [[entry.path for entry in artifact.manifest.contents] for artifact in run["artifacts"]]
    assert "final_model" in aliases[-1]
    assert set(files[-1]) == {"README.md", "model.safetensors", "model_architecture.txt"}
    between = [names for names, told in zip(aliases, files, strict=True) if "optimizer.pt" in told]
    steps = [["checkpoint_global_step_2"], ["checkpoint_global_step_4"]] if choice == "checkpoint" else []
    assert [sorted(name for name in names if name.startswith("checkpoint_")) for names in between] == steps


def test_wandb_of_a_user_is_used(tmp_path: Path, wandb: Any) -> None:
    run = wandb.init(project="own", config={"mine": 1})
    train(tmp_path / "out", "wandb")
    assert wandb.run is run
    wandb.finish()
    (read,) = written_runs(tmp_path)
    assert (read["project"], read["config"]["mine"], read["config"]["max_steps"]) == ("own", 1, 4)


def test_wandb_turned_off(tmp_path: Path, wandb: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_DISABLED", "true")
    train(tmp_path / "out", "wandb")
    assert wandb.run is None
    assert written_runs(tmp_path) == []


class At(TrainerCallback):
    """Calls a function at the end of one step."""

    def __init__(self, step: int, action: Any) -> None:
        self.step, self.action = step, action

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.action()


def children(parent: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = path.read_text()
        except OSError:
            continue
        if int(text.rsplit(")", 1)[1].split()[1]) == parent:
            found.append(int(path.parent.name))
    return found


JOB = """
import os, signal, sys
from test_trackers import At, children, train
def kill():
    (core,) = [pid for pid in children(os.getpid()) if b"wandb-core" in open(f"/proc/{pid}/cmdline", "rb").read()]
    os.kill(core, signal.SIGKILL)
from pathlib import Path
trainer = train(Path(sys.argv[1]), "wandb", max_steps=12, callbacks=[At(3, kill)])
print("steps", trainer.state.global_step, flush=True)
os._exit(0)  # wandb's own end waits for what was killed
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_wandb_whose_service_dies_does_not_stop_the_run(tmp_path: Path, wandb: Any) -> None:
    paths = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "support"), *sys.path]
    done = subprocess.run(
        [sys.executable, "-c", JOB, str(tmp_path / "out")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "steps 12" in done.stdout, done.stderr
    assert done.stderr.count("WandbCallback failed in on_log; the run goes on.") == 1, done.stderr


# ---- MLflow


class Server:
    """An MLflow server over a sqlite file."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            self.port = listener.getsockname()[1]
        self.folder, self.uri = folder, f"http://127.0.0.1:{self.port}"
        folder.mkdir(exist_ok=True)
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        store = ["--backend-store-uri", f"sqlite:///{self.folder}/runs.db", "--artifacts-destination"]
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *store, str(self.folder / "artifacts"), "--workers", "1"],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        for _ in range(1200):
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            except OSError:
                time.sleep(0.1)
            else:
                return
        raise TimeoutError((self.folder / "server.log").read_text())

    def send(self, number: int) -> None:
        os.killpg(self.process.pid, number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    needs("mlflow")
    server = Server(tmp_path_factory.mktemp("server"))
    yield server
    server.kill()


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    for name in [name for name in os.environ if name.startswith(("MLFLOW_", "HF_MLFLOW_"))]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    module = needs("mlflow")
    monkeypatch.setattr(importlib.import_module("mlflow.tracking._tracking_service.utils"), "_tracking_uri", None)
    monkeypatch.setattr(importlib.import_module("mlflow.tracking.fluent"), "_active_experiment_id", None)
    yield module
    module.end_run()


def history(client: Any, run_id: str, name: str) -> list[tuple[int, float]]:
    return sorted((metric.step, metric.value) for metric in client.get_metric_history(run_id, name))


def test_mlflow_run_read_back(
    tmp_path: Path, mlflow: Any, monkeypatch: pytest.MonkeyPatch, shared_server: Server
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", shared_server.uri)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "letters")
    monkeypatch.setenv("MLFLOW_TAGS", '{"kind": "test"}')
    monkeypatch.setenv("HF_MLFLOW_LOG_ARTIFACTS", "1")
    trainer = train(
        tmp_path / "out", "mlflow", run_name="first", save_steps=2, hub_token="hf_abcdefghijklmnopqrstuvwxyz"
    )
    client = mlflow.MlflowClient(shared_server.uri)
    (run,) = client.search_runs([client.get_experiment_by_name("letters").experiment_id])
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert history(client, run.info.run_id, "loss") == list(enumerate(losses, start=1))
    evaluated = [(row["step"], row["eval_loss"]) for row in trainer.state.log_history if "eval_loss" in row]
    assert history(client, run.info.run_id, "eval_loss") == evaluated
    assert run.data.params["max_steps"] == "4"
    assert run.data.params["model/num_parameters"] == str(trainer.get_num_trainable_parameters())
    assert run.data.tags["kind"] == "test"
    assert "hf_abcdefghijklmnopqrstuvwxyz" not in str(run.data.params)
    uploaded = [item.path for item in client.list_artifacts(run.info.run_id)]
    assert uploaded == ["README.md", "checkpoint-2", "checkpoint-4"]
    assert run.data.tags["model_tags"] == "paceline"
    assert run.data.tags["mlflow.note.content"].startswith("# out\n\n`Classifier`, trained: the model after 4 ")
    names = [item.path for item in client.list_artifacts(run.info.run_id, "checkpoint-4")]
    assert "checkpoint-4/model.safetensors" in names

    assert mlflow.active_run() is None
    trainer.log_figure("eval/picture", np.eye(8))
    names = [item.path for item in client.list_artifacts(run.info.run_id, "media/eval")]
    assert names == ["media/eval/picture-4.png"]  # the server reads %2F in a name as /
    trainer.evaluate()  # of the same run, and no new one
    assert len(history(client, run.info.run_id, "eval_loss")) == 3
    assert mlflow.active_run() is None
    assert len(client.search_runs([run.info.experiment_id])) == 1


def test_mlflow_resumed_training_is_the_same_run(
    tmp_path: Path, mlflow: Any, monkeypatch: pytest.MonkeyPatch, shared_server: Server
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", shared_server.uri)
    train(tmp_path / "out", "mlflow", save_steps=2, project="resumed")
    resume = str(tmp_path / "out" / "checkpoint-2")
    train(tmp_path / "out", "mlflow", resume, project="resumed", max_steps=6)
    client = mlflow.MlflowClient(shared_server.uri)
    experiment = client.get_experiment_by_name("resumed").experiment_id
    (run,) = client.search_runs([experiment])
    steps = {step for step, _ in history(client, run.info.run_id, "loss")}
    assert steps == {1, 2, 3, 4, 5, 6}
    assert run.data.params["max_steps"] == "4"  # MLflow lets nobody change one

    train(tmp_path / "out", "mlflow", resume, project="resumed", run_name="another")
    assert len(client.search_runs([experiment])) == 2


def test_mlflow_each_trial_of_a_search_is_a_run(tmp_path: Path, mlflow: Any) -> None:
    """And so is each training around a search, and an evaluation after one."""
    needs("optuna")
    trainer = make_search(tmp_path / "out", report_to="mlflow")
    trainer.train()
    searched(trainer, hp_space=lambda trial: {}, n_trials=2)
    trainer.train()
    searched(trainer, hp_space=lambda trial: {}, n_trials=3)
    trainer.evaluate()
    client = mlflow.MlflowClient()
    runs = client.search_runs(["0"], order_by=["attributes.start_time"])
    evaluated = [[step for step, _ in history(client, run.info.run_id, "eval_loss")] for run in runs]
    assert evaluated == [*[[2, 4, 6]] * 5, [6]]


def test_mlflow_in_a_file_by_default(tmp_path: Path, mlflow: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_FLATTEN_PARAMS", "true")
    monkeypatch.setenv("MLFLOW_MAX_LOG_PARAMS", "5")
    with mlflow.start_run() as outer:
        train(tmp_path / "out", "mlflow")
        assert mlflow.active_run().info.run_id == outer.info.run_id  # the user's, so not ended
    run = mlflow.MlflowClient().get_run(outer.info.run_id)
    assert (tmp_path / "mlflow.db").is_file()
    assert run.data.metrics["train_loss"] > 0
    assert len(run.data.params) == 5

    monkeypatch.setenv("MLFLOW_NESTED_RUN", "1")
    with mlflow.start_run() as outer:
        train(tmp_path / "out", "mlflow")
    (inner,) = mlflow.MlflowClient().search_runs(
        [outer.info.experiment_id], f"tags.mlflow.parentRunId = '{outer.info.run_id}'"
    )
    assert inner.data.metrics["train_loss"] > 0

    monkeypatch.setenv("DISABLE_MLFLOW_INTEGRATION", "TRUE")
    count = len(mlflow.MlflowClient().search_runs([outer.info.experiment_id]))
    train(tmp_path / "out", "mlflow")
    assert len(mlflow.MlflowClient().search_runs([outer.info.experiment_id])) == count


def test_mlflow_whose_server_dies_does_not_stop_the_run(
    tmp_path: Path, mlflow: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(tmp_path / "server")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
    try:
        monkeypatch.setattr("paceline.callbacks.reporters.mlflow.ANSWER_SECONDS", 3.0)
        started = time.monotonic()  # mlflow itself would wait for 16 minutes for a server that does not answer
        trainer = train(tmp_path / "stopped", "mlflow", callbacks=[At(3, partial(server.send, signal.SIGSTOP))])
        assert trainer.state.global_step == 4
        assert time.monotonic() - started < 60
        assert "cannot be reached (timed out)" in caplog.text
        server.send(signal.SIGCONT)

        trainer = train(tmp_path / "out", "mlflow", max_steps=12, callbacks=[At(3, server.kill)])
        assert trainer.state.global_step == 12
        assert mlflow.active_run() is None
        assert "MLflow's server did not accept the last" in caplog.text
        caplog.clear()

        started = time.monotonic()
        trainer = train(tmp_path / "other", "mlflow")  # a server that is not there from the start
        assert trainer.state.global_step == 4
        assert time.monotonic() - started < 20
        assert caplog.text.count("MLflowCallback failed in on_train_begin; the run goes on.") == 1
        assert "cannot be reached" in caplog.text
    finally:
        server.process.poll() is None and server.kill()


def test_all_takes_what_is_installed(tmp_path: Path, wandb: Any, mlflow: Any) -> None:
    trainer = train(tmp_path / "out", "all", max_steps=1)
    names = trainer.callback_handler.callback_list.split()
    assert {"TensorBoardCallback", "WandbCallback", "MLflowCallback", "JSONLReporter", "CSVReporter"} <= set(names)
