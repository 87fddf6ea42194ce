"""Samples the resource use of the machine on a thread, for the log rows (`log_resources`)."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from typing import Any

from paceline.core.ledger import RESOURCE_PREFIX
from paceline.core.optional import is_installed, require

logger = logging.getLogger(__name__)

SECONDS = 1.0  # interval between samples; taking one costs about a millisecond
MB, GB = 2**20, 2**30


class Resources:
    """Samples the use of CPU, memory, disk, network and NVIDIA GPUs of this machine, until it is closed.

    In a log row, loads, rates and power are means since the previous row, memory and temperatures are maxima:
    `resource/cpu_percent` (of all cores), `resource/process_memory_gb`, `resource/memory_percent`,
    `resource/disk_read_mb_s`, `resource/disk_write_mb_s`, `resource/network_in_mb_s`, `resource/network_out_mb_s`; and
    for each GPU of the machine `resource/gpu0_percent`, `resource/gpu0_memory_gb`, `resource/gpu0_power_w`,
    `resource/gpu0_celsius`. Values that the system does not report are left out.

    Args:
        seconds: the interval between samples.

    Raises:
        ImportError: psutil is missing; the message names the extra.
    """

    def __init__(self, seconds: float = SECONDS) -> None:
        self._psutil: Any = require("psutil", "resources")
        self._process = self._psutil.Process()
        self._gpus = Gpus()
        self._seconds = seconds
        self._lock = threading.Lock()
        self._sums: dict[str, float] = {}
        self._peaks: dict[str, float] = {}
        self._num_samples = 0
        self._counters = self._count()
        self._since = time.monotonic()
        self._psutil.cpu_percent()  # psutil measures between two calls: the first call returns 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="paceline-resources", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while not self._is_over.wait(self._seconds):
            try:
                self.sample()
            except Exception as error:
                self._stop_sampling(error)

    def _stop_sampling(self, error: Exception) -> None:
        """Ends the sampling with a warning, because a failing driver must not end the training."""
        self._is_over.set()
        logger.warning("log_resources: no further samples are taken: %s: %s", type(error).__name__, error)

    def sample(self) -> None:
        """Takes one sample."""
        loads = {"cpu_percent": float(self._psutil.cpu_percent()), **self._gpus.loads()}
        levels = {
            "process_memory_gb": self._process.memory_info().rss / GB,
            "memory_percent": float(self._psutil.virtual_memory().percent),
            **self._gpus.levels(),
        }
        with self._lock:
            self._num_samples += 1
            for name, value in loads.items():
                self._sums[name] = self._sums.get(name, 0.0) + value
            for name, value in levels.items():
                self._peaks[name] = max(self._peaks.get(name, value), value)

    def take(self) -> dict[str, float]:
        """Returns the entries of a log row and starts the next; takes a sample if there is none yet.

        After a failed sample the entries are only those of disks and network.
        """
        if not self._num_samples and not self._is_over.is_set():
            try:
                self.sample()
            except Exception as error:
                self._stop_sampling(error)
        counters, now = self._count(), time.monotonic()
        passed = max(now - self._since, 1e-9)
        with self._lock:
            row = {name: total / self._num_samples for name, total in self._sums.items()}
            row.update(self._peaks)
            self._sums, self._peaks, self._num_samples = {}, {}, 0
        for name, value in counters.items():
            row[name] = max(value - self._counters.get(name, value), 0.0) / MB / passed
        self._counters, self._since = counters, now
        return {RESOURCE_PREFIX + name: round(value, 3) for name, value in row.items()}

    def _count(self) -> dict[str, float]:
        """Returns the bytes transferred since boot; disk bytes are left out if the system does not count them."""
        counters: dict[str, float] = {}
        disk = self._psutil.disk_io_counters()
        if disk is not None:
            counters.update(disk_read_mb_s=disk.read_bytes, disk_write_mb_s=disk.write_bytes)
        network = self._psutil.net_io_counters()
        if network is not None:
            counters.update(network_in_mb_s=network.bytes_recv, network_out_mb_s=network.bytes_sent)
        return counters

    def close(self) -> None:
        """Ends the thread."""
        self._is_over.set()
        self._thread.join()
        self._gpus.close()


class Gpus:
    """Reads the NVIDIA GPUs of this machine through nvidia-ml-py. Without it or a driver, there are no GPUs."""

    def __init__(self) -> None:
        self._handles: list[Any] = []
        if not is_installed("pynvml"):
            return
        self._nvml: Any = require("pynvml", "resources")
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError:  # no driver
            return
        count = self._nvml.nvmlDeviceGetCount()
        self._handles = [self._nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]

    def loads(self) -> dict[str, float]:
        """Returns utilization in percent and power in watts, by name."""
        found: dict[str, float] = {}
        for index, handle in enumerate(self._handles):
            with suppress(self._nvml.NVMLError):  # a MIG slice reports no utilization, a laptop GPU no power
                found[f"gpu{index}_percent"] = float(self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
            with suppress(self._nvml.NVMLError):
                found[f"gpu{index}_power_w"] = self._nvml.nvmlDeviceGetPowerUsage(handle) / 1000
        return found

    def levels(self) -> dict[str, float]:
        """Returns memory in GB and temperature in degrees Celsius, by name."""
        found: dict[str, float] = {}
        for index, handle in enumerate(self._handles):
            with suppress(self._nvml.NVMLError):
                found[f"gpu{index}_memory_gb"] = self._nvml.nvmlDeviceGetMemoryInfo(handle).used / GB
            with suppress(self._nvml.NVMLError):
                kind = self._nvml.NVML_TEMPERATURE_GPU
                found[f"gpu{index}_celsius"] = float(self._nvml.nvmlDeviceGetTemperature(handle, kind))
        return found

    def close(self) -> None:
        """Releases the driver."""
        if self._handles:
            self._nvml.nvmlShutdown()
            self._handles = []
