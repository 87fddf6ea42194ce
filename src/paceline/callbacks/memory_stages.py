"""Memory metrics of each stage of a Trainer (`skip_memory_metrics=False`)."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from paceline.callbacks.memory import process_bytes
from paceline.core.optional import require

SAMPLE_SECONDS = 0.01  # a sample takes about 10 us, so sampling costs 0.1 % of the time
_STATUS = "/proc/self/status"


class MemoryStages:
    """Measures the memory of the stages init, train, eval and test; a nested stage is ignored.

    For each stage, in bytes: `alloc_delta` is the memory at its end minus that at its start, and `peaked_delta` is its
    peak minus that at its end. Their sum is the memory that the stage needed. CPU memory is the resident memory of the
    process, sampled every 10 ms by a thread, and the kernel's peak; GPU memory is torch's allocated memory.

    Args:
        is_on: False disables every call.
        device: type of the device to measure in addition to the CPU; None for the CPU only.

    Raises:
        ImportError: psutil is required on this system and missing.
    """

    def __init__(self, is_on: bool, device: str | None = None) -> None:
        self.is_on = is_on
        self.current: str | None = None
        self._device = Device(device) if is_on and device not in (None, "cpu", "meta") else None
        self._unreported: dict[str, int] = {}
        if is_on and process_bytes() is None:
            require("psutil", "memory")

    def start(self, stage: str) -> None:
        """Starts a stage unless another one is running."""
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
        """Ends a stage and returns its metrics; {} if another stage is running. The first stage's include `init`'s."""
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
        """Context manager that ends a stage with the block; a stage ended by an error is not reported."""
        is_outer = self.is_on and self.current is None
        self.start(stage)
        try:
            yield
        finally:
            if is_outer and self.current == stage:
                self._sampler.stop()
                self.current = None

    def __del__(self) -> None:
        """Ends the thread of an unfinished stage, for instance if a Trainer's constructor raised."""
        sampler = vars(self).get("_sampler")
        if sampler is not None:
            sampler.end()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_sampler"} | {"current": None}


class MemoryTracker:
    """Measures memory through the interface of the Hugging Face Trainer, for methods copied from it.

    The calling method determines the stage.
    """

    STAGES: ClassVar[dict[str, str]] = {"__init__": "init", "train": "train", "evaluate": "eval", "predict": "test"}

    def __init__(self, stages: MemoryStages) -> None:
        self._stages = stages
        self.skip_memory_metrics = not stages.is_on

    def start(self) -> None:
        """Starts the stage of the calling method."""
        self._stages.start(self._stage_of(sys._getframe(1).f_code.co_name))

    def stop_and_update_metrics(self, metrics: dict[str, Any] | None = None) -> None:
        """Ends the stage of the calling method and adds its memory metrics to `metrics`."""
        measured = self._stages.stop(self._stage_of(sys._getframe(1).f_code.co_name))
        if metrics is not None:
            metrics.update(measured)

    def _stage_of(self, method: str) -> str:
        return self.STAGES.get(method, "train")


class Sampler:
    """Samples the resident memory until it is stopped.

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
        """Ends the thread at its next sample."""
        self._is_over.set()

    def stop(self) -> int:
        """Ends the thread. Returns the peak in bytes, from the samples or the kernel."""
        self.end()
        self._thread.join()
        self._look()
        noted = noted_peak()
        # the kernel does not date its peak: only a peak that rose during the stage belongs to it
        return max(self._peak, noted) if noted > self._noted else self._peak


class Device:
    """torch's allocated memory on an accelerator, in bytes.

    Attributes:
        first: allocated bytes at the start.
    """

    def __init__(self, kind: str) -> None:
        self._module = getattr(sys.modules["torch"], kind)
        self.first = self._peak = 0

    def start(self) -> None:
        """Resets the peak."""
        self._peak = 0
        reset = getattr(self._module, "reset_peak_memory_stats", None)
        if reset is not None and self._is_ready():
            reset()
        self.first = self.held()

    def _is_ready(self) -> bool:
        """True if the device was used; a query would initialize an unused one."""
        ask = getattr(self._module, "is_initialized", None)
        return ask is None or bool(ask())

    def held(self) -> int:
        """Returns the bytes allocated now."""
        read = getattr(self._module, "memory_allocated", None) or self._module.current_allocated_memory
        return int(read()) if self._is_ready() else 0

    def look(self) -> None:
        """Updates the peak on devices without a peak counter (Apple's)."""
        if not hasattr(self._module, "max_memory_allocated"):
            self._peak = max(self._peak, self.held())

    def peak(self) -> int:
        """Returns the peak since the start."""
        read = getattr(self._module, "max_memory_allocated", None)
        return int(read()) if read is not None and self._is_ready() else self._peak


def noted_peak() -> int:
    """Returns the kernel's peak of resident memory in bytes; 0 if unknown."""
    try:
        with open(_STATUS, encoding="ascii", errors="replace") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return 0
