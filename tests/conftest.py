"""One thread, no network, fixed seeds; and, in CI, no test skipped for a reason nobody expects."""

from __future__ import annotations

import fnmatch
import gc
import logging
import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

# before torch and the Hugging Face libraries are imported, and for the processes that tests start
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import hypothesis
import interrupts
import numpy as np
import pytest
import torch
from hub_server import Hub, point_to, serving

interrupts.restore()
torch.set_num_threads(1)
hypothesis.settings.register_profile("paceline", derandomize=True, deadline=None, database=None, max_examples=50)
hypothesis.settings.load_profile("paceline")

# Files of minutes, longest first: workers that take whole files start with them, and end together.
LONGEST = (
    "pytorch/distributed/test_shared_numbers.py",
    "compat/drop_in/test_libraries.py",
    "crash/test_kills.py",
    "pytorch/distributed/test_mesh.py",
    "pytorch/distributed/test_deepspeed.py",
    "benchmarks/test_benchmarks.py",
    "tensorflow/test_tf_import_order.py",
    "pytorch/checkpoint/test_hostile_files.py",
)
EXPECTED_SKIPS = Path(__file__).with_name("expected_skips.txt")
unexpected_skips = pytest.StashKey[list[str]]()
cache_folder = pytest.StashKey[tempfile.TemporaryDirectory[str]]()


def pytest_configure(config: pytest.Config) -> None:
    folder = tempfile.TemporaryDirectory(prefix="paceline-tests-")
    config.stash[cache_folder] = folder
    # nothing is left in the user's cache, nothing is found there
    os.environ["HF_HOME"] = os.environ["XDG_CACHE_HOME"] = folder.name
    # of all workers together: what DeepSpeed compiles takes a minute
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", f"{folder.name}/torch_extensions")


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[cache_folder].cleanup()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


def pytest_collection_finish() -> None:
    """The garbage collections of the tests leave out the objects of the large libraries."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    """The same random numbers whatever ran before; and the process-wide switches as they were."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    ours = logging.getLogger("paceline")
    level = ours.level
    yield
    ours.setLevel(level)
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub on loopback, which huggingface_hub speaks to in this process."""
    huggingface_hub = pytest.importorskip("huggingface_hub")
    constants = pytest.importorskip("huggingface_hub.constants")
    http = pytest.importorskip("huggingface_hub.utils._http")
    with serving() as served:
        point_to(served.url, monkeypatch)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
        monkeypatch.setattr(http.time, "sleep", lambda seconds: None)  # between its retries
        yield served
    huggingface_hub.close_session()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """With CI=true a skip is a failure unless its reason is listed: a suite must not shrink in silence."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("CI") != "true" or reporter is None:
        return
    lines = EXPECTED_SKIPS.read_text(encoding="utf-8").splitlines()
    expected = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    unexpected = []
    for report in reporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reason = reason.removeprefix("Skipped: ")
        if not any(fnmatch.fnmatchcase(reason, pattern) for pattern in expected):
            unexpected.append(f"{report.nodeid}: {reason}")
    session.config.stash[unexpected_skips] = unexpected
    if unexpected and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    unexpected = config.stash.get(unexpected_skips, [])
    if unexpected:
        terminalreporter.section("unexpected skips")
        for line in unexpected:
            terminalreporter.line(line)
        terminalreporter.line(f"Make them run, or list the reason in tests/{EXPECTED_SKIPS.name}.")
