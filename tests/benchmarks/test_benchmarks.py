"""The benchmarks run, their results have what the page needs, and the page is what the results say."""

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

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
NEEDS = {"transformers.Trainer": "transformers", "lightning": "lightning", "accelerate loop": "accelerate"}
PEERS = [name for name, module in NEEDS.items() if importlib.util.find_spec(module) is not None]


def run(script: str, *arguments: str) -> str:
    command = [sys.executable, str(FOLDER / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
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


def test_step_overhead(tmp_path: Path) -> None:
    result = run_for_result(tmp_path, "step_overhead", "--quick", "--contenders", "loop", "paceline")
    assert list(result["rows"]) == ["loop", "paceline"]
    assert result["rows"]["loop"]["over_loop"]["median"] == 1
    ratio, guarded, calls = result["targets"]
    assert guarded["value"] is None
    assert ratio["value"] == result["rows"]["paceline"]["over_loop"]["median"]
    assert calls["value"] == result["rows"]["paceline"]["calls_per_step"] > 5
    assert result["rows"]["loop"]["calls_per_step"] is None


def test_import_time(tmp_path: Path) -> None:
    result = run_for_result(tmp_path, "import_time", "--quick", "--contenders", "import torch", "import paceline")
    rows = result["rows"]
    assert rows["import paceline"]["cpu_ms"]["median"] < rows["import torch"]["cpu_ms"]["median"]


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


def test_resume_time(tmp_path: Path) -> None:
    result = run_for_result(tmp_path, "resume_time", "--quick", "--contenders", "paceline, stream", "paceline, map")
    rows = result["rows"]
    assert rows["paceline, stream"]["samples_read"]["max"] == 8  # one batch, and nothing read again
    assert rows["paceline, map"]["samples_read"]["max"] == 1000
    assert len(result["targets"]) == 2
    page = tmp_path / "page.md"
    run("report.py", "--results", str(tmp_path), "--page", str(page))
    assert "GB/s" in page.read_text("utf-8")


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


def test_gpt2_has_124_million_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
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


def test_the_page_says_what_the_results_say() -> None:
    run("report.py", "--check")


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


@pytest.mark.slow
@pytest.mark.parametrize("peer", PEERS)
def test_peers_train(tmp_path: Path, peer: str) -> None:
    result = run_for_result(tmp_path, "step_overhead", "--quick", "--contenders", "loop", peer)
    assert result["rows"][peer]["calls_per_step"] > 10


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


@pytest.mark.slow
def test_sharded_save(tmp_path: Path) -> None:
    contenders = ["shards, behind", "dcp.save"]
    result = run_for_result(tmp_path, "sharded_save", "--quick", "--contenders", *contenders)
    behind, torchs = (result["rows"][name] for name in contenders)
    assert torchs["held_seconds"]["median"] > 0
    assert result["targets"][0]["value"] == behind["held_of_dcp_save"]["median"]
    page = tmp_path / "page.md"
    run("report.py", "--results", str(tmp_path), "--page", str(page))
    assert "of dcp.save" in page.read_text("utf-8")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_export(tmp_path: Path) -> None:
    result = run_for_result(tmp_path, "export", "--quick")
    export, whole = (result["rows"][name] for name in ("paceline export", "whole in memory"))
    assert 0 < export["peak_mb"]["median"] < whole["peak_mb"]["median"]
    page = tmp_path / "page.md"
    run("report.py", "--results", str(tmp_path), "--page", str(page))
    assert "What making one model of shards takes" in page.read_text("utf-8")


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


@pytest.mark.slow
def test_shared_overhead(tmp_path: Path) -> None:
    result = run_for_result(tmp_path, "shared_overhead", "--quick")
    assert list(result["rows"]) == ["ddp", "fsdp", *(["deepspeed"] if importlib.util.find_spec("deepspeed") else [])]
    for row, limit in zip(result["rows"].values(), result["targets"], strict=True):
        assert row["loop_cpu_ms"]["median"] > 0
        assert limit["value"] == row["over_loop"]["median"]
    page = tmp_path / "page.md"
    run("report.py", "--results", str(tmp_path), "--page", str(page))
    assert "| fsdp |" in page.read_text("utf-8")


def test_tf_step(tmp_path: Path) -> None:
    pytest.importorskip("tensorflow")
    result = run_for_result(tmp_path, "tf_step", "--quick")
    rows = result["rows"]
    assert list(rows) == ["loop", "paceline", "fit"]
    assert rows["loop"]["wall_ms_over_loop"]["median"] == rows["fit"]["cpu_ms_over_fit"]["median"] == 1
    values = [rows["paceline"][f"{key}_over_{base}"] for key in ("wall_ms", "cpu_ms") for base in ("loop", "fit")]
    assert [row["value"] for row in result["targets"]] == [value["median"] for value in values]
    page = tmp_path / "page.md"
    run("report.py", "--results", str(tmp_path), "--page", str(page))
    assert "2.7 M parameters, batches of 128" in page.read_text("utf-8")
