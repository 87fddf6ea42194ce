"""Stand-ins for the clients of tracking services: modules that keep what a reporter sends, in one form for all."""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


class Run:
    """One run, as its service has it."""

    def __init__(self, service: Service, run_id: str, about: dict[str, Any]) -> None:
        self.service, self.id, self.about = service, run_id, about
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.settings: dict[str, Any] = {}
        self.summary: dict[str, float] = {}
        self.files: list[str] = []
        self.tags: list[str] = []
        self.card = ""
        self.shown: dict[str, tuple[int, str]] = {}  # figures and tables by name: step, and path or content
        self.is_open = True

    def put(self, step: int, row: dict[str, float]) -> None:
        self.service.answer()
        self.rows.append((step, row))

    def set(self, settings: dict[str, Any]) -> None:
        self.service.answer()
        self.settings.update(settings)

    def tag(self, tags: list[str]) -> None:
        self.service.answer()
        self.tags += [tag for tag in tags if tag not in self.tags]

    def tagged(self, tags: list[str]) -> Run:
        self.tag(tags)
        return self

    def describe(self, text: str) -> None:
        self.service.answer()
        self.card = text

    def add(self, path: str) -> None:
        self.service.answer()
        self.files.append(path)

    def end(self) -> None:
        self.service.answer()
        self.is_open = False
        if self.service.active is self:
            self.service.active = None

    def values(self, name: str) -> list[tuple[int, float]]:
        """Steps and values of a metric, under the last part of its name."""
        found = []
        for step, row in self.rows:
            found += [(step, value) for key, value in row.items() if key in (name, f"train/{name}", f"eval/{name}")]
        return found


class Service:
    """The runs of a service; `is_dead` makes every call fail."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.active: Run | None = None
        self.is_dead = False
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def answer(self) -> None:
        if self.is_dead:
            raise ConnectionError("the service is gone")

    def open(self, run_id: str | None = None, **about: Any) -> Run:
        self.answer()
        for run in self.runs:
            if run.id == run_id:
                run.is_open, self.active = True, run
                return run
        self.active = Run(self, run_id or f"run-{len(self.runs)}", about)
        self.runs.append(self.active)
        return self.active


def module(name: str, **content: Any) -> ModuleType:
    made = ModuleType(name)
    made.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    made.__path__ = []
    vars(made).update(content)
    return made


def comet_ml(service: Service) -> list[ModuleType]:
    def wrap(run: Run | None) -> Any:
        if run is None:
            return None
        return SimpleNamespace(
            get_key=lambda: run.id,
            log_parameters=run.set,
            log_other=lambda name, value: None,
            add_tags=run.tag,
            log_asset_data=lambda text, name, **how: run.describe(text),
            log_metrics=lambda row, step, epoch: run.put(step, row),
            log_asset_folder=lambda folder, **how: run.add(folder),
            end=run.end,
        )

    def start(**how: Any) -> Any:
        config = how.pop("experiment_config")
        return wrap(service.open(how.pop("experiment_key", None), name=config["name"], **how))

    return [
        module(
            "comet_ml",
            start=start,
            ExperimentConfig=dict,
            get_config={"comet.api_key": "key"}.get,
            get_running_experiment=lambda: wrap(service.active),
        )
    ]


class ClearMLLogger:
    """The logger of a task of ClearML."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def report_scalar(self, title: str, series: str, value: float, iteration: int) -> None:
        self.run.put(iteration, {f"{title}/{series}": value})

    def report_single_value(self, name: str, value: float) -> None:
        self.run.service.answer()
        self.run.summary[name] = value

    def show(self, title: str, series: str, iteration: int, local_path: str = "", table_plot: Any = None) -> None:
        self.run.shown[f"{title}/{series}"] = (iteration, local_path or str(table_plot))

    report_image = report_table = show


def clearml(service: Service) -> list[ModuleType]:
    class Task:
        def __init__(self, run: Run) -> None:
            self.id, self.run = run.id, run

        def update_parameters(self, values: dict[str, Any]) -> None:
            self.run.set({name.removeprefix("Transformers/"): value for name, value in values.items()})

        def add_tags(self, tags: list[str]) -> None:
            self.run.tag(tags)

        @property
        def comment(self) -> str:
            return self.run.card

        def set_comment(self, text: str) -> None:
            self.run.describe(text)

        def get_logger(self) -> ClearMLLogger:
            return ClearMLLogger(self.run)

        def close(self) -> None:
            self.run.end()

        @classmethod
        def current_task(cls) -> Task | None:
            return None if service.active is None else cls(service.active)

        @classmethod
        def init(cls, project_name: str, task_name: str, reuse_last_task_id: Any, **how: Any) -> Task:
            return cls(service.open(reuse_last_task_id or None, name=task_name, project=project_name, **how))

    class OutputModel:
        def __init__(self, task: Task, name: str) -> None:
            self.task = task

        def update_weights_package(self, weights_path: str, **how: Any) -> None:
            self.task.run.add(weights_path)

    return [module("clearml", Task=Task, OutputModel=OutputModel)]


def dvclive(service: Service) -> list[ModuleType]:
    class Live:
        def __init__(self, dir: str = "dvclive", resume: bool = False, **how: Any) -> None:
            self.dir = dir if resume or not service.runs else f"{dir}-{len(service.runs)}"
            self.run, self.step = service.open(self.dir, **how), 0

        def log_params(self, values: dict[str, Any]) -> None:
            self.run.set(values)

        def log_metric(self, name: str, value: float, plot: bool = True) -> None:
            if plot:
                self.run.put(self.step, {name: value})
            else:
                self.run.summary[name] = value

        def log_artifact(self, path: str, labels: list[str] | None = None, **how: Any) -> None:
            self.run.add(path)
            self.run.tag(labels or [])

        def sync(self) -> None:
            self.run.service.answer()

        def end(self) -> None:
            self.run.end()

    return [module("dvclive", Live=Live)]


def swanlab(service: Service) -> list[ModuleType]:
    def wrap(run: Run) -> Any:
        return SimpleNamespace(
            id=run.id,
            config=SimpleNamespace(update=run.set),
            log=lambda row, step: run.describe(row["model_card"]) if "model_card" in row else run.put(step, row),
            save=lambda pattern, **how: run.add(pattern),
            finish=run.end,
        )

    return [
        module(
            "swanlab",
            init=lambda id=None, tags=(), **about: wrap(service.open(id, **about).tagged(tags)),
            Text=str,
            has_run=lambda: service.active is not None,
            get_run=lambda: wrap(service.active),  # type: ignore[arg-type]
        )
    ]


def trackio(service: Service) -> list[ModuleType]:
    state: dict[str, Any] = {}

    class Client:
        def __init__(self, run: Run) -> None:
            self.run, self.name = run, run.id
            self.config = SimpleNamespace(update=run.set)

        def log(self, row: dict[str, Any], step: int) -> None:
            if "model_card" in row:
                self.run.describe(row["model_card"])
            else:
                self.run.put(step, row)

    def init(project: str, name: str | None, resume: str, space_id: str | None, **about: Any) -> Client:
        known = name if resume == "allow" else None
        state.update(project=project, space_id=space_id and f"me/{space_id}")
        state["run"] = Client(service.open(known, project=project, name=name, space_id=space_id, **about))
        run: Client = state["run"]
        return run

    def finish() -> None:
        state.pop("run").run.end()

    def export(kind: str) -> Callable[..., str]:
        def call(**how: Any) -> str:
            service.answer()
            service.calls.append((kind, how))
            return str(how.get("new_space_id") or how["space_id"])

        return call

    def variable(name: str) -> Any:
        return SimpleNamespace(get=lambda: state.get(name))

    context = module(
        "trackio.context_vars",
        current_run=variable("run"),
        current_project=variable("project"),
        current_space_id=variable("space_id"),
    )
    exports = {"freeze": export("freeze"), "sync": export("sync")}
    return [module("trackio", init=init, finish=finish, Markdown=str, **exports), context]


class File:
    """A file of Neptune."""

    def __init__(self, path: str = "", content: str = "") -> None:
        self.path, self.content = path, content

    @classmethod
    def from_content(cls, content: str, extension: str) -> File:
        return cls(f"card.{extension}", content)


class Field:
    """A field of a run of Neptune, by its path."""

    def __init__(self, run: Run, path: str) -> None:
        self.run, self.path = run, path

    def fetch(self) -> str:
        return self.run.id

    def append(self, value: Any, step: int) -> None:
        name = self.path.split("/", 1)[1]
        if isinstance(value, str | File):
            self.run.shown[name] = (step, value if isinstance(value, str) else value.path)
            return
        self.run.put(step, {name: value})

    def add(self, tags: list[str]) -> None:
        self.run.tag(tags)

    def upload(self, file: Any) -> None:
        self.run.describe(file.content)

    def upload_files(self, path: str) -> None:
        self.run.add(path)

    def delete_files(self, path: str) -> None:
        self.run.files.remove(path)


def neptune(service: Service) -> list[ModuleType]:
    class Missing(Exception):
        pass

    class Client:
        def __init__(self, run: Run) -> None:
            self.run, self.stop = run, run.end

        def __getitem__(self, path: str) -> Field:
            return Field(self.run, path)

        def __setitem__(self, path: str, values: dict[str, Any]) -> None:
            self.run.set(values)

    def init_run(with_id: str | None = None, **about: Any) -> Client:
        return Client(service.open(with_id, **about))

    names = ("NeptuneMissingProjectNameException", "NeptuneMissingApiTokenException", "MissingFieldException")
    return [
        module("neptune", init_run=init_run),
        module("neptune.exceptions", **dict.fromkeys(names, Missing)),
        module("neptune.utils", stringify_unsupported=dict),
        module("neptune.types", File=File),
    ]


def azureml(service: Service) -> list[ModuleType]:
    class Context:
        def log(self, name: str, value: float, description: str, step: int) -> None:
            (service.active or service.open()).put(step, {name: value})

    return [
        module("azureml"),
        module("azureml.core"),
        module("azureml.core.run", Run=SimpleNamespace(get_context=Context)),
    ]


def codecarbon(service: Service) -> list[ModuleType]:
    class Tracker:
        def __init__(self, **about: Any) -> None:
            self.run = service.open(kind=type(self).__name__, **about)

        def start(self) -> None:
            service.answer()

        def stop(self) -> None:
            self.run.end()

    return [
        module(
            "codecarbon",
            EmissionsTracker=type("EmissionsTracker", (Tracker,), {}),
            OfflineEmissionsTracker=type("OfflineEmissionsTracker", (Tracker,), {}),
        )
    ]


def flytekit(service: Service) -> list[ModuleType]:
    def save(path: str) -> None:
        (service.active or service.open()).add(path)

    def deck(name: str, html: str) -> None:
        (service.active or service.open()).set({name: html})

    class MarkdownRenderer:
        def to_html(self, text: str) -> str:
            return f"<p>{text}</p>"

    class TableRenderer:
        def to_html(self, table: Any) -> str:
            return str(table.to_html())

    context = SimpleNamespace(checkpoint=SimpleNamespace(save=save))
    return [
        module("flytekit", current_context=lambda: context, Deck=deck),
        module("flytekit.deck", MarkdownRenderer=MarkdownRenderer),
        module("flytekitplugins"),
        module("flytekitplugins.deck"),
        module("flytekitplugins.deck.renderer", TableRenderer=TableRenderer),
    ]


# value of report_to: the function that makes its client's modules
CLIENTS: dict[str, Callable[[Service], list[ModuleType]]] = {
    "azure_ml": azureml,
    "clearml": clearml,
    "codecarbon": codecarbon,
    "comet_ml": comet_ml,
    "dvclive": dvclive,
    "flyte": flytekit,
    "neptune": neptune,
    "swanlab": swanlab,
    "trackio": trackio,
}


def install(name: str, monkeypatch: pytest.MonkeyPatch) -> Service:
    """Replaces a client by its stand-in until the test ends. Returns what the service has."""
    service = Service()
    for made in CLIENTS[name](service):
        monkeypatch.setitem(sys.modules, made.__name__, made)
    return service
