"""Completes the record of a run while it trains: uncommitted code, packages, hardware, datasets, and how it ended.

The diff is read by a thread from the beginning, before the code is edited again. All else waits for the first log,
save or end of an epoch, so that the first optimizer step is not delayed. Files are written by the main thread.
"""

from __future__ import annotations

import datetime
import hashlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from paceline.args.secrets import mask_text
from paceline.core.code_state import read_changes
from paceline.core.events import CallbackHandler, TrainerCallback, ignores_keywords
from paceline.core.fingerprint import fingerprints
from paceline.core.lineage import DIFF_FILE, PACKAGES_FILE, RECORD_NAME, RunMark
from paceline.core.machine import describe_hardware, installed_packages
from paceline.core.record import GIT_SECONDS, update_record
from paceline.core.retry_writer import RetryWriter, replace_whole, set_aside
from paceline.core.state import TrainerState

logger = logging.getLogger(__name__)

FINISHED, INTERRUPTED, FAILED = "finished", "interrupted", "failed"  # how a start of a run ended


class Findings(threading.Thread):
    """Reads the code of a run at once, and its packages and hardware once `late` is set.

    Attributes:
        late: the first optimizer steps are done.
        entries: entries of `run.json`, complete once the thread has ended.
        files: the texts of the files beside it; an empty text stands for no file.
    """

    def __init__(self) -> None:
        super().__init__(name="paceline-provenance", daemon=True)
        self.late = threading.Event()
        self.entries: dict[str, Any] = {}
        self.files: dict[str, str] = {}

    def begin(self) -> None:
        """Starts the thread; a machine without room for another one is recorded."""
        try:
            self.start()
        except RuntimeError as error:
            self.entries["provenance_error"] = str(error)

    def run(self) -> None:
        """Reads; an error of the machine is recorded, because it must not end the run."""
        try:
            changes, diff = read_changes(Path.cwd())
            if changes:
                self.entries["git"] = changes
            self.files[DIFF_FILE] = diff
            self.late.wait()
            packages = "".join(f"{line}\n" for line in installed_packages())
            self.files[PACKAGES_FILE] = packages
            digest = hashlib.sha256(packages.encode()).hexdigest()
            self.entries["packages"] = {"file": PACKAGES_FILE, "sha256": digest, "count": packages.count("\n")}
            self.entries["hardware"] = describe_hardware()
        except Exception as error:
            self.entries["provenance_error"] = f"{type(error).__name__}: {error}"


class RecordWatch(TrainerCallback):
    """Adds findings about a run to its record, without delaying the first optimizer steps.

    Args:
        put: `(entries)`: writes entries to the record.
        datasets: the datasets of the run by name.
        write: `(name, text)`: writes a file beside the record, or removes it if the text is empty.
        uses_workers: worker processes load the data, so that the user's code does not run in this one.
    """

    may_fail = True
    reads_checkpoint = False

    def __init__(
        self,
        put: Callable[[Mapping[str, Any]], None],
        datasets: Mapping[str, Any],
        write: Callable[[str, str], None],
        uses_workers: bool = False,
    ) -> None:
        self.put, self.datasets, self.write = put, datasets, write
        self.uses_workers = uses_workers
        self.findings = Findings()
        self.is_written = self.has_data = False

    def look(self, *args: Any, **kwargs: Any) -> None:
        """Reads the datasets at the first call, and writes what the thread has found once it has ended."""
        self.findings.late.set()
        if not self.has_data:
            self.has_data = True
            self.put({"data": fingerprints(self.datasets, runs_code=not self.uses_workers)})
        if not self.is_written and not self.findings.is_alive():
            self.is_written = True
            for name, text in self.findings.files.items():
                self.write(name, text)
            self.put(self.findings.entries)

    on_log = on_save = on_epoch_end = ignores_keywords(look)

    def finish(self) -> None:
        """Waits for the thread, but no longer than git may take, and writes what is left."""
        self.findings.late.set()
        if self.findings.is_alive():
            self.findings.join(timeout=GIT_SECONDS)
        self.look()


@contextmanager
def recording(
    folder: Path,
    mark: Callable[[], RunMark],
    state: Callable[[], TrainerState],
    *,
    writer: RetryWriter,
    handler: CallbackHandler,
    datasets: Mapping[str, Any],
    uses_workers: bool,
    is_stopped: Callable[[], bool],
    metric: str | None,
) -> Iterator[None]:
    """Context manager of a training, which completes its record, `run.json`; it raises no errors itself.

    Args:
        folder: output folder of the run.
        mark: returns the mark of the run, with the seconds of training so far.
        state: returns the live state.
        writer: writes the files of the run.
        handler: the callbacks, to which a listener is added for the time of the training.
        datasets: the datasets of the run by name.
        uses_workers: worker processes load the data.
        is_stopped: returns True if a signal has stopped the run.
        metric: the metric of the best model.
    """
    path = folder / RECORD_NAME

    def put(entries: Mapping[str, Any]) -> None:
        writer.put(path, partial(update_record, path, mark(), entries))

    def write(name: str, text: str) -> None:
        writer.put(folder / name, partial(replace_if_other, folder / name, text))

    watch = RecordWatch(put, datasets, write, uses_workers)
    watch.findings.begin()
    handler.add_callback(watch)
    error: BaseException | None = None
    try:
        yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        handler.pop_callback(watch)
        try:
            watch.finish()
            put({"end": describe_end(mark(), state(), error, is_stopped=is_stopped(), metric=metric)})
        except Exception as problem:
            logger.warning("%s is incomplete.", path, exc_info=problem)


def describe_end(
    mark: RunMark, state: TrainerState, error: BaseException | None, *, is_stopped: bool, metric: str | None
) -> dict[str, Any]:
    """Returns the entry `end` of a record: state, time, step, seconds of training, best metric, and the error."""
    found: dict[str, Any] = {
        "state": INTERRUPTED if is_stopped else FINISHED,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "step": state.global_step,
        "seconds": None if mark.seconds is None else round(mark.seconds, 3),
        "metric_for_best_model": metric,
        "best_metric": state.best_metric,
    }
    if error is not None:
        found["state"] = FAILED if isinstance(error, Exception) else INTERRUPTED
        lines = str(error).strip().splitlines()
        found["error"] = mask_text(f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__)
    return found


def replace_if_other(path: Path, text: str) -> None:
    """Writes a file unless it has this text; a file of an earlier start is renamed. No text stands for no file.

    Raises: OSError, if the file cannot be written.
    """
    content = text.encode()
    if path.is_file() and path.read_bytes() == content:
        return
    set_aside(path)
    if text:
        replace_whole(path, text)
