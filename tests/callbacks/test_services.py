"""The reporters of tracking services with stand-ins for their clients; test_offline_services.py has the clients."""

from __future__ import annotations

import contextvars
import copy
import http.server
import json
import logging
import os
import pickle
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import stand_in_services
from small_models import Classifier, classification, make_trainer
from stand_in_services import Run, Service

from paceline import TrainingArguments
from paceline.callbacks.defaults import with_defaults
from paceline.callbacks.reporters import find_reporters, kubeflow
from paceline.callbacks.reporters.base import num_parameters
from paceline.callbacks.reporters.dagshub import DagsHubCallback, repository_of
from paceline.callbacks.reporters.kubeflow import KubeflowCallback, StatusSender
from paceline.callbacks.reporters.service import BackgroundCall, ServiceReporter, signals_kept
from paceline.callbacks.reporters.trackio import static_space_name
from paceline.core.events import CallbackHandler
from paceline.core.media import Media
from paceline.core.state import TrainerControl, TrainerState

SECRET = "hf_" + "secret" * 5
RUNS = ["clearml", "comet_ml", "dvclive", "neptune", "swanlab", "trackio"]  # services that have runs
VARIABLES = ("COMET_", "CLEARML_", "DVC", "HF_DVCLIVE", "SWANLAB_", "TRACKIO_", "NEPTUNE_", "CODECARBON_", "KUBEFLOW_")


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(VARIABLES)]:
        monkeypatch.delenv(name)


class Course:
    """The events of a training with one reporter, without the training: steps, logs, evaluations and checkpoints."""

    def __init__(self, folder: Path, report_to: Any, **changes: Any) -> None:
        own = {"max_steps": 4, "eval_steps": 2, "save_steps": 0, "callbacks": [], "before_step": lambda step: None}
        own.update({name: changes.pop(name) for name in list(changes) if name in own})
        self.own = own
        self.args = TrainingArguments(str(folder), max_steps=own["max_steps"], report_to=report_to, **changes)
        self.model = Classifier()
        self.reporters = [*(kind() for kind in find_reporters(report_to)), *own["callbacks"]]
        self.callback_handler = CallbackHandler(self.reporters, model=self.model)
        self.state, self.control = TrainerState(), TrainerControl()
        self.metrics: dict[str, Any] = {"loss": 2.0}

    def fire(self, event: str, **keywords: Any) -> None:
        self.callback_handler.call_event(event, self.args, self.state, self.control, **keywords)

    def log(self, row: dict[str, Any]) -> None:
        self.state.log_history.append({**row, "step": self.state.global_step})
        self.fire("on_log", logs=dict(row))

    def train(self, resume_from_checkpoint: Any = None) -> None:
        start, steps = 0, self.own["max_steps"]
        if resume_from_checkpoint is not None:
            saved = json.loads(Path(resume_from_checkpoint, "state.json").read_text())
            start = saved["step"]
            self.reporters[0].load_state_dict(saved["reporter"])
        self.state.global_step, self.state.max_steps = start, steps
        self.fire("on_train_begin")
        for step in range(start + 1, steps + 1):
            self.own["before_step"](step)
            self.state.global_step, self.state.epoch = step, step / 4
            self.fire("on_step_end")
            self.log({"loss": 1 / step, "learning_rate": 0.1 * step})
            if self.own["eval_steps"] and step % self.own["eval_steps"] == 0:
                self.evaluate()
            if self.own["save_steps"] and step % self.own["save_steps"] == 0:
                self.save(step)
            if self.control.should_training_stop:
                break
        self.log({"train_loss": 0.5, "train_runtime": 1.0})
        self.fire("on_train_end")

    def save(self, step: int) -> None:
        folder = Path(str(self.args.output_dir), f"checkpoint-{step}")
        folder.mkdir(parents=True, exist_ok=True)
        states = [part.state_dict() for part in self.reporters if hasattr(part, "state_dict")]
        (folder / "state.json").write_text(json.dumps({"step": step, "reporter": (states or [{}])[0]}))
        self.state.best_model_checkpoint = str(folder)
        self.fire("on_save")

    def evaluate(self) -> None:
        self.log({"eval_loss": 3.0 + self.state.global_step})

    def predict(self) -> None:
        self.fire("on_predict", metrics={"test_loss": 4.0})


def train(folder: Path, report_to: Any, resume: Any = None, **changes: Any) -> Course:
    course = Course(folder, report_to, **changes)
    course.train(resume)
    return course


def losses(course: Any, key: str = "loss") -> list[tuple[int, float]]:
    return [(row["step"], row[key]) for row in course.state.log_history if key in row]


# ---- services that have runs


@pytest.mark.parametrize("name", RUNS)
def test_rows_and_settings(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = stand_in_services.install(name, monkeypatch)
    trainer = train(tmp_path, name, run_name="first", hub_token="hf_abcdefghijklmnopqrstuvwxyz")
    (run,) = service.runs
    assert [value for value in run.values("loss") if value in losses(trainer)] == losses(trainer)
    assert [value for value in run.values("loss") if value in losses(trainer, "eval_loss")] == losses(
        trainer, "eval_loss"
    )
    assert run.settings["max_steps"] == 4
    assert run.settings["model/num_parameters"] == num_parameters(Classifier())
    assert "hf_abcdefghijklmnopqrstuvwxyz" not in str(run.settings)
    told = {**run.summary, **{key: value for _, row in run.rows for key, value in row.items()}}
    assert any(key.endswith("train_loss") for key in told)


@pytest.mark.parametrize("name", ["clearml", "neptune"])
def test_figures_and_tables(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the services whose clients do not run here; the others are read back in `test_offline_services.py`."""
    service = stand_in_services.install(name, monkeypatch)
    course = train(tmp_path, name)
    figure = Media("eval/picture", 4, tmp_path / "picture.png")
    table = Media("eval/samples", 4, tmp_path / "samples.json", ["text", "label"], [["a", 1]])
    course.fire("on_media", media=figure)
    course.fire("on_media", media=table)
    (run,) = service.runs
    assert run.shown["eval/picture"] == (4, str(figure.path))
    step, text = run.shown["eval/samples"]
    assert step == 4
    assert "label" in text
    assert not run.is_open


@pytest.mark.parametrize("name", RUNS)
def test_tags_and_model_card(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = stand_in_services.install(name, monkeypatch)
    monkeypatch.chdir(tmp_path)
    Path("dvclive").mkdir()
    monkeypatch.setenv("HF_DVCLIVE_LOG_MODEL", "1")
    course = Course(tmp_path, name)
    course.model.model_tags = ["letters", SECRET]
    course.fire("on_train_begin")
    course.fire("on_model_card", make_card=lambda: "# The card")
    course.fire("on_train_end")
    (run,) = service.runs
    if name != "trackio":  # it has none
        assert run.tags[:2] == ["paceline", "letters"]
        assert SECRET not in str(run.tags)
    written = [path.read_text() for path in (Path("dvclive", "README.md"), Path("last", "README.md")) if path.exists()]
    assert [*written, run.card][0].startswith("# The card")
    assert len(written) == (2 if name == "dvclive" else 0)


def test_a_description_of_the_user_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = stand_in_services.install("clearml", monkeypatch)
    course = Course(tmp_path, "clearml")
    course.fire("on_train_begin")
    for text, seen in (("one", "one"), ("two", "two")):  # the card of a resumed training replaces that before
        course.fire("on_model_card", make_card=lambda text=text: text)
        assert service.runs[0].card.startswith(seen)
    service.runs[0].card = "mine"
    course.fire("on_model_card", make_card=lambda: "three")
    assert service.runs[0].card == "mine"


def test_a_trainer_makes_the_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = stand_in_services.install("comet_ml", monkeypatch)
    options: dict[str, Any] = {"max_steps": 2, "report_to": "comet_ml", "load_best_model_at_end": True}
    data = classification(8)
    make_trainer(
        tmp_path / "letters",
        Classifier(),
        data,
        eval_dataset=data,
        save_strategy="steps",
        eval_strategy="steps",
        eval_steps=1,
        save_steps=1,
        **options,
    ).train()
    card = service.runs[0].card
    assert card.startswith("# letters\n\n`Classifier`, trained: the model after 2 optimizer steps. It has ")
    assert "On the evaluation da" in card
    assert "### Framework versions" in card


# ---- clients that hang


class Hanging(ServiceReporter):
    """Ends its run when it is let go."""

    service = "Slow"

    def __init__(self) -> None:
        super().__init__()
        self.go, self.ended, self.opened = threading.Event(), 0, 0

    def open_run(self, args: Any, name: Any, run_id: Any) -> Any:
        self.opened += 1
        return object()

    def id_of(self) -> str:
        return "run"

    def log_settings(self, settings: Any) -> None:
        pass

    def log_row(self, row: Any, state: Any) -> None:
        pass

    def close_run(self) -> None:
        assert self.go.wait(60)
        self.ended += 1


def test_a_client_that_does_not_end_its_run_costs_the_training_no_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("paceline.callbacks.reporters.service.CLOSE_SECONDS", 0.05)
    reporter = Hanging()
    course = Course(tmp_path, "none", callbacks=[reporter])
    course.train()
    assert caplog.text.count("Slow did not end its run within 0.05 s. The training ends without waiting for it") == 1
    assert reporter.ended == 0
    course.train()  # whose run would be taken for one of the script
    assert "Slow is still ending the run of the training before: this one is not recorded." in caplog.text
    assert reporter.opened == 1
    reporter.go.set()
    course.train()
    assert (reporter.opened, reporter.ended) == (2, 2)


def test_a_close_in_a_thread_raises_and_changes_the_context() -> None:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)
    variable.set(1)

    def close() -> None:
        assert variable.get() == 1
        variable.set(2)

    assert BackgroundCall(close).is_done_within(60)
    assert variable.get() == 2
    with pytest.raises(ZeroDivisionError):
        BackgroundCall(lambda: 1 / 0).is_done_within(60)  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_training_is_the_same_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = stand_in_services.install(name, monkeypatch)
    train(tmp_path, name, run_name="mine", save_steps=2)
    close(service)
    resume = str(tmp_path / "checkpoint-2")
    train(tmp_path, name, resume, run_name="mine")
    (run,) = service.runs
    assert [step for step, _ in run.values("learning_rate")] == [1, 2, 3, 4, 3, 4]
    close(service)
    train(tmp_path, name, resume, run_name="another")
    close(service)
    train(tmp_path, name, resume, run_name="mine", project="elsewhere")
    close(service)
    assert len(service.runs) == 3


def close(service: Service) -> None:
    """Ends the open run, as the end of a process does."""
    if service.active is not None:
        service.active.end()


@pytest.mark.parametrize("name", RUNS)
def test_what_is_logged_before_and_after_a_training(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = stand_in_services.install(name, monkeypatch)
    trainer = Course(tmp_path, name, eval_steps=0)
    trainer.evaluate()
    trainer.train()
    trainer.evaluate()
    trainer.predict()
    (run,) = service.runs
    assert [step for step, row in run.rows if any(key.startswith("eval/loss") for key in row)] == [0, 4]
    assert any("test/loss" in row for _, row in run.rows)
    trainer.train()  # another training
    assert [len(run.values("learning_rate")) for run in service.runs] == [4, 4]


def test_a_trainer_resumes_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = stand_in_services.install("comet_ml", monkeypatch)
    options: dict[str, Any] = {"max_steps": 4, "logging_steps": 1, "save_steps": 2, "report_to": "comet_ml"}
    make_trainer(tmp_path, Classifier(), classification(16), save_strategy="steps", **options).train()
    close(service)
    trainer = make_trainer(tmp_path, Classifier(), classification(16), save_strategy="steps", **options)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    (run,) = service.runs
    assert [step for step, _ in run.values("learning_rate")] == [1, 2, 3, 4, 3, 4]
    assert run.values("loss")[-2:] == losses(trainer)[-2:]


@pytest.mark.parametrize("name", ["clearml", "comet_ml", "swanlab", "trackio"])
def test_the_run_of_the_script_is_used(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = stand_in_services.install(name, monkeypatch)
    if name == "trackio":
        sys.modules[name].init(project="own", name=None, resume="never", space_id=None)
    else:
        service.open(project="own")
    train(tmp_path, name)
    (run,) = service.runs
    assert run.is_open
    assert len(run.values("learning_rate")) == 4


@pytest.mark.parametrize("name", RUNS)
def test_each_trial_has_its_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = stand_in_services.install(name, monkeypatch)
    trainer = Course(tmp_path, name)
    reporter = next(part for part in trainer.callback_handler.callbacks if isinstance(part, ServiceReporter))
    for trial in ("a", "b"):
        trainer.state.is_hyper_param_search, trainer.state.trial_name = True, trial
        trainer.state.global_step = 0
        reporter.on_train_begin(trainer.args, trainer.state, trainer.control, model=trainer.model)
        reporter.on_log(trainer.args, trainer.state, trainer.control, logs={"loss": 1.0})
        reporter.on_train_end(trainer.args, trainer.state, trainer.control)
    assert [len(run.rows) for run in service.runs] == [1, 1]


@pytest.mark.parametrize("name", RUNS)
def test_an_evaluation_after_a_search_is_not_that_of_the_last_trial(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = stand_in_services.install(name, monkeypatch)
    trainer = Course(tmp_path, name, eval_steps=0)
    trainer.state.is_hyper_param_search, trainer.state.trial_name = True, "run-0"
    trainer.train()
    trainer.state = TrainerState()
    trainer.reporters[0].load_state_dict({})
    trainer.evaluate()
    assert ["eval/loss" in str(run.rows) for run in service.runs] == [False, True]


@pytest.mark.parametrize("name", RUNS)
def test_each_trainer_of_a_script_has_its_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = stand_in_services.install(name, monkeypatch)
    train(tmp_path / "first", name)
    train(tmp_path / "second", name)
    assert [len(run.values("learning_rate")) for run in service.runs] == [4, 4]
    is_left_open = name in ("comet_ml", "swanlab")  # for what the script still logs
    assert [run.is_open for run in service.runs] == [False, is_left_open]


@pytest.mark.parametrize("name", RUNS)
def test_one_process_of_the_run_writes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = stand_in_services.install(name, monkeypatch)
    trainer = Course(tmp_path, name)
    trainer.state.is_world_process_zero = False
    for event in ("on_train_begin", "on_log", "on_save", "on_predict", "on_train_end"):
        trainer.callback_handler.call_event(event, trainer.args, trainer.state, trainer.control)
    assert service.runs == []


def test_what_cannot_be_sent_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    service = stand_in_services.install("comet_ml", monkeypatch)
    trainer = Course(tmp_path, "comet_ml")
    for _ in range(2):
        trainer.log({"note": "text", "number": 1.5, "many": [1, 2]})
    assert service.runs[0].values("number") == [(0, 1.5), (0, 1.5)]
    assert caplog.text.count("Comet accepts only numbers, so these logs are not sent: note, many.") == 1


def test_settings_that_a_service_refuses_cost_no_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    service = stand_in_services.install("swanlab", monkeypatch)
    monkeypatch.setattr(Run, "set", lambda self, values: 1 / 0)
    train(tmp_path, "swanlab")
    assert len(service.runs[0].values("learning_rate")) == 4
    assert "SwanLab did not accept the settings of the run: division by zero" in caplog.text


@pytest.mark.parametrize("name", RUNS)
def test_copies(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy holds no client, and starts a run of its own."""
    service = stand_in_services.install(name, monkeypatch)
    trainer = Course(tmp_path, name)
    trainer.evaluate()
    reporter = next(part for part in trainer.callback_handler.callbacks if isinstance(part, ServiceReporter))
    for copied in (copy.deepcopy(reporter), pickle.loads(pickle.dumps(reporter))):
        assert copied._run is None
        assert not copied._initialized
    assert reporter._run is not None
    assert service.active is not None


# ---- all of them


@pytest.mark.parametrize("name", [*stand_in_services.CLIENTS, "kubeflow"])
@pytest.mark.parametrize("dies_at", [0, 2])
def test_a_service_that_dies_costs_no_step(
    name: str, dies_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", "http://127.0.0.1:9/status")  # nobody listens there
    monkeypatch.setattr(kubeflow, "MIN_SECONDS", 0.0)
    service = Service() if name == "kubeflow" else stand_in_services.install(name, monkeypatch)
    service.is_dead = dies_at == 0

    def before_step(step: int) -> None:
        service.is_dead = service.is_dead or step > dies_at

    with caplog.at_level(logging.WARNING):
        trainer = train(tmp_path, name, save_steps=2, before_step=before_step)
    assert trainer.state.global_step == 4
    assert caplog.text.count("the run goes on.") == 1


@pytest.mark.parametrize("name", [*stand_in_services.CLIENTS, "dagshub"])
def test_a_client_that_is_missing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (kind,) = find_reporters(name)
    for module in ("azureml", kind.requires[0]):
        monkeypatch.setitem(sys.modules, module, None)
    extra = {"azure_ml": "azure-ml", "comet_ml": "comet"}.get(name, name)
    with pytest.raises(ImportError, match=rf'is required: pip install "paceline\[{extra}\]"'):
        kind()


def test_all_takes_those_that_can_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.callbacks.reporters.is_installed", lambda module: module in ("dvclive", "flytekit"))
    names = [kind.__name__ for kind in find_reporters("all")]
    assert names == ["JSONLReporter", "CSVReporter", "DVCLiveCallback"]
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", "http://controller")
    monkeypatch.setenv("FLYTE_INTERNAL_EXECUTION_ID", "x")
    names = [kind.__name__ for kind in find_reporters("all")]
    assert names[2:] == ["DVCLiveCallback", "FlyteCallback", "KubeflowCallback"]


def test_all_takes_neptune_with_a_project_and_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_services.install("neptune", monkeypatch)
    (kind,) = find_reporters("neptune")
    for name in ("NEPTUNE_PROJECT", "NEPTUNE_API_TOKEN", "NEPTUNE_MODE"):
        monkeypatch.delenv(name, raising=False)
    assert not kind.is_ready()
    monkeypatch.setenv("NEPTUNE_PROJECT", "me/letters")
    assert not kind.is_ready()
    monkeypatch.setenv("NEPTUNE_API_TOKEN", "x")
    assert kind.is_ready()
    monkeypatch.delenv("NEPTUNE_API_TOKEN")
    monkeypatch.setenv("NEPTUNE_MODE", "offline")
    assert kind.is_ready()


def test_all_takes_azure_ml_without_mlflow_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for has_mlflow in (False, True):
        for module in ("paceline.callbacks.reporters", "paceline.callbacks.reporters.azure_ml"):
            monkeypatch.setattr(f"{module}.is_installed", lambda name, too=has_mlflow: name == "azureml.core" or too)
        monkeypatch.setattr("paceline.callbacks.reporters.comet.is_installed", lambda module: False)
        names = [kind.__name__ for kind in find_reporters("all")]
        assert ("AzureMLCallback" in names) is not has_mlflow


def test_dagshub_is_mlflow_on_a_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.callbacks.reporters.is_installed", lambda module: module in ("dagshub", "mlflow"))
    monkeypatch.setattr("paceline.callbacks.reporters.dagshub.is_installed", lambda module: True)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///mlflow.db")
    assert "DagsHubCallback" not in [kind.__name__ for kind in find_reporters("all")]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://dagshub.com/me/letters.mlflow")
    names = [kind.__name__ for kind in find_reporters("all")]
    assert "DagsHubCallback" in names
    assert "MLflowCallback" not in names  # the same rows, twice
    assert repository_of("https://dagshub.com/me/letters.mlflow") == ("me", "letters")
    with pytest.raises(ValueError, match=r"MLFLOW_TRACKING_URI='sqlite:///x.db' names no DagsHub repository"):
        repository_of("sqlite:///x.db")
    assert issubclass(DagsHubCallback, ServiceReporter) is False


# ---- files


@pytest.mark.parametrize(
    ("name", "variable", "value", "expected"),
    [
        ("clearml", "CLEARML_LOG_MODEL", "1", ["checkpoint-2", "checkpoint-4"]),
        ("swanlab", "SWANLAB_LOG_MODEL", "1", ["checkpoint-2/**", "checkpoint-4/**"]),
        ("comet_ml", "COMET_LOG_ASSETS", "TRUE", [""]),
        ("dvclive", "HF_DVCLIVE_LOG_MODEL", "all", ["", ""]),
        ("dvclive", "HF_DVCLIVE_LOG_MODEL", "true", ["last"]),
        ("flyte", "NOT_READ", "1", ["checkpoint-2", "checkpoint-4"]),
        ("clearml", "CLEARML_LOG_MODEL", "0", []),
        ("dvclive", "HF_DVCLIVE_LOG_MODEL", "0", []),
    ],
)
def test_files_that_a_variable_asks_for(
    name: str, variable: str, value: str, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = stand_in_services.install(name, monkeypatch)
    monkeypatch.setenv(variable, value)
    train(tmp_path / "out", name, save_steps=2)
    folder = tmp_path / "out"
    assert service.runs[0].files == [str(folder / part) if part else str(folder) for part in expected]
    if expected == ["last"]:
        assert (folder / "last" / "model.safetensors").is_file()


@pytest.mark.parametrize(("choice", "expected"), [("same", [2, 4]), ("last", [4]), ("best", [4]), (None, [])])
def test_checkpoints_of_neptune(
    choice: str | None, expected: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = stand_in_services.install("neptune", monkeypatch)
    (kind,) = find_reporters("neptune")
    train(tmp_path, "none", save_steps=2, callbacks=[kind(log_checkpoints=choice)])
    assert service.runs[0].files == [str(tmp_path / f"checkpoint-{step}") for step in expected]
    with pytest.raises(ValueError, match="log_checkpoints='first' is invalid"):
        kind(log_checkpoints="first")


def test_neptune_uses_a_run_and_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = stand_in_services.install("neptune", monkeypatch)
    (kind,) = find_reporters("neptune")
    run = sys.modules["neptune"].init_run(project="own")
    trainer = Course(tmp_path, "none", callbacks=[kind(run=run, base_namespace="deep")])
    trainer.evaluate()
    assert kind.get_run(trainer) is run
    assert service.runs[0].is_open
    with pytest.raises(LookupError, match="no NeptuneCallback"):
        kind.get_run(Course(tmp_path, "none"))


def test_dvclive_takes_a_live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = stand_in_services.install("dvclive", monkeypatch)
    (kind,) = find_reporters("dvclive")
    train(tmp_path, "none", callbacks=[kind(sys.modules["dvclive"].Live("mine"))])
    assert [(run.id, run.is_open) for run in service.runs] == [("mine", True)]
    with pytest.raises(TypeError, match=r"live=3 is invalid: expected a dvclive\.Live"):
        kind(3)


def test_an_invalid_mode_of_comet(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_services.install("comet_ml", monkeypatch)
    (kind,) = find_reporters("comet_ml")
    monkeypatch.setenv("COMET_MODE", "sometimes")
    with pytest.raises(ValueError, match="COMET_MODE='sometimes' is invalid: expected one of get, create"):
        kind()


# ---- Trackio's options


@pytest.mark.parametrize(
    ("options", "kind", "target"),
    [
        ({"trackio_space_id": "board", "trackio_bucket_id": "store"}, "freeze", "letters-static-"),
        ({"trackio_space_id": "board", "trackio_static_space_id": "me/fixed"}, "freeze", "me/fixed"),
        ({"trackio_space_id": "board", "trackio_static_space_id": False}, None, ""),
    ],
)
def test_spaces_of_trackio(
    options: dict[str, Any], kind: str | None, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = stand_in_services.install("trackio", monkeypatch)
    trainer = train(tmp_path, "trackio", project="letters", hub_private_repo=True, **options)
    about = service.runs[0].about
    assert (about["space_id"], about["bucket_id"]) == ("board", options.get("trackio_bucket_id"))
    assert about["private"] is True
    trainer.callback_handler.on_push_begin(trainer.args, trainer.state, trainer.control)
    assert [name for name, _ in service.calls] == [kind] * (kind is not None)
    tags = getattr(trainer.model, "model_tags", [])
    if kind is not None:
        assert service.calls[0][1]["space_id"] == "me/board"
        assert service.calls[0][1]["new_space_id"].startswith(target)
        assert tags == ["trackio", f"trackio:https://huggingface.co/spaces/{service.calls[0][1]['new_space_id']}"]
    else:
        assert tags == []


@pytest.mark.parametrize(("static", "number"), [(None, 1), ("me/fixed", 1), (False, 0)])
def test_a_push_exports_local_runs_of_trackio(
    static: Any, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = stand_in_services.install("trackio", monkeypatch)
    trainer = train(tmp_path, "trackio", trackio_static_space_id=static)
    trainer.callback_handler.on_push_begin(trainer.args, trainer.state, trainer.control)
    assert [name for name, _ in service.calls] == ["sync"] * number
    if static:
        assert service.calls[0][1]["space_id"] == "me/fixed"


def test_names_of_static_spaces() -> None:
    name = static_space_name(" My/Project: ä ")
    assert name.startswith("my-project-static-")
    assert static_space_name("...").startswith("trackio-project-static-")


def test_options_of_trackio_need_its_reporter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = TrainingArguments(str(tmp_path), trackio_space_id="me/board", report_to="none")
    with pytest.raises(ValueError, match=r"trackio_space_id='me/board' is an option of Trackio: set report_to="):
        with_defaults([], args)
    stand_in_services.install("trackio", monkeypatch)
    (kind,) = find_reporters("trackio")
    with_defaults([kind()], args)
    with_defaults([], TrainingArguments(str(tmp_path), trackio_space_id="trackio", trackio_static_space_id=False))


# ---- without runs


def test_azure_ml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = stand_in_services.install("azure_ml", monkeypatch)
    trainer = train(tmp_path, "azure_ml")
    assert service.runs[0].values("loss") == losses(trainer)
    assert service.runs[0].values("eval_loss") == losses(trainer, "eval_loss")


def test_codecarbon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = stand_in_services.install("codecarbon", monkeypatch)
    train(tmp_path / "out", "codecarbon", project="letters")
    monkeypatch.setenv("CODECARBON_COUNTRY_ISO_CODE", "FRA")
    monkeypatch.setenv("CODECARBON_PROJECT_NAME", "other")
    train(tmp_path / "out", "codecarbon", project="letters")
    first, second = service.runs
    assert first.about == {"kind": "EmissionsTracker", "output_dir": str(tmp_path / "out"), "project_name": "letters"}
    assert second.about == {"kind": "OfflineEmissionsTracker", "output_dir": str(tmp_path / "out")}
    assert not first.is_open
    assert not second.is_open


def test_the_deck_of_flyte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pandas", reason="installed with datasets")
    service = stand_in_services.install("flyte", monkeypatch)
    course = train(tmp_path, "flyte")
    course.fire("on_model_card", make_card=lambda: "The card")
    assert service.runs[0].settings["Model Card"] == "<p>The card</p>"
    assert "eval_loss" in service.runs[0].settings["Log History"]
    (kind,) = find_reporters("flyte")

    class Context:
        @property
        def checkpoint(self) -> Any:
            raise NotImplementedError("no platform")

    monkeypatch.setattr(sys.modules["flytekit"], "current_context", Context)
    with pytest.raises(RuntimeError, match='report_to="flyte" works in a Flyte task only'):
        kind()


# ---- Kubeflow: a real server


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[dict[str, Any]]]:
    received: list[dict[str, Any]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append({**json.loads(body)["trainerStatus"], "token": self.headers["Authorization"]})
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    (tmp_path / "token").write_text("secret\n")
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", f"http://127.0.0.1:{server.server_port}/status")
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(tmp_path / "token"))
    yield received
    server.shutdown()
    thread.join()
    server.server_close()


def test_progress_of_a_train_job(tmp_path: Path, controller: list[dict[str, Any]]) -> None:
    trainer = train(tmp_path / "out", "kubeflow")
    last = controller[-1]
    assert last["token"] == "Bearer secret"
    assert (last["progressPercentage"], last["estimatedRemainingSeconds"]) == (100, 0)
    metrics = {item["name"]: item["value"] for item in last["metrics"]}
    assert (metrics["current_step"], metrics["total_steps"]) == ("4", "4")
    assert metrics["loss"] == str(losses(trainer)[-1][1])
    assert len(controller) <= 2  # at most one in 5 s, and the end


def test_a_stopped_train_job_is_not_complete(
    tmp_path: Path, controller: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubeflow, "MIN_SECONDS", 0.0)

    def before_step(step: int) -> None:
        trainer.control.should_training_stop = step == 4

    trainer = Course(tmp_path / "out", "kubeflow", max_steps=8, before_step=before_step)
    trainer.train()
    assert controller[-1]["progressPercentage"] == 50
    assert all(0 <= status["progressPercentage"] < 100 for status in controller)


def test_kubeflow_elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="requires KUBEFLOW_TRAINER_SERVER_URL"):
        KubeflowCallback()
    monkeypatch.setenv("DISABLE_KUBEFLOW_INTEGRATION", "TRUE")
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", "http://127.0.0.1:9/status")
    assert not KubeflowCallback.is_ready()
    train(tmp_path, "kubeflow", max_steps=1, eval_steps=0)


def test_the_newest_status_is_sent() -> None:
    sender = StatusSender("http://127.0.0.1:9/status", None, None)
    sender.put({})
    sender.close(5)
    with pytest.raises(ConnectionError, match="took no status"):
        sender.check()
    sender.check()


# ---- signals


def test_a_client_takes_no_signal_from_the_run() -> None:
    before = signal.getsignal(signal.SIGTERM)

    def of_client(number: int, frame: Any) -> None:
        raise SystemExit

    try:
        with signals_kept():
            signal.signal(signal.SIGTERM, of_client)
        assert signal.getsignal(signal.SIGTERM) is before
    finally:
        signal.signal(signal.SIGTERM, before)


def test_state_of_a_run_that_was_never_opened() -> None:
    class Plain(ServiceReporter):
        service = "Plain"

    reporter = Plain()
    reporter.load_state_dict({"run_id": "a", "project": None, "run_name": None})
    assert reporter.state_dict()["run_id"] == "a"  # a checkpoint before the service answers keeps it
    state = SimpleNamespace(is_world_process_zero=False, is_hyper_param_search=False, global_step=2)
    reporter.on_train_begin(SimpleNamespace(), state, None)  # type: ignore[arg-type]
    assert reporter.state_dict()["run_id"] == "a"
