"""Jobs of `paceline train`: a person's module and a configuration in one folder, and what a run of it has written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.cli.main import main


def write_job(folder: Path, module: str, config: str) -> Path:
    """Writes a module and the configuration that names it as {module}; returns the path of the configuration."""
    name = f"train_{folder.name.replace('-', '_')}"
    (folder / f"{name}.py").write_text(module, encoding="utf-8")
    path = folder / "job.yaml"
    path.write_text(config.format(module=name, folder=folder), encoding="utf-8")
    return path


def module_of(config: Path) -> str:
    """Returns the name of the module beside a configuration."""
    return next(config.parent.glob("train_*.py")).stem


def losses(run: Path) -> list[tuple[int, float]]:
    """Returns the logged losses with their steps."""
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    return [(row["step"], row["loss"]) for row in rows if "loss" in row]


def results(run: Path) -> dict[str, float]:
    """Returns the metrics of all stages."""
    found: dict[str, float] = json.loads((run / "all_results.json").read_text(encoding="utf-8"))
    return found


def check_finished(config: Path, steps: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Checks that a finished run is found so, and that an option that it was not trained with is named."""
    assert main(["train", str(config), "--learning_rate", "0.1"]) == 0
    output = capsys.readouterr().out
    assert f"This run is finished: {steps} steps" in output
    assert "Not trained with learning_rate = 0.1: it was 0.03." in output


def check_refused(config: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Checks that a usage error is reported in a sentence; {module} stands for the name of the module."""
    module = module_of(config)
    assert main(["train", str(config), *(word.format(module=module) for word in words)]) == 2
    assert message.format(module=module) in capsys.readouterr().err
