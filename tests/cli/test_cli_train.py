"""`paceline train` with a person's own model and data, from the file to the results."""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from torch import nn
from train_jobs import MODULE, check_finished, check_refused, losses, module_of, results, write_job

from paceline import Trainer
from paceline.args.errors import UnsupportedOption
from paceline.cli.config import read_job
from paceline.cli.errors import UsageError
from paceline.cli.main import main
from paceline.cli.references import put_on_path
from paceline.cli.train import choose_stages, make_arguments, report
from paceline.cli.train_torch import build_trainer

CONFIG = """
model: {{factory: "{module}:Net", width: 4}}
data: {module}:data
compute_metrics: {module}:metrics
arguments:
  output_dir: {folder}/run
  max_steps: 12
  learning_rate: 3e-2
  eval_strategy: steps
  eval_steps: 6
  save_steps: 6
  logging_steps: 3
  label_names: [y]
  report_to: jsonl
  disable_tqdm: true
  use_cpu: true
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    return write_job(tmp_path, MODULE, CONFIG)


def test_a_run_trains_evaluates_and_is_found_finished(config: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["train", str(config)]) == 0
    output = capsys.readouterr().out
    assert "train metrics" in output
    assert "eval metrics" in output
    assert {"train_loss", "eval_loss", "eval_mae"} <= set(results(config.parent / "run"))
    for name in ("model.safetensors", "run.json", "job.json", "trainer_state.json", "log.jsonl", "checkpoint-12"):
        assert (config.parent / "run" / name).exists(), name
    check_finished(config, 12, capsys)


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt, 130), (RuntimeError, None)])
def test_a_last_evaluation_that_does_not_end_loses_no_model(
    error: type[BaseException],
    code: int | None,
    config: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """Without a checkpoint; the same command makes up for the evaluation, once, and trains no further."""

    def fail(*args: object, **kwargs: object) -> None:
        raise error

    words = ["train", str(config), "--save_strategy", "no", "--eval_strategy", "no"]
    note = f"The training is complete: its model is in {config.parent / 'run'}/, and the same command evaluates it."
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "evaluate", fail)
        if code is None:
            with pytest.raises(error) as caught:
                main(words)
            assert caught.value.__notes__ == [note]
        else:
            assert main(words) == code
            assert capsys.readouterr().err.splitlines()[-2:] == ["paceline: interrupted", note]
    weights = (config.parent / "run" / "model.safetensors").read_bytes()
    assert (config.parent / "run" / "train_results.json").is_file()
    capsys.readouterr()
    assert main(words) == 0
    output = capsys.readouterr().out
    assert "This run is finished: 12 steps" in output
    assert "eval metrics" in output
    assert "eval_mae" in results(config.parent / "run")
    assert (config.parent / "run" / "model.safetensors").read_bytes() == weights
    assert main(words) == 0
    assert "eval metrics" not in capsys.readouterr().out


def test_the_notes_of_a_refusal_are_shown_once(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def refuse(*args: object, **kwargs: object) -> None:
        error = UnsupportedOption("torch_compile=True is not supported here: leave it out.")
        error.add_note("Described by: paceline train --help torch_compile")
        raise error

    monkeypatch.setattr(Trainer, "train", refuse)
    assert main(["train", str(config)]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "paceline: torch_compile=True is not supported here: leave it out.",
        "Described by: paceline train --help torch_compile",
    ]


def test_an_evaluation_of_the_own_folder_is_the_missing_one(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    words = ["train", str(config), "--save_strategy", "no", "--eval_strategy", "no"]
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "evaluate", interrupt)
        assert main(words) == 130
    assert main([*words, "--do_eval", "--resume_from_checkpoint", str(config.parent / "run")]) == 0
    assert "eval metrics" in capsys.readouterr().out
    assert main(words) == 0
    assert "eval metrics" not in capsys.readouterr().out


def test_metrics_are_saved_even_if_they_cannot_be_printed():
    calls = []

    def refuse(split: str, metrics: dict[str, float]) -> None:
        raise OSError("No space left on device")

    trainer = SimpleNamespace(save_metrics=lambda split, metrics: calls.append(split), log_metrics=refuse)
    with pytest.raises(OSError, match="No space"):
        report(trainer, "eval", {"eval_loss": 1.0})  # type: ignore[arg-type]
    assert calls == ["eval"]


def test_a_longer_run_goes_on(config: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["train", str(config), "--max_steps", "6"]) == 0
    assert main(["train", str(config)]) == 0
    assert "Resuming from" in capsys.readouterr().out
    assert [step for step, _ in losses(config.parent / "run")] == [3, 6, 9, 12]


def test_a_run_in_a_store_goes_on_on_another_machine(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    words = ["train", str(config), "--output_dir", f"memory://{config.parent.name}/run"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(config.parent / "first"))
    assert main([*words, "--max_steps", "6"]) == 0
    monkeypatch.setenv("XDG_CACHE_HOME", str(config.parent / "second"))
    assert main([*words, "--fresh"]) == 2
    assert "is not empty; give another --output_dir" in capsys.readouterr().err
    assert main([*words, "--resume_from_checkpoint", "auto"]) == 0
    output = capsys.readouterr().out
    assert "checkpoint-6 is resumed from memory://" in output
    assert "Resuming from" in output
    log = next((config.parent / "second").rglob("log.jsonl"))
    assert [step for step, _ in losses(log.parent)] == [3, 6, 9, 12]
    assert main([*words[:2], "--resume_from_checkpoint", f"{words[-1]}/checkpoint-7"]) == 2
    assert "Can't resume" in capsys.readouterr().err


def test_predictions_are_kept_one_row_per_sample(config: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["train", str(config), "--do_train", "--do_predict"]) == 0
    kept = np.load(config.parent / "run" / "predictions.npz")
    assert kept["predictions"].shape == (16, 1)
    assert kept["label_ids"].shape == (16, 1)
    assert {"test_loss", "test_mae"} <= set(results(config.parent / "run"))
    assert "eval metrics" not in capsys.readouterr().out


def test_evaluating_alone_uses_the_weights_of_the_run(config: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["train", str(config)]) == 0
    before = results(config.parent / "run")["eval_loss"]
    capsys.readouterr()
    assert main(["train", str(config), "--do_eval"]) == 0
    output = capsys.readouterr().out
    assert f"Weights from {config.parent / 'run'}" in output
    assert "The results are saved to" in output  # and no model
    assert "Model, metrics" not in output
    assert "train metrics" not in output
    assert results(config.parent / "run")["eval_loss"] == pytest.approx(before)


def test_evaluating_a_named_checkpoint_or_an_untrained_model(config: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["train", str(config), "--do_eval"]) == 0
    assert "nothing has been trained here yet" in capsys.readouterr().out
    untrained = results(config.parent / "run")["eval_loss"]
    assert main(["train", str(config)]) == 0
    named = str(config.parent / "run" / "checkpoint-6")
    assert main(["train", str(config), "--do_eval", "--resume_from_checkpoint", named]) == 0
    assert results(config.parent / "run")["eval_loss"] < untrained
    assert main(["train", str(config), "--do_eval", "--resume_from_checkpoint", "nowhere"]) == 2
    assert "there is no folder nowhere" in capsys.readouterr().err


@pytest.mark.parametrize("data", ["pair", "alone"])
def test_other_forms_of_data(config: Path, data: str):
    words = ["--data", f"{module_of(config)}:{data}"]
    assert main(["train", str(config), *words, *(["--eval_strategy", "no"] if data == "alone" else [])]) == 0
    assert ("eval_loss" in results(config.parent / "run")) == (data == "pair")


@pytest.mark.slow
def test_callbacks_and_a_trainer_of_ones_own(config: Path, capsys: pytest.CaptureFixture[str]):
    module = module_of(config)
    assert main(["train", str(config)]) == 0
    plain = results(config.parent / "run")["eval_loss"]
    text = config.read_text(encoding="utf-8")
    text += f'\ncallbacks: ["{module}:Note", {{factory: "{module}:logger", tag: second}}]\ntrainer: {module}:Mine\n'
    config.write_text(text, encoding="utf-8")
    capsys.readouterr()
    assert main(["train", str(config), "--fresh", "--learning_rate", "0"]) == 0
    output = capsys.readouterr().out
    assert "note was here" in output
    assert "second was here" in output
    assert main(["train", str(config), "--fresh"]) == 0
    assert results(config.parent / "run")["eval_loss"] != pytest.approx(plain)


@pytest.mark.slow
def test_members_are_trained_at_once_resumed_and_predicted_with(config: Path, capsys: pytest.CaptureFixture[str]):
    folder = config.parent / "run"
    config.write_text(
        f"{config.read_text()}members:\n- {{name: slow, learning_rate: 1e-3}}\n- {{name: fast, learning_rate: 5e-2}}\n"
    )
    assert main(["train", str(config), "--max_steps", "6"]) == 0
    assert main(["train", str(config), "--do_train", "--do_eval", "--do_predict"]) == 0
    assert "Resuming from" in capsys.readouterr().out
    found = results(folder)
    assert {"eval_loss/slow", "eval_loss/fast", "eval_mae/fast"} <= set(found)
    assert found["eval_loss"] == min(found["eval_loss/slow"], found["eval_loss/fast"])
    assert found["eval_loss/slow"] != found["eval_loss/fast"]
    assert all((folder / "members" / name / "model.safetensors").is_file() for name in ("slow", "fast"))
    assert np.load(folder / "predictions.npz")["predictions"].shape == (16, 1)  # of the best member
    text = config.read_text()
    for changed, message in (
        (text.replace("name: fast", "seed: 3, name: fast"), "members was"),
        (text.replace("name: fast", "rate: 3"), "'rate' is no setting of a member"),
        (text.replace("members:", "framework: tf\nmembers:"), "TensorFlow trains one model at a time"),
        (
            text.replace("arguments:", "trainer: paceline:Trainer\narguments:").replace("/run", "/two"),
            "no subclass of paceline.MembersTrainer",
        ),
    ):
        config.write_text(changed)
        assert main(["train", str(config)]) == 2
        assert message in capsys.readouterr().err
    config.write_text(text.replace("learning_rate: 1e-3", "seed: 1").replace("learning_rate: 5e-2", "seed: 2"))
    assert main(["train", str(config), "--output_dir", str(config.parent / "seeds")]) == 0
    seeds = results(config.parent / "seeds")
    assert seeds["eval_loss/slow"] != seeds["eval_loss/fast"]


def test_members_of_a_search_are_refused_with_the_method_that_draws_them(config: Path):
    config.write_text(f"{config.read_text()}members: [{{learning_rate: 1e-3}}, {{learning_rate: 5e-2}}]\n")
    job, _ = read_job([str(config)])
    put_on_path(job.folder)
    with pytest.raises(UsageError, match=r'^members: .*Trainer\.hyperparameter_search\(backend="members"\)'):
        build_trainer(job, make_arguments(job), lambda tokenizer, trial: nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model.widht", "3"], "model.widht: {module}:Net takes no 'widht'; did you mean 'width'"),
        (["--data.sise", "3"], "data.sise: {module}:data takes no 'sise'; did you mean 'size'"),
        (["--data", "{module}:misnamed"], "gave a split 'trian'; did you mean 'train'"),
        (["--model", "{module}:Ned"], "has no 'Ned'; did you mean 'Net'"),
        (["--model", "{module}:rows"], "missing a required argument: 'size'"),
        (["--model", "{module}:alone"], "gave a list; an nn.Module is needed"),
        (["--trainer", "{module}:Net"], "is no subclass of paceline.Trainer"),
        (["--learning_rate", "fast"], "learning_rate='fast'"),
        (["--data", "{module}:alone"], "eval_strategy='steps': the data has no evaluation split (found: train)"),
        (["--data", "{module}:pair", "--do_train", "--do_predict"], "do_predict: the data has no test split"),
        (["--load_best_model_at_end", "--save_steps", "5"], "save_steps"),
    ],
)
def test_what_is_wrong_is_said_without_a_traceback(
    config: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    check_refused(config, words, message, capsys)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--train_sampling_strategy", "group_by_length"], "Sampling by length needs"),
        (["--output_dir", "{file}/run"], "output_dir"),
        (["--nonfinite_policy", "raise", "--learning_rate", "1e30", "--max_grad_norm", "0"], "Not finite at step"),
    ],
)
def test_what_a_run_cannot_do_is_said_without_a_traceback(
    config: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["train", str(config), *(word.format(file=config) for word in words)]) in (1, 2)
    assert message in capsys.readouterr().err


def test_another_model_in_the_same_folder_is_an_error(config: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["train", str(config), "--max_steps", "2"]) == 0
    assert main(["train", str(config), "--model.width", "6"]) == 2
    assert "holds another job: model was" in capsys.readouterr().err
    assert main(["train", str(config), "--model.width", "6", "--fresh"]) == 0
    assert (config.parent / "run-earlier-1" / "model.safetensors").is_file()


def test_an_error_of_the_persons_own_code_is_raised_as_it_is(config: Path):
    path = config.parent / f"{module_of(config)}.py"
    path.write_text(MODULE.replace("def data(size=64):", "def data(size=64):\n    1 / 0"), encoding="utf-8")
    with pytest.raises(ZeroDivisionError):
        main(["train", str(config)])


def test_without_a_model_or_data_the_section_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "job.yaml"
    path.write_text(f"output_dir: {tmp_path}/run\n", encoding="utf-8")
    assert main(["train", str(path)]) == 2
    assert "'model' is missing" in capsys.readouterr().err
    path.write_text(f"output_dir: {tmp_path}/run\nmodel: torch.nn:Identity\n", encoding="utf-8")
    assert main(["train", str(path)]) == 2
    assert "'data' is missing" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["true", True, "y", "YES", "t", "On", 1, " true "])
def test_a_stage_is_on_by_every_word_that_the_options_take(word: object):
    assert choose_stages({"do_train": word, "do_eval": "n", "do_predict": word}) == ("do_train", "do_predict")
    assert choose_stages({"do_train": "f"}) == ("do_eval",)
