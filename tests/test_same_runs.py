"""`tools/same_runs.py`: equal runs compare as equal, and a difference is told where it is."""

from __future__ import annotations

from pathlib import Path

import same_runs


def test_a_run_made_twice_gives_the_same_record_and_another_does_not(tmp_path: Path) -> None:
    first, second = (same_runs.CASES["accumulated"][1](tmp_path / name) for name in ("first", "second"))
    assert same_runs.differences(first, second) == []
    assert "on_optimizer_step@0" in first["events"]
    assert "loss" in first["log"][0]
    assert not any("runtime" in key for row in first["log"] for key in row)
    other = same_runs.CASES["plain"][1](tmp_path / "other")
    assert any(line.startswith("log[0]") for line in same_runs.differences(first, other))


def test_weights_and_files_are_compared_by_what_they_hold(tmp_path: Path) -> None:
    same_runs.CASES["plain"][1](tmp_path)
    weights = same_runs.weights_of(tmp_path / "final")
    assert sorted(weights) == [
        "layers.0.weight",
        "layers.1.bias",
        "layers.1.weight",
        "layers.4.bias",
        "layers.4.weight",
    ]
    assert "checkpoint-5/trainer_state.json" in same_runs.files_of(tmp_path)
