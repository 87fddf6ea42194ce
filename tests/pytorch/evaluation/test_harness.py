"""Tasks of the lm-evaluation-harness: their results are those computed by hand, and no bit of the training changes."""

import json
from pathlib import Path
from typing import Any

import harness_job
import processes
import pytest
import torch
from harness_job import QUESTIONS, accuracy, run, write_tasks
from small_models import Classifier, classification, make_trainer, weights

from paceline import EvaluationHarness, TrainingArguments, UnsupportedOption
from paceline.pytorch.evaluation.harness import flatten


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tasks": "hellaswag"}, "list of names"),
        ({"tasks": []}, "list of names"),
        ({"tasks": ["a"], "every": 0}, "every"),
        ({"tasks": ["a"], "num_fewshot": -1}, "num_fewshot"),
        ({"tasks": ["a"], "limit": 0}, "limit"),
        ({"tasks": ["a"], "include_path": "nowhere"}, "no such folder"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        EvaluationHarness(**arguments)


def test_names_of_results() -> None:
    results = {
        "gsm8k": {
            "alias": "gsm8k",
            "exact_match,strict-match": 0.5,
            "exact_match_stderr,strict-match": "N/A",
            "sample_len": 3,
        },
        "arc": {"acc,none": 1, "acc_stderr,none": 0.1},
    }
    expected = {"gsm8k_exact_match_strict-match": 0.5, "arc_acc": 1.0, "arc_acc_stderr": 0.1}
    assert flatten(results) == expected


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("lm_eval", reason="needs lm-eval")
    folder = tmp_path_factory.mktemp("harness")
    write_tasks(folder / "tasks", ("one", "two"))
    return folder / "tasks"


@pytest.mark.slow
def test_the_results_are_those_by_hand_and_the_training_is_the_same(tmp_path: Path, tasks: Path) -> None:
    alone, _ = run(tmp_path / "alone", None)
    harness = {"tasks": ["one", "two"], "include_path": str(tasks)}
    options = {"metric_for_best_model": "one_acc", "save_strategy": "best"}
    trainer, rows = run(tmp_path / "tasks", None, eval_harness=harness, **options)
    assert torch.equal(weights(alone.model), weights(trainer.model))
    trainer.model.eval()
    assert rows[-1]["eval_one_acc"] == accuracy(trainer.model, QUESTIONS)
    assert rows[-1]["eval_two_acc"] == accuracy(trainer.model, QUESTIONS[1:])
    assert {"eval_one_acc_stderr", "eval_loss"} <= rows[0].keys()
    assert trainer.state.best_metric == max(row["eval_one_acc"] for row in rows)
    sometimes = EvaluationHarness(["one"], include_path=tasks, every=2, limit=4)
    _, rows = run(tmp_path / "every", sometimes)
    assert ["eval_one_acc" in row for row in rows] == [True, False]


@pytest.mark.slow
def test_what_the_harness_cannot_evaluate_is_refused(tmp_path: Path, tasks: Path) -> None:
    with pytest.raises(ValueError, match="no task 'none'"):
        run(tmp_path / "none", EvaluationHarness(["one", "none"], include_path=tasks))
    harness = EvaluationHarness(["one"], include_path=tasks)
    data = classification(8)
    with pytest.raises(UnsupportedOption, match="language model of transformers, and the model is a Classifier"):
        make_trainer(tmp_path / "other", Classifier(), data, eval_dataset=data, callbacks=[harness]).evaluate()


@pytest.mark.slow
def test_processes_divide_the_tasks(tasks: Path) -> None:
    folder = tasks.parent
    processes.run("harness_job.py", 2, str(folder))
    one, two = (json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1))
    for found in (one, two):
        assert {name: found["rows"][-1][f"eval_{name}_acc"] for name in ("one", "two")} == {
            name: one[name] for name in ("one", "two")
        }


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"limit": 3}, "expected names of tasks"),
        ({"tasks": ["a"], "limits": 3}, "did you mean 'limit'"),
        (["a", 1], "expected names of tasks"),
    ],
)
def test_wrong_values_of_the_option(tmp_path: Path, value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=f"eval_harness.*{words}"):
        TrainingArguments(str(tmp_path), eval_harness=value)


def test_forms_of_the_option_and_models_that_are_refused_before_the_first_step(tmp_path: Path) -> None:
    for value in (["a", "b"], "a, b", '["a", "b"]', {"tasks": ["a", "b"]}, '{"tasks": ["a", "b"]}'):
        assert TrainingArguments(str(tmp_path), eval_harness=value).eval_harness == {"tasks": ["a", "b"]}
    with pytest.raises(UnsupportedOption, match=r"eval_harness=.* with pipeline"):
        TrainingArguments(str(tmp_path), eval_harness=["a"], parallel={"pp": 2})
    trainer = make_trainer(tmp_path, Classifier(), classification(8), eval_harness=["a"])
    with pytest.raises(UnsupportedOption, match="the model is a Classifier"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_missing_harness_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "lm_eval.tasks", None)
    with pytest.raises(ImportError, match=r"paceline\[lm-eval\]"):
        run(tmp_path, EvaluationHarness(["one"]))
    assert harness_job.WORDS
