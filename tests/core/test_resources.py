"""`log_resources`: what a row holds; the thread; missing packages."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_models import Classifier, classification, make_trainer

from paceline import TrainerCallback
from paceline.core import resources
from paceline.core.resources import Gpus, Resources


class FakePsutil:
    """A machine whose load is read from a list."""

    def __init__(self) -> None:
        self.loads = [0.0, 20.0, 40.0]
        self.bytes = 0

    def cpu_percent(self) -> float:
        return self.loads.pop(0)

    def Process(self) -> Any:
        return SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=3 * 2**30))

    def virtual_memory(self) -> Any:
        return SimpleNamespace(percent=50.0)

    def disk_io_counters(self) -> None:
        """Counts nothing, as in some containers."""

    def net_io_counters(self) -> Any:
        self.bytes += 10 * 2**20
        return SimpleNamespace(bytes_recv=self.bytes, bytes_sent=0)


def test_a_row_holds_means_peaks_and_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 102.0])
    monkeypatch.setattr(resources, "require", lambda *names: FakePsutil())
    monkeypatch.setattr(resources, "is_installed", lambda name: False)
    monkeypatch.setattr(resources, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    sampler = Resources(seconds=1000.0)
    sampler.sample()
    sampler.sample()
    assert sampler.take() == {
        "resource/cpu_percent": 30.0,
        "resource/process_memory_gb": 3.0,
        "resource/memory_percent": 50.0,
        "resource/network_in_mb_s": 5.0,  # 10 MB in 2 s
        "resource/network_out_mb_s": 0.0,
    }
    sampler.close()
    assert "paceline-resources" not in [thread.name for thread in threading.enumerate()]


def test_gpus_through_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []
    nvml = SimpleNamespace(
        NVMLError=RuntimeError,
        NVML_TEMPERATURE_GPU=0,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: closed.append(True),
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=90 + handle),
        nvmlDeviceGetPowerUsage=lambda handle: 300_000,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=2**30),
        nvmlDeviceGetTemperature=lambda handle, kind: 60,
    )
    monkeypatch.setattr(resources, "is_installed", lambda name: True)
    monkeypatch.setattr(resources, "require", lambda *names: nvml)
    gpus = Gpus()
    assert gpus.loads() == {"gpu0_percent": 90.0, "gpu0_power_w": 300.0, "gpu1_percent": 91.0, "gpu1_power_w": 300.0}
    assert gpus.levels()["gpu1_celsius"] == 60.0
    assert gpus.levels()["gpu0_memory_gb"] == 1.0
    gpus.close()
    assert closed == [True]


def test_what_a_gpu_does_not_tell_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("Not Supported")

    nvml = SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUtilizationRates=fail,
        nvmlDeviceGetPowerUsage=lambda handle: 1000,
    )
    monkeypatch.setattr(resources, "is_installed", lambda name: True)
    monkeypatch.setattr(resources, "require", lambda *names: nvml)
    assert Gpus().loads() == {"gpu0_power_w": 1.0}


def test_a_sample_that_fails_ends_the_samples_and_not_the_run(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("psutil")
    sampler = resources.Resources(seconds=60)
    sampler._gpus = SimpleNamespace(loads=lambda: 1 / 0, close=lambda: None)  # type: ignore[assignment, return-value]
    assert "resource/cpu_percent" not in sampler.take()
    assert "resource/cpu_percent" not in sampler.take()
    assert caplog.text.count("no further samples") == 1
    sampler.close()


def test_a_machine_without_a_driver_has_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("Driver Not Loaded")

    monkeypatch.setattr(resources, "is_installed", lambda name: True)
    monkeypatch.setattr(resources, "require", lambda *names: SimpleNamespace(NVMLError=RuntimeError, nvmlInit=fail))
    assert Gpus().loads() == {}


class Rows(TrainerCallback):
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.rows.append(logs)


def test_the_rows_of_a_run(tmp_path: Path) -> None:
    pytest.importorskip("psutil")
    rows = Rows()
    trainer = make_trainer(
        tmp_path, Classifier(), classification(16), max_steps=4, logging_steps=2, log_resources=True, callbacks=[rows]
    )
    trainer.train()
    told = [row for row in rows.rows if "resource/cpu_percent" in row]
    assert len(told) == 3, "two training rows, and the last"
    assert all(row["resource/process_memory_gb"] > 0 for row in told)
    assert not any(name.startswith("resource/") for row in trainer.state.log_history for name in row)
    assert "paceline-resources" not in [thread.name for thread in threading.enumerate()]


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    real = importlib.import_module

    def without_psutil(name: str, package: str | None = None) -> Any:
        if name == "psutil":
            raise ImportError("No module named 'psutil'")
        return real(name, package)

    monkeypatch.setattr("paceline.core.optional.importlib.import_module", without_psutil)
    trainer = make_trainer(tmp_path, Classifier(), classification(16), max_steps=1, log_resources=True)
    with pytest.raises(ImportError, match=r"psutil is required: pip install \"paceline\[resources\]\""):
        trainer.train()
