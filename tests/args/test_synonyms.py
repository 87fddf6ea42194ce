"""Common names of options, which errors translate."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline import HfArgumentParser, TrainingArguments
from paceline.args.errors import did_you_mean
from paceline.args.synonyms import REMEDIES, SYNONYMS, meant_by
from paceline.cli.config import read_config
from paceline.cli.errors import UsageError
from paceline.cli.options import Known, argument_names, parse_options

GUESSES = {
    "lr": "learning_rate",
    "epochs": "num_train_epochs",
    "batch_size": "per_device_train_batch_size",
    "bs": "per_device_train_batch_size",
    "grad_accum": "gradient_accumulation_steps",
    "wd": "weight_decay",
    "warmup": "warmup_steps",
    "steps": "max_steps",
    "optimizer": "optim",
    "scheduler": "lr_scheduler_type",
    "out_dir": "output_dir",
    "output": "output_dir",
    "random_seed": "seed",
    "num_workers": "dataloader_num_workers",
    "eval_freq": "eval_steps",
    "keep_last": "save_total_limit",
    "strategy": "parallel",
    "use_ema": "ema_decay",
}
REMEDIED = {
    "gpus": "one process per GPU is started by `paceline launch",
    "max_time": "a run has no time limit",
    "nproc": "one process per GPU",
    "patience": "callbacks: .*EarlyStoppingCallback, early_stopping_patience: 3",
    "val_split": "eval_fraction",
}


def test_each_guess_means_an_option_and_is_none() -> None:
    assert not (SYNONYMS.keys() | REMEDIES.keys()) & argument_names()
    assert not SYNONYMS.keys() & REMEDIES.keys()
    for guesses in (SYNONYMS, REMEDIES):
        assert list(guesses) == sorted(guesses)
    assert all(meant_by(guess, argument_names() | {"arguments", "data"}) for guess in SYNONYMS)


@pytest.mark.parametrize(("guess", "meant"), GUESSES.items())
def test_a_guess_names_the_option(tmp_path: Path, guess: str, meant: str) -> None:
    with pytest.raises(TypeError, match=rf"argument '{guess}': no such option; did you mean '{meant}'\?"):
        TrainingArguments(str(tmp_path), **{guess: 1})  # type: ignore[arg-type]
    flag = f"--{guess.replace('_', '-')}"
    with pytest.raises(UsageError, match=rf"no option {flag}; did you mean '--{meant}'"):
        parse_options([flag, "1"], Known())
    for text in (f"{guess}: 1\n", f"arguments: {{{guess}: 1}}\n"):
        (tmp_path / "job.yaml").write_text(text)
        with pytest.raises(UsageError, match=rf"unknown key '{guess}'; did you mean '{meant}'"):
            read_config(tmp_path / "job.yaml")


@pytest.mark.parametrize(("guess", "meant"), [("dataset", "data"), ("training", "arguments")])
def test_a_guess_names_the_section(tmp_path: Path, guess: str, meant: str) -> None:
    (tmp_path / "job.yaml").write_text(f"{guess}: {{a: 1}}\n")
    with pytest.raises(UsageError, match=rf"unknown key '{guess}'; did you mean '{meant}'"):
        read_config(tmp_path / "job.yaml")


@pytest.mark.parametrize(("guess", "remedy"), REMEDIED.items())
def test_what_is_no_option_here_has_a_remedy(tmp_path: Path, guess: str, remedy: str) -> None:
    """Instead of the option with the most similar name, as `past_index` for `patience`."""
    with pytest.raises(TypeError, match=f"argument '{guess}': no such option; .*{remedy}"):
        TrainingArguments(str(tmp_path), **{guess: 1})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=f"no option --{guess}; .*{remedy}"):
        parse_options([f"--{guess}", "1"], Known())


@pytest.mark.parametrize("guess", ["lr", "epochs", "output"])
def test_the_parser_of_scripts_names_it_too(guess: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where argparse takes the guess for an abbreviation of several options."""
    with pytest.raises((ValueError, SystemExit)) as caught:
        HfArgumentParser(TrainingArguments).parse_args_into_dataclasses([f"--{guess}", "1"], look_for_args_file=False)
    assert f"did you mean '--{GUESSES[guess]}'?" in f"{caught.value}{capsys.readouterr().err}"


def test_a_guess_that_can_mean_two_options_names_both() -> None:
    with pytest.raises(TypeError, match=r"did you mean 'bf16' or 'fp16'\?"):
        TrainingArguments(mixed_precision="bf16")  # type: ignore[call-arg]


def test_a_guess_means_known_words_only() -> None:
    assert did_you_mean("lr", ["lr_max", "width"]) == ""
    assert did_you_mean("steps", ["step"]) == "; did you mean 'step'?"


def test_no_private_name_is_proposed() -> None:
    assert did_you_mean("gpus", ["_n_gpu", "seed"]) == ""
    assert did_you_mean("n_gpu", ["_n_gpu", "seed"]) == ""
    assert did_you_mean("_n_gpus", ["_n_gpu", "seed"]) == "; did you mean '_n_gpu'?"
