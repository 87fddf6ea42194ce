"""Metrics that a configuration names: of the task that predictions and labels are of, by either package."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paceline import TrainingArguments
from paceline.cli import metric_backends
from paceline.cli.config import JobConfig
from paceline.cli.errors import UsageError
from paceline.cli.job_metrics import METRICS, MULTI, REGRESSION, SINGLE, TOKENS, MetricError, make_metrics, read_metrics
from paceline.cli.job_trainer import check_best_metric
from paceline.cli.main import main
from paceline.core.outputs import EvalPrediction

sklearn = pytest.importorskip("sklearn.metrics")
stats = pytest.importorskip("scipy.stats")

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(50, 3))
CLASSES = RNG.integers(0, 3, 50)


def score(names: Any, predictions: Any, labels: Any, model: Any = None, shifts: bool = False) -> dict[str, float]:
    section = read_metrics(names)
    return make_metrics(section, model, shifts)(EvalPrediction(predictions, labels))


def test_one_of_several_classes() -> None:
    names = ["accuracy", "balanced_accuracy", "f1", "f1_micro", "f1_weighted", "precision", "recall", "mcc"]
    answers = LOGITS.argmax(-1)
    assert score(names, LOGITS, CLASSES) == {
        "accuracy": pytest.approx(np.mean(answers == CLASSES)),
        "balanced_accuracy": sklearn.balanced_accuracy_score(CLASSES, answers),
        "f1": sklearn.f1_score(CLASSES, answers, average="macro"),
        "f1_micro": pytest.approx(np.mean(answers == CLASSES)),
        "f1_weighted": sklearn.f1_score(CLASSES, answers, average="weighted"),
        "precision": sklearn.precision_score(CLASSES, answers, average="macro"),
        "recall": sklearn.recall_score(CLASSES, answers, average="macro"),
        "mcc": sklearn.matthews_corrcoef(CLASSES, answers),
    }
    assert score("accuracy", (LOGITS, LOGITS * 0), CLASSES)["accuracy"] == np.mean(answers == CLASSES)
    assert score("accuracy", answers, CLASSES)["accuracy"] == np.mean(answers == CLASSES)


def test_two_classes_are_scored_by_the_second() -> None:
    labels, logits = CLASSES % 2, LOGITS[:, :2]
    expected = sklearn.f1_score(labels, logits.argmax(-1))
    assert score("f1", logits, labels)["f1"] == pytest.approx(expected)
    one = logits[:, 1:] - logits[:, :1]  # one logit, of shape (samples, 1), and labels as floats
    assert score("f1", one, labels.astype(np.float32))["f1"] == pytest.approx(expected)
    assert score("f1", one[:, 0], labels)["f1"] == pytest.approx(expected)


def test_probabilities_have_another_threshold_than_logits(caplog: pytest.LogCaptureFixture) -> None:
    labels, logits = CLASSES % 2, LOGITS[:, 0]
    expected = score("f1", logits, labels)
    assert not caplog.records
    odds = 1 / (1 + np.exp(-logits))
    assert score("f1", odds, labels) == expected
    assert "taken as probabilities, with the threshold 0.5" in caplog.text
    caplog.clear()
    assert score({"names": ["f1"], "threshold": 0.5}, odds, labels) == expected
    assert score({"names": ["recall"], "threshold": 0}, odds, labels) == {"recall": 1.0}
    assert not caplog.records


def test_several_labels() -> None:
    labels = RNG.integers(0, 2, (50, 3)).astype(np.float32)
    answers = (LOGITS > 0).astype(int)
    found = score(["accuracy", "f1", "f1_micro"], LOGITS, labels)
    assert found["accuracy"] == pytest.approx((answers == labels).all(-1).mean())
    assert found["f1"] == pytest.approx(sklearn.f1_score(labels, answers, average="macro"))
    assert found["f1_micro"] == pytest.approx(sklearn.f1_score(labels, answers, average="micro"))


def test_one_hot_labels_are_not_guessed() -> None:
    labels = np.eye(3)[CLASSES]
    with pytest.raises(MetricError, match=r"exactly one 1.*task: single_label.* or task: multi_label"):
        score("accuracy", LOGITS, labels)
    assert score({"names": "accuracy", "task": SINGLE}, LOGITS, labels) == score("accuracy", LOGITS, CLASSES)
    expected = ((LOGITS > 0) == labels).all(-1).mean()
    assert score({"names": "accuracy", "task": MULTI}, LOGITS, labels)["accuracy"] == pytest.approx(expected)


def test_tokens_without_the_ignored_ones() -> None:
    logits, labels = RNG.normal(size=(8, 5, 4)), RNG.integers(0, 4, (8, 5))
    labels[:, 3:] = -100
    logits[:, 4:] = -100  # padding of ragged rows
    kept = labels != -100
    found = score(["accuracy", "f1"], logits, labels)
    assert found["accuracy"] == pytest.approx(np.mean(logits.argmax(-1)[kept] == labels[kept]))
    assert found["f1"] == pytest.approx(sklearn.f1_score(labels[kept], logits.argmax(-1)[kept], average="macro"))
    shifted = score("accuracy", logits, labels, shifts=True)["accuracy"]
    kept = labels[:, 1:] != -100
    assert shifted == pytest.approx(np.mean(logits.argmax(-1)[:, :-1][kept] == labels[:, 1:][kept]))
    with pytest.raises(MetricError, match="no labels other than -100"):
        score("accuracy", logits, np.full((8, 5), -100))


def test_a_model_that_diverged_has_no_metric() -> None:
    """NaN is no answer, unless its label is ignored; an infinity is one."""
    nan, inf = float("nan"), float("inf")
    for predictions, labels in (
        ([[1.0, 0.0], [nan, nan]], [0, 0]),
        ([[[1.0, 0.0], [0.0, nan]]], [[0, 1]]),
        ([[1.0, nan], [0.0, 1.0]], [[1, 1], [0, 0]]),
        ([1.0, nan], [1, 0]),
    ):
        found = score(["accuracy", "f1"], np.array(predictions), np.array(labels))
        assert set(found) == {"accuracy", "f1"}
        assert np.isnan(list(found.values())).all()
    found = score(["accuracy"], np.array([[[1.0, 0.0], [nan, nan], [-inf, 0.0]]]), np.array([[0, -100, 1]]))
    assert found == {"accuracy": 1.0}


def test_regression() -> None:
    labels, answers = RNG.normal(size=40), RNG.normal(size=(40, 1))
    found = score(["mae", "mse", "rmse", "r2", "pearson", "spearman"], answers, labels)
    errors = answers[:, 0] - labels
    assert found["mae"] == pytest.approx(np.abs(errors).mean())
    assert found["rmse"] == pytest.approx(np.sqrt((errors**2).mean()))
    assert found["mse"] == pytest.approx((errors**2).mean())
    assert found["r2"] == pytest.approx(1 - (errors**2).sum() / ((labels - labels.mean()) ** 2).sum())
    assert found["pearson"] == pytest.approx(np.corrcoef(labels, answers[:, 0])[0, 1])
    assert found["spearman"] == pytest.approx(stats.spearmanr(labels, answers[:, 0]).statistic)
    assert score("mse", answers, np.arange(40) % 5)["mse"] > 0  # ratings as integers
    assert np.isnan(list(score(["mse", "r2", "pearson"], np.full(40, np.nan), labels).values())).all()
    assert score("mse", answers, np.arange(40) % 2)["mse"] > 0


@pytest.mark.parametrize(
    ("names", "predictions", "labels", "message"),
    [
        ("f1", LOGITS[:, 0], LOGITS[:, 1], "f1 is not defined for regression; these are: mae"),
        ("mse", LOGITS, CLASSES, "mse is not defined for single_label; these are: accuracy"),
        ("mcc", LOGITS, RNG.integers(0, 2, (50, 3)), "mcc is not defined for multi_label"),
        ("accuracy", LOGITS, CLASSES[:49, None], "of no known task"),
        ("accuracy", LOGITS, {"a": CLASSES}, "one array of predictions and one of labels"),
        ("accuracy", LOGITS, CLASSES - 5, "is neither a class nor -100"),
        ({"names": "mse", "task": REGRESSION}, LOGITS, CLASSES, "regression needs predictions of the shape"),
    ],
)
def test_what_does_not_fit_is_refused(names: Any, predictions: Any, labels: Any, message: str) -> None:
    with pytest.raises(MetricError, match=message):
        score(names, predictions, labels)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (["acuracy"], "there is no 'acuracy'; did you mean 'accuracy'"),
        (["bleu"], "there is no 'bleu'; known are: accuracy, .*compute_metrics: package.module:name"),
        ([], "expected a list of names"),
        ({"names": ["f1"], "taks": 1}, "unknown key 'taks'; did you mean 'task'"),
        ({"names": ["f1"], "task": "ner"}, "metrics.task: 'ner' is none of single_label"),
        ({"names": ["f1"], "task": "regression"}, "f1 is not defined for regression"),
        ({"names": ["f1"], "threshold": "high"}, "metrics.threshold: 'high' is not a number"),
    ],
)
def test_a_wrong_section_is_said(section: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_metrics(section)


@pytest.mark.parametrize(
    ("name", "config", "metric"),
    [
        ("BertForSequenceClassification", {"problem_type": "regression"}, "accuracy"),
        ("BertForSequenceClassification", {"problem_type": None, "num_labels": 1}, "f1"),
        ("BertForSequenceClassification", {"problem_type": "multi_label_classification"}, "mcc"),
        ("BertForTokenClassification", {"num_labels": 3}, "mae"),
    ],
)
def test_a_model_that_names_its_task_is_refused_before_training(name: str, config: dict[str, Any], metric: str) -> None:
    model = type(name, (), {"config": SimpleNamespace(**config)})()
    with pytest.raises(UsageError, match=f"{metric} is not defined for"):
        make_metrics(read_metrics(metric), model)


@pytest.mark.slow  # torchmetrics takes seconds to import
@pytest.mark.parametrize("task", [SINGLE, MULTI, TOKENS, REGRESSION])
def test_the_packages_agree(task: str) -> None:
    pytest.importorskip("torchmetrics")
    arrays: dict[str, tuple[np.ndarray, np.ndarray, int]] = {
        SINGLE: (CLASSES, LOGITS.argmax(-1), 3),
        TOKENS: (CLASSES % 2, LOGITS[:, :2].argmax(-1), 2),
        MULTI: (RNG.integers(0, 2, (50, 3)), (LOGITS > 0).astype(np.int64), 3),
        REGRESSION: (RNG.normal(size=(50, 2)), LOGITS[:, :2], 1),
    }
    for name in (name for name, tasks in METRICS.items() if task in tasks):
        one = metric_backends.by_sklearn(name, *arrays[task])
        assert metric_backends.by_torchmetrics(name, *arrays[task]) == pytest.approx(one, abs=1e-5), name


WITHOUT = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
from paceline.cli.metric_backends import find_backend
try:
    print(find_backend().__name__)
except ImportError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        pytest.param(["sklearn"], "by_torchmetrics", marks=pytest.mark.slow),
        (["sklearn", "torchmetrics"], 'pip install "paceline[metrics]"'),
    ],
)
def test_another_package_or_the_extra(missing: list[str], said: str) -> None:
    if len(missing) == 1:
        pytest.importorskip("torchmetrics")
    code = WITHOUT.format(missing=missing)
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert said in result.stdout


MODULE = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
    def forward(self, x, labels=None):
        logits = self.linear(x)
        if labels is None:
            return {"logits": logits}
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}
def data():
    rows = [{"x": torch.tensor([i / 10, 1.0]), "labels": i % 2} for i in range(20)]
    return rows, rows[:7]
"""
JOB = """
model: {module}:Net
data: {module}:data
metrics: [accuracy, f1]
output_dir: {folder}
max_steps: 2
eval_strategy: steps
eval_steps: 1
metric_for_best_model: f1
use_cpu: true
"""


def test_a_job_with_named_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = f"metrics_job_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{module}.py").write_text(MODULE)
    job, out = tmp_path / "job.yaml", tmp_path / "out"
    job.write_text(JOB.format(module=module, folder=out))
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert main(["train", str(job), "--disable_tqdm", "--metrics", "[mse]"]) == 2
    assert main(["train", str(job), "--disable_tqdm"]) == 0
    results = json.loads((out / "all_results.json").read_text())
    assert 0 <= results["eval_accuracy"] <= 1
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "eval_f1" in row][:2] == [1, 2]


@pytest.mark.parametrize(
    ("best", "section", "said"),
    [
        ("accuracy", ["f1"], "'accuracy' is no metric of the evaluation: add it to metrics: [f1, accuracy]"),
        ("eval_accuracy", None, "'eval_accuracy' is no metric of the evaluation: add it to metrics: [accuracy]"),
        ("acuracy", ["accuracy"], "'acuracy' is no metric of the evaluation; did you mean 'accuracy'?"),
        ("f1", ["f1"], None),
        ("eval_test_f1", ["f1"], None),
        ("loss", None, None),
        ("own", None, None),
    ],
)
def test_the_best_metric_is_one_of_the_evaluation(best: str, section: Any, said: str | None) -> None:
    config = JobConfig(Path("job.yaml"), {} if section is None else {"metrics": section})
    args = TrainingArguments(metric_for_best_model=best)
    if said is None:
        check_best_metric(config, args)
        return
    with pytest.raises(UsageError, match=re.escape(said)):
        check_best_metric(config, args)
    check_best_metric(config, TrainingArguments(metric_for_best_model=best, eval_harness=["arc_easy"]))
    for name in ("callbacks", "trainer", "compute_metrics"):  # these may add metrics
        check_best_metric(JobConfig(Path("job.yaml"), {**config.sections, name: "package.module:name"}), args)
