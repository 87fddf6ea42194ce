"""The command as a whole: help without torch, exit codes, no traceback for what a person typed wrong."""

import io
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from paceline import __version__
from paceline.args.sections import Options
from paceline.cli.display import AboveBars, say
from paceline.cli.main import main
from paceline.cli.texts import help_on
from paceline.core.metrics import best_metric_value

LOOK = "import sys; from paceline.cli.main import main; main({words!r}); print('torch' in sys.modules)"


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["demo", "--help"], ["train", "--help", "loss"]])
def test_help_loads_no_torch(words: list[str]):
    code = LOOK.format(words=words)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_the_module_can_be_run():
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "--version"], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == f"paceline {__version__}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "there is no command 'trian'; did you mean 'train'"),
        (["demo", "digts"], "there is no demonstration 'digts'; did you mean 'digits'"),
        (["demo", "--learning_rte", "1"], "did you mean '--learning_rate'"),
        (["demo", "--seconds", "soon"], "--seconds soon: give a number above 0"),
        (["demo", "--seconds", "-3"], "--seconds -3: give a number above 0"),
        (["demo", "digits", "--prompt", "x"], "--prompt has a meaning only for"),
        (["demo", "--modle.x", "1"], "no option --modle.x"),
        (["demo", "digits", "--xla"], "xla is an option of TensorFlow: give --framework tf too"),
        (["train", "job.yaml", "--poly_powr", "2"], "did you mean '--poly_power'"),
        (["train", "job.yaml", "--framwork", "tf"], "did you mean '--framework'"),
        (["train"], "train needs a file"),
        (["train", "nowhere.yaml"], "nowhere.yaml cannot be read"),
    ],
)
def test_what_is_typed_wrong_is_said_in_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main(words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_without_a_command_help_is_shown(capsys: pytest.CaptureFixture[str]):
    assert main([]) == 2
    assert "paceline train CONFIG.yaml" in capsys.readouterr().out


def test_a_word_after_help_lists_the_options_about_it():
    text = help_on("train", ["--help", "warmup"])
    assert "--warmup_steps (default 0)" in text
    assert "--bf16 " not in text
    assert "no option contains xyz" in help_on("demo", ["digits", "--help", "xyz"])


@pytest.mark.parametrize("word", ["learning_rate", "learning-rate", "lr"])
def test_the_name_of_an_option_shows_it_alone(word: str):
    text = help_on("train", ["--help", word])
    assert text.startswith("  --learning_rate (default 5e-05)\n      Peak learning rate, ")
    assert "--lr_scheduler_type " not in text


def test_choices_are_listed():
    text = help_on("train", ["--help", "optim"])
    assert "Optimizer by name" in text
    assert "Choices: auto, adamw_torch, " in text
    assert "also: optim_args, optim_target_modules" in text


def test_every_option_can_be_looked_up():
    assert all(f"--{name} " in help_on("train", ["--help", name]) for name in Options.__dataclass_fields__)


def test_the_options_of_tensorflow_say_so():
    assert "--xla (default False; with --framework tf)" in help_on("train", ["--help", "xla"])
    assert "--tf32 (default None)" in help_on("train", ["--help", "tf32"])


@pytest.mark.parametrize(
    ("missing", "words", "message"),
    [
        ("tensorflow", ["--framework", "tf"], 'pip install "paceline[tf]"'),
        ("torch", [], 'pip install "paceline[torch]"; a job of TensorFlow: give --framework tf'),
    ],
)
def test_a_framework_that_is_missing_is_said_in_one_line(tmp_path: Path, missing: str, words: list[str], message: str):
    path = tmp_path / "job.yaml"
    path.write_text(f"output_dir: {tmp_path}/run\nmodel: somewhere:net\ndata: somewhere:data\n", encoding="utf-8")
    code = f"import sys; sys.modules[{missing!r}] = None; from paceline.cli.main import main; "
    code += f"sys.exit(main({['train', str(path), *words]!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert message in done.stderr
    assert not (tmp_path / "run").exists()


def test_ctrl_c_outside_training_ends_with_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def interrupt(words: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("paceline.cli.main.dispatch", interrupt)
    assert main(["demo"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_the_help_of_train_names_what_exists(tmp_path: Path):
    text = help_on("train", ["job.yaml", "--help"])
    for section in ("model", "tokenizer", "data", "preprocess", "callbacks", "compute_metrics", "trainer", "arguments"):
        assert section in text


def test_what_the_output_cannot_show_becomes_a_question_mark(monkeypatch: pytest.MonkeyPatch):
    buffer = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(buffer, encoding="ascii"))
    say("a ● b")
    assert buffer.getvalue() == b"a ? b\n"


def test_log_lines_go_above_a_bar(capsys: pytest.CaptureFixture[str]):
    record = logging.LogRecord("x", logging.WARNING, "", 0, "take %s", ("care",), None)
    AboveBars().emit(record)
    assert capsys.readouterr().err == "take care\n"


def test_a_reader_that_has_seen_enough_is_no_error():
    command = [sys.executable, "-m", "paceline", "train", "--help", "a"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 141


def test_a_metric_that_is_not_there_is_said_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("paceline.cli.main.dispatch", lambda words: best_metric_value({"eval_loss": 1.0}, "bogus"))
    assert main(["train"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("paceline: The `metric_for_best_model` training argument is set to 'bogus'")
    assert error.count("\n") == 1


def test_values_of_options_are_no_search_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "x.yaml", "--max_steps", "5", "--help"]) == 0
    assert "A configuration:" in capsys.readouterr().out
    assert main(["train", "--help", "max_steps"]) == 0
    assert "--max_steps" in capsys.readouterr().out


def test_names_of_folders_cannot_move_the_cursor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder may have been made by others; each command names it in its messages, and none prints its escapes."""
    folder = tmp_path / "<b>\x1b[31m\x07red"
    commands = (["replay", "--step", "1"], ["control", "save"], ["compare", "."], ["runs"], ["report"], ["verify"])
    for command, *words in commands:
        main([command, str(folder), *words])
    folder.mkdir()
    (folder / "run.json").write_text("{")
    for command, *words in commands:
        main([command, str(folder), *words])
    shown = capsys.readouterr()
    assert "<b>" in shown.out + shown.err
    assert not any(character in shown.out + shown.err for character in "\x1b\x07")
