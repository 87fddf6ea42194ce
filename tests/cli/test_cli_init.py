"""`paceline init`: files that `paceline train` accepts."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from paceline.cli.config import read_config
from paceline.cli.init import TASKS
from paceline.cli.job_metrics import read_metrics
from paceline.cli.main import main
from paceline.cli.schema import make_schema
from paceline.cli.train import make_arguments


@pytest.mark.parametrize("task", TASKS)
def test_each_file_is_read_by_train(tmp_path: Path, task: str) -> None:
    path = tmp_path / "job.yaml"
    assert main(["init", task.replace("_", "-"), str(path)]) == 0
    config = read_config(path)
    args = make_arguments(config)
    assert args.output_dir == "runs/job"
    assert args.load_best_model_at_end
    assert args.learning_rate > 0
    if config.get("metrics") is not None:
        assert args.metric_for_best_model in {*read_metrics(config.get("metrics")).names}
    if sys.modules.get("jsonschema") is not None:
        sys.modules["jsonschema"].validate({**config.sections, "arguments": config.arguments}, make_schema())


def test_the_job_of_a_module_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert main(["init", "module", "init-job.yaml"]) == 0
    assert main(["train", "init-job.yaml", "--use_cpu", "--disable_tqdm"]) == 0
    folder = tmp_path / "runs" / "init-job"
    results = json.loads((folder / "all_results.json").read_text())
    assert results["eval_accuracy"] > 0.8
    assert (folder / "log.jsonl").is_file()


def test_a_name_that_the_output_cannot_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    buffer = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(buffer, encoding="ascii"))
    assert main(["init", "language_model", "modèle.yaml"]) == 0
    assert buffer.getvalue().startswith(b"wrote mod?le.yaml\n")
    assert (tmp_path / "modèle.yaml").is_file()


@pytest.mark.parametrize("task", [task for task in TASKS if task != "module"])
def test_what_has_to_be_replaced_is_named_before_a_model_is_looked_for(
    tmp_path: Path, task: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sklearn")
    path = tmp_path / "job.yaml"
    assert main(["init", task, str(path)]) == 0
    assert main(["plan", str(path)]) == 2
    assert "model: replace MODEL by the folder of a model" in capsys.readouterr().err
    (tmp_path / "MODEL").mkdir()
    assert main(["plan", str(path)]) == 2
    assert "data.train: there is no " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("task", "installed", "extras"),
    [
        ("module", ("torch", "sklearn"), None),
        ("module", ("torch", "torchmetrics"), None),
        ("module", ("torch",), "metrics"),
        ("module", (), "torch,metrics"),
        ("text_classification", ("torch", "transformers"), "datasets,metrics"),
        ("language_model", ("torch",), "transformers,datasets"),
    ],
)
def test_packages_that_are_missing_are_named(
    tmp_path: Path,
    task: str,
    installed: tuple[str, ...],
    extras: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("paceline.cli.init.is_installed", lambda name: name in installed)
    assert main(["init", task, str(tmp_path / "job.yaml")]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("first: ")]
    assert lines == ([] if extras is None else [f'first: pip install "paceline[{extras}]"'])


def test_comments_are_aligned(tmp_path: Path) -> None:
    for name in ("a.yaml", "a_long_name.yaml"):
        assert main(["init", "language_model", str(tmp_path / name)]) == 0
        _, options = (tmp_path / name).read_text().split("arguments:")
        lines = [line for line in options.splitlines() if "  # " in line.lstrip(" #")]
        assert len({line.rindex("  # ") for line in lines if not line.startswith("  # ")}) == 1


def test_no_file_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("mine")
    assert main(["init", "module", str(path)]) == 2
    assert "exists: it is not overwritten" in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["job.yaml"]


def test_nothing_is_written_if_one_file_exists(tmp_path: Path) -> None:
    (tmp_path / "job_job.py").write_text("mine")
    assert main(["init", "module", str(tmp_path / "job.yaml")]) == 2
    assert [each.name for each in tmp_path.iterdir()] == ["job_job.py"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "init takes a task (module, text_classification"),
        (["--json", "module"], "init has no option '--json'"),
        (["module", "--force"], "init has no option '--force'"),
        (["modul"], "there is no task 'modul'; did you mean 'module'"),
        (["module", "job.txt"], "expected a name that ends with .yaml"),
        (["module", "1a.yaml"], "are named after the file"),
        (["language_model", "my job.yaml"], "are named after the file"),
        (["module", "no/such/folder/job.yaml"], "cannot be written"),
    ],
)
def test_a_wrong_line_is_said(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", *words]) == 2
    assert message in capsys.readouterr().err
