"""The command as a whole: help without torch, exit codes, no traceback for what a person typed wrong."""

import errno
import io
import logging
import os
import pathlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from terminals import Emulator, on_terminal

import paceline.__main__ as program
from paceline import __version__
from paceline.args.sections import Options
from paceline.cli.display import AboveBars, say
from paceline.cli.main import main
from paceline.cli.texts import HELP, help_on
from paceline.core.metrics import best_metric_value
from paceline.core.retry_writer import replace_whole
from paceline.core.terminal import wrapped

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
        (["train", "job.yaml", "--gradient_acc", "2"], "did you mean '--gradient_accumulation_steps'"),
        (["plan", "job.yaml", "--prin"], "did you mean '--print-config'"),
        (["train"], "train needs a file"),
        (["train", "nowhere.yaml"], "nowhere.yaml cannot be read"),
    ],
)
def test_what_is_typed_wrong_is_said_in_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main(words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_a_wrong_value_is_said_with_the_command_that_describes_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    assert main(["init", "module", "job.yaml"]) == 0
    capsys.readouterr()
    assert main(["train", "job.yaml", "--learning_rate", "-1"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "paceline: learning_rate=-1 is invalid: it must be at least 0.",
        "`paceline train --help learning_rate` describes this option; docs/options.md has all of them.",
    ]


def test_without_a_command_help_is_shown(capsys: pytest.CaptureFixture[str]):
    assert main([]) == 2
    assert "paceline train CONFIG.yaml" in capsys.readouterr().out


def test_help_on_a_command_is_that_of_the_command(capsys: pytest.CaptureFixture[str]):
    for words in (["help", "train"], ["help", "train", "warmup"]):
        assert main(words) == 0
        shown = capsys.readouterr().out
        assert main(["train", "--help", *words[2:]]) == 0
        assert capsys.readouterr().out == shown != HELP


def test_folders_before_help_are_no_search_words(capsys: pytest.CaptureFixture[str]):
    assert main(["export", "runs/a/checkpoint-3", "model", "--help"]) == 0
    assert capsys.readouterr().out.startswith("paceline export CHECKPOINT OUTPUT")


def test_an_option_before_the_command_is_refused(capsys: pytest.CaptureFixture[str]):
    assert main(["--json", "runs", "x"]) == 2
    assert "options of a command stand after it" in capsys.readouterr().err


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


TO_TF = "; a job of TensorFlow: give --framework tf"


@pytest.mark.parametrize(
    ("missing", "command", "words", "message"),
    [
        ("tensorflow", "train", ["--framework", "tf"], 'pip install "paceline[tf]"'),
        ("torch", "train", [], f'pip install "paceline[torch]"{TO_TF}'),
        ("torch", "plan", [], f'pip install "paceline[torch]"{TO_TF}'),
    ],
)
def test_a_framework_that_is_missing_is_said_in_one_line(
    tmp_path: Path, missing: str, command: str, words: list[str], message: str
):
    """Also where the job's own modules import it."""
    path = tmp_path / "job.yaml"
    path.write_text(f"output_dir: {tmp_path}/run\nmodel: some_net:net\ndata: some_net:data\n", encoding="utf-8")
    (tmp_path / "some_net.py").write_text("import torch\n", encoding="utf-8")
    code = f"import sys; sys.modules[{missing!r}] = None; from paceline.cli.main import main; "
    code += f"sys.exit(main({[command, str(path), *words]!r}))"
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


def test_ctrl_c_while_the_command_is_imported_ends_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def interrupt(module: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("importlib.import_module", interrupt)
    assert program.main() == 130
    assert capsys.readouterr().err == "\npaceline: interrupted\n"


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_texts_are_wrapped_at_spaces_of_a_terminal(columns: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    texts = [["--help"], ["train", "--help", "optim"], ["train", f"{'a b c ' * 40}.yaml"]]
    with on_terminal(columns, Emulator) as terminal:
        main(texts[0])
        lines = terminal.look()
        for words in texts[1:]:
            main(words)
            terminal.look()
    assert all(len(line) <= columns for line in lines)
    words = [word for line in lines for word in line.split()]
    assert words == HELP.split()  # none is cut in two
    if columns == 80:
        place = lines.index("  paceline doctor CONFIG.yaml   look for common mistakes in model, data and")
        assert lines[place + 1] == " " * 32 + "options"


def test_texts_end_on_a_terminal_narrower_than_their_indent():
    assert wrapped("    model  of gpt", 2) == "    model\n    of\n    gpt"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_disk_that_takes_nothing_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
):
    """Whichever function of the standard library fails; an error of the user's code keeps its traceback."""
    source = f"def fail(*_, **__): raise OSError({number}, {os.strerror(number)!r}, 'somewhere')"
    names: dict[str, Any] = {}
    exec(compile(source, pathlib.__file__, "exec"), names)
    fail = names["fail"]
    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.open", fail)
        patch.setattr("paceline.cli.main.dispatch", lambda _: replace_whole(tmp_path / "page.html", ""))
        assert main(["report", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert os.strerror(number) in error
    assert "page.html" in error
    monkeypatch.setattr("paceline.cli.main.dispatch", lambda _: fail())
    with pytest.raises(OSError, match="somewhere"):
        main(["report", str(tmp_path)])


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


def test_a_line_that_a_library_shows_itself_is_not_shown_again(capsys: pytest.CaptureFixture[str]):
    library, handler = logging.getLogger("library.of_test_cli_main"), AboveBars()
    library.addHandler(logging.StreamHandler())
    logging.getLogger().addHandler(handler)
    try:
        logging.getLogger("library.of_test_cli_main.http").warning("trying again")
        logging.getLogger("library.without_one").warning("once")
    finally:
        logging.getLogger().removeHandler(handler)
        library.handlers.clear()
    assert capsys.readouterr().err == "trying again\nonce\n"


def test_a_reader_that_has_seen_enough_is_no_error():
    command = [sys.executable, "-m", "paceline", "train", "--help", "a"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 141


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a disk that is always full")
def test_an_output_that_is_full_is_said_in_one_line():
    """A short output stays in a buffer until the end."""
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "paceline", "--version"]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment)
    assert (done.returncode, done.stderr) == (1, "paceline: [Errno 28] No space left on device\n")


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
