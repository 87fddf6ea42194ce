"""`paceline compare`: seeded differences between two runs, each told with its first step and its cause."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import Classifier, classification, make_trainer

from paceline import TrainerCallback
from paceline.cli.compare import Comparison, compare
from paceline.cli.main import main
from paceline.core.journal import JOURNAL_FILE, append_rows, read_rows
from paceline.report.differences import open_run

Data = list[dict[str, torch.Tensor]]
OPTIONS = {"max_steps": 8, "learning_rate": 1e-2, "logging_steps": 3, "optim": "adamw_torch"}
CODE = "def scale(): return 1\n"


class Rounded(Classifier):
    """A model whose loss is rounded in another way with every other number of threads."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        loss, logits = super().forward(x, labels)
        return loss * (1 + 1e-6 * (torch.get_num_threads() - 1)), logits


class SetRate(TrainerCallback):
    """Doubles the learning rate after step 4."""

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if state.global_step == 4:
            optimizer.param_groups[0]["lr"] *= 2


class DrawNumbers(TrainerCallback):
    """Draws random numbers after step 3, so that later dropout masks differ."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            torch.rand(1)


class EditGradients(TrainerCallback):
    """Doubles the gradients of step 6 before they are clipped."""

    def on_substep_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 5:
            for parameter in model.parameters():
                parameter.grad *= 2


@dataclass
class Case:
    """A pair of runs: how the second one is made, and what is to be told.

    Attributes:
        step: the first step that differs; None: the step that the logged losses of both runs give.
        kind: the kind of the first cause.
        text: a text in the first cause.
        options: changed options of the second run.
        both: options of both runs.
        data: makes the data of the second run of that of the first.
        num_rows: rows of the data.
        model: makes the model of both runs.
        other_model: makes the model of the second run.
        prepare: called before the second run, with the repository.
        edit: called with the folder of the second run, which is a copy of the first one.
    """

    step: int | None
    kind: str
    text: str
    options: dict[str, Any] = field(default_factory=dict)
    both: dict[str, Any] = field(default_factory=dict)
    data: Callable[[Data], Data] = list
    num_rows: int = 40
    model: Callable[[], torch.nn.Module] = Classifier
    other_model: Callable[[], torch.nn.Module] | None = None
    prepare: Callable[[Path], Any] | None = None
    edit: Callable[[Path], None] | None = None


def change_row(index: int) -> Callable[[Data], Data]:
    return lambda data: [{**row, "x": row["x"] + 1} if place == index else row for place, row in enumerate(data)]


def other_package(folder: Path) -> None:
    """Another torch, whose results differ from step 5 on in the last bits."""
    record = json.loads((folder / "run.json").read_text())
    record["versions"]["torch"] = "2.0.0"
    (folder / "run.json").write_text(json.dumps(record))
    rows = read_rows(folder / JOURNAL_FILE)
    (folder / JOURNAL_FILE).unlink()
    append_rows(folder / JOURNAL_FILE, [row._replace(loss=row.loss * (1 + 1e-7 * (row.step > 4))) for row in rows])


def commit(repository: Path, text: str) -> None:
    (repository / "code.py").write_text(text)
    names = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    for words in (["add", "."], [*names, "commit", "-qm", "a"]):
        subprocess.run(["git", *words], cwd=repository, check=True, capture_output=True)


class Exact(Classifier):
    """A model that takes float32 and computes in its own precision."""

    def begin(self, x: torch.Tensor) -> torch.Tensor:
        return super().begin(x.to(self.first.weight.dtype))


class Wide(Classifier):
    def __init__(self) -> None:
        super().__init__(classes=5)


CASES = {
    "learning rate": Case(1, "argument", "learning_rate: 0.01 -> 0.02", {"learning_rate": 2e-2}),
    "batch size": Case(1, "argument", "per_device_train_batch_size: 4 -> 5", {"per_device_train_batch_size": 5}),
    "seed": Case(1, "argument", "seed: 42 -> 7", {"seed": 7}),
    "data seed": Case(1, "argument", "data_seed: absent -> 7", {"data_seed": 7}),
    "accumulation": Case(1, "argument", "gradient_accumulation_steps", {"gradient_accumulation_steps": 2}),
    "weight decay": Case(2, "argument", "weight_decay: 0.0 -> 0.5", {"weight_decay": 0.5}),
    "clipping": Case(2, "argument", "max_grad_norm", {"max_grad_norm": 1e-3}, both={"optim": "sgd"}),
    "schedule": Case(2, "argument", "lr_scheduler_type: linear -> cosine", {"lr_scheduler_type": "cosine"}),
    "warm-up": Case(1, "argument", "warmup_steps: 0 -> 2", {"warmup_steps": 2}),
    "number of steps": Case(2, "argument", "max_steps: 8 -> 6", {"max_steps": 6}),
    "precision": Case(1, "argument", "bf16: False -> True", {"bf16": True}),
    "optimizer": Case(2, "argument", "optim: adamw_torch -> sgd", {"optim": "sgd"}),
    "rows in another order": Case(None, "data order", "40 of 40 sampled rows", data=lambda data: data[::-1]),
    "two rows exchanged": Case(
        None, "data order", "2 of 40", data=lambda data: [data[9], *data[1:9], data[0], *data[10:]]
    ),
    "a row": Case(None, "data content", "1 of 40 sampled rows: 17", data=change_row(17), both={"max_steps": 10}),
    "a row that was not sampled": Case(
        None, "data content", "the samples of this step", data=change_row(102), num_rows=200, both={"max_steps": 50}
    ),
    "one more row": Case(1, "data content", "length: 40 -> 41", data=lambda data: [*data, data[0]]),
    "uncommitted code": Case(
        None,
        "code",
        "uncommitted changes: none -> uncommitted.diff",
        other_model=lambda: Classifier(seed=5),
        prepare=lambda repository: (repository / "code.py").write_text("def scale(): return 2\n"),
    ),
    "a commit": Case(
        None,
        "code",
        "commit: ",
        other_model=lambda: Classifier(seed=6),
        prepare=lambda repository: commit(repository, "def scale(): return 3\n"),
    ),
    "an untracked file": Case(
        None,
        "code",
        "untracked model.py: absent -> ",
        other_model=lambda: Classifier(seed=7),
        prepare=lambda repository: (repository / "model.py").write_text("seed = 7\n"),
    ),
    "weights of float64": Case(1, "code", "parameter_dtypes", model=Exact, other_model=lambda: Exact().double()),
    "a wider model": Case(1, "code", "model: Classifier -> Wide", other_model=Wide),
    "initial weights": Case(1, "code", "the first common step differs already", other_model=lambda: Classifier(seed=3)),
    "rate set by a callback": Case(
        5, "code", "the learning rate was set by code", {"callbacks": [SetRate()]}, {"lr_scheduler_type": "constant"}
    ),
    "numbers drawn by a callback": Case(
        4,
        "code",
        "all rows of the data are equal",
        {"callbacks": [DrawNumbers()]},
        model=lambda: Classifier(dropout=0.5),
    ),
    "gradients edited by a callback": Case(
        6, "code", "gradients", {"callbacks": [EditGradients()]}, {"gradient_accumulation_steps": 2}
    ),
    "a package": Case(5, "numerics", "torch: 2.", edit=other_package),
    "threads": Case(1, "numerics", "threads: 1 -> 2", model=Rounded, prepare=lambda _: torch.set_num_threads(2)),
}


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    commit(folder, CODE)
    monkeypatch.chdir(folder)
    return folder


def first_logged(first: list[dict[str, float]], other: list[dict[str, float]]) -> int:
    """The first step whose logged loss differs."""
    pairs = zip(first, other, strict=True)
    return next(int(a["step"]) for a, b in pairs if a.get("loss") != b.get("loss"))


@pytest.mark.parametrize("name", CASES)
def test_a_seeded_difference_is_told_with_step_and_cause(name: str, repository: Path, tmp_path: Path) -> None:
    case, data = CASES[name], classification(CASES[name].num_rows)
    options = {**OPTIONS, **case.both, **({"logging_steps": 1} if case.step is None else {})}
    first = make_trainer(tmp_path / "a", case.model(), data, **options)
    first.train()
    if case.edit is not None:
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        case.edit(tmp_path / "b")
        expected = case.step
    else:
        if case.prepare is not None:
            case.prepare(repository)
        model = (case.other_model or case.model)()
        other = make_trainer(tmp_path / "b", model, case.data(data), **{**options, **case.options})
        other.train()
        expected = case.step or first_logged(first.state.log_history, other.state.log_history)
    found = compare(open_run(tmp_path / "a"), open_run(tmp_path / "b"))
    assert found.steps.divergence is not None
    assert found.steps.divergence.step == expected
    assert found.causes[0].kind == case.kind
    assert case.text in found.causes[0].text
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 1


def pair(tmp_path: Path, **options: Any) -> Comparison:
    for name in ("a", "b"):
        trainer = make_trainer(tmp_path / name, Classifier(), classification(), **{**OPTIONS, **options})
        trainer.train()
    return compare(open_run(tmp_path / "a"), open_run(tmp_path / "b"))


def test_a_run_made_twice_is_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = pair(tmp_path)
    assert found.is_same
    assert found.steps.num_common == 8
    capsys.readouterr()
    folders = [str(tmp_path / name) for name in ("a", "b", "a")]
    assert main(["compare", *folders]) == 0
    assert capsys.readouterr().out.count("All 8 common optimizer steps are equal bit for bit.\nsame") == 2
    assert main(["compare", "--json", *folders]) == 0
    told = json.loads(capsys.readouterr().out)["comparisons"]
    assert [each["same"] for each in told] == [True, True]
    assert told[0]["first_difference"] is None


def test_json_names_step_values_and_causes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_trainer(tmp_path / "a", Classifier(), classification(), **OPTIONS).train()
    make_trainer(tmp_path / "b", Classifier(), classification(), **{**OPTIONS, "weight_decay": 0.5}).train()
    capsys.readouterr()
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)["comparisons"][0]
    assert told["first_difference"]["step"] == 2
    assert told["first_difference"]["samples"] == {"epoch": 0, "first": 4, "count": 4}
    assert set(told["first_difference"]["values"]) == {"loss", "grad_norm"}
    assert told["causes"] == [{"kind": "argument", "text": "weight_decay: 0.0 -> 0.5", "recorded": True}]


def test_an_option_without_effect_is_a_difference_but_no_cause(tmp_path: Path) -> None:
    for name, steps in (("a", 2), ("b", 4)):
        make_trainer(tmp_path / name, Classifier(), classification(), **{**OPTIONS, "logging_steps": steps}).train()
    found = compare(open_run(tmp_path / "a"), open_run(tmp_path / "b"))
    assert not found.is_same
    assert found.steps.are_same
    assert [item.kind for item in found.differences if item.section == "arguments"] == [None]


def test_a_run_that_stopped_early_is_not_the_same(tmp_path: Path) -> None:
    found = pair(tmp_path)
    rows = read_rows(tmp_path / "b" / JOURNAL_FILE)
    (tmp_path / "b" / JOURNAL_FILE).unlink()
    append_rows(tmp_path / "b" / JOURNAL_FILE, rows[:5])
    found = compare(open_run(tmp_path / "a"), open_run(tmp_path / "b"))
    assert found.steps.divergence is None
    assert found.steps.last == (8, 5)
    assert not found.is_same


def test_losses_that_are_not_finite_are_equal_to_themselves(tmp_path: Path) -> None:
    pair(tmp_path)
    for name in ("a", "b"):
        path = tmp_path / name / JOURNAL_FILE
        rows = [row._replace(loss=float("nan")) for row in read_rows(path)]
        path.unlink()
        append_rows(path, rows)
    assert compare(open_run(tmp_path / "a"), open_run(tmp_path / "b")).is_same


def test_bad_input_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair(tmp_path)
    (tmp_path / "empty").mkdir()
    record, journal = tmp_path / "b" / "run.json", tmp_path / "b" / JOURNAL_FILE
    good, rows = record.read_text(), journal.read_bytes()

    def refused(*words: str) -> str:
        capsys.readouterr()
        assert main(["compare", *words]) == 2
        return capsys.readouterr().err

    both = (str(tmp_path / "a"), str(tmp_path / "b"))
    assert "two or more folders" in refused(both[0])
    assert "not --fast" in refused(*both, "--fast")
    assert "--page takes the file to write, not the option --json" in refused(*both, "--page", "--json")
    assert "is not a folder" in refused(both[0], str(tmp_path / "none"))
    assert "holds no run" in refused(both[0], str(tmp_path / "empty"))
    for content in (good[: len(good) // 2], "", "\x00"):
        record.write_text(content)
        assert "run.json is damaged" in refused(*both)
    record.write_text("[1]")
    assert "not the record of a run" in refused(*both)
    record.write_text(good.replace('"format": 1', '"format": 9'))
    assert "has format 9" in refused(*both)
    record.write_text(good)
    journal.write_bytes(b"\xff" * 120)
    assert "journal.bin is damaged" in refused(*both)
    journal.write_bytes(rows[:-7])
    capsys.readouterr()
    assert main(["compare", *both]) == 1
    out = capsys.readouterr().out
    assert "journal.bin ends inside a row" in out
    assert "The runs end at different steps: 8 and 7." in out
    journal.unlink()
    journal.mkdir()
    assert "journal.bin is not a regular file" in refused(*both)
    journal.rmdir()
    journal.write_bytes(rows)
    record.rename(tmp_path / "elsewhere")
    record.symlink_to(record)
    assert "run.json is not a regular file" in refused(*both)


def test_runs_without_journals_are_compared_by_their_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, decay in (("a", 0.0), ("b", 0.5)):
        options = {**OPTIONS, "weight_decay": decay, "report_to": "jsonl", "logging_steps": 2}
        make_trainer(tmp_path / name, Classifier(), classification(), **options).train()
        (tmp_path / name / JOURNAL_FILE).unlink()
    found = compare(open_run(tmp_path / "a"), open_run(tmp_path / "b"))
    assert found.steps.are_logged
    assert found.steps.divergence is not None
    assert found.steps.divergence.step == 2
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert "A journal is missing, so only the losses, norms and learning rates" in capsys.readouterr().out
    # without a step that both have, nothing says that they are the same
    (tmp_path / "b" / "run.json").write_text((tmp_path / "a" / "run.json").read_text())
    for name in ("a", "b"):
        (tmp_path / name / "log.jsonl").unlink()
        assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
        assert capsys.readouterr().out.endswith("\nunknown\n")
    (tmp_path / "a" / "report.html").unlink()
    (tmp_path / "a" / "report.html").mkdir()
    assert main(["report", str(tmp_path / "a")]) == 2
    assert "report.html" in capsys.readouterr().err


def test_records_of_other_hands_are_not_trusted(tmp_path: Path) -> None:
    """Values of any type, where mappings are expected, end nothing."""
    pair(tmp_path)
    record = json.loads((tmp_path / "b" / "run.json").read_text())
    for value in (None, 3, "x", [1]):
        for name in ("plan", "git", "data", "versions", "hardware", "extra", "packages", "run", "history"):
            (tmp_path / "b" / "run.json").write_text(json.dumps({**record, name: value}))
            compare(open_run(tmp_path / "a"), open_run(tmp_path / "b"))
        (tmp_path / "b" / "run.json").write_text(
            json.dumps({**record, "data": {"train": {"rows": value, "length": value}}, "git": {"diff": value}})
        )
        compare(open_run(tmp_path / "a"), open_run(tmp_path / "b"))
