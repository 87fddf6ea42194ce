"""Reporter for Kubeflow Trainer: progress, time left and metrics of a TrainJob. Standard library only."""

from __future__ import annotations

import datetime
import json
import os
import ssl
import threading
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.args.training import TrainingArguments
from paceline.callbacks.reporters.base import Reporter, is_set
from paceline.core.events import ignores_keywords
from paceline.core.metrics import jsonable
from paceline.core.state import TrainerControl, TrainerState

SERVER = "KUBEFLOW_TRAINER_SERVER_URL"
CERTIFICATE = "KUBEFLOW_TRAINER_SERVER_CA_CERT"
TOKEN = "KUBEFLOW_TRAINER_SERVER_TOKEN"
MIN_SECONDS = 5.0  # between two updates
REQUEST_SECONDS = 5.0
TOKEN_SECONDS = 300.0  # Kubernetes renews the file


class KubeflowCallback(Reporter):
    """Reports the progress of a TrainJob to its controller, at most every 5 seconds and at the end.

    Requests are made by a background thread, of which only the newest status waits: a slow or dead controller delays
    no step.

    Environment, set by the controller if its feature gate TrainJobRuntimeStatus is enabled:
        KUBEFLOW_TRAINER_SERVER_URL: the address for updates.
        KUBEFLOW_TRAINER_SERVER_CA_CERT: path of the certificate to verify it with.
        KUBEFLOW_TRAINER_SERVER_TOKEN: path of the token.
        DISABLE_KUBEFLOW_INTEGRATION: a true value disables this callback.

    Raises:
        RuntimeError: KUBEFLOW_TRAINER_SERVER_URL is not set.
    """

    reads_checkpoint = False

    def __init__(self) -> None:
        self._is_off = is_set("DISABLE_KUBEFLOW_INTEGRATION")
        if not self._is_off and not os.environ.get(SERVER):
            raise RuntimeError(
                f'report_to="kubeflow" requires {SERVER}, which a Kubeflow TrainJob sets if its feature gate '
                "TrainJobRuntimeStatus is enabled: leave it out elsewhere."
            )
        self._metrics: dict[str, float] = {}
        self._started = 0.0
        self._first_step = 0
        self._sent = 0.0
        self._sender: StatusSender | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_sender": None}  # threads cannot be copied

    @classmethod
    def is_ready(cls) -> bool:
        """True in a TrainJob that takes updates."""
        return bool(os.environ.get(SERVER)) and not is_set("DISABLE_KUBEFLOW_INTEGRATION")

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._is_off or not state.is_world_process_zero:
            return
        self._close()
        self._sender = StatusSender(os.environ[SERVER], os.environ.get(TOKEN), os.environ.get(CERTIFICATE))
        self._metrics = {}
        self._started, self._first_step = time.monotonic(), state.global_step
        self._report(state, progress_of(state))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        plain = {name: jsonable(value) for name, value in (logs or {}).items()}
        self._metrics.update((name, value) for name, value in plain.items() if isinstance(value, (bool, int, float)))

    @ignores_keywords
    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._sender is not None and time.monotonic() - self._sent >= MIN_SECONDS:
            self._report(state, progress_of(state))
            self._sender.check()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._sender is None:
            return
        is_complete = state.max_steps <= 0 or state.global_step >= state.max_steps
        self._report(state, 100 if is_complete else progress_of(state), seconds_left=0)
        sender, self._sender = self._sender, None
        sender.close(REQUEST_SECONDS)
        sender.check()

    def _close(self) -> None:
        if self._sender is not None:
            self._sender.close(0)

    def _report(self, state: TrainerState, progress: int | None, seconds_left: int | None = None) -> None:
        metrics = {**self._metrics, "current_step": state.global_step, "total_steps": state.max_steps}
        if state.epoch is not None:
            metrics["current_epoch"] = round(state.epoch, 2)
        status: dict[str, Any] = {"lastUpdatedTime": datetime.datetime.now(datetime.UTC).isoformat()}
        if progress is not None:
            status["progressPercentage"] = progress
        left = self._seconds_left(state) if seconds_left is None else seconds_left
        if left is not None:
            status["estimatedRemainingSeconds"] = left
        status["metrics"] = [{"name": name, "value": str(value)} for name, value in metrics.items()]
        self._sent = time.monotonic()
        if self._sender is not None:
            self._sender.put({"trainerStatus": status})

    def _seconds_left(self, state: TrainerState) -> int | None:
        """Returns the seconds left at the speed since the training began or was resumed; None without a step yet."""
        done = state.global_step - self._first_step
        if done <= 0 or state.max_steps <= 0:
            return None
        return int((time.monotonic() - self._started) / done * (state.max_steps - state.global_step))


def progress_of(state: TrainerState) -> int | None:
    """Returns the percentage of steps done, at most 99 before the end; None if the number of steps is unknown."""
    if state.max_steps <= 0:
        return None
    return min(99, 100 * state.global_step // state.max_steps)


class StatusSender:
    """Posts the newest status from a background thread; one that is replaced before its turn is dropped.

    Args:
        url: the address.
        token: path of the token; None sends none.
        certificate: path of the certificate; None verifies with the system's.
    """

    def __init__(self, url: str, token: str | None, certificate: str | None) -> None:
        self._url, self._token = url, token
        self._verify = ssl.create_default_context(cafile=certificate) if url.startswith("https") else None
        self._waiting: dict[str, Any] | None = None
        self._changed = threading.Condition()
        self._is_closed = False
        self._error: Exception | None = None
        self._key = ""
        self._key_read: float | None = None
        self._thread = threading.Thread(target=self._work, name="paceline-kubeflow", daemon=True)
        self._thread.start()

    def put(self, status: dict[str, Any]) -> None:
        """Sends a status soon, instead of one that still waits."""
        with self._changed:
            self._waiting = status
            self._changed.notify_all()

    def close(self, seconds: float) -> None:
        """Sends what waits and stops the thread; waits for it at most `seconds`."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(seconds)

    def check(self) -> None:
        """Raises the error of the last request, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None or self._is_closed)
                status, self._waiting = self._waiting, None
            if status is None:
                return
            try:
                self._post(status)
            except Exception as error:
                self._error = ConnectionError(f"Kubeflow's controller {self._url} took no status: {error}")

    def _post(self, status: dict[str, Any]) -> None:
        headers = {"Content-Type": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._read_key(self._token)}"
        request = urllib.request.Request(self._url, json.dumps(status).encode(), headers, method="POST")
        urllib.request.urlopen(request, timeout=REQUEST_SECONDS, context=self._verify).close()

    def _read_key(self, path: str) -> str:
        now = time.monotonic()
        if self._key_read is None or now - self._key_read > TOKEN_SECONDS:
            self._key, self._key_read = Path(path).read_text(encoding="utf-8").strip(), now
        return self._key
