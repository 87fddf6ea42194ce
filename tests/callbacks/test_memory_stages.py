"""The reported memory of each stage, against allocations of a known size."""

from __future__ import annotations

import pickle
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paceline.callbacks import memory, memory_stages
from paceline.callbacks.memory_stages import MemoryStages

MB = 2**20


def filled(num_megabytes: int) -> Any:
    return np.ones(num_megabytes * MB, dtype=np.uint8)


def test_what_is_held_and_what_was_peaked() -> None:
    stages = MemoryStages(True)
    stages.start("train")
    held = filled(64)
    passing = filled(128)
    time.sleep(0.05)  # five looks
    del passing
    metrics = stages.stop("train")
    assert list(metrics) == ["train_mem_cpu_alloc_delta", "train_mem_cpu_peaked_delta"]
    assert metrics["train_mem_cpu_alloc_delta"] == pytest.approx(held.nbytes, abs=24 * MB)
    assert metrics["train_mem_cpu_peaked_delta"] == pytest.approx(128 * MB, abs=24 * MB)


@pytest.mark.slow
@pytest.mark.skipif(not memory_stages.noted_peak(), reason="needs Linux")
def test_a_peak_between_two_looks_is_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_stages, "SAMPLE_SECONDS", 60)
    held = memory_stages.noted_peak() - (memory.process_bytes() or 0)
    stages = MemoryStages(True)
    stages.start("eval")
    del_me = filled(held // MB + 100)
    del del_me
    assert stages.stop("eval")["eval_mem_cpu_peaked_delta"] > 90 * MB


def test_init_is_told_with_the_first_stage_and_inner_stages_are_not() -> None:
    stages = MemoryStages(True)
    stages.start("init")
    stages.stop("init")
    stages.start("train")
    stages.start("eval")
    assert stages.stop("eval") == {}
    first = stages.stop("train")
    assert set(first) == {
        "before_init_mem_cpu",
        *(f"{stage}_mem_cpu_{what}_delta" for stage in ("init", "train") for what in ("alloc", "peaked")),
    }
    assert first["before_init_mem_cpu"] > MB
    with stages.measuring("eval"):
        assert len(stages.stop("eval")) == 2


def test_a_stage_that_fails_does_not_go_on() -> None:
    stages = MemoryStages(True)
    with pytest.raises(ZeroDivisionError), stages.measuring("train"):
        1 / 0  # noqa: B018
    assert stages.current is None
    assert not any(thread.name == "paceline-memory" for thread in threading.enumerate())
    assert pickle.loads(pickle.dumps(stages)).is_on


def test_a_stage_that_nobody_can_end_keeps_no_thread() -> None:
    stages = MemoryStages(True)
    stages.start("init")
    thread = stages._sampler._thread
    del stages
    thread.join(10)
    assert not thread.is_alive()


def test_off() -> None:
    stages = MemoryStages(False, "cuda")
    with stages.measuring("train"):
        assert stages.stop("train") == {}
    assert not any(thread.name == "paceline-memory" for thread in threading.enumerate())


def test_without_a_way_to_read_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_stages, "process_bytes", lambda: None)
    monkeypatch.setitem(sys.modules, "psutil", None)
    with pytest.raises(ImportError, match=r'psutil is required: pip install "paceline\[memory\]"'):
        MemoryStages(True)
    MemoryStages(False)


def module(**changes: Callable[..., Any]) -> Any:
    state = SimpleNamespace(now=100, peak=900)
    functions = {
        "is_initialized": lambda: True,
        "memory_allocated": lambda: state.now,
        "max_memory_allocated": lambda: state.peak,
        "reset_peak_memory_stats": lambda: setattr(state, "peak", state.now),
    }
    return SimpleNamespace(state=state, **{**functions, **changes})


def test_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    device = module()
    monkeypatch.setattr(sys.modules["torch"], "cuda", device)
    stages = MemoryStages(True, "cuda")
    stages.start("init")
    stages.stop("init")
    stages.start("test")
    device.state.now, device.state.peak = 150, 500
    metrics = stages.stop("test")
    assert metrics["before_init_mem_gpu"] == 100
    assert metrics["init_mem_gpu_alloc_delta"] == 0
    assert metrics["test_mem_gpu_alloc_delta"] == 50
    assert metrics["test_mem_gpu_peaked_delta"] == 350


def test_an_accelerator_that_was_not_used_yet_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> int:
        raise AssertionError

    device = module(is_initialized=lambda: False, memory_allocated=fail, reset_peak_memory_stats=fail)
    monkeypatch.setattr(sys.modules["torch"], "cuda", device)
    stages = MemoryStages(True, "cuda")
    stages.start("init")
    assert stages.stop("init")["init_mem_gpu_alloc_delta"] == 0


def test_apples_peak_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    state = SimpleNamespace(now=10)
    seen = []

    def look() -> int:
        seen.append(state.now)
        return state.now

    monkeypatch.setattr(sys.modules["torch"], "mps", SimpleNamespace(current_allocated_memory=look), raising=False)
    stages = MemoryStages(True, "mps")
    stages.start("train")
    state.now = 70
    for _ in range(2000):  # the thread that looks may be kept waiting by other work
        if seen.count(70) > 1:
            break
        time.sleep(0.005)
    state.now = 30
    metrics = stages.stop("train")
    assert (metrics["train_mem_gpu_alloc_delta"], metrics["train_mem_gpu_peaked_delta"]) == (20, 40)
