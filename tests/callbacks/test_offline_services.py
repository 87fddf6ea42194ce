"""The clients of tracking services for real, offline or local: each trains, is resumed, and its files are read back.

`make test-slow` installs them. A process of its own runs each, because clients replace functions of the interpreter.
"""

from __future__ import annotations

import csv
import importlib
import inspect
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from service_job import SECRET, TAG

from paceline.core.media import PNG_START

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # theirs are many, and change with each release
]

SUPPORT = Path(__file__).parent.parent / "support"
JOB_SECONDS = 120  # one that hangs, as a client that waits for a server would
Points = list[tuple[int, float]]


def needs(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f'{module} is not installed: pip install "paceline[trackers]"') from error


def run_job(name: str, module: str, folder: Path, **variables: str) -> dict[str, Any]:
    needs(module)
    own = ("CLEARML_", "COMET_", "DVC", "SWANLAB_", "TRACKIO_", "CODECARBON_", "MLFLOW_", "NEPTUNE_")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(own)}
    path = os.pathsep.join([str(SUPPORT), *sys.path])
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "service_job.py"), name, str(folder)],
        env={**environment, **variables, "PYTHONPATH": path, "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=JOB_SECONDS,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    assert "the run goes on" not in done.stderr, done.stderr
    result = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"rows"')))
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert not [file for file in files if SECRET.encode() in file.read_bytes()]
    return dict(result)


def contents(folder: Path) -> Iterator[bytes]:
    """Yields the files that a client has written, and the members of its archives."""
    for file in folder.rglob("*"):
        if not file.is_file() or folder / "out" in file.parents:
            continue
        if file.suffix == ".zip":
            with zipfile.ZipFile(file) as archive:
                yield from map(archive.read, archive.namelist())
        yield file.read_bytes()


def expected(result: dict[str, Any], name: str) -> Points:
    """Steps and values of a metric in both trainings."""
    return [(row["step"], row[name]) for rows in result["rows"] for row in rows if name in row]


# ---- what each service has written: (names of its runs, points of train/loss, points of eval/loss)

Reading = tuple[set[str], Points, Points]


def read_dvclive(folder: Path) -> Reading:
    def points(split: str) -> Points:
        with (folder / "dvclive" / "plots" / "metrics" / split / "loss.tsv").open() as file:
            return [(int(row["step"]), float(row["loss"])) for row in csv.DictReader(file, delimiter="\t")]

    assert "max_steps: 6" in (folder / "dvclive" / "params.yaml").read_text()
    assert json.loads((folder / "dvclive" / "metrics.json").read_text())["train_loss"] > 0
    return {"dvclive"}, points("train"), points("eval")


def ask(port: int, path: str, server: subprocess.Popen[bytes], body: bytes | None = None) -> str:
    """Returns the answer of a server on this machine, for which it waits while the server starts."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", body, {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for _ in range(1200):
        assert server.poll() is None
        try:
            with opener.open(request, timeout=JOB_SECONDS) as response:
                assert response.status == 200
                return str(response.read().decode())
        except urllib.error.HTTPError:
            raise
        except OSError:
            time.sleep(0.1)
    raise TimeoutError(path)


def dashboard_values(folder: Path) -> Points:
    """Returns the points of train/loss that trackio's dashboard shows, over loopback."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = "import sys; from trackio.cli import main; sys.argv = ['trackio', 'show', '--project', 'letters']; main()"
    own = {"TRACKIO_DIR": str(folder / "trackio"), "GRADIO_SERVER_PORT": str(port), "BROWSER": "true"}
    with (folder / "dashboard.log").open("wb") as log:
        dashboard = subprocess.Popen(
            [sys.executable, "-c", command], env={**os.environ, **own}, stdout=log, stderr=log, start_new_session=True
        )
    try:
        assert "<html" in ask(port, "/", dashboard).lower()

        def call(name: str, **arguments: Any) -> Any:
            return json.loads(ask(port, f"/api/{name}", dashboard, json.dumps(arguments).encode()))["data"]

        assert "letters" in call("get_all_projects")
        (run,) = call("get_runs_for_project", project="letters")
        assert run["name"] == "first"
        values = call("get_metric_values", project="letters", run="first", metric_name="train/loss")
        return [(row["step"], row["value"]) for row in values]
    finally:
        os.killpg(dashboard.pid, signal.SIGKILL)
        dashboard.wait()


def read_trackio(folder: Path) -> Reading:
    with sqlite3.connect(folder / "trackio" / "letters.db") as database:
        rows = database.execute("SELECT run_id, run_name, step, metrics FROM metrics ORDER BY id").fetchall()
        (settings,) = database.execute("SELECT config FROM configs").fetchone()
    database.close()
    assert json.loads(settings)["max_steps"] == 6
    assert {name for _, name, _, _ in rows} == {"first"}

    def points(name: str) -> Points:
        return [(step, json.loads(row)[name]) for _, _, step, row in rows if name in json.loads(row)]

    assert sorted(dashboard_values(folder)) == sorted(points("train/loss"))
    return {run_id for run_id, _, _, _ in rows}, points("train/loss"), points("eval/loss")


def read_swanlab(folder: Path) -> Reading:
    reader_of = needs("swanlab.sdk.internal.core_python.store").DataStoreReader
    kind = needs("swanlab.proto.swanlab.record.v1.record_pb2").Record
    found: dict[str, Points] = {"train/loss": [], "eval/loss": []}
    files = sorted((folder / "swanlog").glob("*/*.swanlab"))
    assert len(files) == 2
    for file in files:
        reader = reader_of()
        reader.open(file)
        for data in reader:
            record = kind.FromString(data)
            if record.HasField("scalar") and record.scalar.key in found:
                found[record.scalar.key].append((record.scalar.step, record.scalar.value.number))
        reader.close()
    assert "max_steps" in (files[-1].parent / "files" / "config.yaml").read_text()
    return {file.stem for file in files}, found["train/loss"], found["eval/loss"]


def params_in(payload: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the parameters of a message, which holds one or several."""
    return [value for value in payload.values() if isinstance(value, dict) and "paramName" in value]


def read_comet(folder: Path) -> Reading:
    found: dict[str, Points] = {"train/loss": [], "eval/loss": []}
    keys, parameters = set(), set()
    archives = sorted((folder / "comet").glob("*.zip"), key=lambda file: file.stat().st_mtime_ns)
    assert len(archives) == 2
    for archive in archives:
        with zipfile.ZipFile(archive) as files:
            lines = files.read("messages.json").decode().splitlines()
        keys.add(archive.stem.split("-")[0])
        for message in map(json.loads, lines):
            if message["type"] == "metric_msg":
                metric = message["payload"]["metric"]
                found.get(metric["metricName"], []).append((metric["step"], metric["metricValue"]))
            elif message["type"] == "parameter_msg":
                parameters.update(param["paramName"] for param in params_in(message["payload"]))
    assert "max_steps" in parameters
    return keys, found["train/loss"], found["eval/loss"]


def read_mlflow(folder: Path) -> Reading:
    client = needs("mlflow").MlflowClient(f"sqlite:///{folder}/me/letters.db")
    runs = client.search_runs([client.get_experiment_by_name("letters").experiment_id])

    def points(name: str) -> Points:
        history = client.get_metric_history(runs[0].info.run_id, name)
        return [(metric.step, metric.value) for metric in sorted(history, key=lambda metric: metric.timestamp)]

    return {run.info.run_id for run in runs}, points("loss"), points("eval_loss")


def read_clearml(folder: Path) -> Reading:
    (archive,) = folder.rglob("offline-*.zip")
    found: dict[str, Points] = {"train": [], "eval": []}
    with zipfile.ZipFile(archive) as files:
        task = json.loads(files.read("task.json"))
        for line in files.read("metrics.jsonl").decode().splitlines():
            for event in json.loads(line):
                if event.get("variant") == "loss" and event.get("metric") in found:
                    found[event["metric"]].append((event["iter"], event["value"]))
    assert task["hyperparams"]["Transformers"]["max_steps"]["value"] == "6"
    assert task["comment"].startswith("# out")
    return {archive.stem}, found["train"], found["eval"]


@pytest.mark.parametrize(
    ("name", "module", "read", "variables"),
    [
        pytest.param(
            *("clearml", "clearml", read_clearml, {"CLEARML_OFFLINE_MODE": "1"}),
            marks=pytest.mark.nightly,  # a minute, most of it clearml's own
        ),
        ("dvclive", "dvclive", read_dvclive, {}),
        ("trackio", "trackio", read_trackio, {"TRACKIO_DIR": "{folder}/trackio"}),
        ("swanlab", "swanlab", read_swanlab, {"SWANLAB_MODE": "offline"}),
        (
            "comet_ml",
            "comet_ml",
            read_comet,
            {"COMET_START_ONLINE": "0", "COMET_OFFLINE_DIRECTORY": "{folder}/comet", "COMET_AUTO_LOG_CO2": "0"},
        ),
        pytest.param(
            *("dagshub", "dagshub", read_mlflow, {"MLFLOW_TRACKING_URI": "sqlite:///{folder}/me/letters.db"}),
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_run_read_back(
    name: str, module: str, read: Callable[[Path], Reading], variables: dict[str, str], tmp_path: Path
) -> None:
    """The rows of both trainings, in one run."""
    (tmp_path / "me").mkdir()
    result = run_job(name, module, tmp_path, **{key: value.format(folder=tmp_path) for key, value in variables.items()})
    runs, losses, evaluations = read(tmp_path)
    assert len({run.split("-")[-1] for run in runs}) == 1
    assert sorted(losses) == sorted(expected(result, "loss"))
    told = expected(result, "eval_loss")
    assert set(evaluations) == set(told)
    assert len(evaluations) in (len(told), len(told) - 1)  # swanlab keeps one value of a step
    files = list(contents(tmp_path))
    assert any(content.startswith(PNG_START) for content in files)
    if name != "dvclive":  # it has no tables
        assert any(b"first | sample" in content or b"first \\| sample" in content for content in files)
    assert any(b"the model after 6 optimizer steps" in content for content in files)  # the card
    if name not in ("dvclive", "trackio"):  # they have no tags of runs
        assert any(TAG.encode() in content for content in files)


def read_neptune(log: Path) -> dict[str, list[dict[str, Any]]]:
    """Returns the operations of an offline run by the path of the field."""
    found: dict[str, list[dict[str, Any]]] = {}
    decoder, text = json.JSONDecoder(), log.read_text()
    while text := text.lstrip():
        entry, end = decoder.raw_decode(text)
        found.setdefault("/".join(entry["obj"]["path"]), []).append(entry["obj"])
        text = text[end:]
    return found


def test_neptune(tmp_path: Path) -> None:
    """Offline there is no id to continue a run by: the resumed training is a second one, which stays open."""
    result = run_job("neptune", "neptune", tmp_path, NEPTUNE_MODE="offline", NEPTUNE_PROJECT="me/letters")
    logs = sorted((tmp_path / ".neptune" / "offline").glob("*/data-1.log"), key=lambda file: file.stat().st_mtime_ns)
    assert len(logs) == 2
    for log, rows in zip(logs, result["rows"], strict=True):
        fields = read_neptune(log)
        for name, key in (("train/loss", "loss"), ("eval/loss", "eval_loss")):
            points = [
                (int(value["step"]), value["value"])
                for entry in fields[f"finetuning/{name}"]
                for value in entry.get("values", [])
            ]
            assert points == [(row["step"], row[key]) for row in rows if key in row]
        assert fields["finetuning/trainer_parameters/max_steps"][0]["value"] in (4, 6)
        assert set(fields["sys/tags"][0]["values"]) == {"paceline", TAG}
        assert fields["sys/name"][0]["value"] == "first"
        assert "first \\| sample" in json.dumps(fields["finetuning/eval/samples"]).replace("\\\\", "\\")
        assert fields["finetuning/eval/picture"][-1]["type"] == "LogImages"
        assert b"optimizer steps" in next(log.parent.glob("upload_path/*model_card*.md")).read_bytes()


def test_a_task_of_flyte(tmp_path: Path) -> None:
    """A task of flytekit on this machine: what it keeps is resumed, and its decks show the logs and the card."""
    pytest.importorskip("flytekit", reason="needs flytekit")
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "flyte_job.py"), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT), *sys.path]), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=JOB_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    first, second = result["losses"]
    assert (len(first), len(second)) == (4, 6)
    assert second[:4] == first
    assert "6 optimizer steps" in result["decks"]["Model Card"]
    assert "learning_rate" in result["decks"]["Log History"]


def test_azure_ml_outside_of_a_job(tmp_path: Path) -> None:
    """Its client prints what it is given where there is no job; in a job, a metric takes a step."""
    run = pytest.importorskip("azureml.core", reason="needs azureml-core").Run
    assert "step" in inspect.signature(run.log).parameters
    result = run_job("azure_ml", "azureml.core", tmp_path)
    assert len(expected(result, "loss")) == 8


def test_emissions(tmp_path: Path) -> None:
    run_job("codecarbon", "codecarbon", tmp_path, CODECARBON_COUNTRY_ISO_CODE="FRA", CODECARBON_LOG_LEVEL="error")
    with (tmp_path / "out" / "emissions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["project_name"] for row in rows] == ["letters", "letters"]
    assert [row["country_iso_code"] for row in rows] == ["FRA", "FRA"]
    assert all(float(row["energy_consumed"]) > 0 for row in rows)
