"""`hyperparameter_search` with optuna: trials, stored studies, errors, and what a search leaves of the Trainer."""

from __future__ import annotations

import dataclasses
import gc
import json
import logging
import os
import signal
import sqlite3
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import slow_but
from search_jobs import DATA, EVAL, SAVES, Listed, Sized, make_search, searched
from small_models import Classifier, make_trainer, weights

from paceline import BestRun, EarlyStoppingCallback, TrainerCallback, UnsupportedOption
from paceline.checkpoint import lock
from paceline.checkpoint.lock import FolderInUse
from paceline.search.trials import SearchError

optuna = pytest.importorskip("optuna")


def rates(trial: Any) -> dict[str, Any]:
    return {"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-1, log=True)}


def study_of(folder: Path) -> Any:
    return optuna.load_study(study_name="paceline", storage=f"sqlite:///{folder / 'study.db'}")


def is_open(path: Path) -> bool:
    """Returns True if this process holds a file open; False where the system does not say."""
    return any(os.path.realpath(link) == str(path.resolve()) for link in Path("/proc/self/fd").glob("*"))


@pytest.mark.slow
def test_best_of_several_trials(tmp_path: Path) -> None:
    trainer = make_search(tmp_path)
    best = trainer.hyperparameter_search(hp_space=rates, n_trials=3, direction="minimize")
    assert isinstance(best, BestRun)
    assert not is_open(tmp_path / "study.db")
    study = study_of(tmp_path)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 3
    assert best.objective == min(trial.value for trial in study.trials)
    assert best.hyperparameters == study.best_params
    assert best.run_id == str(study.best_trial.number)
    assert all((tmp_path / f"run-{number}" / "run.json").exists() for number in range(3))


@pytest.mark.slow
def test_the_trainer_is_as_before(tmp_path: Path) -> None:
    trainer = make_search(tmp_path)
    before = {name: value for name, value in vars(trainer).items()}
    given = trainer.args.to_dict()
    trainer.hyperparameter_search(hp_space=rates, n_trials=2)
    assert trainer.args.to_dict() == given
    for name, value in before.items():
        assert vars(trainer)[name] is value, name
    assert set(vars(trainer)) == set(before)
    assert trainer.callback_handler.model is trainer.model
    assert trainer.hp_search_backend is None
    assert trainer.train().global_step > 0


@pytest.mark.slow
@pytest.mark.parametrize("way", ["set on the same Trainer", pytest.param("another Trainer", marks=pytest.mark.slow)])
def test_the_best_trial_again_gives_the_same_metrics(tmp_path: Path, way: str) -> None:
    trainer = make_search(tmp_path / "search")

    def space(trial: Any) -> dict[str, Any]:
        return {**rates(trial), "seed": trial.suggest_int("seed", 1, 40), "label_smoothing_factor": 0.0}

    best = searched(trainer, hp_space=space, n_trials=3)
    if way == "another Trainer":
        trainer = make_search(tmp_path / "again")
    for name, value in best.hyperparameters.items():
        setattr(trainer.args, name, value)
    trainer.train()
    assert trainer.evaluate()["eval_loss"] == best.objective


@pytest.mark.slow
def test_architectures(tmp_path: Path) -> None:
    """Depth and width from the trial."""

    def model_init(trial: Any) -> Sized:
        if trial is None:
            return Sized(1, 4)
        return Sized(trial.suggest_int("depth", 1, 3), trial.suggest_categorical("width", [4, 8]))

    def space(trial: Any) -> dict[str, Any]:
        return {"depth": trial.suggest_int("depth", 1, 3), "learning_rate": 1e-2}

    seen = []

    class Watch(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            seen.append((len(model.layers), model.width, state.trial_params, state.trial_name))
            assert state.is_hyper_param_search

    trainer = make_search(tmp_path, model_init=model_init, callbacks=[Watch])
    best = searched(trainer, hp_space=space, n_trials=4)
    trials = study_of(tmp_path).trials
    told = [(trial.params["depth"], trial.params["width"], trial.params, f"run-{trial.number}") for trial in trials]
    assert seen == told
    fixed = optuna.trial.FixedTrial(best.hyperparameters)
    again = make_search(tmp_path / "again", model_init=lambda: model_init(fixed), learning_rate=1e-2)
    again.train()
    assert again.evaluate()["eval_loss"] == best.objective


@pytest.mark.slow
def test_another_class_of_model_per_trial(tmp_path: Path) -> None:
    def model_init(trial: Any) -> torch.nn.Module:
        is_own = trial is not None and trial.suggest_categorical("kind", ["mlp", "sized"]) == "sized"
        return Sized(1, 4) if is_own else Classifier()

    trainer = make_search(tmp_path, model_init=model_init)
    best = searched(
        trainer,
        hp_space=lambda trial: {},
        n_trials=2,
        sampler=optuna.samplers.GridSampler({"kind": ["mlp", "sized"]}, seed=0),
    )
    assert best.hyperparameters["kind"] in ("mlp", "sized")


@pytest.mark.slow
def test_pruned_at_an_evaluation(tmp_path: Path) -> None:
    """The median pruner ends the trial whose first evaluation is worse; callbacks see its end."""
    ends: list[int] = []

    class Watch(TrainerCallback):
        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            ends.append(state.global_step)

    trainer = make_search(tmp_path, callbacks=[Watch])
    best = searched(
        trainer,
        hp_space=lambda trial: {"learning_rate": 1e-9 if trial.number else 1e-2},
        n_trials=2,
        pruner=optuna.pruners.MedianPruner(n_startup_trials=1, n_warmup_steps=0),
    )
    assert [trial.state.name for trial in study_of(tmp_path).trials] == ["COMPLETE", "PRUNED"]
    assert ends == [6, 2]
    assert best.run_id == "0"


@pytest.mark.slow
def test_several_objectives(tmp_path: Path) -> None:
    trainer = make_search(tmp_path)
    best = trainer.hyperparameter_search(
        hp_space=rates,
        n_trials=3,
        direction=["minimize", "maximize"],
        compute_objective=lambda metrics: [metrics["eval_loss"], metrics["eval_accuracy"]],
    )
    assert isinstance(best, list)
    assert all(isinstance(one, BestRun) and len(one.objective) == 2 for one in best)


@pytest.mark.slow
def test_names_of_trials(tmp_path: Path) -> None:
    trainer = make_search(tmp_path)
    searched(trainer, hp_space=rates, n_trials=2, hp_name=lambda trial: f"lr-{trial.number}")
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"lr-0", "lr-1"}
    with pytest.raises(SearchError, match="gave 'same' to trials 0 and 1"):
        searched(make_search(tmp_path / "b"), hp_space=rates, n_trials=2, hp_name=lambda trial: "same")
    with pytest.raises(SearchError, match=r"hp_name returned '\.\./x'"):
        searched(make_search(tmp_path / "c"), hp_space=rates, n_trials=2, hp_name=lambda trial: "../x")


@pytest.mark.slow
def test_no_trial_inherits_the_counter_of_early_stopping(tmp_path: Path) -> None:
    stop = EarlyStoppingCallback(early_stopping_patience=2)
    options = {"metric_for_best_model": "loss", "load_best_model_at_end": True}
    trainer = make_search(tmp_path, callbacks=[stop], **SAVES, **options)
    searched(trainer, hp_space=lambda trial: {"learning_rate": 0.0}, n_trials=3)
    steps = [
        json.loads(sorted(folder.glob("checkpoint-*"))[-1].joinpath("trainer_state.json").read_text("utf-8"))
        for folder in sorted(tmp_path.glob("run-*"))
    ]
    assert len({state["global_step"] for state in steps}) == 1
    assert stop.early_stopping_patience_counter == 0


# ---- errors


@pytest.mark.slow
def test_a_failed_trial_is_recorded_and_the_search_goes_on(tmp_path: Path) -> None:
    def space(trial: Any) -> dict[str, Any]:
        return {"per_device_train_batch_size": -1 if trial.number == 1 else 4, **rates(trial)}

    searched(make_search(tmp_path), hp_space=space, n_trials=3)
    trials = study_of(tmp_path).trials
    assert [trial.state.name for trial in trials] == ["COMPLETE", "FAIL", "COMPLETE"]
    assert "per_device_train_batch_size" in trials[1].user_attrs["error"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("of_trainer", "options"),
    [
        ({}, {"compute_objective": lambda metrics: metrics["eval_f1"]}),
        pytest.param(
            {"metric_for_best_model": "f1", "load_best_model_at_end": True, **SAVES}, {}, marks=pytest.mark.slow
        ),
    ],
    ids=["of the objective", "of the best model"],
)
def test_a_missing_metric_ends_the_search_in_one_sentence(
    tmp_path: Path, of_trainer: dict[str, Any], options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(SearchError, match="eval_f1"):
        make_search(tmp_path, **of_trainer).hyperparameter_search(hp_space=rates, n_trials=3, **options)
    assert "Traceback" not in caplog.text
    assert len(study_of(tmp_path).trials) == 1
    assert not logging.getLogger("optuna.study._optimize").filters


@pytest.mark.slow
def test_a_failed_trial_is_logged_with_its_own_traceback(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def space(trial: Any) -> dict[str, Any]:
        if trial.number == 0:
            raise OSError("no such model")
        return rates(trial)

    make_search(tmp_path).hyperparameter_search(hp_space=space, n_trials=2)
    told = caplog.text
    assert told.count("Traceback") == 1
    assert "OSError: no such model" in told
    assert "TrialFailed:" not in told.partition("Traceback")[2]


@pytest.mark.slow
def test_all_trials_fail(tmp_path: Path) -> None:
    def model_init(trial: Any) -> Classifier:
        if trial is not None:
            raise OSError("no weights")
        return Classifier()

    with pytest.raises(RuntimeError, match=r"of 2, 2 failed and 0 were pruned. .* trial 1: OSError: no weights"):
        searched(make_search(tmp_path, model_init=model_init), hp_space=rates, n_trials=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hp_space": {"learning_rate": 1}}, "hp_space=.* cannot be called"),
        ({"hp_space": lambda trial: [1]}, "hp_space returned list; it must return a dict"),
        ({"hp_space": lambda trial: {"output_dir": "x"}}, "hp_space returned 'output_dir'"),
        ({"hp_space": lambda trial: {"report_to": "none"}}, "hp_space returned 'report_to', which no trial can change"),
        ({"compute_objective": lambda metrics: metrics["eval_f1"]}, "asked for 'eval_f1'.*eval_accuracy"),
        ({"compute_objective": lambda metrics: "good"}, "returned 'good'; it must return a number"),
        ({"compute_objective": lambda metrics: np.bool_(True)}, "it must return a number"),
        ({"compute_objective": lambda metrics: torch.tensor(1j)}, "it must return a number"),
        ({"compute_objective": lambda metrics: [1.0, 2.0]}, "give direction a list of 2"),
        ({"direction": "up"}, "direction='up' is neither"),
        ({"direction": None}, "direction=None is neither"),
        ({"direction": []}, "has no direction"),
        ({"timeout": -1}, "timeout=-1: give a number of seconds"),
        ({"n_trials": 0}, "n_trials=0"),
        ({"n_trials": None}, "n_trials=None"),
        ({"n_jobs": 2}, "n_jobs=2.*n_parallel"),
        ({"n_parallel": 2}, "n_parallel=2.*paceline search"),
        ({"backend": "sigopt"}, "sigopt.*ended"),
        ({"backend": "optna"}, "did you mean 'optuna'"),
    ],
)
def test_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    trainer = make_search(tmp_path)
    with pytest.raises(ValueError, match=message):
        trainer.hyperparameter_search(**{"hp_space": rates, "n_trials": 2, **options})
    assert trainer.hp_search_backend is None
    assert not (tmp_path / "run-1").exists()  # the search ended at once


def test_refused_trainers(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="pass your model through a model_init"):
        make_trainer(tmp_path, Classifier(), DATA, eval_dataset=EVAL).hyperparameter_search()
    with pytest.raises(ValueError, match="give the Trainer an eval_dataset"):
        make_search(tmp_path, eval_dataset=None, eval_strategy="no").hyperparameter_search()
    with pytest.raises(ValueError, match="MedianPruner: there are no evaluations"):
        make_search(tmp_path, eval_strategy="no").hyperparameter_search(pruner=optuna.pruners.MedianPruner())


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(["suggest_float"], ["set_user_attr", "suggest_float", "report"]))
def test_ctrl_c_anywhere_in_a_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """An interrupted trial is not recorded as failed: the next start goes on with it."""

    def interrupt(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as changed:
        changed.setattr(optuna.Trial, name, interrupt)
        with pytest.raises(KeyboardInterrupt):
            make_search(tmp_path).hyperparameter_search(hp_space=rates, n_trials=2)
    assert [trial.state.name for trial in study_of(tmp_path).trials] == ["RUNNING"]
    make_search(tmp_path).hyperparameter_search(hp_space=rates, n_trials=2)
    states = [trial.state.name for trial in study_of(tmp_path).trials]
    assert states.count("COMPLETE") == 2
    assert "FAIL" not in states


@pytest.mark.slow
def test_locked_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.search.optuna_study.LOCK_SECONDS", 0.1)
    trainer = make_search(tmp_path)
    searched(trainer, hp_space=rates, n_trials=1)
    with sqlite3.connect(tmp_path / "study.db", isolation_level=None) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(RuntimeError, match=r"study.db: another process has locked it"):
            searched(trainer, hp_space=rates, n_trials=2)
        other.execute("ROLLBACK")
    other.close()
    searched(trainer, hp_space=rates, n_trials=2)
    assert len(study_of(tmp_path).trials) == 2


@pytest.mark.slow
def test_storage_that_is_no_database(tmp_path: Path) -> None:
    (tmp_path / "study.db").write_text("x" * 5000)
    with pytest.raises(RuntimeError, match=r"study.db: it is not a database; move the file away"):
        searched(make_search(tmp_path), hp_space=rates, n_trials=1)


@pytest.mark.slow
def test_a_stored_trial_that_still_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that a killed search has started ends after its step: until then, its trial is no failed one."""
    searched(make_search(tmp_path), hp_space=rates, n_trials=1)
    database = sqlite3.connect(tmp_path / "study.db", isolation_level=None)
    database.execute("UPDATE trials SET state = 'RUNNING'")
    monkeypatch.setattr(lock, "GRACE", 0.05)
    held = lock.acquire(tmp_path / "run-0")
    assert held is not None
    held.release()
    parent = dataclasses.replace(held.holder, pid=os.getppid(), started=str(lock._started(os.getppid())))
    (tmp_path / "run-0" / lock.LOCK_NAME).write_text(json.dumps(dataclasses.asdict(parent)))
    with pytest.raises(FolderInUse, match=f"run-0' is in use: process {os.getppid()} "):
        searched(make_search(tmp_path), hp_space=rates, n_trials=1)
    assert [trial.state.name for trial in study_of(tmp_path).trials] == ["RUNNING"]
    (tmp_path / "run-0" / lock.LOCK_NAME).unlink()
    searched(make_search(tmp_path), hp_space=rates, n_trials=1)
    database.execute("UPDATE study_user_attributes SET value_json = '{'")
    database.close()
    with pytest.raises(RuntimeError, match=r"study.db: it is damaged; restore a copy"):
        searched(make_search(tmp_path), hp_space=rates, n_trials=2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["folder", "link to itself"])
def test_a_study_that_is_no_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "study.db"
    path.mkdir() if kind == "folder" else path.symlink_to(path)
    with pytest.raises(SearchError, match=r"study.db is not a regular file.*move it away"):
        searched(make_search(tmp_path), hp_space=rates, n_trials=1)


@pytest.mark.slow
def test_a_disk_that_fills_up_at_the_end_of_a_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """optuna answers an error of the storage with an assertion of its own."""
    database = pytest.importorskip("sqlalchemy").exc

    def full(*arguments: Any, **options: Any) -> None:
        cause = sqlite3.OperationalError("database or disk is full")
        error = database.OperationalError("UPDATE", None, cause)
        raise optuna.exceptions.StorageInternalError("An exception is raised during the commit.") from error

    with monkeypatch.context() as changed:
        changed.setattr(optuna.storages._CachedStorage, "set_trial_state_values", full)
        with pytest.raises(
            RuntimeError, match=r"study.db: the disk is full; free space on it, and the same call continues"
        ):
            searched(make_search(tmp_path, max_steps=1), hp_space=rates, n_trials=2)
    assert searched(make_search(tmp_path, max_steps=1), hp_space=rates, n_trials=2).run_id in ("0", "1")


NAMES = ["", "..", "a/b", "a\0b", "\x1b[31mred", "a\ud800", "x" * 300, 5]


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(["a/b", 5], NAMES))
def test_a_name_of_a_trial_that_is_none_ends_the_search(tmp_path: Path, name: Any) -> None:
    with pytest.raises(SearchError, match="it must return the name of a folder"):
        searched(make_search(tmp_path), hp_space=rates, n_trials=3, hp_name=lambda trial: name)
    assert len(study_of(tmp_path).trials) == 1


@pytest.mark.slow
def test_unknown_hyperparameters(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_search(tmp_path)
    searched(trainer, hp_space=lambda trial: {"learning_rat": 1e-3, "model.width": 3}, n_trials=2)
    told = [record for record in caplog.records if "Trying to set learning_rat " in record.message]
    assert len(told) == 1
    assert "did you mean 'learning_rate'?" in told[0].message
    assert told[0].levelno == logging.WARNING
    assert "hub_model_id" not in caplog.text


# ---- a stored study


@pytest.mark.slow
def test_a_finished_study_is_kept_and_extended(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = searched(make_search(tmp_path), hp_space=rates, n_trials=2)
    again = searched(make_search(tmp_path), hp_space=rates, n_trials=2)
    assert again == first
    assert "nothing is left to run" in caplog.text
    searched(make_search(tmp_path), hp_space=rates, n_trials=3)
    assert len(study_of(tmp_path).trials) == 3
    with pytest.raises(SearchError, match=r"direction=.*maximize.*has .*minimize"):
        searched(make_search(tmp_path), hp_space=rates, n_trials=3, direction="maximize")
    searched(make_search(tmp_path, weight_decay=0.5), hp_space=rates, n_trials=4)
    assert "weight_decay=0.5 (before: 0.0)" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "interrupt"])
def test_a_search_that_died_goes_on_from_the_checkpoint_of_its_trial(tmp_path: Path, how: str) -> None:
    """The same trials, with the same objectives to the last bit, as a search that was not disturbed."""
    straight = searched(make_search(tmp_path / "straight", **SAVES), hp_space=rates, n_trials=3, sampler=Listed())
    done = run_job(tmp_path / "died", how)
    assert done.returncode == (-signal.SIGKILL if how == "kill" else 7), done.stderr
    left = study_of(tmp_path / "died").trials
    assert [trial.state.name for trial in left] == ["COMPLETE", "RUNNING"]
    steps: list[tuple[str, int]] = []

    class Watch(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            steps.append((state.trial_name, state.global_step))

    trainer = make_search(tmp_path / "died", callbacks=[Watch], **SAVES)
    best = searched(trainer, hp_space=rates, n_trials=3, sampler=Listed())
    assert steps[0] == ("run-1", 5) if how == "interrupt" else steps[0] in [("run-1", 2), ("run-1", 4)]
    assert steps[1:] == [("run-2", 0)]
    assert best == straight
    assert [trial.value for trial in study_of(tmp_path / "died").trials] == [
        trial.value for trial in study_of(tmp_path / "straight").trials
    ]


@pytest.mark.slow
def test_two_searches_in_a_folder(tmp_path: Path) -> None:
    trainer = make_search(tmp_path)
    ends: list[str] = []

    def space(trial: Any) -> dict[str, Any]:
        ends.append(run_job(tmp_path, "kill").stderr)
        return rates(trial)

    searched(trainer, hp_space=space, n_trials=1)
    assert FolderInUse.__name__ in ends[0]


def run_job(folder: Path, how: str) -> subprocess.CompletedProcess[str]:
    """Runs a search in another process, which ends in its second trial."""
    command = [sys.executable, str(Path(__file__).parents[1] / "support" / "search_jobs.py"), str(folder), how]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=120)


@pytest.mark.slow
def test_own_storage_and_sampler(tmp_path: Path) -> None:
    storage = f"sqlite:///{tmp_path / 'mine.db'}"
    ended: list[int] = []
    searched(
        make_search(tmp_path / "out"),
        hp_space=rates,
        n_trials=2,
        storage=storage,
        study_name="mine",
        sampler=optuna.samplers.RandomSampler(seed=0),
        gc_after_trial=True,
        callbacks=[lambda study, trial: ended.append(trial.number)],
        timeout=600,
    )
    assert ended == [0, 1]
    assert len(optuna.load_study(study_name="mine", storage=storage).trials) == 2
    assert not (tmp_path / "out" / "study.db").exists()


# ---- memory


@pytest.mark.slow
def test_nothing_of_a_trial_stays(tmp_path: Path) -> None:
    models: list[weakref.ref[Any]] = []

    def model_init(trial: Any) -> Classifier:
        model = Classifier()
        models.append(weakref.ref(model))
        alive = [ref for ref in models[1:-1] if ref() is not None]
        assert not alive, "the model of an earlier trial is alive"
        return model

    trainer = make_search(tmp_path, model_init=model_init, max_steps=1, save_strategy="no", eval_strategy="no")
    counts: list[int] = []

    def count(study: Any, trial: Any) -> None:
        gc.collect()
        counts.append(sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects()))

    gc.collect()
    gc.freeze()  # what earlier tests left is not visited after each trial
    try:
        searched(trainer, hp_space=rates, n_trials=20, callbacks=[count], storage=None)
    finally:
        gc.unfreeze()
    assert len(counts) == 20
    assert counts[-1] == counts[2]
    assert sum(ref() is not None for ref in models) == 1  # the Trainer's own
    assert weights(trainer.model).isfinite().all()


def test_refusal_is_of_the_documented_kind() -> None:
    assert issubclass(SearchError, ValueError)
    assert issubclass(UnsupportedOption, ValueError)


@pytest.mark.slow
def test_numbers_have_the_type_of_the_option_and_not_of_its_present_value(tmp_path: Path) -> None:
    seen = []

    class Watch(TrainerCallback):
        def on_train_begin(self, args: Any, *_: Any, **kwargs: Any) -> None:
            seen.append((args.weight_decay, args.max_grad_norm, args.gradient_accumulation_steps))

    trainer = make_search(tmp_path, callbacks=[Watch], weight_decay=0, max_grad_norm=1)

    def space(trial: Any) -> dict[str, Any]:
        steps = trial.suggest_float("gradient_accumulation_steps", 2.5, 2.5)
        return {"weight_decay": 0.3, "max_grad_norm": 0.5, "gradient_accumulation_steps": steps}

    best = searched(trainer, hp_space=space, n_trials=1)
    assert seen == [(0.3, 0.5, 2)]
    assert type(seen[0][2]) is int
    for name, value in best.hyperparameters.items():
        setattr(trainer.args, name, value)
    assert trainer.args.gradient_accumulation_steps == 2


@pytest.mark.slow
def test_the_ends_of_trials_are_recorded(tmp_path: Path) -> None:
    """One that the user prunes, one whose objective is NaN, and one with a token in its error."""
    token = "hf_abcdefghijklmnopqrstuvwxyzabcdefgh"

    def model_init(trial: Any) -> Classifier:
        if trial is not None and trial.number == 1:
            raise optuna.TrialPruned
        if trial is not None and trial.number == 3:
            raise ValueError(token)
        return Classifier()

    objectives = iter([float("nan")] * 3 + [1.0] * 6)
    options: dict[str, Any] = {"hp_space": rates, "n_trials": 4, "compute_objective": lambda metrics: next(objectives)}
    searched(make_search(tmp_path, model_init=model_init), **options)
    searched(make_search(tmp_path, model_init=model_init), **options)  # nothing is left to run
    trials = study_of(tmp_path).trials
    assert [trial.state.name for trial in trials] == ["FAIL", "PRUNED", "COMPLETE", "FAIL"]
    assert trials[0].user_attrs["error"] == "the objective is NaN"
    assert token.encode() not in (tmp_path / "study.db").read_bytes()


@pytest.mark.slow
def test_a_stored_study_with_another_space(tmp_path: Path) -> None:
    def space(*names: str) -> Any:
        return lambda trial: {"optim": trial.suggest_categorical("optim", names)}

    searched(make_search(tmp_path), hp_space=space("sgd", "adamw_torch"), n_trials=1)
    with pytest.raises(SearchError, match="another space"):
        searched(make_search(tmp_path), hp_space=space("sgd", "adagrad"), n_trials=3)


@pytest.mark.slow
def test_a_failed_trial_is_freed_before_the_next(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    models: list[weakref.ref[Classifier]] = []

    def model_init(trial: Any) -> Classifier:
        assert not [found for found in models if found() is not None]
        made = Classifier()
        if trial is not None:
            models.append(weakref.ref(made))
        return made

    class Fail(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.trial_name != "run-2":
                raise RuntimeError("out of memory")

    gc.disable()
    try:
        with caplog.at_level(logging.CRITICAL, "optuna"):  # its record of a failure would hold the traceback
            searched(make_search(tmp_path, model_init=model_init, callbacks=[Fail]), hp_space=rates, n_trials=3)
    finally:
        gc.enable()
    assert len(models) == 3


@pytest.mark.slow
def test_a_folder_with_the_characters_of_urls(tmp_path: Path) -> None:
    folder = tmp_path / "what? 100%20 #{x}"
    for _ in range(2):
        searched(make_search(folder), hp_space=rates, n_trials=1)
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
    assert sorted(path.name for path in folder.iterdir()) == ["run-0", "study.db"]
