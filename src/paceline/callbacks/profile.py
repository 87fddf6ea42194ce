"""Traces optimizer steps with torch.profiler (`profile=`) and prints a table of the slowest operations."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.args.errors import UnsupportedOption
from paceline.args.places import output_folder
from paceline.args.profiling import Profiling
from paceline.args.training import TrainingArguments
from paceline.core.events import TrainerCallback
from paceline.core.optional import LateModule, require
from paceline.core.state import TrainerControl, TrainerState

logger = logging.getLogger(__name__)
terminal = LateModule("paceline.core.terminal")

FOLDER = "profile"  # below output_dir
ROWS = 10  # operations in the printed table
SNAPSHOT_EVENTS = 200_000  # of the allocator, the latest ones; about 100 MB in a file


class ProfileCallback(TrainerCallback):
    """Writes a trace file per rank and prints the slowest operations of rank 0.

    The file `output_dir/profile/rank0-steps10-15.trace.json.gz` opens in https://ui.perfetto.dev and chrome://tracing.
    A step is recorded from the end of the previous step to its own end: data, forward, backward and optimizer, and a
    log, an evaluation or a save in between. The warmup steps before a trace are profiled and discarded.

    With `snapshot`, each trace has a file `rank0-steps10-15.memory.pickle` beside it, which opens in
    https://pytorch.org/memory_viz: every block of the CUDA device's memory with the stack that allocated it. The
    allocator records from the start of the run on.

    Args:
        profiling: the steps and the details to record.
    """

    def __init__(self, profiling: Profiling) -> None:
        self.profiling = profiling
        self._profiler: Any = None
        self._snapshot: Any = None  # torch.cuda.memory while it records
        self._ranges: tuple[tuple[int, int], ...] = ()
        self._first_step = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._stop()  # the profiler of an earlier run that ended with an error
        self._first_step = state.global_step
        ranges = self.profiling.ranges(state.global_step)
        self._ranges = tuple((first, last) for first, last in ranges if first > state.global_step)
        beyond = [pair for pair in ranges if pair not in self._ranges or pair[0] > state.max_steps]
        if beyond:
            shown = ", ".join(f"{first}-{last}" for first, last in beyond)
            logger.warning(
                "profile: the steps %s are not recorded: this run begins after step %d and ends with step %d.",
                *(shown, state.global_step, state.max_steps),
            )
        if not self._ranges:
            return
        self._start_snapshots()
        profiler = require("torch.profiler", "torch")
        self._action = profiler.ProfilerAction
        folder, rank = output_folder(args) / FOLDER, int(args.process_index)

        def write(profile: Any) -> None:
            self._write(profile, folder, rank, state)

        self._profiler = profiler.profile(
            activities=profiler.supported_activities(),
            schedule=self._act,
            on_trace_ready=write,
            profile_memory=self.profiling.memory,
            with_stack=self.profiling.stacks,
            record_shapes=self.profiling.shapes,
            acc_events=True,
        )
        self._profiler.start()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._profiler is None:
            return
        self._profiler.step()
        if state.global_step >= self._ranges[-1][1]:
            self._stop()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._stop()

    def _start_snapshots(self) -> None:
        """Starts recording the events of the CUDA allocator. Raises: UnsupportedOption, without a CUDA device."""
        if not self.profiling.snapshot:
            return
        cuda = require("torch.cuda", "torch")
        if not cuda.is_available():
            raise UnsupportedOption(
                "profile: snapshot=True needs a CUDA device, and there is none. memory=True records allocations on any "
                "device; trainer.measure_memory() returns the peak of each module."
            )
        cuda.memory._record_memory_history(max_entries=SNAPSHOT_EVENTS)
        self._snapshot = cuda.memory

    def _stop(self) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()
        snapshot, self._snapshot = self._snapshot, None
        if snapshot is not None:
            snapshot._record_memory_history(enabled=None)

    def _act(self, number: int) -> Any:
        """Returns the profiler's action in a step, given the step's number in this run, from 0."""
        step = self._first_step + number + 1
        for first, last in self._ranges:
            if first <= step <= last:
                return self._action.RECORD_AND_SAVE if step == last else self._action.RECORD
            if first - self.profiling.warmup <= step < first:
                return self._action.WARMUP
        return self._action.NONE

    def _write(self, profile: Any, folder: Path, rank: int, state: TrainerState) -> None:
        """Writes the trace of the current range, which is complete or was cut short by the end of the run."""
        first = max(begin for begin, _ in self._ranges if begin <= max(state.global_step, self._ranges[0][0]))
        path = folder / f"rank{rank}-steps{first}-{state.global_step}.trace.json.gz"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(str(path))
            if self._snapshot is not None:
                self._snapshot._dump_snapshot(str(path).removesuffix(".trace.json.gz") + ".memory.pickle")
        except OSError as error:  # a full or read-only disk costs the file, not the run
            logger.warning("%s could not be written, and the run goes on: %s", path, error)
            with suppress(OSError):
                path.unlink()
            return
        if not state.is_world_process_zero:
            return
        averages = profile.key_averages()
        on_device = any(getattr(row, "self_device_time_total", 0) > 0 for row in averages)
        key = "self_device_time_total" if on_device else "self_cpu_time_total"
        table = averages.table(sort_by=key, row_limit=ROWS, max_name_column_width=60)
        text = f"Profile of the steps {first} to {state.global_step}: {path} (open it in https://ui.perfetto.dev)"
        with suppress(OSError):  # a closed pipe or a full disk behind the output ends no training
            print(terminal.encodable(f"{table}\n{text}", sys.stdout), flush=True)
