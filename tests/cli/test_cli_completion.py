"""`paceline completion`: commands, options and choices, completed by a real bash and a real zsh."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from paceline.cli.main import COMMANDS, main

ASK = 'source "$1"; COMP_WORDS=(paceline "${@:2}"); COMP_CWORD=$(($# - 1)); _paceline; echo "${COMPREPLY[@]}"'


def test_bash_completes_commands_options_and_choices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "paceline.bash"
    script.write_text(capsys.readouterr().out, encoding="utf-8")

    def completed(*words: str) -> list[str]:
        done = subprocess.run(
            ["bash", "-c", ASK, "bash", str(script), *words], capture_output=True, text=True, timeout=20
        )
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.split()

    assert set(completed("")) == set(COMMANDS)
    assert completed("pl") == ["plan"]
    assert completed("replay", "runs/a", "--j") == ["--json"]
    assert completed("train", "job.yaml", "--learning_r") == ["--learning_rate"]
    assert completed("train", "job.yaml", "--lr_scheduler_type", "cosine_with_r") == ["cosine_with_restarts"]
    assert completed("init", "mod") == ["module"]
    assert completed("control", "runs/a", "learning") == ["learning-rate"]
    assert completed("train", "jo") == []  # bash completes the names of files


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
def test_zsh_completes_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "zsh"]) == 0
    script = tmp_path / "paceline.zsh"
    script.write_text(capsys.readouterr().out, encoding="utf-8")
    controller, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "dumb", "PS1": ""}
    shell = subprocess.Popen(
        ["zsh", "-f", "-i"], stdin=terminal, stdout=terminal, stderr=terminal, env=environment, start_new_session=True
    )
    os.close(terminal)

    def type_and_wait(typed: str, expected: str) -> None:
        os.write(controller, typed.encode())
        seen, end = "", time.monotonic() + 20
        while expected not in seen and time.monotonic() < end:
            if select.select([controller], [], [], 1)[0]:
                seen += os.read(controller, 65536).decode(errors="replace")
        assert expected in seen

    try:
        type_and_wait(f"source '{script}'; echo rea''dy\n", "ready")
        for typed, completed in (
            ("paceline pl\t", "paceline plan "),
            ("paceline train job.yaml --learning_r\t", "--learning_rate "),
            ("paceline train --lr_scheduler_type cosine_with_r\t", "cosine_with_restarts "),
        ):
            type_and_wait(typed, completed)
            type_and_wait("\x15echo do''ne\n", "done")
    finally:
        shell.kill()
        shell.wait()
        os.close(controller)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "completion takes one shell, bash or zsh: source <(paceline completion bash)"),
        (["bash", "zsh"], "completion takes one shell, bash or zsh: source <(paceline completion bash)"),
        (["bsh"], "completion: there is no shell 'bsh'; did you mean 'bash'?"),
        (["fish"], "completion: there is no shell 'fish'; known are: bash, zsh"),
        (["bash", "--json"], "completion has no option '--json'"),
    ],
)
def test_a_shell_is_needed(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", *words]) == 2
    assert capsys.readouterr().err == f"paceline: {message}\n"
