"""Reporter for MLflow (a server or a database file): logs, settings and checkpoints."""

from __future__ import annotations

import http.client
import json
import logging
import os
import re
import ssl
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from paceline.args.places import output_folder
from paceline.args.training import TrainingArguments
from paceline.callbacks.reporters.base import (
    CARD_FILE,
    CardReporter,
    MakeCard,
    NumberFilter,
    as_description,
    changed_project,
    flat,
    is_set,
    num_parameters,
    run_name_of,
    settings_of,
    tags_of,
)
from paceline.core.optional import is_installed, require
from paceline.core.state import TrainerControl, TrainerState

if TYPE_CHECKING:
    from paceline.core.media import Media

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0
ANSWER_SECONDS = 30.0  # seconds for the first request; a server that is started on demand takes that long
AGAIN_SECONDS = 1.0  # seconds for requests after one without an answer
FINISH_SECONDS = 30.0  # the end of training waits this long for a slow server
MAX_METRICS = 1000  # per request, MLflow's limit
DESCRIPTION = "mlflow.note.content"  # the tag that MLflow's pages show as the description of a run
NOT_IN_NAMES = re.compile(r"[^0-9A-Za-z_\-. :/]")


class MLflowCallback(CardReporter):
    """Logs rows as metrics by step, and the settings as parameters.

    Rows are sent by a background thread, so that a slow or dead server does not delay a step. An active run is used;
    otherwise one is created with the name `args.run_name`, and ended with the training. A resumed training continues
    the run of its checkpoint, unless `run_name` or the experiment has changed.

    Environment:
        MLFLOW_TRACKING_URI: the server or database; by default `mlflow.db` in the working directory.
        MLFLOW_EXPERIMENT_NAME: created if missing; by default `args.project` if that was changed, else Default.
        MLFLOW_RUN_ID: the run to continue.
        MLFLOW_NESTED_RUN: a true value creates a run inside the active one.
        MLFLOW_TAGS: a JSON dict of tags.
        MLFLOW_FLATTEN_PARAMS: a true value logs nested settings one by one, as `outer.inner`.
        MLFLOW_MAX_LOG_PARAMS: maximum number of settings to log.
        HF_MLFLOW_LOG_ARTIFACTS: a true value uploads every checkpoint.
        DISABLE_MLFLOW_INTEGRATION: a true value disables this callback.

    Raises:
        ImportError: mlflow is not installed.
    """

    requires = ("mlflow",)

    def __init__(self) -> None:
        if not is_installed("mlflow"):
            require("mlflow", "mlflow")  # raises with the extra to install
        self._initialized = False
        self._auto_end_run = False
        self._log_artifacts = is_set("HF_MLFLOW_LOG_ARTIFACTS")
        self._is_training = False
        self._run_id: str | None = None
        self._run_name: str | None = None
        self._trial: str | None = None  # that `_run_id` belongs to
        self._resumes: Mapping[str, Any] = {}
        self._sender: Sender | None = None
        self._filter = NumberFilter("MLflow")
        self._answers = True

    @property
    def _ml_flow(self) -> Any:
        return require("mlflow", "mlflow")

    @property
    def reads_checkpoint(self) -> bool:  # type: ignore[override]
        """True if `on_save` needs the files."""
        return self._log_artifacts

    def state_dict(self) -> dict[str, Any]:
        """Returns the ids of the run, for a resumed training."""
        if self._run_id is None:
            return dict(self._resumes)
        return {"run_id": self._run_id, "run_name": self._run_name}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the run to continue, if it still applies."""
        self._resumes = dict(state)

    def setup(self, args: TrainingArguments, state: TrainerState, model: Any) -> None:
        """Creates or finds the run and logs the settings. May be overridden."""
        if is_set("DISABLE_MLFLOW_INTEGRATION") or not state.is_world_process_zero:
            self._initialized = True
            return
        mlflow = self._ml_flow
        self._check_server()
        is_nested, given = is_set("MLFLOW_NESTED_RUN"), os.environ.get("MLFLOW_RUN_ID")
        if mlflow.active_run() is None or is_nested or given:
            experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or changed_project(args)
            chosen = mlflow.set_experiment(experiment).experiment_id if experiment else None
            before = None if given else self._run_to_resume(args, chosen)
            mlflow.start_run(run_id=before, run_name=run_name_of(args), nested=is_nested)
            self._auto_end_run = True
        self._run_id, self._run_name = mlflow.active_run().info.run_id, run_name_of(args)
        self._trial = state.trial_name
        client = mlflow.MlflowClient()
        self._log_settings(client, args, model)
        client.set_tag(self._run_id, "model_tags", ", ".join(tags_of(model)))
        for name, value in json.loads(os.environ.get("MLFLOW_TAGS") or "{}").items():
            client.set_tag(self._run_id, name, value)
        if self._sender is not None:
            self._sender.close()
        self._sender = Sender(partial(send_metrics, client, self._run_id))
        self._initialized, self._resumes = True, {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_sender": None}  # threads cannot be copied

    def _run_to_resume(self, args: TrainingArguments, experiment_id: str | None) -> str | None:
        """Returns the run of the checkpoint if it still exists and no other is requested."""
        run_id = self._resumes.get("run_id")
        if not run_id or self._resumes.get("run_name") != run_name_of(args):
            return None
        try:
            run = self._ml_flow.MlflowClient().get_run(run_id)
        except Exception as error:
            logger.warning("MLflow's run %s cannot be continued, so a new one starts: %s", run_id, error)
            return None
        is_there = run.info.lifecycle_stage == "active" and experiment_id in (None, run.info.experiment_id)
        return str(run_id) if is_there else None

    def _log_settings(self, client: Any, args: TrainingArguments, model: Any) -> None:
        """Logs the settings as parameters, except existing ones, which MLflow does not allow to change."""
        limits = require("mlflow.utils.validation", "mlflow")
        settings = settings_of(args, model)
        count = num_parameters(model)
        if count is not None:
            settings["model/num_parameters"] = count
        if is_set("MLFLOW_FLATTEN_PARAMS"):
            settings = dict(flat(settings))
        there = client.get_run(self._run_id).data.params
        texts = {NOT_IN_NAMES.sub("_", name): str(value) for name, value in settings.items()}
        long = [name for name, text in texts.items() if len(text) > limits.MAX_PARAM_VAL_LENGTH]
        if long:
            logger.warning(
                "MLflow accepts no values of more than %d characters, so these settings are not logged: %s. "
                "MLFLOW_FLATTEN_PARAMS=1 logs nested ones one by one.",
                limits.MAX_PARAM_VAL_LENGTH,
                ", ".join(long),
            )
        kind = require("mlflow.entities", "mlflow").Param
        params = [kind(name, text) for name, text in texts.items() if name not in there and name not in long]
        limit = os.environ.get("MLFLOW_MAX_LOG_PARAMS", "")
        params = params[: int(limit)] if limit.isdigit() else params
        for start in range(0, len(params), limits.MAX_PARAMS_TAGS_PER_BATCH):
            client.log_batch(self._run_id, params=params[start : start + limits.MAX_PARAMS_TAGS_PER_BATCH])

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        # a training that an error ended, or an evaluation before a search: each trial has a run of its own
        if self._is_training or (self._initialized and state.is_hyper_param_search):
            MLflowCallback.on_train_end(self, args, state, control)
        if state.global_step == 0:
            self._resumes = {}  # a run that begins continues none, whatever was restored around a search
        self._is_training = True
        if not self._initialized:
            self.setup(args, state, model)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Any = None,
        model: Any = None,
        **kwargs: Any,
    ) -> None:
        self._prepare(args, state, control, model)
        if self._sender is None or not logs:
            return
        kind, now = require("mlflow.entities", "mlflow").Metric, int(time.time() * 1000)
        numbers = self._filter.numbers({NOT_IN_NAMES.sub("_", name): value for name, value in logs.items()})
        self._sender.put([kind(name, float(value), now, state.global_step) for name, value in numbers.items()])
        if not self._is_training:
            self._finish_sending()
        self._sender.check()

    def on_media(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, media: Media, **kwargs: Any
    ) -> None:
        """Adds the file of a figure or table to the run's artifacts, in the folder `media`."""
        self._prepare(args, state, control, kwargs.get("model"))
        if self._run_id is not None and media.path.exists():
            self._check_server()
            self._ml_flow.MlflowClient().log_artifact(
                self._run_id, str(media.path), artifact_path=media.path.parent.name
            )

    def record_card(self, make_card: MakeCard, args: TrainingArguments, state: TrainerState, model: Any) -> None:
        """Adds the model card to the artifacts, and makes it the description unless that is the user's."""
        if self._sender is None or self._run_id is None:
            return
        self._check_server()
        client, card = self._ml_flow.MlflowClient(), make_card()
        client.log_text(self._run_id, card, CARD_FILE)
        description = as_description(card, client.get_run(self._run_id).data.tags.get(DESCRIPTION))
        limit: int = require("mlflow.utils.validation", "mlflow").MAX_TAG_VAL_LENGTH
        if description is not None and len(description) <= limit:
            client.set_tag(self._run_id, DESCRIPTION, description)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._log_artifacts and self._run_id is not None:
            self._check_server()
            folder = output_folder(args) / f"checkpoint-{state.global_step}"
            self._ml_flow.MlflowClient().log_artifacts(self._run_id, str(folder), artifact_path=folder.name)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._is_training = False
        if self._sender is None:
            return
        is_sent = self._finish_sending()
        if self._auto_end_run and self._ml_flow.active_run() is not None:
            self._end_run(is_sent)
        self._initialized = self._auto_end_run = False  # the next training is another run or resumes this one
        if not is_sent:
            logger.warning(
                "MLflow's server did not accept the last %d metrics of run %s.", self._sender.num_waiting, self._run_id
            )

    def _prepare(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any) -> None:
        """Opens a run for what is logged, if there is none. What is logged after a search belongs to no trial."""
        if self._sender is not None and self._trial != state.trial_name:
            MLflowCallback.on_train_end(self, args, state, control)
            self._sender.close()
            self._sender, self._resumes = None, {}
        if self._sender is None and not self._initialized:
            self.setup(args, state, model)

    def _check_server(self) -> None:
        """Raises ConnectionError if the server does not answer; waits for it at length only once in an outage."""
        seconds = ANSWER_SECONDS if self._answers else AGAIN_SECONDS
        self._answers = False
        check_server(self._ml_flow.get_tracking_uri(), seconds)
        self._answers = True

    def _finish_sending(self) -> bool:
        """Waits until everything is sent, unless the server is unreachable. Returns: True if it is reachable."""
        assert self._sender is not None
        try:
            self._check_server()
        except OSError:
            return False
        return self._sender.drain(FINISH_SECONDS)

    def _end_run(self, is_reachable: bool) -> None:
        """Ends the run; only locally if the server is unreachable, since mlflow would retry for minutes."""
        if is_reachable:
            self._ml_flow.end_run()
            return
        active = getattr(require("mlflow.tracking.fluent", "mlflow"), "_active_run_stack", None)
        if active is not None:  # otherwise mlflow tries to end it at process exit
            active.get().pop()


def send_metrics(client: Any, run_id: str, metrics: list[Any]) -> None:
    """Sends one request.

    Raises:
        ConnectionError: the server is unreachable; replaces mlflow's long message.
    """
    try:
        client.log_batch(run_id, metrics=metrics)
    except Exception:
        check_server(client.tracking_uri)
        raise


class Sender:
    """Sends metrics from a background thread, in order; failed ones are retried with the next.

    Args:
        send: sends a list of at most `MAX_METRICS`; may raise.
    """

    def __init__(self, send: Callable[[list[Any]], Any]) -> None:
        self._send = send
        self._waiting: list[Any] = []
        self._changed = threading.Condition()
        self._is_due = False
        self._is_closed = False
        self._error: Exception | None = None
        self._is_told = False
        threading.Thread(target=self._work, name="paceline-mlflow", daemon=True).start()

    @property
    def num_waiting(self) -> int:
        """The number of metrics not sent yet."""
        return len(self._waiting)

    def put(self, items: list[Any]) -> None:
        """Queues metrics."""
        with self._changed:
            self._waiting.extend(items)
            self._is_due = True
            self._changed.notify_all()

    def close(self) -> None:
        """Stops the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def check(self) -> None:
        """Raises the error of the last send, once per outage."""
        error, self._error = self._error, None
        if error is not None and not self._is_told:
            self._is_told = True
            raise error

    def drain(self, seconds: float) -> bool:
        """Waits until everything is sent or failed, or a timeout. Returns: True if everything is sent."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_due, seconds)
            return not self._waiting

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_due or self._is_closed)
                if self._is_closed:
                    return
                batch = self._waiting[:MAX_METRICS]
            try:
                if batch:
                    self._send(batch)
            except Exception as error:
                with self._changed:
                    self._error, self._is_due = error, False
                    self._changed.notify_all()
                continue
            with self._changed:
                del self._waiting[: len(batch)]
                self._is_told = self._is_told and not batch
                self._is_due = bool(self._waiting)
                self._changed.notify_all()


def check_server(uri: str, seconds: float = ANSWER_SECONDS) -> None:
    """Checks that a tracking server answers with any status; mlflow itself would retry for a quarter of an hour.

    Args:
        uri: the tracking URI.
        seconds: how long to wait for the answer.

    Raises:
        ConnectionError: it is unreachable, or does not answer; the message contains its address.
    """
    parts = urllib.parse.urlsplit(uri)
    if parts.scheme not in ("http", "https") or parts.hostname is None:
        return  # a database, a folder, another scheme
    if parts.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(parts.hostname):
        return  # only the proxy can reach it
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname, parts.port, timeout=min(CONNECT_SECONDS, seconds))
    try:
        connection.connect()
        connection.sock.settimeout(seconds)
        connection.request("GET", "/health")
        connection.getresponse()
    except (ssl.SSLError, http.client.HTTPException):
        pass  # an answer, which mlflow's own client may understand
    except OSError as error:
        raise ConnectionError(
            f"MLflow's server {parts.hostname}:{connection.port} cannot be reached ({error}): start it, or set "
            "MLFLOW_TRACKING_URI, for instance to sqlite:///mlflow.db."
        ) from error
    finally:
        connection.close()
