"""The benchmarks run, their results have what the page needs, and the page is what the results say.

Not run here are `shared_overhead.py` and `tf_step.py`, a minute each: their results are made by hand.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import warm

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
# they measure imports or peaks of memory
FRESH = (
    "import_time.py",
    "ledger.py",
    "large_vocabulary.py",
    "memory_options.py",
    "run_growth.py",
    "eval_memory.py",
    "export.py",
)
NEEDS = {"transformers.Trainer": "transformers", "lightning": "lightning", "accelerate loop": "accelerate"}
PEERS = [name for name, module in NEEDS.items() if importlib.util.find_spec(module) is not None]


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a script in the folder: they import each other."""
    monkeypatch.syspath_prepend(FOLDER)


def run(script: str, *arguments: str) -> str:
    """Run it with all that it starts: forked, but where what is measured is that of a fresh interpreter."""
    words = [str(FOLDER / script), *arguments]
    if script in FRESH:
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    else:
        done = warm.run(words, is_nested=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def run_for_result(tmp_path: Path, name: str, *arguments: str) -> dict[str, Any]:
    run(f"{name}.py", *arguments, "--output", str(tmp_path))
    result: dict[str, Any] = json.loads((tmp_path / f"{name}.json").read_text("utf-8"))
    assert result["benchmark"] == name
    assert str(tmp_path) not in result["command"]
    return result


def load(name: str) -> ModuleType:
    """A benchmark as a module, under a name of its own: its dataclasses look it up by that."""
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.nightly
def test_step_overhead(tmp_path: Path) -> None:
    contenders = ["loop", "paceline", *PEERS]
    result = run_for_result(tmp_path, "step_overhead", "--quick", "--contenders", *contenders)
    assert list(result["rows"]) == contenders
    assert result["rows"]["loop"]["over_loop"]["median"] > 0
    ratio, guarded, calls = result["targets"]
    assert guarded["value"] is None
    assert ratio["value"] == result["rows"]["paceline"]["over_loop"]["median"]
    assert calls["value"] == result["rows"]["paceline"]["calls_per_step"] > 5
    assert result["rows"]["loop"]["calls_per_step"] is None
    assert all(result["rows"][peer]["calls_per_step"] > 10 for peer in PEERS)


@pytest.mark.nightly
def test_ledger(tmp_path: Path) -> None:
    contenders = ["without", "with", "loop"]
    result = run_for_result(tmp_path, "ledger", "--quick", "--contenders", *contenders)
    assert list(result["rows"]) == contenders
    assert result["rows"]["without"]["over_without"]["median"] > 0
    assert result["targets"][0]["value"] == result["rows"]["with"]["over_without"]["median"] > 0


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_large_vocabulary(tmp_path: Path) -> None:
    contenders = ["paceline, by chunks", "paceline, logits", "loop"]
    result = run_for_result(tmp_path, "large_vocabulary", "--quick", "--contenders", *contenders)
    chunks, logits, loop = (result["rows"][name]["added_gb"]["median"] for name in contenders)
    assert chunks < logits / 2
    assert loop == pytest.approx(logits, rel=0.2)


@pytest.mark.nightly
def test_import_time(tmp_path: Path) -> None:
    result = run_for_result(tmp_path, "import_time", "--quick", "--contenders", "import torch", "import paceline")
    rows = result["rows"]
    assert rows["import paceline"]["cpu_ms"]["median"] < rows["import torch"]["cpu_ms"]["median"]


@pytest.mark.nightly
def test_report_page(tmp_path: Path) -> None:
    result = run_for_result(tmp_path, "report_page", "--quick", "--contenders", "a row every step")
    assert result["rows"]["a row every step"]["mb"]["median"] < 1


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_eval_memory(tmp_path: Path) -> None:
    contenders = ["paceline, streaming", "paceline, whole set"]
    result = run_for_result(tmp_path, "eval_memory", "--quick", "--contenders", *contenders)
    streaming, whole = (result["rows"][name] for name in contenders)
    assert streaming["eval_accuracy"] == whole["eval_accuracy"]
    assert streaming["peak_mb_4n"]["median"] < whole["peak_mb_4n"]["median"]
    assert len(result["targets"]) == 2
    page = tmp_path / "page.md"
    run("report.py", "--results", str(tmp_path), "--page", str(page))
    assert "of logits" in page.read_text("utf-8")


@pytest.mark.nightly
def test_resume_time(tmp_path: Path) -> None:
    result = run_for_result(tmp_path, "resume_time", "--quick", "--contenders", "paceline, stream", "paceline, map")
    rows = result["rows"]
    assert rows["paceline, stream"]["samples_read"]["max"] == 8  # one batch, and nothing read again
    assert rows["paceline, map"]["samples_read"]["max"] == 1000
    assert len(result["targets"]) == 2
    page = tmp_path / "page.md"
    run("report.py", "--results", str(tmp_path), "--page", str(page))
    assert "GB/s" in page.read_text("utf-8")


@pytest.mark.nightly
def test_gpt2_124m(tmp_path: Path) -> None:
    result = run_for_result(tmp_path, "gpt2_124m", "--smoke", "--contenders", "loop", "paceline")
    for row in result["rows"].values():
        assert row["tokens_per_second"]["median"] > 0
        assert 0 < row["trace"]["busy"] <= 1.01
        assert row["trace"]["by_kind"]["matrix products"] > 0
    page = tmp_path / "page.md"
    run("report.py", "--results", str(tmp_path), "--page", str(page))
    assert "| paceline |" in page.read_text("utf-8")
    run("report.py", "--results", str(tmp_path), "--page", str(page), "--check")


def test_gpt2_has_124_million_parameters() -> None:
    gpt2 = load("gpt2_124m")
    with torch.device("meta"):
        whole, tiny = gpt2.GPT2(gpt2.Shape()), gpt2.GPT2(gpt2.TINY)
    assert round(sum(parameter.numel() for parameter in whole.parameters()) / 1e6) == 124
    # a product costs two operations per weight forward and four backward; attention has as many of its own
    products = sum(parameter.numel() for parameter in tiny.parameters()) - tiny.positions.weight.numel()
    assert gpt2.flops_per_token(tiny, gpt2.TINY) == 6 * products + 12 * 2 * 64 * 32


def test_an_unknown_contender_is_named(tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / "import_time.py"), "--contenders", "keras", "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0
    assert "keras" in done.stderr
    assert "import torch" in done.stderr


@pytest.mark.slow
def test_the_page_says_what_the_results_say() -> None:
    run("report.py", "--check")


def test_a_stale_result_is_listed() -> None:
    report = load("report")
    unknown = {"benchmark": "collation", "commit": None}
    assert report.list_stale({"collation": unknown}) == ["python benchmarks/collation.py"]


def commit_all(root: Path, *files: str) -> str:
    """Append a line to each file, commit, and return the commit."""
    for name in files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        with (root / name).open("a") as file:
            file.write("line\n")
    command = ["git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a@b.invalid"]
    subprocess.run([*command, "add", "."], check=True)
    subprocess.run([*command, "commit", "--quiet", "--allow-empty", "-m", "one"], check=True)
    done = subprocess.run([*command, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_a_result_is_held_against_the_code_since_its_commit(tmp_path: Path) -> None:
    history = load("history")
    covered, other = "src/paceline/pytorch/data/collators.py", "src/paceline/pytorch/data/stream.py"
    assert history.find_commit(tmp_path) == {"commit": None, "is_clean": None}
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    result = {"benchmark": "collation", "commit": commit_all(tmp_path, covered, other), "is_clean": True}
    assert history.find_commit(tmp_path) == {"commit": result["commit"], "is_clean": True}

    def age(**changes: Any) -> tuple[int | None, bool | None]:
        found = history.find_age({**result, **changes}, tmp_path)
        return found.commits, found.is_stale

    assert age() == (0, False)
    assert age(is_clean=False) == (0, True)  # nobody knows what was measured
    assert age(commit="0" * 40) == age(commit=None) == (None, None)
    commit_all(tmp_path, other)
    assert age() == (1, False)
    (tmp_path / covered).write_text('"""Prose."""\nline  # and a comment\n')
    assert age() == (1, False)
    (tmp_path / covered).write_text("not committed\n")
    assert age() == (1, True)
    assert not history.find_commit(tmp_path)["is_clean"]
    before = commit_all(tmp_path, covered)
    assert age() == (2, True)
    assert age(benchmark="export") == (2, False)
    commit_all(tmp_path, "src/paceline/pytorch/pruning/masks.py")  # a method, which a plain step does not import
    assert age(commit=before, benchmark="step_overhead") == (1, False)
    assert age(commit=before, benchmark="import_time") == (1, True)


def test_the_page_says_how_old_a_result_is() -> None:
    history = load("history")
    result = {"commit": "a" * 40, "is_clean": True}
    known, stale, lost = ages = history.Age(1, False), history.Age(12, True), history.Age(None, None)
    assert history.describe(result, known) == "of aaaaaaa, 1 commit ago"
    assert history.describe({**result, "is_clean": False}, stale) == (
        "of aaaaaaa with changes that are not in it, 12 commits ago"
    )
    assert "how long ago cannot be told" in history.describe(result, lost)
    assert history.describe({"commit": None}, lost) == "of an unknown commit"
    limits = [history.describe_limit(True, age) for age in ages]
    assert limits == ["yes", "to be measured again (was: yes)", "yes (of today's code: not known)"]
    pages = [f"| {limit} |\n{history.describe(result, age)}: x" for limit, age in zip(limits, ages, strict=True)]
    assert len({history.without_history(page) for page in pages}) == 1


def test_what_a_benchmark_covers_exists() -> None:
    history, report = load("history"), load("report")
    assert set(history.COVERS) == set(report.SECTIONS) == set(report.TO_RUN)
    package = FOLDER.parent / "src" / "paceline"
    for name, patterns in history.COVERS.items():
        assert (FOLDER.parent / history.covered_paths(name)[0]).is_file()
        assert [pattern for pattern in patterns if not any(package.glob(pattern.removeprefix(":!")))] == []


def test_ratios_are_paired() -> None:
    measure = load("measure")
    rows = {"a": [{"t": 1.0}, {"t": 2.0}, {"t": 4.0}], "b": [{"t": 3.0}, {"t": 2.0}, {"t": 2.0}]}
    assert measure.ratios(rows, "t", "a")["b"] == {"median": 1.0, "min": 0.5, "max": 3.0}
    assert measure.ratios(rows, "t", "absent") == {}


def test_turns_are_taken() -> None:
    measure = load("measure")
    order: list[str] = []

    def note(name: str) -> dict[str, Any]:
        order.append(name)
        return {"t": len(order)}

    measure.take_turns(["a", "b"], 2, note)
    assert order == ["a", "b", "a", "b"]


@pytest.mark.nightly
def test_members(tmp_path: Path) -> None:
    result = run_for_result(tmp_path, "members", "--quick")
    assert result["rows"]["a run for each"]["of_alone"]["median"] == 1.0
    assert result["rows"]["members at once"]["seconds"]["median"] > 0


@pytest.mark.nightly
def test_ragged_text(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    contenders = ["limit", "paceline flattened", "transformers flattened", "loop, padded", "accelerate loop, padded"]
    result = run_for_result(tmp_path, "ragged_text", "--quick", "--contenders", *contenders)
    assert list(result["rows"]) == contenders
    assert result["rows"]["limit"]["over_limit"]["median"] == 1
    assert len(result["targets"]) == 4
    page = tmp_path / "page.md"
    run("report.py", "--results", str(tmp_path), "--page", str(page))
    assert "| paceline flattened |" in page.read_text("utf-8")


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_options(tmp_path: Path) -> None:
    contenders = ["paceline, plain", "paceline, gradient_checkpointing", "loop, plain"]
    result = run_for_result(tmp_path, "memory_options", "--quick", "--contenders", *contenders)
    plain, checkpointed, loop = (result["rows"][name] for name in contenders)
    assert loop["added_mb_over_plain"]["median"] > 1, "it holds the logits"
    assert plain["added_mb"]["median"] > 3 * 4e-6 * result["settings"]["parameters"]  # gradients and moments
    assert checkpointed["added_mb_over_plain"]["median"] < 1.05  # the small model leaves little to save
    assert result["targets"][0]["value"] == checkpointed["added_mb_over_plain"]["median"]
    page = tmp_path / "page.md"
    run("report.py", "--results", str(tmp_path), "--page", str(page))
    assert "| paceline, gradient_checkpointing |" in page.read_text("utf-8")


@pytest.mark.nightly
def test_compile_ragged(tmp_path: Path) -> None:
    contenders = ["paceline, eager", "paceline, torch_compile", "loop, torch_compile"]
    result = run_for_result(tmp_path, "compile_ragged", "--quick", "--contenders", *contenders)
    eager, compiled, loop = (result["rows"][name] for name in contenders)
    assert loop["graphs"]["max"] >= 1
    assert result["settings"]["lengths"] == result["settings"]["steps"]
    assert eager["graphs"]["max"] == eager["recompilations"]["max"] == 0
    assert (compiled["graphs"]["max"], compiled["recompilations"]["max"]) == (2, 1)
    assert result["targets"][0]["met"]
    page = tmp_path / "page.md"
    run("report.py", "--results", str(tmp_path), "--page", str(page))
    assert "| paceline, torch_compile |" in page.read_text("utf-8")


@pytest.mark.slow
def test_collation(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    result = run_for_result(tmp_path, "collation", "--quick")
    assert len(result["rows"]) == 9
    for row in result["rows"].values():
        assert row["ms"]["paceline"]["median"] > 0
        assert row["of_transformers"]["median"] > 0
    worst = result["targets"][0]
    assert worst["value"] == max(row["of_transformers"]["median"] for row in result["rows"].values())
    page = tmp_path / "page.md"
    run("report.py", "--results", str(tmp_path), "--page", str(page))
    assert "| masked words |" in page.read_text("utf-8")


@pytest.mark.nightly
def test_data_loading(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    result = run_for_result(tmp_path, "data_loading", "--quick")
    assert len(result["rows"]) == 6
    for row in result["rows"].values():
        assert row["samples_per_second"]["paceline"]["median"] > 0
        assert row["of_torch"]["median"] > 0
    page = tmp_path / "page.md"
    run("report.py", "--results", str(tmp_path), "--page", str(page))
    assert "| images, 2 workers |" in page.read_text("utf-8")


@pytest.mark.nightly
def test_sharded_save(tmp_path: Path) -> None:
    contenders = ["shards, behind", "dcp.save"]
    result = run_for_result(tmp_path, "sharded_save", "--quick", "--contenders", *contenders)
    behind, torchs = (result["rows"][name] for name in contenders)
    assert torchs["held_seconds"]["median"] > 0
    assert result["targets"][0]["value"] == behind["held_of_dcp_save"]["median"]
    page = tmp_path / "page.md"
    run("report.py", "--results", str(tmp_path), "--page", str(page))
    assert "of dcp.save" in page.read_text("utf-8")


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_export(tmp_path: Path) -> None:
    result = run_for_result(tmp_path, "export", "--quick")
    export, whole = (result["rows"][name] for name in ("paceline export", "whole in memory"))
    assert 0 < export["peak_mb"]["median"] < whole["peak_mb"]["median"]
    page = tmp_path / "page.md"
    run("report.py", "--results", str(tmp_path), "--page", str(page))
    assert "What making one model of shards takes" in page.read_text("utf-8")


@pytest.mark.slow
def test_checkpoint_save(tmp_path: Path) -> None:
    contenders = ["background", "synchronous"]
    result = run_for_result(tmp_path, "checkpoint_save", "--quick", "--contenders", *contenders)
    background, synchronous = (result["rows"][name] for name in contenders)
    assert synchronous["held_seconds"]["median"] > 0
    assert background["steps_while_writing"]["median"] > 0
    assert abs(background["checkpoint_bytes"]["median"] - synchronous["checkpoint_bytes"]["median"]) < 100
    assert result["targets"][0]["value"] == background["held_of_synchronous"]["median"]
    page = tmp_path / "page.md"
    run("report.py", "--results", str(tmp_path), "--page", str(page))
    assert "while it is written" in page.read_text("utf-8")


@pytest.mark.nightly
def test_run_growth(tmp_path: Path) -> None:
    result = run_for_result(tmp_path, "run_growth", "--quick", "--contenders", "paceline")
    rows = result["rows"]
    # over 40 steps the record of the run, which is written beside them, weighs more than their rows
    assert abs(rows["bytes_per_logged_step"]["paceline"]["median"]) < 10_000
    assert rows["state_mb_per_save"]["paceline"]["median"] == pytest.approx(174e-6 * 750, rel=0.1)  # of 500 and 1,000
    assert len(result["targets"]) == 5
    page = tmp_path / "page.md"
    run("report.py", "--results", str(tmp_path), "--page", str(page))
    assert "MB held" in page.read_text("utf-8")
