"""Memory that each stage of a Trainer took, for its metrics (`skip_memory_metrics=False`)."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from paceline.callbacks.memory import process_bytes
from paceline.core.optional import require

SAMPLE_SECONDS = 0.01  # a look costs some 10 us, so a thousandth of the time
_STATUS = "/proc/self/status"


class MemoryStages:
    """Measures the stages init, train, eval and test; the inner of two does not count.

    For each stage, in bytes: `alloc_delta`, what is held at its end less what was held at its start, and
    `peaked_delta`, how much more than at the end it held at its peak. Their sum is what the stage needed. On the CPU
    the resident memory of the process is looked at every 10 ms by a thread that sleeps in between, and a peak that the
    kernel noted counts too; on a GPU it is what torch allocated.

    Args:
        is_on: whether to measure; else every call returns at once.
        device: the device that is measured beside the CPU, by its type; None: the CPU alone.

    Raises:
        ImportError: this system's memory can only be read by psutil, and that is missing.
    """

    def __init__(self, is_on: bool, device: str | None = None) -> None:
        self.is_on = is_on
        self.current: str | None = None
        self._device = Device(device) if is_on and device not in (None, "cpu", "meta") else None
        self._unreported: dict[str, int] = {}
        if is_on and process_bytes() is None:
            require("psutil", "memory")

    def start(self, stage: str) -> None:
        """Start a stage, unless another one runs."""
        if not self.is_on or self.current is not None:
            return
        self.current = stage
        gc.collect()
        if self._device is not None:
            self._device.start()
        self._sampler = Sampler(self._device)
        if stage == "init":
            self._unreported["before_init_mem_cpu"] = self._sampler.first
            if self._device is not None:
                self._unreported["before_init_mem_gpu"] = self._device.first

    def stop(self, stage: str) -> dict[str, int]:
        """End a stage. Returns its metrics, and those of `init` with the first; none where another stage runs."""
        if not self.is_on or self.current != stage:
            return {}
        self.current = None
        peak = self._sampler.stop()
        gc.collect()
        metrics = {}
        held = process_bytes() or 0
        metrics[f"{stage}_mem_cpu_alloc_delta"] = held - self._sampler.first
        if self._device is not None:
            metrics[f"{stage}_mem_gpu_alloc_delta"] = self._device.held() - self._device.first
        metrics[f"{stage}_mem_cpu_peaked_delta"] = max(0, peak - held)
        if self._device is not None:
            metrics[f"{stage}_mem_gpu_peaked_delta"] = max(0, self._device.peak() - self._device.held())
        before, self._unreported = self._unreported, {}
        if stage == "init":
            self._unreported = {**metrics, **before}
        return {**before, **metrics}

    @contextmanager
    def measuring(self, stage: str) -> Iterator[None]:
        """A stage that ends with the block, at the latest: one that an error cut short is not reported."""
        is_outer = self.is_on and self.current is None
        self.start(stage)
        try:
            yield
        finally:
            if is_outer and self.current == stage:
                self._sampler.stop()
                self.current = None

    def __del__(self) -> None:
        """End the thread of a stage that nobody will end: that of a Trainer whose constructor raised."""
        sampler = vars(self).get("_sampler")
        if sampler is not None:
            sampler.end()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_sampler"} | {"current": None}


class Sampler:
    """Looks at the memory until it is stopped.

    Attributes:
        first: resident bytes at the start.
    """

    def __init__(self, device: Device | None) -> None:
        self._device = device
        self._noted = noted_peak()
        self.first = self._peak = process_bytes() or 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="paceline-memory", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while not self._is_over.wait(SAMPLE_SECONDS):
            self._look()

    def _look(self) -> None:
        self._peak = max(self._peak, process_bytes() or 0)
        if self._device is not None:
            self._device.look()

    def end(self) -> None:
        """Let the thread end at its next look."""
        self._is_over.set()

    def stop(self) -> int:
        """End the thread. Returns the highest number of bytes seen, by the thread or by the kernel."""
        self.end()
        self._thread.join()
        self._look()
        noted = noted_peak()
        # of its highest mark the kernel does not say when it was: only one that rose meanwhile belongs to the stage
        return max(self._peak, noted) if noted > self._noted else self._peak


class Device:
    """What torch holds on an accelerator, in bytes.

    Attributes:
        first: at the start.
    """

    def __init__(self, kind: str) -> None:
        self._module = getattr(sys.modules["torch"], kind)
        self.first = self._peak = 0

    def start(self) -> None:
        """Forget the peak so far."""
        self._peak = 0
        reset = getattr(self._module, "reset_peak_memory_stats", None)
        if reset is not None and self._is_ready():
            reset()
        self.first = self.held()

    def _is_ready(self) -> bool:
        """Whether the device was used: asking for its memory is not to be what starts it."""
        ask = getattr(self._module, "is_initialized", None)
        return ask is None or bool(ask())

    def held(self) -> int:
        """Now."""
        read = getattr(self._module, "memory_allocated", None) or self._module.current_allocated_memory
        return int(read()) if self._is_ready() else 0

    def look(self) -> None:
        """Note the peak where torch notes none (Apple's)."""
        if not hasattr(self._module, "max_memory_allocated"):
            self._peak = max(self._peak, self.held())

    def peak(self) -> int:
        """The most since the start."""
        read = getattr(self._module, "max_memory_allocated", None)
        return int(read()) if read is not None and self._is_ready() else self._peak


def noted_peak() -> int:
    """The most that the kernel has seen resident, in bytes; 0 where it does not say."""
    try:
        with open(_STATUS, encoding="ascii", errors="replace") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return 0
